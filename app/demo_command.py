"""`coread demo`: the scripted readers in a server of this process, or in the one that is running."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app.access import require_owner
from app.demo import MIN_READERS, DemoRefused
from app.runtime import Runtime
from app.settings import Settings
from rag.errors import DataDirLocked


class DemoBody(BaseModel):
    readers: int = MIN_READERS


def demo_router(runtime: Runtime) -> APIRouter:
    """The door through which the command starts the demonstration of a running server."""
    router = APIRouter(prefix="/api/admin")

    @router.post("/demo")
    async def demo_route(body: DemoBody, request: Request) -> dict[str, Any]:
        require_owner(request, runtime.token)
        await runtime.wait_seeded()
        runtime.demo.start(body.readers)
        return runtime.demo.status()

    return router


def run_demo(settings: Settings, readers: int, record: Path | None) -> str:
    """Run it; blocks until interrupted where no server runs yet. Returns what to tell the person."""
    url = _running_server(settings)
    if url is not None:
        if record is not None:
            raise DemoRefused("Stop the running server first: a recording is made by the command's own one.")
        from app.client import Door
        from app.data_dir import resolve_data_dir

        Door(resolve_data_dir(settings.data_dir), url).post("demo", {"readers": readers})
        return f"{readers} readers are on their way: watch them on {url}/memory"
    from app.server import serve

    runtime = Runtime(settings)
    runtime.demo.plan(readers, record)
    serve(runtime, announce="Open /memory there and watch the readers come.")
    return ""


def _running_server(settings: Settings) -> str | None:
    """Where the server is that holds the data directory; None where nobody does."""
    probe = Runtime(settings)
    try:
        probe.open()
    except DataDirLocked as locked:
        url = locked.holder.get("url")
        if isinstance(url, str):
            return url
        raise
    asyncio.run(probe.stop())
    return None
