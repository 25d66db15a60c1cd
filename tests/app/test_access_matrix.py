"""Who may do what, cell by cell.

Ann owns a document that she shared with Bob. Everybody else must see of it exactly what they would see of a
document that does not exist. An administrator runs the server; that gives no right to read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from app.dashboard.feed import Asked
from app.errors import NoIdentity, NotFoundHere
from app.principal import OWNER, Principal
from app.runtime import Runtime
from app.store import Reference
from app.updates import Finished
from rag.errors import NotFound, RagError
from tests.app.fakes import CharTokenizer, FakeEngine

SECRET = "# The vault\n\nThe zebra password of the vault is Quintessence.\n"
QUESTION = "What is the zebra password of the vault?"

PEOPLE: dict[str, Principal] = {
    "owner": Principal("signed_in", "a-ann"),
    "owner's key": Principal("api_key", "a-ann"),
    "reader": Principal("signed_in", "a-bob"),
    "stranger": Principal("signed_in", "a-eve"),
    "anonymous": Principal("anonymous", "b-visitor"),
    "administrator": Principal("signed_in", "a-root", "administrator"),
    "command line": OWNER,
    "key of its own": Principal("api_key", "k-1"),
    "a made-up one": Principal("anonymous", "*"),
}
MAY_READ = {"owner", "owner's key", "reader"}
MAY_DELETE = {"owner", "owner's key"}


@dataclass(slots=True)
class World:
    runtime: Runtime
    engine: FakeEngine
    document: str
    collection: str
    conversation: str
    version: int


@pytest.fixture
async def world(runtime: Runtime, engine: FakeEngine) -> World:
    ann = PEOPLE["owner"]
    document = await runtime.knowledge.upload(ann, "vault.md", SECRET.encode())
    async for _ in runtime.knowledge.progress(ann, document, 0.05):
        pass
    view = next(d for d in await runtime.knowledge.documents(ann) if d.id == document)
    await runtime.store.grant(view.collection_id, PEOPLE["reader"].id)
    talk = await runtime.store.create(ann)
    async for _ in runtime.chat.ask(ann, talk.id, QUESTION):
        pass
    return World(runtime, engine, document, view.collection_id, talk.id, view.version)


async def lists(world: World, who: Principal) -> bool:
    return world.document in {d.id for d in await world.runtime.knowledge.documents(who)}


async def searches(world: World, who: Principal) -> bool:
    hits = await world.runtime.knowledge.search(await world.runtime.store.readable(who), QUESTION, 20)
    return any(hit.document_id == world.document for hit in hits)


async def opens(world: World, who: Principal) -> bool:
    readable = await world.runtime.store.readable(who)
    try:
        text = (await world.runtime.knowledge.document(readable, world.document)).text
    except NotFoundHere:
        return False
    return "Quintessence" in text


async def downloads(world: World, who: Principal) -> bool:
    readable = await world.runtime.store.readable(who)
    library = world.runtime.knowledge._library
    try:
        with await library.original(world.document, readable) as file:
            return file.read() == SECRET.encode()
    except NotFound:
        return False


async def reads_an_excerpt(world: World, who: Principal) -> bool:
    readable = await world.runtime.store.readable(who)
    try:
        await world.runtime.knowledge._library.excerpt(world.document, world.version, 0, 10, readable)
    except RagError:
        return False
    return True


async def is_shown_the_citation(world: World, who: Principal) -> bool:
    """A reference in an answer of one's own, made while one could read it."""
    reference = Reference(1, world.document, world.version, world.collection, 0, len(SECRET))
    (source,) = await world.runtime.knowledge.sources(who, [reference])
    assert source.available == ("Quintessence" in source.text)
    assert source.available or "vault" not in source.title
    return source.available


async def has_it_in_the_prompt(world: World, who: Principal) -> bool:
    talk = await world.runtime.store.create(who)
    updates = [u async for u in world.runtime.chat.ask(who, talk.id, QUESTION)]
    assert isinstance(updates[-1], Finished)
    request = world.engine.requests[-1]
    text = CharTokenizer().decode([t for s in request.segments for t in s.tokens])
    scopes = {s.scope.id for s in request.segments if s.scope.kind == "collection"}
    assert (world.collection in scopes) == ("Quintessence" in text)
    return "Quintessence" in text


async def chooses_it(world: World, who: Principal) -> bool:
    talk = await world.runtime.store.create(who, document_id=world.document)
    try:
        async for _ in world.runtime.chat.ask(who, talk.id, QUESTION):
            pass
    except NotFoundHere:
        return False
    return True


async def invites_into_it(world: World, who: Principal) -> bool:
    try:
        invitation = await world.runtime.chat.invite(who, None, world.document)
    except NotFoundHere:
        return False
    await anext(invitation.updates)  # one that nobody looks at keeps its place for a while
    await invitation.updates.aclose()
    return True


async def deletes(world: World, who: Principal) -> bool:
    try:
        await world.runtime.knowledge.delete(who, world.document)
    except NotFoundHere:
        return False
    return True


async def opens_the_conversation(world: World, who: Principal) -> bool:
    try:
        await world.runtime.store.path(who, world.conversation)
    except NotFoundHere:
        return False
    return True


async def sees_its_row_of_memory(world: World, who: Principal) -> bool:
    """What the page's panel and the hover over a block do before they show a conversation's blocks."""
    feed = await world.runtime.dashboard.read(who, Asked(world.conversation))
    return feed["mine"]["open"] is not None


Action = Callable[[World, Principal], Awaitable[bool]]
READING: list[Action] = [
    lists, searches, opens, downloads, reads_an_excerpt, is_shown_the_citation, has_it_in_the_prompt,
    chooses_it, invites_into_it,
]  # fmt: skip
OWNING: list[Action] = [deletes, opens_the_conversation, sees_its_row_of_memory]


@pytest.mark.parametrize("action", READING, ids=lambda a: a.__name__)
async def test_reading(world: World, action: Action) -> None:
    allowed = {name for name, who in PEOPLE.items() if await action(world, who)}
    assert allowed == MAY_READ


@pytest.mark.parametrize("action", OWNING, ids=lambda a: a.__name__)
async def test_owning(world: World, action: Action) -> None:
    others = {name for name, who in PEOPLE.items() if name not in MAY_DELETE and await action(world, who)}
    assert others == set()
    assert await action(world, PEOPLE["owner"])


@pytest.mark.parametrize("action", READING, ids=lambda a: a.__name__)
async def test_a_right_that_is_taken_away_is_gone_at_once(world: World, action: Action) -> None:
    await world.runtime.store.revoke(world.collection, PEOPLE["reader"].id)
    assert not await action(world, PEOPLE["reader"])


async def test_a_document_of_somebody_else_is_as_good_as_none(world: World) -> None:
    for call in (
        lambda id: world.runtime.knowledge.delete(PEOPLE["stranger"], id),
        lambda id: world.runtime.knowledge.document(frozenset({"sample"}), id),
    ):
        said = set()
        for id in (world.document, "no-such-document"):
            with pytest.raises(NotFoundHere) as refused:
                await call(id)
            said.add(str(refused.value))
        assert len(said) == 1


# The doors


async def through_v1(client: httpx.AsyncClient, key: str) -> httpx.Response:
    body = {"model": "coread", "messages": [{"role": "user", "content": QUESTION}]}
    return await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})


async def test_keys_reach_what_their_owner_may_read(world: World, client: httpx.AsyncClient) -> None:
    world.runtime.access.keys = keys = world.runtime.keys
    keys._role_of = {"a-ann": "reader", "a-eve": "reader"}.get  # type: ignore[assignment]
    reached = {}
    for owner in ("a-ann", "a-eve", None):
        _, secret = await keys.create("key", owner)
        assert (await through_v1(client, secret)).status_code == 200
        request = world.engine.requests[-1]
        text = CharTokenizer().decode([t for s in request.segments for t in s.tokens])
        reached[owner] = "Quintessence" in text
    assert reached == {"a-ann": True, "a-eve": False, None: False}


async def test_a_revoked_key_opens_nothing(world: World, client: httpx.AsyncClient) -> None:
    key, secret = await world.runtime.keys.create("old")
    _, other = await world.runtime.keys.create("other")
    await world.runtime.keys.revoke(key.id)
    headers, before = {"authorization": f"Bearer {secret}"}, len(world.engine.requests)
    assert (await through_v1(client, secret)).status_code == 401
    assert (await client.get("/v1/models", headers=headers)).status_code == 401
    assert (await client.get("/v1/models", headers={"authorization": f"Bearer {other}"})).status_code == 200
    assert len(world.engine.requests) == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/admin/status", None),
        ("POST", "/api/admin/ask", {"question": "x"}),
        ("POST", "/api/admin/search", {"query": "x"}),
        ("POST", "/api/admin/ingest", {"collection": "c", "name": "n", "data": ""}),
        ("POST", "/api/admin/keys/add", {"name": "n"}),
        ("POST", "/api/admin/keys/list", {}),
        ("POST", "/api/admin/keys/revoke", {"id": "n"}),
        (
            "POST",
            "/api/admin/accounts/add",
            {"name": "n", "password": "correct horse", "administrator": True},
        ),
        ("POST", "/api/admin/accounts/password", {"name": "n", "password": "correct horse"}),
    ],
)
async def test_no_cookie_and_no_key_opens_the_commands_door(
    world: World, client: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    _, cookie = world.runtime.signer.issue()
    _, secret = await world.runtime.keys.create("key")
    for headers in (
        {},
        {"cookie": f"{world.runtime.signer.name}={cookie}"},
        {"authorization": f"Bearer {secret}"},
        {"x-coread-token": secret},
        {"x-coread-token": world.runtime.token, "origin": "https://elsewhere.example"},
    ):
        response = await client.request(method, path, json=body, headers=headers)
        assert response.status_code == 403, headers


async def test_a_cookie_is_no_key_and_a_key_is_no_cookie(world: World) -> None:
    _, cookie = world.runtime.signer.issue()
    _, secret = await world.runtime.keys.create("key")
    with pytest.raises(NoIdentity):
        world.runtime.principal({"cookie": f"{world.runtime.signer.name}={secret}"})
    with pytest.raises(NoIdentity):
        world.runtime.principal({"authorization": f"Bearer {secret}"})
    assert world.runtime.keys.principal(cookie) is None
