"""The doors of the memory figures: what the pages poll, and `/api/memory` with the same in full.

The pages do not ask through Gradio: its component server costs several times what the answer costs, and an
answer that is there already as bytes only has to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request
from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from app.dashboard import wire
from app.dashboard.feed import Asked, viewer
from app.errors import AppError
from app.http_errors import as_response
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.runtime import Runtime

FEED = "/api/memory/feed"
#: Answers are one viewer's own: no cache on the way may keep them.
_HEADERS = (
    (b"cache-control", b"private, no-store"), (b"vary", b"cookie, accept-encoding"),
    (b"x-content-type-options", b"nosniff"),
)  # fmt: skip
_JSON, _GZIP = (b"content-type", b"application/json"), (b"content-encoding", b"gzip")


class FeedMiddleware:
    """`GET /api/memory/feed`: one update for the person whose cookie this is; 204 where nothing is new.

    Every open page comes by once a second, so it stands in front of the layers and of the router that the
    other doors need, log and page headers included: it takes no body, changes nothing, shows no page, and
    decides for itself who may pass.
    """

    def __init__(self, app: ASGIApp, runtime: Runtime) -> None:
        self._app, self._runtime = app, runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != FEED or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            principal = self._runtime.principal(headers)
            if not self._runtime.settings.open_to_all:
                await self._runtime.accounts.note_seen(headers)
            asked = Asked.of(QueryParams(scope["query_string"]))
            parts = await self._runtime.dashboard.answer(principal, asked)
        except AppError as error:
            await as_response(error)(scope, receive, send)
        except EngineError as error:  # the engine stops or fails in between
            await _send(send, 503, str(error).encode(), (b"content-type", b"text/plain; charset=utf-8"))
        else:
            if not parts:
                await _send(send, 204)
            elif "gzip" in headers.get("accept-encoding", ""):
                await _send(send, 200, self._runtime.dashboard.gzipped(parts), _JSON, _GZIP)
            else:
                await _send(send, 200, wire.plain(parts), _JSON)


async def _send(send: Send, status: int, body: bytes = b"", *more: tuple[bytes, bytes]) -> None:
    head = [*_HEADERS, *more]
    if body:
        head.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def dashboard_router(runtime: Runtime) -> APIRouter:
    """`GET /api/memory` for programs."""
    router = APIRouter()

    @router.get("/api/memory")
    async def memory(request: Request, conversation: str = "") -> dict[str, Any]:
        """What the page gets, in full. `conversation` must be the caller's own."""
        who = viewer(runtime, request.headers)
        try:
            runtime.access.require_watcher(request)
        except AppError:  # whoever may open the page sees the same counts there
            runtime.identify("page", request)
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
