"""Who is acting, decided in one function for every door: the page, `/v1`, the machine's own commands."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol
from urllib.parse import urlsplit

from app.errors import AppError, LoadingFailed, NoIdentity, NotAllowed, SignedOut, StillWarmingUp
from app.keys import PREFIX, ApiKeys
from app.principal import OWNER, CookieSigner, Principal, key_principal, require
from app.settings import LOOPBACK_HOSTS, Settings

Door = Literal["page", "api", "command"]
#: Programs on this machine that ask a loopback server without a key.
LOCAL_API = Principal("local", "local-api", "administrator")


class Caller(Protocol):
    """The parts of a request that say who is asking (Starlette's `Request` and Gradio's both have them)."""

    @property
    def headers(self) -> Mapping[str, str]: ...


class Sessions(Protocol):
    """Signed-in people (see `app.accounts`)."""

    def principal(self, headers: Mapping[str, str]) -> Principal | None: ...


def host_name(authority: str) -> str:
    """The host of `host:port`, lower case; raises ValueError for a malformed one."""
    return (urlsplit(f"//{authority}").hostname or "").lower()


def is_loopback(address: str) -> bool:
    return address in LOOPBACK_HOSTS or address.startswith("127.")


def known_host(headers: Mapping[str, str], allowed_hosts: Sequence[str] = ()) -> bool:
    """True where a loopback server was asked under a name of its own, and not by a page of another site.

    A page of another site can reach a loopback server through the browser; it then shows in the `Origin`
    header, or (after DNS rebinding) in the `Host` header.
    """
    names = {*LOOPBACK_HOSTS, *(host.lower() for host in allowed_hosts)}
    try:
        if host_name(headers.get("host", "")) not in names:
            return False
        origin = headers.get("origin")
        return origin is None or (urlsplit(origin).hostname or "").lower() in names
    except ValueError:  # a malformed host
        return False


def cross_site(headers: Mapping[str, str]) -> bool:
    """True for a request that a page of another site made a browser send.

    Browsers state it in `Sec-Fetch-Site`; older ones only in `Origin`, which then must name this host.
    Programs send neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:  # malformed
        return True


def from_this_machine(caller: Caller, allowed_hosts: Sequence[str] = ()) -> bool:
    """True where the caller is a program on this machine and not a web page that a browser was lured to: not
    of another site, and not of another port of this machine, where anything may be served."""
    client, headers = getattr(caller, "client", None), caller.headers
    local = is_loopback(client.host if client else "")
    return local and known_host(headers, allowed_hosts) and not cross_site(headers)


def bearer(headers: Mapping[str, str]) -> str | None:
    """The key of an `Authorization: Bearer KEY` header."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else None


def require_owner(caller: Caller, token: str) -> Principal:
    """The machine's own command line, proved by the token that lies in the data directory (mode 0600)."""
    presented = caller.headers.get("x-coread-token", "")
    if not hmac.compare_digest(presented.encode(), token.encode()) or caller.headers.get("origin"):
        raise NotAllowed("This door is for Coread's own commands on this machine.")
    return OWNER


class Access:
    """Resolves principals. `sessions` and `keys` are set once the database is open."""

    def __init__(self, settings: Settings, signer: CookieSigner, token: str) -> None:
        self._settings, self._signer, self._token = settings, signer, token
        self._env_keys = [key.get_secret_value() for key in settings.api_keys]
        self.sessions: Sessions | None = None
        self.keys: ApiKeys | None = None
        #: Why it never will be; "" while there is nothing of the kind.
        self.failure = ""

    def resolve(self, door: Door, caller: Caller) -> Principal:
        """The principal of a request at a door.

        page      whoever signed in; in open mode the browser's own signed cookie
        api       an API key's owner; on a loopback server also programs of this machine without a key
        command   the machine's owner, proved by the token in the data directory (mode 0600)

        Raises `NoIdentity` (401), `NotAllowed` (403), or `StillWarmingUp` (503) before the database is open
        and `LoadingFailed` (503) where it never will be.
        """
        match door:
            case "page":
                return self._browser(caller.headers)
            case "api":
                return self._program(caller)
            case "command":
                return require_owner(caller, self._token)

    def _browser(self, headers: Mapping[str, str]) -> Principal:
        if self._settings.open_to_all:
            return require(self._signer, headers)
        if self.sessions is None:
            raise self._not_yet("Coread is starting; sign in in a moment.")
        principal = self.sessions.principal(headers)
        if principal is None:
            raise SignedOut("Sign in first: your session has ended or there was none.")
        return principal

    def _program(self, caller: Caller) -> Principal:
        presented = bearer(caller.headers)
        if presented is not None:
            if (principal := key_principal(presented, self._env_keys)) is not None:
                return principal
            if self.keys is not None and (principal := self.keys.principal(presented)) is not None:
                return principal
        # Client libraries insist on sending a key; where none was ever made, any is taken for none.
        settings = self._settings
        local = (
            settings.loopback and settings.open_to_all and from_this_machine(caller, settings.allowed_hosts)
        )
        if local and (presented is None or self._needs_no_key(presented)):
            return LOCAL_API
        if presented is not None and self.keys is None:
            raise self._not_yet("Coread is starting; try the key again in a moment.")
        raise NoIdentity(
            "This API key is not known here."
            if presented is not None
            else "An API key is needed: send it as 'Authorization: Bearer KEY'."
        )

    def _not_yet(self, words: str) -> AppError:
        return LoadingFailed(self.failure) if self.failure else StillWarmingUp(words)

    def require_watcher(self, caller: Caller) -> None:
        """Lets programs of this machine, holders of its token and administrators see the server's figures;
        raises `NotAllowed` for everybody else."""
        settings = self._settings
        if settings.open_to_all and from_this_machine(caller, settings.allowed_hosts):
            return
        doors: tuple[Door, ...] = ("command", "api", "page")
        for door in doors:
            try:
                require_administrator(self.resolve(door, caller))
                return
            except AppError:
                continue
        raise NotAllowed("These figures are for administrators and for programs on this machine.")

    def _needs_no_key(self, presented: str) -> bool:
        """True where no key was ever asked for and this is none of ours (any more)."""
        some = self._env_keys or (self.keys is not None and self.keys.live())
        return not some and not presented.startswith(PREFIX)


def require_administrator(principal: Principal) -> Principal:
    """The principal, where it is an administrator; raises `NotAllowed` otherwise."""
    if principal.role != "administrator":
        raise NotAllowed("This is for administrators.")
    return principal
