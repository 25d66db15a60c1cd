"""The door for Coread's own commands: `coread ingest`, `ask` and `search` beside a running server.

Open to callers that hold the token from the data directory; they act as the machine's owner.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from app.commands import ask, ingest_bytes, search
from app.errors import UploadRefused
from app.library_commands import report_json
from app.runtime import Runtime
from engine.errors import IntegrityError


class AskBody(BaseModel):
    question: str
    document: str | None = None


class SearchBody(BaseModel):
    query: str
    limit: int = Field(5, ge=1, le=50)


class IngestBody(BaseModel):
    collection: str = Field(min_length=1, max_length=80)
    name: str = Field(min_length=1, max_length=4096)
    data: str
    private: bool = False


class ReindexBody(BaseModel):
    embeddings: bool = False


def admin_router(runtime: Runtime) -> APIRouter:
    router = APIRouter(prefix="/api/admin")

    @router.post("/ask")
    async def ask_route(body: AskBody, request: Request) -> dict[str, Any]:
        principal = runtime.identify("command", request)
        await runtime.wait_seeded()
        task = asyncio.ensure_future(ask(runtime, principal, body.question, body.document))
        try:
            while not task.done():  # a command that was interrupted must not keep the engine busy
                await asyncio.wait({task}, timeout=0.5)
                if await request.is_disconnected():
                    break
        finally:
            task.cancel()  # does nothing to one that is done
        return await task

    @router.post("/search")
    async def search_route(body: SearchBody, request: Request) -> dict[str, Any]:
        principal = runtime.identify("command", request)
        await runtime.wait_seeded()
        return await search(runtime, principal, body.query, body.limit)

    @router.post("/ingest")
    async def ingest_route(body: IngestBody, request: Request) -> dict[str, Any]:
        principal = runtime.identify("command", request)
        await runtime.wait_seeded()
        try:
            data = base64.b64decode(body.data, validate=True)
        except ValueError:  # malformed, or not even ASCII
            raise UploadRefused("The file's content is not valid base64.") from None
        return await ingest_bytes(runtime, principal, body.collection, body.name, data, body.private)

    @router.get("/status")
    async def status_route(request: Request) -> dict[str, Any]:
        runtime.identify("command", request)
        return runtime.status()

    @router.get("/check")
    async def check_route(request: Request) -> dict[str, Any]:
        """Every account of the memory and every store of documents, recomputed: what does not add up."""
        runtime.identify("command", request)
        problems: list[str] = []
        try:
            await asyncio.to_thread(runtime.engine.check_integrity)
        except IntegrityError as error:
            problems.append(f"The memory's accounts do not add up: {error}")
        report = await runtime.knowledge.check()
        return {
            "problems": problems + list(report.problems),
            "documents": report.documents,
            "passages": report.passages,
        }

    @router.post("/reindex")
    async def reindex_route(body: ReindexBody, request: Request) -> dict[str, Any]:
        """Rebuild what is derived from the stored texts; see `library_commands.reindex`."""
        runtime.identify("command", request)
        await runtime.knowledge.reindex(body.embeddings)
        return report_json(await runtime.knowledge.check())

    return router
