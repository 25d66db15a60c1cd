"""Errors of the engine, the knowledge base and the product as HTTP answers with one shape each."""

from __future__ import annotations

import errno
import logging
import sqlite3

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

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


def sentence(error: Exception) -> str:
    """What a person on the page or at the command line is told about `error`."""
    return str(as_refusal(error))


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
