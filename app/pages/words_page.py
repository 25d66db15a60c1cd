"""A page on its way out: its marks become texts, and Gradio's own texts get the same language."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.addresses import over_https
from app.pages.words import COOKIE, LANGUAGES, MARK, TEXTS, Language, Words, language_of

#: What Gradio's frontend calls the languages; it asks the browser, so the browser is made to say it.
_GRADIO = {"en": "en", "zh-Hant": "zh-TW"}.get
_YEAR_S = 365 * 24 * 3600


def translated(page: str, language: Language) -> str:
    """A page of Gradio's with its texts in. Marks stand in JSON (the page's layout) or in attributes; texts
    hold nothing that would end either."""
    words = Words(language)

    def put(match: re.Match[str]) -> str:
        if match[1] not in TEXTS:
            return match[0]
        text = json.dumps(TEXTS[match[1]][LANGUAGES.index(words.language)], ensure_ascii=False)[1:-1]
        for sign in "<>&'":
            text = text.replace(sign, f"\\u{ord(sign):04x}")
        return text

    told = (
        f'<script>Object.defineProperty(navigator, "language", {{ configurable: true, '
        f'get: () => "{_GRADIO(language)}" }});</script>'
    )
    page = MARK.sub(put, page)
    if "window.gradio_config" not in page:
        return page
    page = re.sub(r'lang="en"', f'lang="{language}"', page, count=1)
    return page.replace("<head>", f"<head>{told}", 1)


def _cookie(language: str, https: bool) -> str:
    """As the identity's cookie is set (a Space is a frame in another site's page), but no secret."""
    site = "SameSite=None; Secure; Partitioned" if https else "SameSite=Lax"
    return f"{COOKIE}={language}; Path=/; Max-Age={_YEAR_S}; HttpOnly; {site}"


class LanguageMiddleware:
    """Sends pages in the reader's language. `?language=…` on any page switches to it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        asked = next((value for name, value in pairs if name == "language" and value in LANGUAGES), None)
        if asked is not None and "text/html" in headers.get("accept", ""):
            # A path that began with two slashes would lead to another site.
            rest = urlencode([pair for pair in pairs if pair[0] != "language"])
            path = "/" + str(scope["path"]).lstrip("/\\")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303, {"cache-control": "no-store"})
            https = over_https(scope.get("scheme"), headers)
            answer.headers.append("set-cookie", _cookie(asked, https))
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, _Translator(send, language_of(headers)).send)


class _Translator:
    """Holds a page back until it is whole; every other answer passes as it comes."""

    def __init__(self, send: Send, language: Language) -> None:
        self._send, self._language = send, language
        self._start: Message | None = None
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._is_page(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._finish(self._start)

    @staticmethod
    def _is_page(message: Message) -> bool:
        headers = Headers(raw=message["headers"])
        return headers.get("content-type", "").startswith("text/html") and "content-encoding" not in headers

    async def _finish(self, start: Message) -> None:
        body = translated(b"".join(self._body).decode("utf-8"), self._language).encode("utf-8")
        headers = MutableHeaders(scope=start)
        headers["content-length"] = str(len(body))
        headers["content-language"] = self._language
        headers.add_vary_header("Accept-Language, Cookie")
        self._start = None
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
