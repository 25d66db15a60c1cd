"""The doors of the memory figures: what the pages poll, and `/api/memory` with the same in full.

The pages do not ask through Gradio: its component server costs several times what the answer costs, and an
answer that is there already as bytes only has to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from app.access import from_this_machine
from app.dashboard import wire
from app.dashboard.feed import EVERYTHING, Asked, viewer
from app.errors import AppError
from app.http_errors import as_response
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.runtime import Runtime

#: Answers are one viewer's own: no cache on the way may keep them.
_PRIVATE = "private, no-store"


def dashboard_router(runtime: Runtime) -> APIRouter:
    """`GET /api/memory/feed` for the pages and `GET /api/memory` for programs."""
    router = APIRouter()

    async def feed(request: Request) -> Response:
        """One update for the person whose cookie this is; 204 where there is nothing new for it."""
        try:
            principal = runtime.principal(request.headers)
            if not runtime.settings.open_to_all:
                await runtime.accounts.note_seen(request.headers)
            parts = await runtime.dashboard.answer(principal, Asked.of(request.query_params))
        except AppError as error:
            return as_response(error)
        except EngineError as error:  # the engine stops or fails in between
            return Response(str(error), 503, {"cache-control": _PRIVATE})
        headers = {"cache-control": _PRIVATE, "vary": "cookie, accept-encoding"}
        if not parts:
            return Response(status_code=204, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(wire.gzipped(parts), 200, headers, "application/json")
        return Response(wire.plain(parts), 200, headers, "application/json")

    # Without FastAPI's argument parsing: every open page comes by once a second.
    router.add_route("/api/memory/feed", feed, methods=["GET"])

    @router.get("/api/memory")
    async def memory(request: Request, conversation: str = "") -> dict[str, Any]:
        """What the page gets, in full. `conversation` must be the caller's own."""
        who = viewer(runtime, request.headers)
        if not from_this_machine(request, runtime.settings.allowed_hosts):
            runtime.identify("page", request)  # counts only, but of people who may not be anybody's business
        asked = EVERYTHING
        if conversation and runtime.ready:
            principal = runtime.principal(request.headers)
            mine = (await runtime.store.conversation(principal, conversation)).id
            asked = Asked(mine, history=True, tree=True, pages=True)
        try:
            return await runtime.dashboard.everything(who, asked)
        except EngineError as error:
            raise HTTPException(503, str(error)) from None

    return router
