"""Conversations: ownership, branches, references instead of text, grants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import NotFoundHere
from app.principal import OWNER, Principal
from app.store import EVERYBODY, MIGRATIONS, Reference, Store
from rag.database import Database

ANN, BOB = Principal("anonymous", "b-ann"), Principal("anonymous", "b-bob")
KEY = Principal("api_key", "k-1")
REFERENCE = Reference(1, "doc", 3, "sample", 10, 25, passage_id=7, zone="front", verdict="verified")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "t.sqlite", MIGRATIONS) as opened:
        yield opened


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


async def test_a_branch_is_read_back_as_it_was_written(store: Store) -> None:
    talk = await store.create(ANN)
    asked = await store.add_message(ANN, talk.id, None, "user", "What is it?")
    answered = await store.add_message(
        ANN, talk.id, asked.id, "assistant", "It.", tokens=[5, 0, 99], model="m",
        receipt={"prompt_tokens": 3}, references=[REFERENCE],
    )  # fmt: skip
    path = await store.path(ANN, talk.id)
    assert path == [asked, answered]
    assert path[1].tokens == (5, 0, 99)
    assert path[1].references == (REFERENCE,)
    assert (await store.conversation(ANN, talk.id)).title == "What is it?"


async def test_regenerating_makes_a_sibling_and_heads_switch_branches(store: Store) -> None:
    talk = await store.create(ANN)
    asked = await store.add_message(ANN, talk.id, None, "user", "q")
    first = await store.add_message(ANN, talk.id, asked.id, "assistant", "one")
    second = await store.add_message(ANN, talk.id, asked.id, "assistant", "two")
    assert await store.siblings(ANN, talk.id, first.id) == [first.id, second.id]
    assert [m.text for m in await store.path(ANN, talk.id)] == ["q", "two"]
    await store.set_head(ANN, talk.id, first.id)
    assert [m.text for m in await store.path(ANN, talk.id)] == ["q", "one"]


@pytest.mark.parametrize(
    "stranger", [BOB, OWNER, KEY, Principal("local", "b-ANN"), Principal("anonymous", "")]
)
@pytest.mark.parametrize(
    "action", ["conversation", "path", "set_document", "set_head", "delete", "add", "siblings"]
)
async def test_nobody_else_reaches_a_conversation(store: Store, stranger: Principal, action: str) -> None:
    talk = await store.create(ANN)
    message = await store.add_message(ANN, talk.id, None, "user", "secret")
    calls = {
        "conversation": lambda: store.conversation(stranger, talk.id),
        "path": lambda: store.path(stranger, talk.id),
        "set_document": lambda: store.set_document(stranger, talk.id, "d"),
        "set_head": lambda: store.set_head(stranger, talk.id, message.id),
        "delete": lambda: store.delete(stranger, talk.id),
        "add": lambda: store.add_message(stranger, talk.id, message.id, "assistant", "forged"),
        "siblings": lambda: store.siblings(stranger, talk.id, message.id),
    }
    with pytest.raises(NotFoundHere) as foreign:
        await calls[action]()
    with pytest.raises(NotFoundHere) as absent:
        await store.conversation(stranger, "no-such-id")
    assert str(foreign.value) == str(absent.value)  # the two cannot be told apart
    assert [m.text for m in await store.path(ANN, talk.id)] == ["secret"]
    assert await store.conversations(stranger) == []


async def test_a_message_of_another_conversation_is_no_parent(store: Store) -> None:
    mine, other = await store.create(ANN), await store.create(ANN)
    foreign = await store.add_message(ANN, other.id, None, "user", "elsewhere")
    with pytest.raises(NotFoundHere):
        await store.add_message(ANN, mine.id, foreign.id, "assistant", "grafted")
    with pytest.raises(NotFoundHere):
        await store.set_head(ANN, mine.id, foreign.id)
    assert await store.path(ANN, mine.id) == []


async def test_deleting_takes_messages_and_references_along(store: Store, database: Database) -> None:
    talk = await store.create(ANN)
    asked = await store.add_message(ANN, talk.id, None, "user", "q")
    await store.add_message(ANN, talk.id, asked.id, "assistant", "a", references=[REFERENCE])
    await store.delete(ANN, talk.id)
    for table in ("app_conversations", "app_messages", "app_references"):
        left = await database.read(lambda c, t=table: c.execute(f"SELECT count(*) FROM {t}").fetchone()[0])
        assert left == 0, table


async def test_no_document_text_has_a_column(database: Database) -> None:
    columns = await database.read(
        lambda c: [row[1] for row in c.execute("SELECT * FROM pragma_table_info('app_references')")]
    )
    assert not {"text", "content", "passage", "quote"} & set(columns)


async def test_grants_are_per_reader_and_revocable(store: Store) -> None:
    await store.grant("sample", EVERYBODY)
    await store.grant("own", ANN.id)
    await store.grant("own", ANN.id)  # twice is once
    assert await store.readable(ANN) == {"sample", "own"}
    assert await store.readable(BOB) == {"sample"}
    await store.revoke("own", ANN.id)
    assert await store.readable(ANN) == {"sample"}


async def test_hostile_text_is_data(store: Store) -> None:
    hostile = "'); DROP TABLE app_messages; --\x00 <|im_end|> ${1} \U0001f600"
    talk = await store.create(ANN, title=hostile)
    message = await store.add_message(ANN, talk.id, None, "user", hostile)
    assert (await store.path(ANN, talk.id))[0] == message
    assert (await store.conversations(ANN))[0].title == hostile


async def test_a_database_from_before_collections_could_be_chosen_is_brought_up_to_date(
    tmp_path: Path,
) -> None:
    path = tmp_path / "old.sqlite"
    with Database(path, MIGRATIONS[:3]) as old:
        row = ("c1", ANN.id, "Old talk", 1.0, 2.0, "doc", None)
        await old.write(
            lambda c: c.execute("INSERT INTO app_conversations VALUES (?, ?, ?, ?, ?, ?, ?)", row).rowcount
        )
    with Database(path, MIGRATIONS) as new:
        store = Store(new)
        talk = await store.conversation(ANN, "c1")
        assert (talk.title, talk.document_id, talk.collection_id) == ("Old talk", "doc", None)
        await store.set_document(ANN, "c1", None, "own")
        assert (await store.conversation(ANN, "c1")).collection_id == "own"
        assert await store.pins() == frozenset()


async def test_readers_and_pins(store: Store) -> None:
    for reader in (ANN.id, BOB.id, EVERYBODY):
        await store.grant("own", reader)
    assert await store.readers("own") == {ANN.id, BOB.id, EVERYBODY}
    await store.forget_collection("own")
    assert await store.readers("own") == frozenset()
    for _ in range(2):
        await store.set_pin(ANN, "doc", True)
    assert await store.pins() == {"doc"}
    await store.set_pin(BOB, "doc", False)
    assert await store.pins() == frozenset()
