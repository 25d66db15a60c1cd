"""People: set-up, signing in, throttling, sessions and accounts that end at once, the pages around them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from app import accounts as module
from app.accounts import MAX_SESSIONS, WRONG, Accounts
from app.errors import NoIdentity, NotAllowed, NotFoundHere, TooMany, ValueRefused
from app.keys import ApiKeys
from app.pages.build import build_demo
from app.passwords import PasswordHasher, hash_password, verify_password
from app.people_commands import PeopleCommands
from app.people_schema import MIGRATIONS
from app.principal import Principal
from app.runtime import Runtime
from app.server import create_app
from app.settings import load_settings
from app.store import MIGRATIONS as STORE
from rag.database import Database
from tests.app.conftest import FakeParts

PASSWORD, OTHER = "correct horse", "battery staple"
HTML = {"accept": "text/html"}


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.passwords._N", 2**4)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "t.sqlite", [*STORE, *MIGRATIONS]) as opened:
        yield opened


@pytest.fixture
async def accounts(database: Database) -> AsyncIterator[Accounts]:
    made = Accounts(database, "s")
    await made.open()
    yield made
    made.close()


def cookie(token: str) -> dict[str, str]:
    return {"cookie": f"s={token}"}


async def root(accounts: Accounts) -> module.Account:
    token = accounts.setup_token
    assert token is not None
    return await accounts.set_up(token, "Root", PASSWORD, "1.2.3.4")


# Passwords


def test_a_hash_says_nothing_twice_and_proves_its_password() -> None:
    first, second = hash_password(PASSWORD), hash_password(PASSWORD)
    assert first != second
    assert PASSWORD not in first
    assert verify_password(PASSWORD, first)
    assert not verify_password(PASSWORD + "x", first)
    # The same letters typed on another keyboard (composed and decomposed).
    assert verify_password("passwörter-sind", hash_password("passwo\u0308rter-sind"))


@pytest.mark.parametrize("stored", ["", "scrypt", "scrypt$x$8$1$a$b", "md5$1$1$1$YQ==$YQ==", "$$$$$"])
def test_a_damaged_record_proves_nothing(stored: str) -> None:
    assert not verify_password(PASSWORD, stored)


@pytest.mark.parametrize("password", ["", "short", "x" * 257])
async def test_unfit_passwords_are_refused(password: str) -> None:
    hasher = PasswordHasher()
    with pytest.raises(ValueRefused, match="between 10 and 256"):
        await hasher.hash(password)
    assert not await hasher.verify(password, None)
    hasher.close()


# Accounts and sessions


async def test_the_first_administrator_needs_the_token_and_is_the_only_first(accounts: Accounts) -> None:
    token = accounts.setup_token
    assert token is not None
    for wrong in ("", token[:-1], token + "x"):
        with pytest.raises(NotAllowed):
            await accounts.set_up(wrong, "Eve", PASSWORD, f"9.9.9.{len(wrong)}")
    made = await root(accounts)
    assert made.role == "administrator"
    assert accounts.setup_token is None
    with pytest.raises(NotAllowed):
        await accounts.set_up(token, "Eve", PASSWORD, "1.1.1.1")


async def test_the_token_may_come_from_the_environment(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COREAD_SETUP_TOKEN", "chosen-beforehand")
    made = Accounts(database, "s")
    assert made.setup_token == "chosen-beforehand"
    assert made.setup_token_chosen
    made.close()
    monkeypatch.delenv("COREAD_SETUP_TOKEN")
    of_our_own = Accounts(database, "s")
    assert not of_our_own.setup_token_chosen
    of_our_own.close()


async def test_signing_in_is_a_principal_until_it_is_revoked(accounts: Accounts) -> None:
    me = await root(accounts)
    token = await accounts.sign_in("ROOT ", PASSWORD, "a", "Firefox\n\x00")
    assert accounts.principal(cookie(token)) == Principal("signed_in", me.id, "administrator")
    (session,) = accounts.sessions(me.id)
    assert session.label == "Firefox"
    with pytest.raises(NotFoundHere):
        await accounts.revoke_session(session.id, "a-somebody-else")
    await accounts.revoke_session(session.id, me.id)
    assert accounts.principal(cookie(token)) is None


async def test_wrong_names_and_passwords_get_the_same_words(accounts: Accounts) -> None:
    await root(accounts)
    said = set()
    for number, (name, password) in enumerate([("root", "wrong wrong"), ("nobody", PASSWORD), ("", "")]):
        with pytest.raises(NoIdentity) as refused:
            await accounts.sign_in(name, password, f"address {number}", "x")
        said.add(str(refused.value))
    assert said == {WRONG}


async def test_a_name_that_does_not_exist_costs_a_hash_too(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str | None] = []
    verify = PasswordHasher.verify

    async def counted(self: PasswordHasher, password: str, stored: str | None) -> bool:
        calls.append(stored)
        return await verify(self, password, stored)

    monkeypatch.setattr(PasswordHasher, "verify", counted)
    with pytest.raises(NoIdentity):
        await accounts.sign_in("nobody", PASSWORD, "a", "x")
    assert calls == [None]


async def test_guessing_is_throttled_by_address_and_a_success_starts_anew(accounts: Accounts) -> None:
    await root(accounts)
    for _ in range(4):
        with pytest.raises(NoIdentity):
            await accounts.sign_in("root", "wrong wrong", "a", "x")
    await accounts.sign_in("root", PASSWORD, "a", "x")
    for _ in range(5):
        with pytest.raises(NoIdentity):
            await accounts.sign_in("root", "wrong wrong", "a", "x")
    with pytest.raises(TooMany, match="too many attempts"):
        await accounts.sign_in("root", PASSWORD, "a", "x")
    assert await accounts.sign_in("root", PASSWORD, "another address", "x")


async def test_another_spelling_of_a_name_is_no_name_that_nobody_tried(accounts: Accounts) -> None:
    await root(accounts)
    for name in ("root", " root", "ROOT ", "\troot", " " * 70 + "root"):
        with pytest.raises(NoIdentity):
            await accounts.sign_in(name, "wrong wrong", "a", "x")
    with pytest.raises(TooMany):
        await accounts.sign_in("root  ", PASSWORD, "a", "x")


async def test_many_names_from_one_address_are_throttled_too(accounts: Accounts) -> None:
    for number in range(30):
        with pytest.raises(NoIdentity):
            await accounts.sign_in(f"name {number}", PASSWORD, "a", "x")
    with pytest.raises(TooMany):
        await accounts.sign_in("name 30", PASSWORD, "a", "x")


async def test_disabling_ends_sessions_and_keys_at_once(accounts: Accounts) -> None:
    await root(accounts)
    ann = await accounts.create("Ann", PASSWORD, "reader")
    token = await accounts.sign_in("ann", PASSWORD, "a", "x")
    assert accounts.role_of(ann.id) == "reader"
    await accounts.set_disabled(ann.id, True)
    assert accounts.principal(cookie(token)) is None
    assert accounts.role_of(ann.id) is None
    with pytest.raises(NoIdentity):
        await accounts.sign_in("ann", PASSWORD, "a", "x")
    await accounts.set_disabled(ann.id, False)
    assert accounts.principal(cookie(token)) is None, "an ended session does not come back"
    assert await accounts.sign_in("ann", PASSWORD, "a", "x")


async def test_the_last_administrator_stays(accounts: Accounts) -> None:
    me = await root(accounts)
    with pytest.raises(ValueRefused, match="last administrator"):
        await accounts.set_disabled(me.id, True)
    other = await accounts.create("Second", PASSWORD, "administrator")
    await accounts.set_disabled(me.id, True)
    with pytest.raises(ValueRefused):
        await accounts.set_disabled(other.id, True)


async def test_a_new_password_ends_the_other_sessions(accounts: Accounts) -> None:
    me = await root(accounts)
    here, elsewhere = [await accounts.sign_in("root", PASSWORD, "a", "x") for _ in range(2)]
    mine = accounts.session(cookie(here))
    assert mine is not None
    with pytest.raises(NoIdentity):
        await accounts.change_password(me.id, "wrong wrong", OTHER, "a", mine.id)
    await accounts.change_password(me.id, PASSWORD, OTHER, "a", mine.id)
    assert accounts.principal(cookie(here)) is not None
    assert accounts.principal(cookie(elsewhere)) is None
    with pytest.raises(NoIdentity):
        await accounts.sign_in("root", PASSWORD, "b", "x")
    assert await accounts.sign_in("root", OTHER, "c", "x")


async def test_names_are_taken_once_whatever_their_case(accounts: Accounts) -> None:
    await accounts.create("Ann Öst", PASSWORD, "reader")
    for name in ("ann öst", "ANN  ÖST"):
        with pytest.raises(ValueRefused, match="already"):
            await accounts.create(name, PASSWORD, "reader")


async def test_sessions_are_capped_and_outlive_a_restart_but_not_their_time(
    accounts: Accounts, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await root(accounts)
    proved = await accounts._stored(me.id)
    assert proved is not None
    tokens = [await accounts._begin(me, proved, "x") for _ in range(MAX_SESSIONS + 3)]
    assert len(accounts.sessions(me.id)) == MAX_SESSIONS
    assert accounts.principal(cookie(tokens[0])) is None
    again = Accounts(database, "s")
    await again.open()
    assert again.principal(cookie(tokens[-1])) == me.principal
    stored = await database.read(lambda c: "".join(map(str, c.execute("SELECT * FROM app_sessions"))))
    assert tokens[-1] not in stored
    monkeypatch.setattr(module, "IDLE_S", -1.0)
    assert again.principal(cookie(tokens[-1])) is None
    await again.open()
    assert again.sessions(me.id) == []
    again.close()


# What happens while a password is being checked or a session is being written


class Paused:
    """A function of `owner` that waits behind its work: `reached` says that it has been done, `go` lets it
    return. Only the first call is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        real = getattr(owner, name)

        async def held(*arguments: Any) -> Any:
            found = await real(*arguments)
            if not self.reached.is_set():
                self.reached.set()
                await self.go.wait()
            return found

        monkeypatch.setattr(owner, name, held)


async def test_an_old_password_that_was_being_checked_begins_no_session(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await root(accounts)
    checked = Paused(monkeypatch, accounts._hasher, "verify")
    old = asyncio.ensure_future(accounts.sign_in("Root", PASSWORD, "9.9.9.9", "x"))
    await checked.reached.wait()
    await accounts.set_password(me.id, OTHER)
    checked.go.set()
    with pytest.raises(NoIdentity, match=WRONG):
        await old
    assert accounts.sessions(me.id) == []


async def test_a_session_that_was_being_written_ends_with_its_password(
    accounts: Accounts, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await root(accounts)
    written = Paused(monkeypatch, database, "write")
    old = asyncio.ensure_future(accounts.sign_in("Root", PASSWORD, "9.9.9.9", "x"))
    await written.reached.wait()
    await accounts.set_password(me.id, OTHER)
    written.go.set()
    with pytest.raises(NoIdentity):
        await old
    assert await accounts.sign_in("Root", OTHER, "a", "x")
    assert len(accounts.sessions(me.id)) == 1
    again = Accounts(database, "s")
    await again.open()
    assert again.sessions(me.id) == accounts.sessions(me.id), "nor after a restart"
    again.close()


async def test_of_two_changes_of_one_password_one_counts(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await root(accounts)
    checked = Paused(monkeypatch, accounts._hasher, "verify")
    late = asyncio.ensure_future(accounts.change_password(me.id, PASSWORD, "the late one", "a"))
    await checked.reached.wait()
    here = await accounts.sign_in("Root", PASSWORD, "b", "x")
    mine = accounts.session(cookie(here))
    assert mine is not None
    await accounts.change_password(me.id, PASSWORD, OTHER, "b", mine.id)
    checked.go.set()
    with pytest.raises(NoIdentity, match="present password"):
        await late
    assert accounts.principal(cookie(here)) is not None, "a change that does not count ends nothing"
    with pytest.raises(NoIdentity):
        await accounts.sign_in("Root", "the late one", "c", "x")
    assert await accounts.sign_in("Root", OTHER, "c", "x")


@pytest.mark.parametrize("part", ["verify", "write"])
async def test_no_session_of_a_locked_account_comes_back_with_it(
    accounts: Accounts, database: Database, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    await root(accounts)
    ann = await accounts.create("Ann", PASSWORD, "reader")
    held = Paused(monkeypatch, accounts._hasher if part == "verify" else database, part)
    begun = asyncio.ensure_future(accounts.sign_in("Ann", PASSWORD, "9.9.9.9", "x"))
    await held.reached.wait()
    await accounts.set_disabled(ann.id, True)
    held.go.set()
    with pytest.raises(NoIdentity):
        await begun
    await accounts.set_disabled(ann.id, False)
    assert accounts.sessions(ann.id) == []
    again = Accounts(database, "s")
    await again.open()
    assert again.sessions(ann.id) == []
    again.close()


async def test_a_session_that_ends_by_itself_keeps_no_other_one(
    accounts: Accounts, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = await root(accounts)
    tokens = [await accounts.sign_in("Root", PASSWORD, f"{n}", "x") for n in range(3)]
    writing = Paused(monkeypatch, database, "write")
    ending = asyncio.ensure_future(accounts.revoke_sessions(me.id))
    await writing.reached.wait()
    for token in tokens:
        await accounts.sign_out(cookie(token))
    writing.go.set()
    await ending
    assert accounts.sessions(me.id) == []


async def test_a_lock_ends_keys_for_good(accounts: Accounts, database: Database) -> None:
    """Also one that is being written; other people's go on."""
    me = await root(accounts)
    ann = await accounts.create("Ann", PASSWORD, "reader")
    keys = ApiKeys(database, accounts.role_of)
    await keys.open()
    accounts.on_lock(keys.forget)
    _, leaked = await keys.create("leaked", ann.id)
    _, mine = await keys.create("mine", me.id)
    writing = asyncio.ensure_future(keys.create("being written", ann.id))
    await asyncio.sleep(0)  # its row is in line
    await accounts.set_disabled(ann.id, True)
    _, late = await writing
    await accounts.set_password(ann.id, OTHER)
    await accounts.set_disabled(ann.id, False)
    again = ApiKeys(database, accounts.role_of)
    await again.open()
    for opened in (keys, again):
        assert opened.principal(leaked) is opened.principal(late) is None
        assert opened.principal(mine) == Principal("api_key", me.id, "administrator")
        assert opened.live(ann.id) == []


async def test_what_was_locked_by_an_earlier_version_has_no_keys_and_gets_none(
    accounts: Accounts, database: Database
) -> None:
    me = await root(accounts)
    ann = await accounts.create("Ann", PASSWORD, "reader")
    keys = ApiKeys(database, accounts.role_of)
    _, old = await keys.create("old", ann.id)
    _, mine = await keys.create("mine", me.id)
    await accounts.sign_in("Ann", PASSWORD, "a", "x")
    await database.write(lambda c: c.execute("UPDATE app_accounts SET disabled = 1.0 WHERE name = 'Ann'"))
    again = Accounts(database, "s")
    await again.open()
    opened = ApiKeys(database, again.role_of)
    await opened.open()
    with pytest.raises(ValueRefused, match="'Ann' is locked"):
        await PeopleCommands(again, opened).add_key("new", "ann")
    await again.set_disabled(ann.id, False)
    assert opened.principal(old) is None
    assert opened.principal(mine) is not None
    assert again.sessions(ann.id) == []
    again.close()


# The pages


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    monkeypatch.setenv("COREAD_SETUP_TOKEN", "the-token")
    made = Runtime(load_settings(data_dir=tmp_path / "d", access="accounts"), FakeParts())
    made.open()
    made.start()
    await made.wait_seeded()
    yield made
    await made.stop()


@pytest.fixture
async def visitors(runtime: Runtime) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Three browsers."""
    app = create_app(runtime, build_demo(runtime))
    made = [
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app, client=("127.0.0.1", 1 + n)), base_url="http://127.0.0.1:7860"
        )
        for n in range(3)
    ]
    yield made
    for client in made:
        await client.aclose()


async def set_up(client: httpx.AsyncClient) -> None:
    fields = {"token": "the-token", "name": "Root", "password": PASSWORD}
    assert (await client.post("/set-up", data=fields)).status_code == 303


def ids(text: str, action: str) -> list[str]:
    return re.findall(rf'action="{action}"><input type="hidden" name="id" value="([^"]+)"', text)


async def test_nothing_of_the_page_is_reached_without_signing_in(visitors: list[httpx.AsyncClient]) -> None:
    eve = visitors[0]
    first = await eve.get("/", headers=HTML)
    assert (first.status_code, first.headers["location"]) == (303, "/set-up")
    await set_up(visitors[1])
    assert (await eve.get("/", headers=HTML)).headers["location"] == "/sign-in"
    for method, path in (
        ("GET", "/"), ("GET", "/config"), ("GET", "/profile"), ("GET", "/people"),
        ("GET", "/gradio_api/info"), ("POST", "/gradio_api/queue/join"),
        ("GET", "/gradio_api/queue/data?session_hash=abc"), ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/heartbeat/abc"), ("POST", "/gradio_api/cancel"),
        ("POST", "/gradio_api/component_server"), ("GET", "/gradio_api/startup-events"),
        ("POST", "/people"), ("POST", "/profile/keys"),
    ):  # fmt: skip
        response = await eve.request(method, path, json={} if method == "POST" else None)
        assert response.status_code == 401, path
    assert (await eve.get("/healthz")).status_code == 200


async def test_set_up_sign_in_profile_and_out(visitors: list[httpx.AsyncClient], runtime: Runtime) -> None:
    me, again, _ = visitors
    assert (
        await me.post("/set-up", data={"token": "x", "name": "E", "password": PASSWORD})
    ).status_code == 403
    await set_up(me)
    assert (await me.get("/", headers=HTML)).status_code == 200
    wrong = await again.post("/sign-in", data={"name": "Root", "password": "wrong wrong"})
    assert wrong.status_code == 401
    assert WRONG in wrong.text
    right = await again.post("/sign-in", data={"name": "Root", "password": PASSWORD})
    assert "HttpOnly" in right.headers["set-cookie"]
    assert "SameSite=Lax" in right.headers["set-cookie"]
    profile = (await me.get("/profile")).text
    assert "Storage" in profile
    sessions = ids(profile, "/profile/sessions/revoke")
    assert len(sessions) == 2
    for id in sessions:
        if id != runtime.accounts.session(dict(me.headers) | {"cookie": _jar(me)}).id:  # type: ignore[union-attr]
            await me.post("/profile/sessions/revoke", data={"id": id})
    assert (await again.get("/profile")).status_code == 401
    assert (await me.post("/sign-out")).headers["location"] == "/sign-in"
    assert (await me.get("/profile")).status_code == 401


def _jar(client: httpx.AsyncClient) -> str:
    return "; ".join(f"{name}={value}" for name, value in client.cookies.items())


async def test_readers_are_made_by_administrators_and_manage_nobody(
    visitors: list[httpx.AsyncClient],
) -> None:
    boss, ann, _ = visitors
    await set_up(boss)
    hostile = '<b onmouseover="x">Ann</b>'
    made = await boss.post("/people", data={"name": hostile, "password": PASSWORD, "role": "reader"})
    assert hostile not in made.text
    assert "&lt;b onmouseover" in made.text
    assert (await ann.post("/sign-in", data={"name": hostile, "password": PASSWORD})).status_code == 303
    for path, fields in (
        ("/people", {"name": "X", "password": PASSWORD}), ("/people/disable", {"id": "x"}),
        ("/people/enable", {"id": "x"}), ("/people/password", {"name": "Root", "password": OTHER}),
    ):  # fmt: skip
        assert (await ann.post(path, data=fields)).status_code == 403
    assert (await ann.get("/people")).status_code == 403
    told = await ann.get("/people", headers=HTML)
    assert told.status_code == 403
    assert told.headers["content-type"].startswith("text/html")
    (id,) = ids((await boss.get("/people")).text, "/people/disable")
    await boss.post("/people/disable", data={"id": id})
    assert (await ann.get("/profile")).status_code == 401


async def test_a_persons_key_is_shown_once_and_acts_as_the_person(
    visitors: list[httpx.AsyncClient], runtime: Runtime
) -> None:
    me, program, _ = visitors
    await set_up(me)
    shown = (await me.post("/profile/keys", data={"name": "script"})).text
    found = re.search(r"coread_[\w-]+", shown)
    assert found
    assert found[0] not in (await me.get("/profile")).text
    headers = {"authorization": f"Bearer {found[0]}"}
    assert (await program.get("/v1/models", headers=headers)).status_code == 200
    boss = runtime.accounts.accounts()[0]
    assert runtime.keys.principal(found[0]) == Principal("api_key", boss.id, "administrator")
    (id,) = ids((await me.get("/profile")).text, "/profile/keys/revoke")
    await me.post("/profile/keys/revoke", data={"id": id})
    assert (await program.get("/v1/models", headers=headers)).status_code == 401


async def test_forms_of_other_sites_and_absurd_ones_are_refused(visitors: list[httpx.AsyncClient]) -> None:
    me = visitors[0]
    await set_up(me)
    for headers in (
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
        {"origin": "https://elsewhere.example"}, {"origin": "null"},
    ):  # fmt: skip
        assert (await me.post("/profile/keys", data={"name": "x"}, headers=headers)).status_code == 403
    assert (await me.post("/profile/keys", content=b"a=" + b"x" * 20_000)).status_code == 413
    assert (await me.post("/profile/keys", content=b"a&" * 60)).status_code in (403, 422)


async def test_accounts_mode_needs_no_demo_and_open_mode_no_sign_in(tmp_path: Path) -> None:
    open_one = Runtime(load_settings(data_dir=tmp_path / "o"), FakeParts())
    open_one.open()
    transport = httpx.ASGITransport(create_app(open_one, gr.Blocks()), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/sign-in")).status_code == 404
        assert (await client.post("/set-up", data={})).status_code == 404
    await open_one.stop()
