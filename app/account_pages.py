"""Signing in, a person's own profile, and the list of people: plain pages without scripts.

Everything that is shown was escaped by `_e`. Forms are taken from our own pages only: the gate refuses what
another site sends.
"""

from __future__ import annotations

import html
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app import render
from app.access import require_administrator
from app.errors import AppError, NotAllowed, NotFoundHere
from app.gate import MAX_FORM, form_fields, read_body
from app.principal import Principal, Role
from app.runtime import Runtime

Handler = Callable[[Request, dict[str, str]], Awaitable[Response]]


def _e(text: object) -> str:
    return html.escape(str(text), quote=True)


def _when(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)) if at else "never"


_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:46em;margin:3em auto;padding:0 1em;color:#1f2937;background:#fff}"
    "@media(prefers-color-scheme:dark){body{color:#e5e7eb;background:#111827}a{color:#7dd3fc}}"
    "form{margin:.6em 0}label{display:block;margin:.6em 0}"
    "input,select{font:inherit;padding:.35em;max-width:100%}"
    "button{font:inherit;padding:.35em .9em;cursor:pointer}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;padding:.3em .8em .3em 0;border-bottom:1px solid #8884;vertical-align:top}"
    ".said{padding:.6em .9em;border-left:4px solid #0e7490;background:#8881}code{word-break:break-all}"
)


def page(title: str, body: str, said: str = "", status: int = 200) -> HTMLResponse:
    """One whole page; `body` is HTML, `title` and `said` are text."""
    note = f'<p class="said" role="status">{_e(said)}</p>' if said else ""
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_e(title)} · Coread</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{_e(title)}</h1>{note}{body}</html>"
    )
    return HTMLResponse(text, status, {"cache-control": "no-store"})


def _button(action: str, label: str, **fields: str) -> str:
    hidden = "".join(
        f'<input type="hidden" name="{_e(name)}" value="{_e(value)}">' for name, value in fields.items()
    )
    return f'<form method="post" action="{_e(action)}">{hidden}<button>{_e(label)}</button></form>'


def _field(label: str, name: str, kind: str = "text", complete: str = "off") -> str:
    return (
        f"<label>{_e(label)}<br><input required name={_e(name)} type={_e(kind)} "
        f'autocomplete="{_e(complete)}" maxlength="256"></label>'
    )


_SIGN_IN = (
    '<form method="post" action="/sign-in">'
    + _field("Name", "name", complete="username")
    + _field("Password", "password", "password", "current-password")
    + "<button>Sign in</button></form>"
)
_SET_UP = (
    "<p>There is no account yet. The token stands in the server's log (or is what "
    "<code>COREAD_SETUP_TOKEN</code> was set to).</p>"
    '<form method="post" action="/set-up">'
    + _field("Set-up token", "token")
    + _field("Your name", "name", complete="username")
    + _field("Your password, at least 10 characters", "password", "password", "new-password")
    + "<button>Make the first administrator</button></form>"
)


class AccountPages:
    """What the pages show and do. Each method answers one request."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    # -- entering ----------------------------------------------------------------------------------------

    def _only_accounts(self) -> None:
        if self._runtime.settings.open_to_all:
            raise NotFoundHere("Nobody needs to sign in here.")

    async def sign_in_form(self, request: Request) -> Response:
        self._only_accounts()
        if self._runtime.accounts.setup_token is not None:
            return RedirectResponse("/set-up", 303)
        return page("Sign in", _SIGN_IN)

    async def sign_in(self, request: Request, fields: dict[str, str]) -> Response:
        self._only_accounts()
        try:
            return await self._enter(request, fields)
        except AppError as error:
            return _with_retry(page("Sign in", _SIGN_IN, str(error), error.status), error)

    async def _enter(self, request: Request, fields: dict[str, str]) -> Response:
        name, password = fields.get("name", ""), fields.get("password", "")
        agent = request.headers.get("user-agent", "unknown")
        token = await self._runtime.accounts.sign_in(name, password, _address(request), agent)
        response = RedirectResponse("/", 303, {"cache-control": "no-store"})
        response.raw_headers.append((b"set-cookie", self._cookie(request, token).encode()))
        return response

    def _cookie(self, request: Request, token: str, age: int = 180 * 24 * 3600) -> str:
        https = request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "") == "https"
        secure = "; Secure" if https else ""
        name = self._runtime.signer.name + "_s"
        return f"{name}={token}; Path=/; Max-Age={age}; HttpOnly; SameSite=Lax{secure}"

    async def set_up_form(self, request: Request) -> Response:
        self._only_accounts()
        if self._runtime.accounts.setup_token is None:
            return RedirectResponse("/sign-in", 303)
        return page("Set up", _SET_UP)

    async def set_up(self, request: Request, fields: dict[str, str]) -> Response:
        self._only_accounts()
        name, password = fields.get("name", ""), fields.get("password", "")
        try:
            await self._runtime.accounts.set_up(fields.get("token", ""), name, password, _address(request))
            return await self._enter(request, fields)
        except AppError as error:
            return _with_retry(page("Set up", _SET_UP, str(error), error.status), error)

    async def sign_out(self, request: Request, fields: dict[str, str]) -> Response:
        self._only_accounts()
        await self._runtime.accounts.sign_out(request.headers)
        response = RedirectResponse("/sign-in", 303, {"cache-control": "no-store"})
        response.raw_headers.append((b"set-cookie", self._cookie(request, "", 0).encode()))
        return response

    # -- one's own ---------------------------------------------------------------------------------------

    async def profile(self, request: Request, said: str = "", status: int = 200) -> Response:
        principal = self._runtime.principal(request.headers)
        parts = ['<p><a href="/">Back to the documents</a></p>', await self._usage(principal)]
        if principal.kind == "signed_in":
            parts += [self._sessions(request, principal), self._keys(principal), _PASSWORD]
            if principal.role == "administrator":
                parts.append('<p><a href="/people">People</a></p>')
            parts.append(_button("/sign-out", "Sign out"))
        title = self._runtime.accounts.account(principal.id).name if principal.kind == "signed_in" else "You"
        return page(title, "".join(parts), said, status)

    async def _usage(self, principal: Principal) -> str:
        usage = self._runtime.limits.usage(principal.id, await self._runtime.knowledge.stored(principal))

        def of(left: Any, most: Any) -> str:
            return "no limit" if most is None else f"{left:,} of {most:,} left"

        rows = [
            ("Documents", f"{usage['documents']:,} of {usage['max_documents']:,}"),
            ("Storage", f"{render.size(usage['bytes'])} of {render.size(usage['max_bytes'])}"),
            ("Computed tokens this minute", of(usage["tokens_left"], usage["max_tokens_per_minute"])),
            ("Files this hour", of(usage["uploads_left"], usage["max_uploads_per_hour"])),
            ("Answers at a time", f"{usage['max_running']:,}, and {usage['max_queued']:,} in line"),
        ]
        body = "".join(f"<tr><th>{_e(a)}</th><td>{_e(b)}</td></tr>" for a, b in rows)
        return f"<h2>What you use</h2><table>{body}</table>"

    def _sessions(self, request: Request, principal: Principal) -> str:
        here = self._runtime.accounts.session(request.headers)
        rows = "".join(
            f"<tr><td>{_e(s.label)}{' (this one)' if here and s.id == here.id else ''}</td>"
            f"<td>{_e(_when(s.seen))}</td>"
            f"<td>{_button('/profile/sessions/revoke', 'End', id=s.id)}</td></tr>"
            for s in self._runtime.accounts.sessions(principal.id)
        )
        return f"<h2>Where you are signed in</h2><table>{rows}</table>"

    def _keys(self, principal: Principal) -> str:
        rows = "".join(
            f"<tr><td>{_e(key.name)}</td><td>made {_e(_when(key.created))}</td>"
            f"<td>used {_e(_when(key.used))}</td>"
            f"<td>{_button('/profile/keys/revoke', 'Revoke', id=key.id)}</td></tr>"
            for key in self._runtime.keys.live(principal.id)
        )
        form = (
            '<form method="post" action="/profile/keys"><label>Name of a new key<br>'
            '<input required name="name" maxlength="80"></label><button>Make a key</button></form>'
        )
        return f"<h2>Keys for programs</h2><table>{rows}</table>{form}"

    def _signed_in(self, request: Request) -> Principal:
        principal = self._runtime.principal(request.headers)
        if principal.kind != "signed_in":
            raise NotAllowed("This is for people who signed in.")
        return principal

    async def revoke_session(self, request: Request, fields: dict[str, str]) -> Response:
        await self._runtime.accounts.revoke_session(fields.get("id", ""), self._signed_in(request).id)
        return RedirectResponse("/profile", 303)

    async def new_key(self, request: Request, fields: dict[str, str]) -> Response:
        principal = self._signed_in(request)
        key, secret = await self._runtime.keys.create(fields.get("name", ""), principal.id)
        body = (
            f"<p>This is the key <b>{_e(key.name)}</b>. Copy it now: it cannot be shown again.</p>"
            f'<p><code>{_e(secret)}</code></p><p><a href="/profile">Done</a></p>'
        )
        return page("A new key", body)

    async def revoke_key(self, request: Request, fields: dict[str, str]) -> Response:
        await self._runtime.keys.revoke(fields.get("id", ""), self._signed_in(request).id)
        return RedirectResponse("/profile", 303)

    async def change_password(self, request: Request, fields: dict[str, str]) -> Response:
        principal = self._signed_in(request)
        here = self._runtime.accounts.session(request.headers)
        await self._runtime.accounts.change_password(
            principal.id, fields.get("present", ""), fields.get("password", ""), _address(request),
            here.id if here else None,
        )  # fmt: skip
        return await self.profile(request, "Your password is changed; your other sessions have ended.")

    # -- administrators ----------------------------------------------------------------------------------

    async def people(self, request: Request, said: str = "", status: int = 200) -> Response:
        me = require_administrator(self._signed_in(request))
        rows = []
        for account in self._runtime.accounts.accounts():
            action = "enable" if account.disabled else "disable"
            state = f"locked since {_when(account.disabled)}" if account.disabled else "may sign in"
            button = (
                "" if account.id == me.id else _button(f"/people/{action}", action.title(), id=account.id)
            )
            rows.append(
                f"<tr><td>{_e(account.name)}</td><td>{_e(account.role)}</td><td>{_e(state)}</td>"
                f"<td>{button}</td></tr>"
            )
        body = (
            f'<p><a href="/profile">Your profile</a></p><table>{"".join(rows)}</table>{_NEW_PERSON}{_RESET}'
        )
        return page("People", body, said, status)

    async def new_person(self, request: Request, fields: dict[str, str]) -> Response:
        require_administrator(self._signed_in(request))
        role: Role = "administrator" if fields.get("role") == "administrator" else "reader"
        made = await self._runtime.accounts.create(fields.get("name", ""), fields.get("password", ""), role)
        return await self.people(request, f"{made.name} may sign in now.")

    async def disable(self, request: Request, fields: dict[str, str]) -> Response:
        require_administrator(self._signed_in(request))
        await self._runtime.accounts.set_disabled(fields.get("id", ""), True)
        return RedirectResponse("/people", 303)

    async def enable(self, request: Request, fields: dict[str, str]) -> Response:
        require_administrator(self._signed_in(request))
        await self._runtime.accounts.set_disabled(fields.get("id", ""), False)
        return RedirectResponse("/people", 303)

    async def reset_password(self, request: Request, fields: dict[str, str]) -> Response:
        require_administrator(self._signed_in(request))
        named = [a for a in self._runtime.accounts.accounts() if a.name == fields.get("name", "").strip()]
        if not named:
            raise NotFoundHere("There is no account of this name.")
        await self._runtime.accounts.set_password(named[0].id, fields.get("password", ""))
        return await self.people(request, f"{named[0].name} has a new password; the old sessions have ended.")


_PASSWORD = (
    '<h2>Password</h2><form method="post" action="/profile/password">'
    + _field("Present password", "present", "password", "current-password")
    + _field("New password, at least 10 characters", "password", "password", "new-password")
    + "<button>Change it</button></form>"
)
_NEW_PERSON = (
    '<h2>Somebody new</h2><form method="post" action="/people">'
    + _field("Name", "name")
    + _field("First password, at least 10 characters", "password", "password", "new-password")
    + '<label>Role<br><select name="role"><option>reader</option><option>administrator</option></select>'
    "</label><button>Add</button></form>"
)
_RESET = (
    '<h2>A forgotten password</h2><form method="post" action="/people/password">'
    + _field("Name", "name")
    + _field("New password, at least 10 characters", "password", "password", "new-password")
    + "<button>Set it</button></form>"
)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _with_retry(response: HTMLResponse, error: AppError) -> HTMLResponse:
    retry = getattr(error, "retry_after_s", None)
    if retry is not None:
        response.headers["retry-after"] = str(int(retry))
    return response


def account_router(runtime: Runtime) -> APIRouter:
    """All these pages' routes."""
    pages, router = AccountPages(runtime), APIRouter(include_in_schema=False)
    shown = {
        "/sign-in": pages.sign_in_form, "/set-up": pages.set_up_form,
        "/profile": pages.profile, "/people": pages.people,
    }  # fmt: skip
    done: dict[str, Handler] = {
        "/sign-in": pages.sign_in, "/set-up": pages.set_up, "/sign-out": pages.sign_out,
        "/profile/sessions/revoke": pages.revoke_session, "/profile/keys": pages.new_key,
        "/profile/keys/revoke": pages.revoke_key, "/profile/password": pages.change_password,
        "/people": pages.new_person, "/people/disable": pages.disable, "/people/enable": pages.enable,
        "/people/password": pages.reset_password,
    }  # fmt: skip

    def show(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await handler(request)

        return answer

    def take(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            fields = form_fields(await read_body(request, MAX_FORM))
            try:
                return await handler(request, fields)
            except AppError as error:
                back = '<p><a href="/profile">Back</a></p>'
                return _with_retry(page("That did not work", back, str(error), error.status), error)

        return answer

    for path, handler in shown.items():
        router.add_api_route(path, show(handler), methods=["GET"], response_model=None)
    for path, action in done.items():
        router.add_api_route(path, take(action), methods=["POST"], response_model=None)
    return router
