"""A crowd: whoever finds no place is told at once, before anything is searched for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat import Chat
from app.limits import Limits, Place
from app.principal import Principal
from app.prompting import Built, Prompter
from app.runtime import Runtime
from app.server import create_app
from app.settings import load_settings
from engine.errors import LimitReached
from engine.service import EngineStatus
from tests.app.conftest import FakeParts
from tests.app.fakes import FakeEngine

QUESTION = "When was the lighthouse on Gull Rock built?"
PLACES = 5  # two that run and three that wait


@dataclass(slots=True)
class BusyEngine(FakeEngine):
    """Tells how many run and wait, as a test sets it."""

    running: int = 0
    queued: int = 0

    def status(self) -> EngineStatus:
        return replace(FakeEngine.status(self), running=self.running, queued=self.queued)


@dataclass(slots=True)
class Search:
    """Holds every search back until it may go on."""

    may: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    held = Search()
    build = Prompter.build

    async def slowly(prompter: Prompter, **asked: Any) -> Built:
        held.begun += 1
        await held.may.wait()
        return await build(prompter, **asked)

    monkeypatch.setattr(Prompter, "build", slowly)
    return held


@pytest.fixture
async def crowded(tmp_path: Path, search: Search) -> AsyncIterator[tuple[Runtime, BusyEngine]]:
    engine = BusyEngine()
    settings = load_settings(
        data_dir=tmp_path / "data", max_running=2, max_queued=3, max_running_per_person=1,
        max_queued_per_person=1,
    )  # fmt: skip
    runtime = Runtime(settings, FakeParts(engine))
    runtime.open()
    runtime.start()
    await runtime.wait_seeded()
    yield runtime, engine
    search.may.set()
    await runtime.stop()


async def ask(chat: Chat, runtime: Runtime, number: int) -> str:
    """Its outcome: "answered", or the refusal."""
    who = Principal("anonymous", f"b-{number}")
    talk = await runtime.store.create(who)
    try:
        async for _ in chat.ask(who, talk.id, QUESTION):
            pass
    except LimitReached as refused:
        assert await runtime.store.path(who, talk.id) == []
        return str(refused)
    return "answered"


async def test_a_crowd_is_told_before_it_is_searched_for(
    crowded: tuple[Runtime, BusyEngine], search: Search
) -> None:
    runtime, _ = crowded
    tasks = [asyncio.create_task(ask(runtime.chat, runtime, n)) for n in range(12)]
    done: set[asyncio.Task[str]] = set()
    async with asyncio.timeout(60):
        while len(done) < 12 - PLACES or search.begun < PLACES:
            done, _waiting = await asyncio.wait(tasks, timeout=0.01)
    assert (len(done), search.begun) == (12 - PLACES, PLACES)
    words = "The limit of 3 waiting requests is reached; try again in a few seconds."
    assert {task.result() for task in done} == {words}
    search.may.set()
    assert Counter(await asyncio.gather(*tasks)) == {"answered": PLACES, words: 12 - PLACES}
    assert await ask(runtime.chat, runtime, 99) == "answered"  # every place was given back


async def test_those_that_the_engine_has_count_as_well(
    crowded: tuple[Runtime, BusyEngine], search: Search
) -> None:
    runtime, engine = crowded
    search.may.set()
    engine.running, engine.queued = 2, 2
    assert await ask(runtime.chat, runtime, 1) == "answered"
    engine.queued = 3
    assert "waiting requests" in await ask(runtime.chat, runtime, 2)
    engine.running = 1  # somebody has just ended, and the first in line has not moved up yet
    assert await ask(runtime.chat, runtime, 3) == "answered"
    assert search.begun == 2


async def test_one_person_does_not_take_all_the_places(
    crowded: tuple[Runtime, BusyEngine], search: Search
) -> None:
    runtime, engine = crowded
    ann = Principal("anonymous", "b-ann")
    with runtime.limits.place(engine, ann.id), runtime.limits.place(engine, ann.id):
        with pytest.raises(LimitReached, match="The limit of 2 requests of your own at a time is reached"):
            runtime.limits.place(engine, ann.id)
        runtime.limits.place(engine, "b-bob").leave()
    runtime.limits.place(engine, ann.id).leave()


async def test_whoever_leaves_during_the_search_leaves_the_place_too(
    crowded: tuple[Runtime, BusyEngine], search: Search
) -> None:
    runtime, engine = crowded
    runtime.chat.grace_s = 0.01
    tasks = [asyncio.create_task(ask(runtime.chat, runtime, n)) for n in range(PLACES)]
    await until(lambda: search.begun == PLACES)
    assert not free(runtime, engine)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: free(runtime, engine))  # the page may come back for a moment; then it is over


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what is bound to happen; raises `TimeoutError` where it does not."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


def free(runtime: Runtime, engine: FakeEngine) -> bool:
    try:
        runtime.limits.place(engine, "b-late").leave()
    except LimitReached:
        return False
    return True


async def test_over_the_api_it_is_a_429_with_when_to_come_back(
    crowded: tuple[Runtime, BusyEngine], search: Search
) -> None:
    runtime, engine = crowded
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 50_000))
    body = {"model": "coread", "messages": [{"role": "user", "content": QUESTION}]}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
        places = [runtime.limits.place(engine, f"b-{n}") for n in range(PLACES)]
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert search.begun == 0
        places.pop().leave()
        search.may.set()
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_places_against_a_plain_count(steps: list[tuple[str, bool]]) -> None:
    """Coming and leaving in any order: never more than there are, never more than one's own, none lost."""
    settings = load_settings(
        data_dir="unused", max_running=2, max_queued=3, max_running_per_person=1, max_queued_per_person=2
    )
    limits, engine = Limits(settings, Path()), BusyEngine()
    held: list[tuple[str, Place]] = []
    for who, comes in steps:
        if comes:
            free = len(held) < PLACES and sum(name == who for name, _ in held) < 3
            try:
                held.append((who, limits.place(engine, who)))
                assert free
            except LimitReached:
                assert not free
        elif held:
            place = held.pop(0)[1]
            place.leave()
            place.leave()
    for _, place in held:
        place.leave()
    assert not limits._preparing


async def test_a_turn_that_is_refused_is_no_turn(crowded: tuple[Runtime, BusyEngine]) -> None:
    """The conversation is free again, and says nothing of a question that was not taken."""
    runtime, engine = crowded
    engine.queued, engine.running = 3, 2
    ann = Principal("anonymous", "b-ann")
    talk = await runtime.store.create(ann)
    for _ in range(2):  # the second time it must not say that a turn is running
        with pytest.raises(LimitReached, match="waiting requests"):
            async for _update in runtime.chat.ask(ann, talk.id, QUESTION):
                pass
    assert not runtime.chat._turns
    assert await runtime.chat.watch(ann, talk.id) is None
