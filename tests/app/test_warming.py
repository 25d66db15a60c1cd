"""Warming a collection: what a question would read first is there, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.collections_warm import Warming
from app.errors import NotFoundHere, QuotaRefused
from app.principal import Principal
from app.prompting import Span
from app.runtime import Runtime
from app.settings import Settings, load_settings
from engine.types import GenerationRequest, Priority, SamplingParams, Scope, Segment
from tests.app.conftest import FakeParts
from tests.app.small_engine import SmallEngine

ANN = Principal("local", "b-ann")


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine(blocks=400, threaded=True, pause_s=0.002)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", answer_tokens=16, max_batch_tokens=64)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in the engine's thread)
            await asyncio.sleep(0.01)


async def warmed(runtime: Runtime, collection: str = "sample") -> Warming:
    runtime.warmer.look_s = 0.01
    now = await runtime.warmer.start(ANN, collection)
    await until(lambda: not now.running)
    return now


async def test_the_next_question_finds_what_was_warmed(runtime: Runtime, engine: SmallEngine) -> None:
    now = await warmed(runtime)
    assert (now.state, now.done, now.problem) == ("done", now.total, "")
    assert now.tokens > 0
    assert {"sample-lighthouse", "sample-bakery"} <= set(engine.documents(fresh=True))
    talk = await runtime.store.create(ANN, document_id="sample-bakery")
    async for _ in runtime.chat.ask(ANN, talk.id, "When does the bakery open?"):
        pass
    receipt = (await runtime.store.path(ANN, talk.id))[-1].receipt
    assert receipt is not None
    assert receipt["reused_tokens"] >= 0.6 * receipt["prompt_tokens"]
    again = await warmed(runtime)
    assert (again.tokens, again.found) == (0, again.total), "what is there is not computed again"
    await asyncio.to_thread(engine.check_integrity)


async def test_it_counts_for_the_engine_and_uses_up_nobodys_tokens(
    tmp_path: Path, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(
        load_settings(data_dir=tmp_path / "limited", max_tokens_per_minute=400),
        FakeParts(engine),  # type: ignore[arg-type]
    )
    asked: list[GenerationRequest] = []
    submit = engine.submit

    async def noted(request: GenerationRequest) -> Any:
        asked.append(request)
        return await submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    runtime.open()
    runtime.start()
    await runtime.wait_seeded()
    try:
        now = await warmed(runtime)
        assert now.tokens > 400, "too few to tell"
        assert runtime.limits.token_headers(ANN.id)["x-ratelimit-remaining-tokens"] == "400"
        assert {(r.principal, r.conversation, r.priority) for r in asked} == {
            ("system", "system", Priority.BATCH)
        }
    finally:
        await runtime.stop()


async def test_it_waits_while_somebody_is_answered(runtime: Runtime, engine: SmallEngine) -> None:
    runtime.warmer.look_s = 0.01
    person = GenerationRequest(
        segments=[Segment(list(range(20, 60)), Scope.account("p"))],
        sampling=SamplingParams(max_tokens=4_000, ignore_eos=True), principal="p", conversation="p",
        output_scope=Scope.account("p"),
    )  # fmt: skip
    generation = await engine.submit(person)
    reading = asyncio.ensure_future(_drain(generation))
    await until(lambda: engine.status().running > 0)
    now = await runtime.warmer.start(ANN, "sample")
    await until(lambda: now.state == "waiting")
    await asyncio.sleep(0.1)
    assert (now.done, now.tokens) == (0, 0)
    generation.abort()
    await reading
    await until(lambda: now.state == "done")


async def _drain(generation: object) -> None:
    async for _ in generation:  # type: ignore[attr-defined]
        pass


async def test_an_item_in_work_gives_way(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody comes in the middle of a long prefill: it is given up, and done afterwards."""
    long = "\n\n".join(f"Sentence number {n} tells of barley, oats and rye." for n in range(55))
    document = await runtime.knowledge.upload(ANN, "long.md", f"# Long\n\n{long}".encode())
    await runtime.knowledge._library.wait(document)
    collection = (await runtime.knowledge.readable_info(ANN, document)).collection_id
    runtime.warmer.look_s = 0.005
    submitted: list[GenerationRequest] = []
    submit = engine.submit

    async def noted(request: GenerationRequest) -> object:
        submitted.append(request)
        return await submit(request)

    monkeypatch.setattr(engine, "submit", noted)
    now = await runtime.warmer.start(ANN, collection)
    await until(lambda: engine.status().running > 0)
    person = GenerationRequest(
        segments=[Segment(list(range(20, 60)), Scope.account("p"))],
        sampling=SamplingParams(max_tokens=40, ignore_eos=True), principal="p", conversation="p",
        output_scope=Scope.account("p"),
    )  # fmt: skip
    await _drain(await submit(person))
    await until(lambda: not now.running)
    assert now.state in ("done", "full")
    assert {request.priority for request in submitted} == {Priority.BATCH}
    assert all(not segment.scope.private for request in submitted for segment in request.segments)


async def test_at_most_half_the_memory_is_taken(runtime: Runtime, engine: SmallEngine) -> None:
    for part in range(8):
        text = "\n\n".join(f"Part {part} number {n} tells of barley and rye." for n in range(40))
        await runtime.knowledge._library.wait(
            await runtime.knowledge.upload(ANN, f"{part}.md", f"# Part {part}\n\n{text}".encode())
        )
    collection = next(v for v in await runtime.collections.readable(ANN) if v.own)
    now = await warmed(runtime, collection.id)
    assert now.state == "full"
    assert 0 < now.done < now.total
    snapshot = engine.memory()
    assert snapshot.retained <= snapshot.total_blocks // 2 + 2


async def test_one_at_a_time_and_it_can_be_stopped(runtime: Runtime, engine: SmallEngine) -> None:
    runtime.warmer.look_s = 0.01
    now = await runtime.warmer.start(ANN, "sample")
    with pytest.raises(QuotaRefused):
        await runtime.warmer.start(ANN, "sample")
    await runtime.warmer.stop()
    assert now.state in ("stopped", "done")
    await until(lambda: engine.status().running + engine.status().queued == 0)
    empty = await runtime.collections.create(ANN, "Empty")
    with pytest.raises(NotFoundHere):
        await runtime.warmer.start(ANN, empty)
    assert runtime.warmer.now is None


async def test_stopping_it_while_its_parts_are_being_listed_ends_it(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, go_on, parts = asyncio.Event(), asyncio.Event(), runtime.warmer._parts

    async def held(principal: Principal, collection: str) -> list[Span]:
        listing.set()
        await go_on.wait()
        return await parts(principal, collection)

    monkeypatch.setattr(runtime.warmer, "_parts", held)
    starting = asyncio.create_task(runtime.warmer.start(ANN, "sample"))
    await listing.wait()
    await runtime.warmer.stop()
    go_on.set()
    assert (await starting).state == "stopped"
    assert runtime.warmer._task is None
