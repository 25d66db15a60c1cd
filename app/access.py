"""Who may use the HTTP doors beside the page: keys, the loopback exception, the machine's own commands."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from app.errors import NoIdentity, NotAllowed
from app.principal import OWNER, Principal, key_principal
from app.settings import LOOPBACK_HOSTS, Settings

#: Programs on this machine that ask a loopback server without a key.
LOCAL_API = Principal("local", "local-api")


def _host_name(authority: str) -> str:
    return (urlsplit(f"//{authority}").hostname or "").lower()


def from_this_machine(request: Request, allowed_hosts: Sequence[str] = ()) -> bool:
    """True where the caller is a program on this machine and not a web page that a browser was lured to.

    A page of another site can reach a loopback server through the browser; it then shows in the `Origin`
    header, or (after DNS rebinding) in the `Host` header.
    """
    client = request.client.host if request.client else ""
    if client not in LOOPBACK_HOSTS and not client.startswith("127."):
        return False
    names = {*LOOPBACK_HOSTS, *(host.lower() for host in allowed_hosts)}
    try:
        if _host_name(request.headers.get("host", "")) not in names:
            return False
        origin = request.headers.get("origin")
        return origin is None or (urlsplit(origin).hostname or "").lower() in names
    except ValueError:  # a malformed host
        return False


def _bearer(request: Request) -> str | None:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else None


def api_principal(request: Request, settings: Settings) -> Principal:
    """The principal of a `/v1` request: a key's, or the keyless local one on a loopback server.

    Raises `NoIdentity` (401) otherwise. On a loopback server without keys in its settings any key is taken
    for none: client libraries insist on sending one.
    """
    keys = [key.get_secret_value() for key in settings.api_keys]
    presented = _bearer(request)
    if presented is not None and (principal := key_principal(presented, keys)) is not None:
        return principal
    local = settings.loopback and from_this_machine(request, settings.allowed_hosts)
    if local and (presented is None or not keys):
        return LOCAL_API
    raise NoIdentity(
        "This API key is not known here."
        if presented is not None
        else "An API key is needed: send it as 'Authorization: Bearer KEY'."
    )


def require_owner(request: Request, token: str) -> Principal:
    """The machine's own command line, proved by the token that lies in the data directory (mode 0600)."""
    presented = request.headers.get("x-coread-token", "")
    if not hmac.compare_digest(presented.encode(), token.encode()) or request.headers.get("origin"):
        raise NotAllowed("This door is for Coread's own commands on this machine.")
    return OWNER
