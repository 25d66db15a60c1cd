"""Who is acting. One `Principal`, resolved from a request in one function, an argument of every read.

A browser is told apart by a random id in a signed HttpOnly cookie. Nothing else that a browser sends
(a session hash, a form field, a header of its own making) says who it is.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.addresses import over_https
from app.errors import NoIdentity

Kind = Literal["local", "anonymous", "signed_in", "api_key"]
Role = Literal["administrator", "reader"]
_ID_BYTES = 16
_MAX_PROVED = 4_096
_MAX_AGE_S = 180 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Principal:
    """A person or program. `id` is what things are owned by: an account's browser and its API keys share it,
    and nothing else shares one."""

    kind: Kind
    id: str
    role: Role = "reader"


#: The person at the machine's own command line. Browsers never are this one.
OWNER = Principal("local", "owner", "administrator")


class CookieSigner:
    """Issues and checks identity cookies: `<id>.<HMAC-SHA256 of the id>`, both base64url.

    The cookie's name carries a fingerprint of the secret: cookies are shared by all ports of a host, so
    two servers on one machine would otherwise overwrite each other's identities.
    """

    def __init__(self, secret: bytes, kind: Kind) -> None:
        if len(secret) < 32:
            raise ValueError(f"the cookie secret has {len(secret)} bytes; it needs at least 32")
        self._secret = secret
        self._kind: Kind = kind
        #: Values that were proved already. Open pages show theirs once a second.
        self._proved: dict[str, Principal] = {}
        self.name = "coread_" + hashlib.sha256(b"name" + secret).hexdigest()[:8]

    def issue(self) -> tuple[Principal, str]:
        """A new principal and the cookie value that proves it."""
        id = "b-" + secrets.token_hex(_ID_BYTES)
        return Principal(self._kind, id), f"{id}.{self._mac(id)}"

    def check(self, value: str) -> Principal | None:
        """The principal that `value` proves, or None where it proves none."""
        if (found := self._proved.get(value)) is not None:
            return found
        id, _, mac = value.partition(".")
        if len(value) > 200 or not id.startswith("b-") or not value.isascii():
            return None
        if not hmac.compare_digest(mac, self._mac(id)):
            return None
        if len(self._proved) >= _MAX_PROVED:
            self._proved.clear()
        found = self._proved[value] = Principal(self._kind, id)
        return found

    def _mac(self, id: str) -> str:
        digest = hmac.digest(self._secret, b"coread identity\0" + id.encode(), "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def set_cookie(self, value: str, https: bool) -> str:
        """The `Set-Cookie` header. Under https the page may live in another site's frame (a Space), so the
        cookie is `SameSite=None; Partitioned`; over plain http browsers accept only `Lax`."""
        site = "SameSite=None; Secure; Partitioned" if https else "SameSite=Lax"
        return f"{self.name}={value}; Path=/; Max-Age={_MAX_AGE_S}; HttpOnly; {site}"

    def from_headers(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal of a request's `Cookie` header, or None."""
        value = cookie_parser(headers.get("cookie", "")).get(self.name)
        return self.check(value) if value else None


def require(signer: CookieSigner, headers: Mapping[str, str]) -> Principal:
    """The principal of a browser's request; raises `NoIdentity` where it has no valid cookie."""
    principal = signer.from_headers(headers)
    if principal is None:
        raise NoIdentity("Your browser sent no identity cookie; allow cookies for this page and reload it.")
    return principal


def key_principal(presented: str, keys: Sequence[str]) -> Principal | None:
    """The principal of an API key, or None where it is not one of `keys`. Compares all, in constant time."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(key.encode(), presented.encode())
    return Principal("api_key", "k-" + hashlib.sha256(presented.encode()).hexdigest()[:32]) if found else None


class IdentityMiddleware:
    """Gives a browser its cookie with the page itself; every later request of that page then carries it.

    Only page loads set it: parallel requests of one first visit would otherwise race for several ids.
    """

    def __init__(self, app: ASGIApp, signer: CookieSigner) -> None:
        self._app, self._signer = app, signer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "text/html" not in headers.get("accept", "") or self._signer.from_headers(headers) is not None:
            await self._app(scope, receive, send)
            return
        _, value = self._signer.issue()
        https = over_https(scope.get("scheme"), headers)

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                response = MutableHeaders(scope=message)
                response.append("set-cookie", self._signer.set_cookie(value, https))
                response["cache-control"] = "no-store"
            await send(message)

        await self._app(scope, receive, send_with_cookie)
