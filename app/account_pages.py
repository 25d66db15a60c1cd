"""Signing in, a person's own profile, and the list of people: plain pages without scripts.

`account_html` escapes everything that is shown. Forms are taken from our own pages only: the gate refuses
what another site sends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from app import account_html as view
from app import render
from app.access import require_administrator
from app.addresses import client_address, over_https
from app.errors import AppError, LoadingFailed, NotAllowed, NotFoundHere, StillWarmingUp
from app.gate import MAX_FORM, form_fields, read_body
from app.pages import words
from app.pages.words import Words, phrase
from app.principal import Principal, Role
from app.runtime import Runtime

Handler = Callable[[Request, dict[str, str]], Awaitable[Response]]


class AccountPages:
    """What the pages show and do. Each method answers one request."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    # -- entering ----------------------------------------------------------------------------------------

    def _only_accounts(self) -> None:
        if self._runtime.settings.open_to_all:
            raise NotFoundHere(phrase("account.not_needed"))

    @staticmethod
    def _entry(request: Request, name: str, error: AppError | None = None) -> Response:
        """The page to sign in or to set up, with what was wrong the last time."""
        w = words.of(request.headers)
        body, here = (view.sign_in(w), "/sign-in") if name == "sign_in" else (view.set_up(w), "/set-up")
        if error is None:
            return view.page(w("account." + name), body, w, here=here)
        return _with_retry(
            view.page(w("account." + name), body, w, w.sentence(error), error.status, here), error
        )

    async def sign_in_form(self, request: Request) -> Response:
        self._only_accounts()
        if self._runtime.accounts.setup_token is not None:
            return RedirectResponse("/set-up", 303)
        return self._entry(request, "sign_in")

    async def sign_in(self, request: Request, fields: dict[str, str]) -> Response:
        self._only_accounts()
        try:
            return await self._enter(request, fields)
        except AppError as error:
            return self._entry(request, "sign_in", error)

    async def _enter(self, request: Request, fields: dict[str, str]) -> Response:
        name, password = fields.get("name", ""), fields.get("password", "")
        agent = request.headers.get("user-agent", "unknown")
        token = await self._runtime.accounts.sign_in(name, password, client_address(request), agent)
        response = RedirectResponse("/", 303, {"cache-control": "no-store"})
        response.raw_headers.append((b"set-cookie", self._cookie(request, token).encode()))
        return response

    def _cookie(self, request: Request, token: str, age: int = 180 * 24 * 3600) -> str:
        secure = "; Secure" if over_https(request.url.scheme, request.headers) else ""
        name = self._runtime.signer.name + "_s"
        return f"{name}={token}; Path=/; Max-Age={age}; HttpOnly; SameSite=Lax{secure}"

    async def set_up_form(self, request: Request) -> Response:
        self._only_accounts()
        if self._runtime.accounts.setup_token is None:
            return RedirectResponse("/sign-in", 303)
        return self._entry(request, "set_up")

    async def set_up(self, request: Request, fields: dict[str, str]) -> Response:
        self._only_accounts()
        name, password = fields.get("name", ""), fields.get("password", "")
        try:
            await self._runtime.accounts.set_up(
                fields.get("token", ""), name, password, client_address(request)
            )
            return await self._enter(request, fields)
        except AppError as error:
            return self._entry(request, "set_up", error)

    async def sign_out(self, request: Request, fields: dict[str, str]) -> Response:
        self._only_accounts()
        await self._runtime.accounts.sign_out(request.headers)
        response = RedirectResponse("/sign-in", 303, {"cache-control": "no-store"})
        response.raw_headers.append((b"set-cookie", self._cookie(request, "", 0).encode()))
        return response

    # -- one's own ---------------------------------------------------------------------------------------

    async def profile(self, request: Request, said: str = "", status: int = 200) -> Response:
        principal, w = self._runtime.principal(request.headers), words.of(request.headers)
        parts = [
            f'<p><a href="/">{view.e(w("account.back_to_chat"))}</a></p>',
            await self._usage(principal, w),
        ]
        if principal.kind == "signed_in":
            parts += [self._sessions(request, principal, w), self._keys(principal, w), view.password(w)]
            if principal.role == "administrator":
                parts.append(f'<p><a href="/people">{view.e(w("account.people"))}</a></p>')
            parts.append(view.button("/sign-out", w("account.sign_out")))
        signed_in = principal.kind == "signed_in"
        title = self._runtime.accounts.account(principal.id).name if signed_in else w("account.you")
        return view.page(title, "".join(parts), w, said, status)

    async def _usage(self, principal: Principal, w: Words) -> str:
        head = f"<h2>{view.e(w('account.usage'))}</h2>"
        try:
            knowledge = self._runtime.knowledge
        except (StillWarmingUp, LoadingFailed):  # sessions, keys and the way out are there all the same
            return f"{head}<p>{view.e(w('account.usage_later'))}</p>"
        usage = self._runtime.limits.usage(principal.id, await knowledge.stored(principal))

        def of(left: Any, most: Any) -> str:
            return w("account.no_limit") if most is None else w("account.left", left=left, most=most)

        counted = "account.of_failed" if usage["failed"] else "account.of"
        documents = w(
            counted, n=usage["failed"], used=f"{usage['documents']:,}", most=f"{usage['max_documents']:,}"
        )
        stored = w("account.of", used=render.size(usage["bytes"]), most=render.size(usage["max_bytes"]))
        answers = w("account.answers_are", running=usage["max_running"], queued=usage["max_queued"])
        rows = [
            ("documents", documents),
            ("storage", stored),
            ("tokens_minute", of(usage["tokens_left"], usage["max_tokens_per_minute"])),
            ("files_hour", of(usage["uploads_left"], usage["max_uploads_per_hour"])),
            ("answers", answers),
        ]
        body = "".join(
            f'<tr><th scope="row">{view.e(w("account." + name))}</th><td>{view.e(text)}</td></tr>'
            for name, text in rows
        )
        return f"{head}<table>{body}</table>"

    def _sessions(self, request: Request, principal: Principal, w: Words) -> str:
        here = self._runtime.accounts.session(request.headers)
        rows = ""
        for s in self._runtime.accounts.sessions(principal.id):
            this = f" {w('account.this_one')}" if here and s.id == here.id else ""
            end = view.button(
                "/profile/sessions/revoke", w("account.end"), w("account.end_which", name=s.label), id=s.id
            )
            seen = view.e(view.when(s.seen, w))
            rows += f"<tr><td>{view.e(s.label + this)}</td><td>{seen}</td><td>{end}</td></tr>"
        return f"<h2>{view.e(w('account.sessions'))}</h2><table>{rows}</table>"

    def _keys(self, principal: Principal, w: Words) -> str:
        rows = ""
        for key in self._runtime.keys.live(principal.id):
            made, used = view.when(key.created, w), view.when(key.used, w)
            revoke = view.button(
                "/profile/keys/revoke",
                w("account.revoke"),
                w("account.revoke_which", name=key.name),
                id=key.id,
            )
            rows += (
                f"<tr><td>{view.e(key.name)}</td><td>{view.e(w('account.made', when=made))}</td>"
                f"<td>{view.e(w('account.used', when=used))}</td><td>{revoke}</td></tr>"
            )
        table = f"<table>{rows}</table>" if rows else f"<p>{view.e(w('account.no_keys'))}</p>"
        form = view.form(
            "/profile/keys", w("account.make_key"),
            f'<label>{view.e(w("account.key_name"))}<br><input required name="name" maxlength="80"></label>',
        )  # fmt: skip
        return f"<h2>{view.e(w('account.keys'))}</h2>{table}{form}"

    def _signed_in(self, request: Request) -> Principal:
        principal = self._runtime.principal(request.headers)
        if principal.kind != "signed_in":
            raise NotAllowed(phrase("account.signed_in_only"))
        return principal

    async def revoke_session(self, request: Request, fields: dict[str, str]) -> Response:
        await self._runtime.accounts.revoke_session(fields.get("id", ""), self._signed_in(request).id)
        return RedirectResponse("/profile", 303)

    async def new_key(self, request: Request, fields: dict[str, str]) -> Response:
        principal = self._signed_in(request)
        key, secret = await self._runtime.keys.create(fields.get("name", ""), principal.id)
        w = words.of(request.headers)
        body = (
            f"<p>{view.e(w('account.new_key_is'))} <b>{view.e(key.name)}</b></p>"
            f"<p>{view.e(w('account.copy_now'))}</p>"
            f'<p><code>{view.e(secret)}</code></p><p><a href="/profile">{view.e(w("account.done"))}</a></p>'
        )
        return view.page(w("account.new_key"), body, w)

    async def revoke_key(self, request: Request, fields: dict[str, str]) -> Response:
        await self._runtime.keys.revoke(fields.get("id", ""), self._signed_in(request).id)
        return RedirectResponse("/profile", 303)

    async def change_password(self, request: Request, fields: dict[str, str]) -> Response:
        principal = self._signed_in(request)
        here = self._runtime.accounts.session(request.headers)
        await self._runtime.accounts.change_password(
            principal.id, fields.get("present", ""), fields.get("password", ""), client_address(request),
            here.id if here else None,
        )  # fmt: skip
        return await self.profile(request, words.of(request.headers)("account.changed"))

    # -- administrators ----------------------------------------------------------------------------------

    async def people(self, request: Request, said: str = "", status: int = 200) -> Response:
        me, w = require_administrator(self._signed_in(request)), words.of(request.headers)
        rows = []
        for account in self._runtime.accounts.accounts():
            action = "enable" if account.disabled else "disable"
            state = (
                w("account.locked", when=view.when(account.disabled, w))
                if account.disabled
                else w("account.may")
            )
            label = w(f"account.{action}", name=account.name)
            button = "" if account.id == me.id else view.button(f"/people/{action}", label, id=account.id)
            rows.append(
                f"<tr><td>{view.e(account.name)}</td><td>{view.e(w('account.' + account.role))}</td>"
                f"<td>{view.e(state)}</td><td>{button}</td></tr>"
            )
        names = ("name", "role", "state", "action")
        head = "".join(f'<th scope="col">{view.e(w("account." + name))}</th>' for name in names)
        body = (
            f'<p><a href="/profile">{view.e(w("page.profile"))}</a></p>'
            f"<table><tr>{head}</tr>{''.join(rows)}</table>{view.new_person(w)}{view.reset(w)}"
        )
        return view.page(w("account.people"), body, w, said, status, "/people")

    async def new_person(self, request: Request, fields: dict[str, str]) -> Response:
        require_administrator(self._signed_in(request))
        role: Role = "administrator" if fields.get("role") == "administrator" else "reader"
        made = await self._runtime.accounts.create(fields.get("name", ""), fields.get("password", ""), role)
        return await self.people(request, words.of(request.headers)("account.may_now", name=made.name))

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
            raise NotFoundHere(phrase("account.none_named"))
        await self._runtime.accounts.set_password(named[0].id, fields.get("password", ""))
        said = words.of(request.headers)("account.reset", name=named[0].name)
        return await self.people(request, said)


def _with_retry(response: Response, error: AppError) -> Response:
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

    def refusal(request: Request, error: AppError) -> Response:
        w = words.of(request.headers)
        back = f'<p><a href="/profile">{view.e(w("account.back"))}</a></p>'
        return _with_retry(view.page(w("chat.failed"), back, w, w.sentence(error), error.status), error)

    def show(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except AppError as error:
                if "text/html" not in request.headers.get("accept", ""):
                    raise
                return refusal(request, error)

        return answer

    def take(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            fields = form_fields(await read_body(request, MAX_FORM))
            try:
                return await handler(request, fields)
            except AppError as error:
                return refusal(request, error)

        return answer

    for path, handler in shown.items():
        router.add_api_route(path, show(handler), methods=["GET"], response_model=None)
    for path, action in done.items():
        router.add_api_route(path, take(action), methods=["POST"], response_model=None)
    return router
