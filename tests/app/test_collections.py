"""Collections and documents as their owner handles them, and as everybody else does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.collections_documents import Shelf
from app.errors import AppError, NotAllowed, NotFoundHere, QuotaRefused, UploadRefused, ValueRefused
from app.principal import OWNER, Principal
from app.runtime import Runtime
from app.settings import Settings, load_settings
from app.store import EVERYBODY
from tests.app.conftest import FakeParts
from tests.app.small_engine import SmallEngine
from tests.app.test_dashboard import ask

ANN, VISITOR = Principal("signed_in", "a-ann"), Principal("anonymous", "b-visitor")
MILL = b"# The mill\n\nThe mill at Tarn grinds barley since 1802.\n"


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine(blocks=300, threaded=True)


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return load_settings(data_dir=tmp_path / "data", answer_tokens=64, access="accounts")


async def account(runtime: Runtime, name: str, role: Any = "reader") -> Principal:
    return (await runtime.accounts.create(name, "correct horse", role)).principal


async def add(runtime: Runtime, who: Principal, name: str = "mill.md", data: bytes = MILL) -> str:
    id = await runtime.shelf.add(who, None, name, data)
    info = await runtime.knowledge._library.wait(id)
    assert info.status == "ready", info.message
    return id


async def test_an_owner_names_readers_and_sees_them(runtime: Runtime) -> None:
    ann, bob = await account(runtime, "Ann"), await account(runtime, "Bob")
    eve = await account(runtime, "Eve")
    collections = runtime.collections
    id = await collections.create(ann, "  Field   notes ")
    assert await runtime.store.readable(bob) == {"sample"}
    assert (await collections.share(ann, id, " bOb ")).name == "Bob"
    seen = {v.id: v for v in await collections.readable(ann)}[id]
    assert (seen.name, seen.own, [r.name for r in seen.readers], seen.owner) == (
        "Field notes", True, ["Bob"], "",
    )  # fmt: skip
    seen = {v.id: v for v in await collections.readable(bob)}[id]
    assert (seen.own, seen.readers, seen.owner) == (False, (), "Ann"), "readers do not see each other"
    assert id not in {v.id for v in await collections.readable(eve)}
    await collections.unshare(ann, id, bob.id)
    assert id not in await runtime.store.readable(bob)
    await collections.share(ann, id, "Bob")
    await collections.leave(bob, id)
    assert id not in await runtime.store.readable(bob)
    with pytest.raises(ValueRefused, match="Nobody called “Mallory”"):
        await collections.share(ann, id, "Mallory")
    with pytest.raises(ValueRefused, match="always reads"):
        await collections.unshare(ann, id, ann.id)
    await runtime.accounts.set_disabled(eve.id, True)
    with pytest.raises(ValueRefused):
        await collections.share(ann, id, "Eve")


async def test_only_administrators_open_a_collection_to_everybody(runtime: Runtime) -> None:
    ann, root = await account(runtime, "Ann"), await account(runtime, "Root", "administrator")
    id = await runtime.collections.create(ann, "Notes")
    with pytest.raises(NotAllowed):
        await runtime.collections.open_to_everybody(ann, id, True)
    with pytest.raises(NotFoundHere):
        await runtime.collections.open_to_everybody(root, id, True)  # nobody opens somebody else's
    theirs = await runtime.collections.create(root, "For all")
    await runtime.collections.open_to_everybody(root, theirs, True)
    assert theirs in await runtime.store.readable(VISITOR)
    assert EVERYBODY in await runtime.store.readers(theirs)
    await runtime.collections.open_to_everybody(root, theirs, False)
    assert theirs not in await runtime.store.readable(VISITOR)


async def test_names_are_refused_with_a_reason(runtime: Runtime) -> None:
    collections = runtime.collections
    id = await collections.create(ANN, "Notes")
    other = await collections.create(ANN, "Other")
    for name, said in (("", "between 1 and 80"), ("x" * 81, "it has 81"), ("nOTES", "already")):
        with pytest.raises(ValueRefused, match=said):
            await collections.create(ANN, name)
    with pytest.raises(ValueRefused, match="already"):
        await collections.rename(ANN, other, "Notes")
    await collections.rename(ANN, id, "notes")
    for n in range(48):
        await collections.create(ANN, f"n{n}")
    with pytest.raises(QuotaRefused, match="50 collections, and 50 is the limit"):
        await collections.create(ANN, "one too many")


Call = Callable[[Runtime, Principal, str, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "rename": lambda r, who, c, d: r.collections.rename(who, c, "mine"),
    "share": lambda r, who, c, d: r.collections.share(who, c, "Eve"),
    "unshare": lambda r, who, c, d: r.collections.unshare(who, c, "a-bob"),
    "everybody": lambda r, who, c, d: r.collections.open_to_everybody(who, c, True),
    "delete collection": lambda r, who, c, d: r.shelf.delete_collection(who, c),
    "weigh collection": lambda r, who, c, d: r.shelf.collection_weight(who, c),
    "add": lambda r, who, c, d: r.shelf.add(who, c, "n.md", b"text"),
    "replace": lambda r, who, c, d: r.shelf.replace(who, d, "n.md", b"text"),
    "retry": lambda r, who, c, d: r.shelf.retry(who, d),
    "cancel": lambda r, who, c, d: r.shelf.cancel(who, d),
    "weigh": lambda r, who, c, d: r.shelf.weight(who, d),
    "delete": lambda r, who, c, d: r.shelf.delete(who, d),
}
READING: dict[str, Call] = {
    "info": lambda r, who, c, d: r.knowledge.readable_info(who, d),
    "versions": lambda r, who, c, d: r.knowledge.versions(who, d),
    "original": lambda r, who, c, d: r.knowledge.original(who, d),
    "pin": lambda r, who, c, d: r.shelf.pin(who, d, True),
    "keepable": lambda r, who, c, d: r.shelf.keepable(who, c),
    "leave": lambda r, who, c, d: r.collections.leave(who, c),
}


@pytest.mark.parametrize("name", [*CALLS, *READING])
async def test_a_stranger_learns_nothing(runtime: Runtime, name: str) -> None:
    document = await add(runtime, ANN)
    collection = (await runtime.knowledge.readable_info(ANN, document)).collection_id
    call = (CALLS | READING)[name]
    eve = await account(runtime, "Eve")
    root = await account(runtime, "Root", "administrator")
    for who in (eve, root, VISITOR, OWNER, Principal("anonymous", EVERYBODY)):
        said = set()
        for c, d in ((collection, document), ("c-nothing", "d-nothing")):
            with pytest.raises(NotFoundHere) as refused:
                await call(runtime, who, c, d)
            said.add(str(refused.value))
        assert len(said) == 1, who
    assert (await runtime.knowledge.readable_info(ANN, document)).version == 1


@pytest.mark.parametrize("name", CALLS)
async def test_a_reader_changes_nothing(runtime: Runtime, name: str) -> None:
    document = await add(runtime, ANN)
    collection = (await runtime.knowledge.readable_info(ANN, document)).collection_id
    bob = await account(runtime, "Bob")
    await runtime.store.grant(collection, bob.id)
    with pytest.raises(AppError):
        await CALLS[name](runtime, bob, collection, document)
    with (await runtime.knowledge.original(bob, document))[1] as file:
        assert file.read() == MILL


async def test_deleting_says_before_and_after_what_it_frees(runtime: Runtime, engine: SmallEngine) -> None:
    document = await add(runtime, ANN)
    cold = await runtime.shelf.weight(ANN, document)
    assert (cold.documents, cold.passages, cold.file_bytes, cold.blocks) == (1, 1, len(MILL), 0)
    await ask(runtime, ANN, "What does the mill grind?", document)
    before = await runtime.shelf.weight(ANN, document)
    assert before.blocks > 0
    free = engine.memory().free
    assert (await runtime.shelf.delete(ANN, document)).blocks == before.blocks
    engine.fresh()
    assert engine.memory().free >= free + before.blocks - 1, "the blocks are really given back"
    with pytest.raises(NotFoundHere):
        await runtime.knowledge.readable_info(ANN, document)


async def test_the_weight_of_a_document_does_not_tell_what_others_have(runtime: Runtime) -> None:
    ann, bob = await account(runtime, "Ann"), await account(runtime, "Bob")
    hers = await add(runtime, ann, "pay.md")
    guesses = {data: await add(runtime, bob, "g.md", data) for data in (MILL, MILL.replace(b"1802", b"1803"))}
    for data, id in guesses.items():
        assert (await runtime.shelf.weight(bob, id)).file_bytes == len(data)
    other = await runtime.collections.create(bob, "Other")
    again = await runtime.shelf.add(bob, other, "g.md", MILL)
    await runtime.knowledge._library.wait(again)
    assert (await runtime.shelf.weight(bob, again)).file_bytes == 0, "his own other one keeps it"
    for id in (again, guesses[MILL]):
        await runtime.shelf.delete(bob, id)
    with (await runtime.knowledge.original(ann, hers))[1] as file:
        assert file.read() == MILL


async def test_no_crowd_of_requests_gets_past_a_limit(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.collections.MAX_COLLECTIONS", 4)
    monkeypatch.setattr("app.collections.MAX_READERS", 2)
    ann = await account(runtime, "Ann")

    async def at_once(*calls: Awaitable[Any]) -> list[Any]:
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [r for r in results if isinstance(r, BaseException)]
        assert all(isinstance(r, AppError) for r in refused), refused
        return [r for r in results if not isinstance(r, BaseException)]

    collections = runtime.collections
    assert len(await at_once(*(collections.create(ann, "Same") for _ in range(5)))) == 1
    made = await at_once(*(collections.create(ann, f"c{n}") for n in range(12)))
    assert len(made) == 3
    await at_once(*(collections.rename(ann, id, "New") for id in made))
    assert sorted(v.name for v in await collections.readable(ann) if v.own).count("New") == 1
    for n in range(6):
        await account(runtime, f"R{n}")
    assert len(await at_once(*(collections.share(ann, made[0], f"R{n}") for n in range(6)))) == 2


async def test_no_crowd_of_uploads_gets_past_a_limit(engine: SmallEngine, tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "limited", access="accounts", max_documents_per_person=5)
    runtime = Runtime(settings, FakeParts(engine))  # type: ignore[arg-type]
    runtime.open()
    runtime.start()
    await runtime.wait_seeded()
    try:
        ann, bob = await account(runtime, "Ann"), await account(runtime, "Bob")

        async def at_once(who: Principal, count: int) -> int:
            files = [f"# {n}\n\nWords of {who.id}.\n".encode() for n in range(count)]
            calls = (runtime.shelf.add(who, None, f"f{n}.md", data) for n, data in enumerate(files))
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(r, str | UploadRefused) for r in results), results
            return sum(isinstance(r, str) for r in results)

        assert await at_once(ann, 30) == 5
        assert (await runtime.knowledge.stored(ann)).documents == 5
        assert await at_once(bob, 7) == 5, "everybody has a limit of their own"
    finally:
        await runtime.stop()


async def test_a_whole_collection_is_deleted(runtime: Runtime) -> None:
    document = await add(runtime, ANN)
    collection = (await runtime.knowledge.readable_info(ANN, document)).collection_id
    await add(runtime, ANN, "second.md", b"# Second\n\nAnother text.")
    await runtime.store.grant(collection, "a-bob")
    freed = await runtime.shelf.delete_collection(ANN, collection)
    assert (freed.documents, freed.passages) == (2, 2)
    assert await runtime.store.readers(collection) == frozenset()
    assert collection not in {v.id for v in await runtime.collections.readable(ANN)}


async def test_a_new_version_takes_the_old_ones_place_and_its_pin(
    runtime: Runtime, engine: SmallEngine
) -> None:
    document = await add(runtime, ANN)
    await ask(runtime, ANN, "What does the mill grind?", document)
    assert await runtime.shelf.pin(ANN, document, True) > 0
    await runtime.shelf.replace(ANN, document, "mill 2.md", b"# The mill\n\nThe mill grinds oats now.\n")
    assert (await runtime.knowledge._library.wait(document)).version == 2
    assert [v.version for v in await runtime.knowledge.versions(ANN, document)] == [2, 1]
    held = engine.documents(fresh=True)[document]
    assert (held.kept, held.blocks) == (True, 0), "kept, and nothing of the old text is left"
    await ask(runtime, ANN, "What does the mill grind?", document)
    assert engine.documents(fresh=True)[document].pinned > 0


async def test_pins_outlive_a_restart_and_go_with_their_document(
    runtime: Runtime, engine: SmallEngine
) -> None:
    kept, gone = await add(runtime, ANN), await add(runtime, ANN, "b.md", b"# B\n\nSecond text.")
    for id in (kept, gone):
        assert await runtime.shelf.pin(ANN, id, True) == 0, "nothing is computed yet"
    await runtime.shelf.delete(ANN, gone)
    assert await runtime.store.pins() == {kept}
    await runtime.store.set_pin(ANN, "d-of-before", True)
    engine.unpin_document(kept)
    again = Shelf(
        runtime.knowledge, runtime.collections, runtime.knowledge._library, runtime.store, engine,
        runtime.limits,
    )  # fmt: skip
    await again.open()
    assert engine.documents(fresh=True)[kept].kept
    assert await runtime.store.pins() == {kept}
    await again.pin(ANN, kept, False)
    assert await runtime.store.pins() == frozenset()
    assert kept not in engine.documents(fresh=True)


async def test_what_is_kept_is_kept_by_an_engine_that_was_started_again(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await add(runtime, ANN)
    await runtime.shelf.pin(ANN, document, True)
    # The tests' engine keeps its memory over a restart; of the real one's nothing is left.
    monkeypatch.setattr(engine, "restart", lambda: engine.unpin_document(document))
    monkeypatch.setattr(Runtime, "engine_failed", True)
    assert await runtime.revive()
    assert engine.documents(fresh=True)[document].kept


async def test_the_pin_cap_is_explained(runtime: Runtime, engine: SmallEngine) -> None:
    root = await account(runtime, "Root", "administrator")
    long = "\n\n".join(f"## Part {n}\n\nSentence number {n} about barley and oats." for n in range(60))
    document = await add(runtime, root, "long.md", long.encode())
    await ask(runtime, root, "What about barley?", document)
    with pytest.raises(QuotaRefused, match="at most 150 may be"):
        await runtime.shelf.pin(root, document, True)
    assert await runtime.store.pins() == frozenset()


async def test_who_decides_what_stays_in_memory(runtime: Runtime) -> None:
    may = runtime.shelf.may_keep
    assert may(ANN, ANN.id)
    assert may(Principal("api_key", ANN.id), ANN.id)
    assert may(Principal("local", "b-1"), "server")
    assert may(Principal("signed_in", "a-root", "administrator"), ANN.id)
    assert not may(ANN, "a-bob")
    assert not may(VISITOR, VISITOR.id)
    with pytest.raises(NotAllowed):
        await runtime.shelf.pin(VISITOR, "sample-lighthouse", True)
