"""One log line a request, with an id and without anybody's text.

A line holds method, path, status and times; never a query string, a header, a body, a name or a key, since
those can hold what people ask and read. The id is also sent back (`X-Request-Id`), so that a person can name
the request that went wrong, and stands in every line that is logged while the request is handled.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("coread.http")
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("coread_request_id", default="")
_GIVEN = re.compile(r"[A-Za-z0-9._-]{8,64}")
#: Asked for many times a minute by every open page.
_QUIET = (
    "/gradio_api/",
    "/assets/",
    "/static/",
    "/svelte/",
    "/healthz",
    "/readyz",
    "/api/memory",
    "/metrics",
)


class JsonFormatter(logging.Formatter):
    """A line of JSON: `time`, `level`, `logger`, `message`, `request`, and `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        value: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id := request_id.get():
            value["request"] = id
        value |= getattr(record, "fields", {})
        if record.exc_info:
            value["error"] = self.formatException(record.exc_info)
        return json.dumps(value, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text, id = super().format(record), request_id.get()
        # A line break in a message (a path that somebody made up) must not look like a line of its own.
        head, _, rest = text.partition("\n")
        return (f"{head} [{id}]" if id else head) + (f"\n{rest}" if record.exc_info and rest else "")


def configure_logging(level: str, form: str) -> None:
    """Log to standard error, as `text` or `json`, from `level` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "sentence_transformers", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class RequestLogMiddleware:
    """Gives every request its id and logs its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if _GIVEN.fullmatch(given) else secrets.token_hex(8)
        token, began, status = request_id.set(id), time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = str(scope["path"])[:200]
            fields = {
                "method": scope["method"], "path": path, "status": status,
                "ms": round((time.monotonic() - began) * 1000),
            }  # fmt: skip
            quiet = path.startswith(_QUIET) and status < 500
            log.log(
                logging.DEBUG if quiet else logging.INFO, "%s %r %s %s ms", *fields.values(),
                extra={"fields": fields},
            )  # fmt: skip
            request_id.reset(token)
