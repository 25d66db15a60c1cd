"""Errors of the engine, the knowledge base and the product as HTTP answers with one shape each."""

from __future__ import annotations

import errno
import logging
import sqlite3
from html import escape

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.errors import AppError, LoadingFailed, TooMany
from app.openai_schema import ApiRefusal
from engine.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    EngineStarting,
    EngineUnavailable,
    InvalidRequest,
    LimitReached,
    ModelNotFound,
    ModelRefused,
)
from rag.errors import NotFound, RagError

log = logging.getLogger("coread")
_PLAIN = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Coread</title>'
    '<body style="font-family:system-ui;max-width:40em;margin:4em auto;padding:0 1em"><p>{}</p></body></html>'
)
#: Doors of programs: what a browser shows of them is JSON, errors too.
_PROGRAMS = ("/v1/", "/api/", "/metrics", "/healthz", "/readyz")


def maximum_context(tokens: int) -> str:
    """OpenAI's own words, by which agents' libraries (litellm, pydantic-ai) know that they must send less."""
    return f"This model's maximum context length is {tokens:,} tokens."


def as_refusal(error: Exception) -> ApiRefusal:
    """Any error as OpenAI's error object. What was not foreseen is logged and says nothing of itself."""
    match error:
        case ApiRefusal():
            return error
        case ContextTooLong():
            text = f"{maximum_context(error.limit)} {error}"
            return ApiRefusal(text, code=error.code, param="messages")
        case InvalidRequest():
            return ApiRefusal(str(error), code=error.code)
        case LimitReached():
            return ApiRefusal(
                str(error), status=429, code=error.code, kind="rate_limit_error",
                retry_after_s=error.retry_after_s,
            )  # fmt: skip
        case EngineStarting() | EngineUnavailable() | ModelNotFound() | ModelRefused():
            return ApiRefusal(str(error), status=503, code=error.code, kind="server_error", retry_after_s=5.0)
        case DeadlineExceeded():
            return ApiRefusal(str(error), status=504, code=error.code, kind="server_error")
        case EngineError():
            return ApiRefusal(str(error), status=500, code=error.code, kind="server_error")
        case TooMany():
            return ApiRefusal(
                str(error), status=429, code=error.code, kind="rate_limit_error",
                retry_after_s=error.retry_after_s,
            )  # fmt: skip
        case NotFound():
            return ApiRefusal(str(error), status=404, code=error.code)
        case RagError():
            return ApiRefusal(str(error), code=error.code)
        case AppError():
            kind = "authentication_error" if error.status in (401, 403) else "invalid_request_error"
            retry = 5.0 if error.status == 503 and not isinstance(error, LoadingFailed) else None
            kind = "server_error" if error.status == 503 else kind
            return ApiRefusal(
                str(error), status=error.status, code=error.code, kind=kind, retry_after_s=retry
            )
    if (words := _storage_trouble(error)) is not None:
        log.error("storage: %s", error)
        return ApiRefusal(
            words, status=503, code="storage_unavailable", kind="server_error", retry_after_s=30.0
        )
    log.error("unexpected error in an HTTP request", exc_info=error)
    return ApiRefusal(
        "Something went wrong inside Coread; the log says what.",
        status=500,
        code="internal_error",
        kind="server_error",
    )


def _storage_trouble(error: Exception) -> str | None:
    """What is wrong with the disk or the database file, where that is what an error tells."""
    kept = "What was stored before is safe; try again in a moment."
    # The low byte of SQLite's code is its kind, the rest says more about it.
    code = getattr(error, "sqlite_errorcode", None) if isinstance(error, sqlite3.Error) else None
    match None if code is None else code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return f"The server's disk is full, so nothing new can be stored. {kept}"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"Another program holds the server's database, so nothing new can be stored. {kept}"
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN:
            return f"The server cannot write to its disk. {kept}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The server's disk is full, so nothing new can be stored. {kept}"
    return None


def as_response(error: Exception) -> JSONResponse:
    refusal = as_refusal(error)
    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(refusal.retry_after_s)))
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=headers)


def as_page(error: Exception) -> HTMLResponse:
    """The same for a browser that loads a page: a sentence to read, tried again where waiting helps."""
    answer = as_response(error)
    headers = {name: value for name, value in answer.headers.items() if name == "retry-after"}
    if answer.status_code == 503 and headers:
        headers["refresh"] = "2"
    text = escape(sentence(error), quote=False)
    return HTMLResponse(_PLAIN.format(text), answer.status_code, headers | {"cache-control": "no-store"})


def sentence(error: Exception) -> str:
    """What a person on the page or at the command line is told about `error`."""
    return str(as_refusal(error))


def _of_a_page(request: Request) -> bool:
    """True where a browser wants to show what comes back."""
    path, accepts = str(request.scope["path"]), request.headers.get("accept", "")
    return request.method == "GET" and "text/html" in accepts and not path.startswith(_PROGRAMS)


def malformed(error: RequestValidationError) -> ApiRefusal:
    """What is wrong with a request that does not fit its route's form: the first thing found, with the field
    as `param`; for text that is no JSON, where it stops being JSON."""
    first = error.errors()[0] if error.errors() else {}
    if first.get("type") == "json_invalid":
        at = first.get("loc", ("body", 0))[-1]
        place = f" at character {at + 1:,}" if isinstance(at, int) else ""
        reason = str(first.get("ctx", {}).get("error", "")).strip()
        return ApiRefusal(
            f"The body is not valid JSON{place}{f': {reason}' if reason else ''}.",
            code="invalid_json",
        )
    where = ".".join(str(part) for part in first.get("loc", ())[1:])
    message = str(first.get("msg", "The request is malformed.")).removeprefix("Value error, ")
    return ApiRefusal(f"{where}: {message}" if where else message, code="invalid_value", param=where or None)


def install(app: FastAPI) -> None:
    """Answer every error of our own routes with OpenAI's error object, or a page where a browser shows it."""

    async def handle(request: Request, error: Exception) -> Response:
        return as_page(error) if _of_a_page(request) else as_response(error)

    async def handle_invalid(_: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RequestValidationError):
            raise error
        return as_response(malformed(error))

    async def handle_http(_: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        refusal = ApiRefusal(str(error.detail), status=error.status_code)
        return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)

    async def handle_gone(_: Request, error: Exception) -> Response:
        """Whoever was sending is gone (an upload was cancelled): no fault, and nobody is there to be told."""
        return Response(status_code=400)

    for kind in (AppError, EngineError, RagError, sqlite3.Error, OSError, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientDisconnect, handle_gone)
    app.add_exception_handler(RequestValidationError, handle_invalid)
    app.add_exception_handler(HTTPException, handle_http)
