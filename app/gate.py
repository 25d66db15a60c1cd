"""What stands in front of every door: which of Gradio's routes are open at all, who may pass, from where.

    request ─▶ host known? ─▶ route open? ─▶ sent by our own page? ─▶ signed in? ─▶ session hash its own?

Gradio checks no login on `/cancel`, `/heartbeat` and `/stream`, lets a client choose its session hash, and
serves whatever lies in its cache to everybody who knows the path. So nothing of Gradio's is reached without
a principal, routes that the page does not need are closed, and a session hash belongs to who used it first.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access import Door, bearer, cross_site, from_this_machine, known_host
from app.addresses import client_address
from app.error_pages import as_page, wants_page
from app.errors import AppError, BodyTooLarge, NoIdentity, NotAllowed, NotFoundHere, TooMany, UploadRefused
from app.http_errors import as_response
from app.limits import KEPT_FREE_BYTES
from app.rates import Rate
from app.sent_files import check_files
from app.streams import EventStreams, OpenRequests
from app.text import may_be_broken, whole

if TYPE_CHECKING:
    from app.principal import Principal
    from app.runtime import Runtime

GRADIO = "/gradio_api"
#: Routes of Gradio's that the page uses. All others under its prefix answer 404, by being left out here.
OPEN_ROUTES = frozenset(
    {
        "/queue/join", "/queue/data", "/cancel", "/component_server", "/upload", "/upload_progress",
        "/startup-events", "/info", "/theme.css", "/heartbeat", "/app_id",
    }
)  # fmt: skip
#: Routes of Gradio's outside the prefix that the page does not need.
CLOSED = ("/monitoring", "/login", "/logout")
#: Files of the page itself, the same for everybody.
ASSETS = ("/static/", "/assets/", "/svelte/", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json",
          "/pwa_icon")  # fmt: skip
#: Doors that decide for themselves who may pass.
OWN_CHECK = ("/v1", "/api", "/metrics", "/healthz", "/readyz")
SIGN_IN = ("/sign-in", "/set-up")
#: Where the library page sends files.
FILES = ("/library/files",)
_MAX_HASHES, _MAX_HASHES_EACH, _NEW_HASHES_AN_HOUR = 100_000, 500, 500
#: What a page sends with an event: a question at most, never a file.
_MAX_JSON = 2**20
MAX_FORM = 16_384
#: All that one person's pages ask for: some dozens of tabs that are in use.
REQUESTS_A_MINUTE = 1_200
#: What may be asked for from one address without an identity: a page load, which brings one, or a look by a
#: program, which comes again without.
NEWCOMERS_A_MINUTE = 600


def _path(request: Request) -> str:
    """The decoded path that the router will match (a URL made of it would be encoded again)."""
    return str(request.scope["path"])


def _under(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix.rstrip("/") or path.startswith(prefix.rstrip("/") + "/") for prefix in prefixes)


def gradio_route(path: str) -> str | None:
    """The route of Gradio's that a path under its prefix means, None for any other path."""
    if path != GRADIO and not path.startswith(GRADIO + "/"):
        return None
    rest = path.removeprefix(GRADIO).rstrip("/")
    return "/heartbeat" if rest.startswith("/heartbeat/") and rest.count("/") == 2 else rest


def is_open(path: str) -> bool:
    """False for a route of Gradio's that the page does not need."""
    route = gradio_route(path)
    return route in OPEN_ROUTES if route is not None else not _under(path, CLOSED)


class SessionHashes:
    """Which principal a session hash of Gradio's belongs to: the first that used it."""

    def __init__(self) -> None:
        self._owner: OrderedDict[str, str] = OrderedDict()
        self._held: dict[str, int] = {}
        # Gradio keeps something for each of some thousand pages: one person must not push out the others'.
        self._fresh = Rate(_NEW_HASHES_AN_HOUR, 3600.0)

    def check(self, hash: str, principal: str) -> None:
        """Raises `NotAllowed` where the hash is somebody else's or is no hash."""
        if not 0 < len(hash) <= 64 or not hash.isascii() or not hash.isalnum():
            raise NotAllowed("This is not a session of this page.")
        owner = self._owner.get(hash)
        if owner is None:
            self._take(hash, principal)
        elif owner != principal:
            raise NotAllowed("This session belongs to somebody else.")
        else:
            self._owner.move_to_end(hash)

    def _take(self, hash: str, principal: str) -> None:
        if wait := self._fresh.take(principal):
            raise TooMany("Too many pages were opened within an hour.", wait)
        self._owner[hash] = principal
        self._held[principal] = self._held.get(principal, 0) + 1
        if self._held[principal] > _MAX_HASHES_EACH:  # one person's many tabs push out nobody else's
            self._drop(next(h for h, p in self._owner.items() if p == principal))
        elif len(self._owner) > _MAX_HASHES:
            self._drop(next(iter(self._owner)))

    def _drop(self, hash: str) -> None:
        principal = self._owner.pop(hash)
        self._held[principal] -= 1
        if not self._held[principal]:
            del self._held[principal]


class GateMiddleware:
    """Refuses what may not pass. Answers are one sentence: a page to browsers, JSON to programs."""

    def __init__(
        self,
        app: ASGIApp,
        runtime: Runtime,
        streams: EventStreams,
        components: frozenset[int] = frozenset(),
        events: frozenset[int] = frozenset(),
    ) -> None:
        self._app, self._runtime, self._settings = app, runtime, runtime.settings
        self._streams, self._components, self._known_events = streams, components, events
        self._hashes, self._open = SessionHashes(), OpenRequests()
        self._newcomers = Rate(NEWCOMERS_A_MINUTE, 60.0)
        self._visitors = Rate(600, 3600.0)  # new identities from one address
        self._uploads = Rate(max(10 * self._settings.max_upload_bytes, 2**28), 3600.0)
        self._upload_ids = Rate(400, 3600.0)  # two requests for each file
        self._requests = Rate(REQUESTS_A_MINUTE, 60.0)
        #: Events of one page's queue; each may run as long as an answer does.
        self._events = Rate(240, 60.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # nothing here speaks it
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            with ExitStack() as held:
                answer, receive = await self._pass(request, receive, held)
                if answer is None:
                    await self._app(scope, receive, send)
                    return
        except AppError as error:  # of this gate: the application behind answers its own
            answer = self._refusal(request, error)
        except ClientDisconnect:  # gone while its body was being read: nobody is there to be answered
            return
        await answer(scope, receive, send)

    def _on_the_page(self, component: object) -> bool:
        return type(component) is int and component in self._components

    def _is_event(self, number: object) -> bool:
        return type(number) is int and number in self._known_events

    async def _pass(
        self, request: Request, receive: Receive, held: ExitStack
    ) -> tuple[Response | None, Receive]:
        """None where the request may pass, else the answer it gets; and what to receive from. `held` is given
        what lasts as long as the request does."""
        path, headers = _path(request), request.headers
        settings = self._settings
        if _under(path, ("/v1", "/api/admin")):
            await self._program(request, "api" if _under(path, ("/v1",)) else "command", held)
            return None, receive
        if _under(path, OWN_CHECK) or _under(path, ASSETS):
            return None, receive
        if settings.loopback and not known_host({"host": headers.get("host", "")}, settings.allowed_hosts):
            raise NotAllowed(
                "This server is for this machine and was asked under another name; COREAD_ALLOWED_HOSTS "
                "lists the names that it answers to."
            )
        if not is_open(path):
            raise NotFoundHere("There is nothing here.")
        if request.method not in ("GET", "HEAD") and cross_site(headers):
            raise NotAllowed("This was sent by a page of another site.")
        if _under(path, SIGN_IN):
            return None, receive
        if self._shows_nothing_private(request) and not self._known(request):
            return self._newcomer(request), receive
        principal = self._runtime.principal(headers)
        if not settings.open_to_all:
            await self._runtime.accounts.note_seen(headers)
        if wait := self._requests.take(principal.id):
            raise TooMany("Too much is asked for at a time.", wait)
        held.enter_context(self._open.one_more(principal.id))
        return None, await self._gradio(request, receive, principal, held)

    async def _program(self, request: Request, door: Door, held: ExitStack) -> None:
        """Refuse a program without a right before its body is read: the route itself would parse it first."""
        principal = self._runtime.identify(door, request)
        presented = bearer(request.headers)
        if principal.kind == "api_key" and presented is not None:
            await self._runtime.keys.note_use(presented)
        held.enter_context(self._open.one_more(principal.id))

    # -- pages -------------------------------------------------------------------------------------------

    def _shows_nothing_private(self, request: Request) -> bool:
        """A page load; in open mode also the page and its layout for programs (a host's health check)."""
        if _is_page(request):
            return True
        reads = request.method in ("GET", "HEAD")
        return self._settings.open_to_all and reads and gradio_route(_path(request)) is None

    def _known(self, request: Request) -> bool:
        try:
            self._runtime.principal(request.headers)
        except NoIdentity:
            return False
        return True

    def _newcomer(self, request: Request) -> Response | None:
        """What a page load gets where nobody is known yet: the way to sign in, or (None) an identity."""
        if not self._settings.open_to_all:
            fresh = self._runtime.accounts.setup_token is not None
            return RedirectResponse("/set-up" if fresh else "/sign-in", 303, {"cache-control": "no-store"})
        address = client_address(request)
        local = from_this_machine(request, self._settings.allowed_hosts)
        if not local and (wait := self._newcomers.take(address)):
            raise TooMany("Too much is asked for at a time from your address.", wait)
        if _is_page(request) and not local and (wait := self._visitors.take(address)):
            raise TooMany("Too many new visitors come from your address.", wait)
        return None  # `IdentityMiddleware` behind this gives the cookie

    def _refusal(self, request: Request, error: AppError) -> Response:
        return as_page(error, request.headers) if wants_page(request) else as_response(error)

    # -- Gradio's own routes -------------------------------------------------------------------------------

    async def _gradio(
        self, request: Request, receive: Receive, principal: Principal, held: ExitStack
    ) -> Receive:
        route, who = gradio_route(_path(request)), principal.id
        if request.method == "POST" and _under(_path(request), FILES):
            route = "/upload"  # files of the library page, which come without Gradio's forms
        match route:
            case "/queue/data":
                hash = request.query_params.get("session_hash", "")
                self._hashes.check(hash, who)
                held.enter_context(self._streams.fetching(hash))
            case "/upload_progress":
                self._check_upload_id(request, who)
            case "/heartbeat":
                hash = _path(request).rstrip("/").rsplit("/", 1)[1]
                self._hashes.check(hash, who)
                held.enter_context(self._streams.shown(hash))
            case "/queue/join" | "/cancel" | "/component_server":
                if not request.headers.get("content-type", "").startswith("application/json"):
                    raise NotAllowed("This route takes JSON only.")
                body = await read_body(request, _MAX_JSON)
                if may_be_broken(body):
                    body = _mended(body)
                value = _json_object(body)
                hash = sent if isinstance(sent := value.get("session_hash"), str) else ""
                self._hashes.check(hash, who)
                if route == "/component_server" and not self._on_the_page(value.get("component_id")):
                    raise NotFoundHere("There is no such part of the page.")  # Gradio fails on it
                check_files(value, _upload_folder())
                if route == "/queue/join":
                    if wait := self._events.take(who):
                        raise TooMany("Too much is clicked at a time.", wait)
                    if not self._is_event(value.get("fn_index")):
                        raise NotFoundHere("There is no such event on the page.")  # Gradio fails on it
                    self._streams.joined(hash)
                return _replay(body, receive)
            case "/upload":
                self._check_upload_id(request, who)
                length = request.headers.get("content-length", "")
                size = int(length) if length.isdigit() else self._settings.max_body_bytes
                if shutil.disk_usage(self._runtime.upload_dir.parent).free < size + KEPT_FREE_BYTES:
                    raise UploadRefused("The server's disk is nearly full, so nothing can be added now.")
                if wait := self._uploads.take(who, size):
                    raise TooMany("You have sent as much as one person may send an hour.", wait)
        return receive

    def _check_upload_id(self, request: Request, who: str) -> None:
        """Gradio remembers every upload's name that it was ever asked about: few, and short ones only."""
        given = request.query_params.get("upload_id", "")
        if len(given) > 64 or not given.isascii():
            raise NotAllowed("This is not the name of an upload.")
        if wait := self._upload_ids.take(who):
            raise TooMany("Too many files were sent within an hour.", wait)


def _is_page(request: Request) -> bool:
    path = _path(request)
    return (
        request.method == "GET"
        and "text/html" in request.headers.get("accept", "")
        and gradio_route(path) is None
        and path != "/config"
    )


async def read_body(request: Request, limit: int) -> bytes:
    """The body, read no further than `limit`; raises `BodyTooLarge` for a longer one."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"The request's body is larger than the limit of {limit:,} bytes.")
        chunks.append(chunk)
    return b"".join(chunks)


def _upload_folder() -> Path:
    """Where Gradio puts uploads now."""
    from gradio.utils import get_upload_folder

    return Path(get_upload_folder())


def _json_object(body: bytes) -> dict[str, Any]:
    """The body's object; empty for any other JSON."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise NotAllowed("This route takes JSON only.") from None
    return value if isinstance(value, dict) else {}


def _mended(body: bytes) -> bytes:
    """The same JSON with every text of whole characters: Gradio's queue could not answer with another."""
    try:
        return whole(json.dumps(json.loads(body), ensure_ascii=False)).encode()
    except (ValueError, RecursionError):
        raise NotAllowed("This route takes JSON only.") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read once more, then what comes after it."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def form_fields(body: bytes) -> dict[str, str]:
    """The fields of a urlencoded form, the last of each name; raises `NotAllowed` for an absurd one."""
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=50)
    except ValueError:
        raise NotAllowed("The form has too many fields.") from None
    return {name: values[-1] for name, values in fields.items()}
