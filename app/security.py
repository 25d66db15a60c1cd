"""Headers that every answer carries and the limits on what a request may send."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import host_name


def content_security_policy(on_space: bool) -> str:
    """The page's policy. Pictures, styles, scripts and connections come from this server alone, so nothing
    that a document or a model writes can make a browser ask elsewhere. Gradio evaluates its HTML
    components' scripts, hence 'unsafe-eval'. A Space is shown in a frame of the hub, with its resizer."""
    frames = "https://huggingface.co https://*.hf.space" if on_space else "'self'"
    resizer = " https://cdnjs.cloudflare.com/ajax/libs/iframe-resizer/" if on_space else ""
    return (
        f"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'{resizer}; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; "
        f"worker-src 'self' blob:; frame-ancestors {frames}"
    )


class CookiesMiddleware:
    """Drops cookies that hold a backslash, which neither Coread nor Gradio ever sets.

    Python before 3.11.10 and 3.12.6 unquotes a value with backslashes in quadratic time (CVE-2024-7592): one
    header of 60 KB, sent by anybody, stopped the event loop for 15 s. Outermost, before anything looks.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(k == b"cookie" and b"\\" in v for k, v in scope["headers"]):
            headers = [(k, _plain(v) if k == b"cookie" else v) for k, v in scope["headers"]]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _plain(cookies: bytes) -> bytes:
    return b";".join(each for each in cookies.split(b";") if b"\\" not in each)


#: Address and headers of one request. A browser's cookies and an agent's labels fit many times over.
MAX_HEADERS_BYTES = 64 * 1024


class HeaderLimitMiddleware:
    """Refuses requests whose address and headers are larger than `MAX_HEADERS_BYTES` (431), and those whose
    `Host` is no host (400): the addresses that are made of it would fail anywhere. h11 has a limit of its
    own, but looks only once what came in one piece, up to 256 KiB, has turned out to be no whole request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
            size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])  # ": " and a line end
            if size > MAX_HEADERS_BYTES:
                said = (
                    f"The request's address and headers have {size:,} bytes; "
                    f"the limit is {MAX_HEADERS_BYTES:,}."
                )
                await _refused(431, "headers_too_large", said)(scope, receive, send)
                return
            if not all(_is_host(value) for name, value in scope["headers"] if name == b"host"):
                await _refused(400, "invalid_host", "The request's Host is no host.")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_host(value: bytes) -> bool:
    try:
        host_name(value.decode("latin-1"))
    except ValueError:
        return False
    return True


def _refused(status: int, code: str, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


class HeadersMiddleware:
    """Adds the security headers to every HTTP answer."""

    def __init__(self, app: ASGIApp, on_space: bool) -> None:
        self._app, self._policy = app, content_security_policy(on_space)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # A file that somebody uploaded comes with a narrower policy of its own.
                headers.setdefault("content-security-policy", self._policy)
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "same-origin"
                headers["permissions-policy"] = "camera=(), microphone=(), geolocation=()"
            await send(message)

        await self._app(scope, receive, send_with_headers)


class BodyLimitMiddleware:
    """Refuses bodies over `limit` bytes: at once where the length is announced, else when it is passed.

    `smaller` has the limits of paths that take less, by how the path begins.
    """

    def __init__(self, app: ASGIApp, limit: int, smaller: Mapping[str, int] | None = None) -> None:
        self._app, self._limit, self._smaller = app, limit, dict(smaller or {})

    def _limit_of(self, path: str) -> int:
        return min([self._limit, *(n for begin, n in self._smaller.items() if path.startswith(begin))])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(str(scope["path"]))
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await self._refuse(scope, receive, send, limit)
            return
        seen, refused, started = 0, False, False

        async def counted() -> Message:
            nonlocal seen, refused
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    refused = True
                    return {"type": "http.disconnect"}
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if refused and not started:
                return  # the handler's own complaint about the cut-off body
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except Exception:
            if not refused:
                raise
        if refused and not started:
            await self._refuse(scope, receive, send, limit)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        said = f"The request's body is larger than the limit of {limit:,} bytes."
        await _refused(413, "body_too_large", said)(scope, receive, send)
