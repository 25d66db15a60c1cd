"""Refusals and failures as a browser shows them: a small page in our look, in the reader's language.

Programs get JSON (see `app.http_errors`). Nothing of what was asked for stands on the page: not the address,
and not what Gradio says of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import account_html as view
from app.errors import AppError
from app.http_errors import as_response, malformed
from app.openai_schema import ApiRefusal
from app.pages import words
from app.pages.words import Words
from engine.errors import EngineError
from rag.errors import RagError

Handler = Callable[[Request, Any], Awaitable[Response]]
#: Doors of programs: what a browser shows of them is JSON, errors too.
_PROGRAMS = ("/v1/", "/api/", "/metrics", "/healthz", "/readyz")
#: What is said where all that is known is a status.
_SENTENCES: Mapping[int, str] = MappingProxyType(
    {403: "error.not_allowed", 404: "page.nowhere", 405: "page.not_taken", 413: "error.body_too_large",
     429: "error.rate_limit_exceeded"}
)  # fmt: skip


def wants_page(request: Request) -> bool:
    """True where a browser wants to show what comes back."""
    path, accepts = str(request.scope["path"]), request.headers.get("accept", "")
    return "text/html" in accepts and not path.startswith(_PROGRAMS)


def as_page(error: Exception, headers: Mapping[str, str]) -> HTMLResponse:
    """`error` as a page for whoever sent `headers`, tried again where waiting helps."""
    answer, w = as_response(error), words.of(headers)
    wait = answer.headers.get("retry-after")
    page = _page(answer.status_code, w.sentence(error), w, later=wait is not None)
    if wait is not None:
        page.headers["retry-after"] = wait
        if answer.status_code == 503:
            page.headers["refresh"] = "2"
    return page


def _page(status: int, sentence: str, w: Words, *, later: bool = False) -> HTMLResponse:
    title = {401: "page.refused", 403: "page.refused", 404: "page.not_found"}.get(status, "chat.failed")
    title = "page.later" if later else title
    body = f'<p>{view.e(sentence)}</p><p><a href="/">{view.e(w("page.to_chat"))}</a></p>'
    return view.page(w(title), body, w, status=status, here="/")


def _of_status(error: HTTPException, headers: Mapping[str, str]) -> HTMLResponse:
    w, status = words.of(headers), error.status_code
    key = _SENTENCES.get(status, "error.internal_error" if status >= 500 else "error.app_error")
    page = _page(status, w(key), w)
    page.headers.update(error.headers or {})
    return page


async def answer_to(request: Request, error: Exception) -> Response:
    """What a request that failed is answered: a page where a browser shows it, else OpenAI's error object."""
    return as_page(error, request.headers) if wants_page(request) else as_response(error)


class FaultsMiddleware:
    """Answers what no handler foresaw. Starlette would do so outside all other layers, where the answer gets
    no security headers and the log no status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if started:  # the connection has to break: half an answer must not pass for a whole one
                raise
            await (await answer_to(Request(scope), error))(scope, receive, send)


def install(app: FastAPI) -> None:
    """Answer every error of our own routes with OpenAI's error object, or a page where a browser shows it."""

    async def handle_invalid(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        return await answer_to(request, malformed(error))

    async def handle_http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        if wants_page(request):
            return _of_status(error, request.headers)
        refusal = ApiRefusal(str(error.detail), status=error.status_code)
        return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)

    async def handle_gone(_: Request, error: Exception) -> Response:
        """Whoever was sending is gone (an upload was cancelled): no fault, and nobody is there to be told."""
        return Response(status_code=400)

    for kind in (AppError, EngineError, RagError, sqlite3.Error, OSError):
        app.add_exception_handler(kind, answer_to)
    app.add_exception_handler(ClientDisconnect, handle_gone)
    app.add_exception_handler(RequestValidationError, handle_invalid)
    app.add_exception_handler(HTTPException, handle_http)


def gradio_handlers() -> dict[type[Exception], Handler]:
    """The same for Gradio's own routes and for addresses that nobody has. Its scripts read Gradio's JSON."""

    async def handle_http(request: Request, error: HTTPException) -> Response:
        if wants_page(request):
            return _of_status(error, request.headers)
        return await http_exception_handler(request, error)

    return {HTTPException: handle_http, Exception: answer_to}
