"""API keys: shown once, hashed at rest, gone the moment they are revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.access import LOCAL_API
from app.errors import NotFoundHere, QuotaRefused, ValueRefused
from app.keys import MAX_KEYS, ApiKeys
from app.people_schema import MIGRATIONS
from app.principal import Principal, Role
from app.runtime import Runtime
from app.store import MIGRATIONS as STORE
from rag.database import Database
from tests.app.fakes import FakeEngine

ROLES: dict[str, Role | None] = {"a-ann": "reader", "a-root": "administrator", "a-gone": None}
CHAT = {"model": "coread", "messages": [{"role": "user", "content": "When does the bakery open?"}]}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "t.sqlite", [*STORE, *MIGRATIONS]) as opened:
        yield opened


@pytest.fixture
async def keys(database: Database) -> ApiKeys:
    made = ApiKeys(database, ROLES.get)
    await made.open()
    return made


def file_bytes(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.glob("t.sqlite*")]


async def test_a_key_acts_as_its_account(keys: ApiKeys) -> None:
    _, secret = await keys.create("laptop", "a-ann")
    assert keys.principal(secret) == Principal("api_key", "a-ann", "reader")
    _, root = await keys.create("laptop", "a-root")
    assert keys.principal(root) == Principal("api_key", "a-root", "administrator")


async def test_a_key_without_account_is_a_reader_of_its_own(keys: ApiKeys) -> None:
    (one, first), (_, second) = await keys.create("one"), await keys.create("two")
    assert keys.principal(first) == Principal("api_key", one.owner, "reader")
    assert keys.principal(first) != keys.principal(second)


async def test_a_key_of_an_account_that_may_not_act_is_none(keys: ApiKeys) -> None:
    _, secret = await keys.create("old laptop", "a-gone")
    assert keys.principal(secret) is None


async def test_only_the_whole_secret_counts(keys: ApiKeys) -> None:
    _, secret = await keys.create("laptop", "a-ann")
    for wrong in ("", secret[:-1], secret + "x", secret.upper(), " ", "\udcff", "coread_"):
        assert keys.principal(wrong) is None


async def test_keys_outlive_a_restart_and_are_nowhere_in_the_file(
    keys: ApiKeys, database: Database, tmp_path: Path
) -> None:
    _, secret = await keys.create("laptop", "a-ann")
    again = ApiKeys(database, lambda _: "reader")
    await again.open()
    assert again.principal(secret) is not None
    stored = b"".join(file_bytes(tmp_path))
    assert secret.encode() not in stored
    assert secret.removeprefix("coread_").encode() not in stored


async def test_a_revoked_key_is_gone_at_once_and_after_a_restart(keys: ApiKeys, database: Database) -> None:
    key, secret = await keys.create("laptop", "a-ann")
    with pytest.raises(NotFoundHere):
        await keys.revoke(key.id, owner="a-root")  # somebody else's
    assert keys.principal(secret) is not None
    await keys.revoke(key.id, owner="a-ann")
    assert keys.principal(secret) is None
    again = ApiKeys(database, lambda _: "reader")
    await again.open()
    assert again.principal(secret) is None
    with pytest.raises(NotFoundHere):
        await keys.revoke(key.id)


async def test_names_and_numbers_are_limited(keys: ApiKeys) -> None:
    for name in ("", "  \x00\n ", "x" * 81):
        with pytest.raises(ValueRefused, match="between 1 and 80"):
            await keys.create(name, "a-ann")
    assert (await keys.create("a\nb\x1b[31m", "a-ann"))[0].name == "a b [31m"
    for _ in range(MAX_KEYS - 1):
        await keys.create("k", "a-ann")
    with pytest.raises(QuotaRefused, match=str(MAX_KEYS)):
        await keys.create("one more", "a-ann")


async def test_keys_made_at_the_same_time_count_for_each_other(keys: ApiKeys, database: Database) -> None:
    made = await asyncio.gather(
        *(keys.create(f"key {n}", "a-ann") for n in range(MAX_KEYS + 9)), return_exceptions=True
    )
    assert sum(isinstance(one, QuotaRefused) for one in made) == 9
    assert len(keys.live("a-ann")) == MAX_KEYS
    again = ApiKeys(database, ROLES.get)
    await again.open()
    assert len(again.live("a-ann")) == MAX_KEYS


async def test_the_last_use_is_noted_but_not_each_time(keys: ApiKeys) -> None:
    _, secret = await keys.create("laptop", "a-ann")
    await keys.note_use(secret)
    first = keys.live("a-ann")[0].used
    assert first is not None
    await keys.note_use(secret)
    assert keys.live("a-ann")[0].used == first


async def test_the_first_key_closes_the_keyless_door_to_wrong_ones(
    runtime: Runtime, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Without keys any bearer is taken for none on this machine; with one, a wrong key is a mistake."""
    url = "/v1/chat/completions"
    wrong = {"authorization": "Bearer sk-anything"}
    assert (await client.post(url, json=CHAT, headers=wrong)).status_code == 200
    key, secret = await runtime.keys.create("script")
    assert (await client.post(url, json=CHAT, headers=wrong)).status_code == 401
    assert (await client.post(url, json=CHAT)).status_code == 200
    assert (
        await client.post(url, json=CHAT, headers={"authorization": f"Bearer {secret}"})
    ).status_code == 200
    assert [r.principal for r in engine.requests] == [LOCAL_API.id, LOCAL_API.id, key.owner]
    await runtime.keys.revoke(key.id)


async def test_commands_make_list_and_revoke_keys(runtime: Runtime, client: httpx.AsyncClient) -> None:
    door = {"x-coread-token": runtime.token}
    made = (await client.post("/api/admin/keys/add", json={"name": "script"}, headers=door)).json()
    assert set(made) == {"id", "owner", "name", "created", "used", "key"}
    listed = (await client.post("/api/admin/keys/list", json={}, headers=door)).json()
    assert [k["id"] for k in listed["keys"]] == [made["id"]]
    assert made["key"] not in str(listed)
    assert (await client.get("/v1/models", headers={"authorization": f"Bearer {made['key']}"})).is_success
    assert (await client.post("/api/admin/keys/add", json={"name": "x"})).status_code == 403
    gone = await client.post("/api/admin/keys/revoke", json={"id": made["id"]}, headers=door)
    assert gone.is_success
    assert runtime.keys.live() == []
    assert (
        await client.post("/api/admin/keys/revoke", json={"id": made["id"]}, headers=door)
    ).status_code == 404
