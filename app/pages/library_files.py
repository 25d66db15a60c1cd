"""The library page's files: sent as they are, one a request, and fetched again by those who may read them.

A file never passes through Gradio's cache, which everybody could read. Its name comes in a header, where no
log keeps it, and goes back as data in `Content-Disposition`; a browser is told to save the file, never to
show it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from typing import BinaryIO
from urllib.parse import quote, unquote

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from app.errors import AppError, UploadRefused
from app.http_errors import as_refusal
from app.pages import words
from app.pages.words import phrase
from app.principal import Principal
from app.runtime import Runtime
from app.streams import OpenRequests
from rag.errors import DuplicateDocument, RagError

NAME_HEADER = "x-coread-name"
_MAX_NAME = 3_000
#: Files that one person may be fetching at a time: whoever reads slowly keeps one open for as long.
DOWNLOADS_EACH = 4
#: Bytes of a file that are in memory at a time, for each who fetches it.
_PIECE_BYTES = 256 * 1024


def library_router(runtime: Runtime) -> APIRouter:
    router = APIRouter(prefix="/library/files", include_in_schema=False)
    fetching = OpenRequests(DOWNLOADS_EACH, words="You are fetching {held:,} files already; wait for one.")

    @router.post("")
    async def add(request: Request, collection: str = "") -> Response:
        """Queue the body as a document of a collection of the caller's own; `{"id": …}`."""
        try:
            principal = runtime.identify("page", request)
            if collection:  # before the body is read, as below
                await runtime.collections.own(principal, collection)
            data = await _body(request, runtime.settings.max_upload_bytes)
            id = await runtime.shelf.add(principal, collection or None, _name(request), data)
            return JSONResponse({"id": id, "namesake": await _namesake(runtime, principal, id)})
        except (AppError, RagError) as error:
            return _refused(request, error)

    @router.post("/{id}")
    async def replace(request: Request, id: str) -> Response:
        """Queue the body as a new version of a document that the caller may change."""
        try:
            principal = runtime.identify("page", request)
            # Looked at before the body is read: a stranger's megabytes are not taken first.
            await runtime.knowledge.changeable(principal, id)
            data = await _body(request, runtime.settings.max_upload_bytes)
            await runtime.shelf.replace(principal, id, _name(request), data)
            return JSONResponse({"id": id})
        except (AppError, RagError) as error:
            return _refused(request, error)

    @router.get("/{id}")
    async def original(request: Request, id: str) -> Response:
        """The file as it was uploaded, to be saved."""
        principal = runtime.identify("page", request)
        with ExitStack() as held:
            held.enter_context(fetching.one_more(principal.id))
            info, file = await runtime.knowledge.original(principal, id)
            held.enter_context(file)
            name = quote(_saved_as(info.name), safe="")
            headers = {
                "content-disposition": f"attachment; filename*=UTF-8''{name}",
                "content-security-policy": "default-src 'none'; sandbox",
                "cache-control": "no-store",
                "content-length": str(os.fstat(file.fileno()).st_size),
            }
            return _FileResponse(file, headers, held.pop_all())

    return router


class _FileResponse(Response):
    """An open file, sent piece by piece as fast as it is read at the other end. `held` ends with it."""

    def __init__(self, file: BinaryIO, headers: dict[str, str], held: ExitStack) -> None:
        super().__init__(None, headers=headers, media_type="application/octet-stream")
        self._file, self._held = file, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            while piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _body(request: Request, limit: int) -> bytes:
    """The request's body, read no further than `limit`."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise UploadRefused(phrase("library.too_large", limit=limit / 2**20))
        chunks.append(chunk)
    return b"".join(chunks)


async def _namesake(runtime: Runtime, principal: Principal, id: str) -> str:
    """The newest other document of the same name in the same collection; "" where there is none. Both stay: a
    file of the same name need not be a new version."""
    added = await runtime.knowledge.readable_info(principal, id)
    inside = await runtime.knowledge.infos(principal, frozenset({added.collection_id}))
    named = [info for info in inside if info.name == added.name and info.id != id and info.version]
    return max(named, key=lambda info: info.created).id if named else ""


def _name(request: Request) -> str:
    """The file's name, percent-encoded UTF-8 in a header. It is only ever data."""
    return unquote(request.headers.get(NAME_HEADER, "")[:_MAX_NAME], errors="replace")


def _saved_as(name: str) -> str:
    """A name that a browser may save under: no part of a path, nothing that a shell or a system minds."""
    kept = "".join("_" if c in '\\/:*?"<>|' or not c.isprintable() else c for c in name)
    return kept.strip(" .")[:150] or "document"


def _refused(request: Request, error: AppError | RagError) -> JSONResponse:
    """A refusal for the page: one sentence, and of a duplicate the document that is there already (which is
    the caller's own: nobody adds to somebody else's collection)."""
    refusal = as_refusal(error)
    w = words.of(request.headers)
    answer = {"error": w.sentence(error), "code": error.code}
    if isinstance(error, DuplicateDocument):
        answer |= {"error": w("library.duplicate", name=error.name), "existing": error.existing}
    headers = {"retry-after": str(max(1, round(refusal.retry_after_s)))} if refusal.retry_after_s else {}
    return JSONResponse(answer, status_code=refusal.status, headers=headers)
