"""The doors of the memory figures: what the pages poll, and `/api/memory` with the same in full.

The pages do not ask through Gradio: its component server costs several times what the answer costs, and an
answer that is there already as bytes only has to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access import from_this_machine
from app.dashboard import wire
from app.dashboard.feed import Asked, viewer
from app.errors import AppError
from app.http_errors import as_response
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.runtime import Runtime

FEED = "/api/memory/feed"
#: Answers are one viewer's own: no cache on the way may keep them.
_PRIVATE = "private, no-store"


class FeedMiddleware:
    """`GET /api/memory/feed`: one update for the person whose cookie this is; 204 where nothing is new.

    Every open page comes by once a second, so it stands in front of the layers and of the router that the
    other doors need: it takes no body, changes nothing, and decides for itself who may pass.
    """

    def __init__(self, app: ASGIApp, runtime: Runtime) -> None:
        self._app, self._runtime = app, runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != FEED or scope["method"] != "GET":
            await self._app(scope, receive, send)
        else:
            await (await self._answer(Request(scope)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        runtime, headers = self._runtime, {"cache-control": _PRIVATE, "vary": "cookie, accept-encoding"}
        try:
            principal = runtime.principal(request.headers)
            if not runtime.settings.open_to_all:
                await runtime.accounts.note_seen(request.headers)
            parts = await runtime.dashboard.answer(principal, Asked.of(request.query_params))
        except AppError as error:
            return as_response(error)
        except EngineError as error:  # the engine stops or fails in between
            return Response(str(error), 503, headers)
        if not parts:
            return Response(status_code=204, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(wire.plain(parts), 200, headers, "application/json")
        headers["content-encoding"] = "gzip"
        return Response(runtime.dashboard.gzipped(parts), 200, headers, "application/json")


def dashboard_router(runtime: Runtime) -> APIRouter:
    """`GET /api/memory` for programs."""
    router = APIRouter()

    @router.get("/api/memory")
    async def memory(request: Request, conversation: str = "") -> dict[str, Any]:
        """What the page gets, in full. `conversation` must be the caller's own."""
        who = viewer(runtime, request.headers)
        if not from_this_machine(request, runtime.settings.allowed_hosts):
            runtime.identify("page", request)  # counts only, but of people who may not be anybody's business
        asked = Asked.everything()
        if conversation and runtime.ready:
            principal = runtime.principal(request.headers)
            mine = (await runtime.store.conversation(principal, conversation)).id
            asked = Asked.everything(mine)
        try:
            return await runtime.dashboard.everything(who, asked)
        except EngineError as error:
            raise HTTPException(503, str(error)) from None

    return router
