"""The parts of the account pages as HTML. Everything that is shown is escaped by `e`."""

from __future__ import annotations

import html
import time

from fastapi.responses import HTMLResponse

from app.pages.words import Words


def e(text: object) -> str:
    return html.escape(str(text), quote=True)


def when(at: float | None, w: Words) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)) if at else w("account.never")


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46em;margin:3em auto;padding:0 1em;color:#17232f;"
    "background:#f6f8fa}main{background:#fff;border:1px solid #dde3ea;border-radius:16px;padding:1.2em 1.6em}"
    "a{color:#0f766e}"
    "nav{display:flex;justify-content:space-between;align-items:baseline;gap:1em;margin:0 0 1em}"
    "nav a:first-child{font-size:1.3em;font-weight:680;color:inherit;text-decoration:none}"
    "h1{font-size:1.4em;margin:.2em 0 .6em}h2{font-size:1.1em;margin:1.6em 0 .4em}"
    "form{margin:.6em 0}label{display:block;margin:.6em 0}"
    "input,select{font:inherit;padding:.45em .6em;max-width:100%;box-sizing:border-box;color:inherit;"
    "background:inherit;border:1px solid #8a97a5;border-radius:10px}label input{width:24em}"
    "button{font:inherit;padding:.4em 1em;cursor:pointer;color:inherit;background:inherit;border-radius:10px;"
    "border:1px solid #8a97a5}button.go{background:#0f766e;border-color:#0f766e;color:#fff;font-weight:600}"
    "table{border-collapse:collapse;width:100%}th{font-weight:450}"
    "td,th{text-align:start;padding:.35em .8em .35em 0;border-bottom:1px solid #8884;vertical-align:top}"
    "td,th,h1,p{overflow-wrap:anywhere}td form{margin:0;min-width:7em}td:has(form){width:1%}"
    "@media(min-width:40.01em){td:has(+td form){white-space:nowrap}}"
    "button.go{margin-top:.4em}"
    "@media(max-width:40em){body{margin:1.2em auto}main{padding:1em 1.1em}label input{width:100%}"
    "table,tbody{display:block}tr{display:flex;flex-wrap:wrap;gap:.1em 1.2em;align-items:baseline;"
    "border-bottom:1px solid #8884;padding:.5em 0}td,th{border:0;padding:0;min-width:0}td:empty{display:none}"
    "tr:has([scope=col]){display:none}[scope=row]+td{margin-inline-start:auto;text-align:end}}"
    ".said{padding:.6em .9em;border-left:4px solid #0e7490;background:#8881}"
    ":focus-visible{outline:2px solid #e5540b;outline-offset:1px}"
    "@media(prefers-color-scheme:dark){body{color:#e8eef4;background:#0c1218}"
    "main{background:#151d26;border-color:#2b3743}a{color:#45c9b4}"
    "button.go{background:#45c9b4;border-color:#45c9b4;"
    "color:#10212a}:focus-visible{outline-color:#ff5a2a}}"
)


def page(
    title: str, body: str, w: Words, said: str = "", status: int = 200, here: str = "/profile"
) -> HTMLResponse:
    """One whole page; `body` is HTML, `title` and `said` are text. The switch of language leads to `here`."""
    note = f'<p class="said" role="status">{e(said)}</p>' if said else ""
    other = w("page.other_code")
    head = (
        f'<nav aria-label="{e(w("page.about"))}"><a href="/">Coread</a>'
        f'<a href="{e(here)}?language={e(other)}" lang="{e(other)}">{e(w("page.other_language"))}</a></nav>'
    )
    text = (
        f'<!doctype html><html lang="{w.language}"><meta charset="utf-8"><title>{e(title)} · Coread</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"{head}<main><h1>{e(title)}</h1>{note}{body}</main></html>"
    )
    return HTMLResponse(text, status, {"cache-control": "no-store"})


def button(action: str, label: str, spoken: str = "", **fields: str) -> str:
    """A form of one button; `spoken` names it where several on a page have the same label."""
    hidden = "".join(
        f'<input type="hidden" name="{e(name)}" value="{e(value)}">' for name, value in fields.items()
    )
    name = f' aria-label="{e(spoken)}"' if spoken else ""
    return f'<form method="post" action="{e(action)}">{hidden}<button{name}>{e(label)}</button></form>'


def field(label: str, name: str, kind: str = "text", complete: str = "off") -> str:
    return (
        f"<label>{e(label)}<br><input required name={e(name)} type={e(kind)} "
        f'autocomplete="{e(complete)}" maxlength="256"></label>'
    )


def form(action: str, button: str, *parts: str) -> str:
    go = f'<button class="go">{e(button)}</button>'
    return f'<form method="post" action="{e(action)}">{"".join(parts)}{go}</form>'


def sign_in(w: Words) -> str:
    return form(
        "/sign-in", w("account.sign_in"), field(w("account.name"), "name", complete="username"),
        field(w("account.password"), "password", "password", "current-password"),
    )  # fmt: skip


def set_up(w: Words) -> str:
    return f"<p>{e(w('account.no_account'))} <code>COREAD_SETUP_TOKEN</code></p>" + form(
        "/set-up", w("account.make_first"), field(w("account.token"), "token"),
        field(w("account.your_name"), "name", complete="username"),
        field(w("account.your_password"), "password", "password", "new-password"),
    )  # fmt: skip


def password(w: Words) -> str:
    return f"<h2>{e(w('account.password'))}</h2>" + form(
        "/profile/password", w("account.change"),
        field(w("account.present_password"), "present", "password", "current-password"),
        field(w("account.new_password"), "password", "password", "new-password"),
    )  # fmt: skip


def new_person(w: Words) -> str:
    roles = "".join(
        f'<option value="{role}">{e(w("account." + role))}</option>' for role in ("reader", "administrator")
    )
    return f"<h2>{e(w('account.somebody_new'))}</h2>" + form(
        "/people", w("account.add"), field(w("account.name"), "name"),
        field(w("account.first_password"), "password", "password", "new-password"),
        f'<label>{e(w("account.role"))}<br><select name="role">{roles}</select></label>',
    )  # fmt: skip


def reset(w: Words) -> str:
    return f"<h2>{e(w('account.forgotten'))}</h2>" + form(
        "/people/password", w("account.set_it"), field(w("account.name"), "name"),
        field(w("account.new_password"), "password", "password", "new-password"),
    )  # fmt: skip
