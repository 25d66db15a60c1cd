"""The service thread: slow, vanished and late consumers, a thread that dies, a restart. No packaged model."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core import EngineCore
from engine.errors import EngineStarting, EngineUnavailable, IntegrityError, InvalidRequest, StepFailed
from engine.model import LoadedModel
from engine.service import EngineService, EngineStatus, Generation
from engine.types import (
    Delta,
    Done,
    EngineConfig,
    Event,
    Failed,
    GenerationRequest,
    Reading,
    SamplingParams,
    Scope,
    Segment,
    Waiting,
)
from tests.engine.real import RealEngine
from tests.engine.tiny import some_tokens, tiny_model

A = Scope.account("a")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model("llama", num_hidden_layers=1)


class Harness:
    """A service whose cores are made by the test; `engines` has each one that was made."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self.engines: list[RealEngine] = []
        self.steps: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.service = EngineService(EngineConfig(model="tiny"))

        def make() -> EngineCore:
            engine = RealEngine(model, **{"blocks": 64, **options})
            engine.core.clock = time.monotonic
            step = engine.runner.step

            def gated(rows: Any, copies: Any = ()) -> Any:
                self.steps.append(len(rows))
                self.gate.wait(20)
                return step(rows, copies)

            engine.runner.step = gated  # type: ignore[method-assign]
            self.engines.append(engine)
            return engine.core

        self.service._make_core = make

    def __enter__(self) -> Harness:
        self.service.start()
        assert self.service.wait_ready_sync(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        if self.service._thread is not None and self.service._thread.is_alive():
            self.service.stop()


@pytest.fixture
def harness(model: LoadedModel) -> Iterator[Harness]:
    with Harness(model) as made:
        yield made


def request(seed: int = 0, *, max_tokens: int = 5, **changes: Any) -> GenerationRequest:
    settings: dict[str, Any] = {
        "segments": [Segment(some_tokens(6, seed), A)],
        "sampling": SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        "principal": "p",
        "conversation": "c",
        "output_scope": A,
        **changes,
    }
    return GenerationRequest(**settings)


async def collect(generation: Generation) -> list[Event]:
    return [event async for event in generation]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def test_events_come_in_order_and_end(harness: Harness) -> None:
    events = await collect(await harness.service.submit(request()))
    deltas = [e for e in events if isinstance(e, Delta)]
    assert isinstance(events[-1], Done)
    assert events[-1].text == "".join(d.text for d in deltas)
    assert events[-1].tokens == tuple(t for d in deltas for t in d.tokens)
    assert harness.service.status().state == "ready"


async def test_many_at_once_and_every_stream_is_whole(harness: Harness) -> None:
    generations = [await harness.service.submit(request(n % 3, max_tokens=4 + n % 5)) for n in range(12)]
    for n, events in enumerate(await asyncio.gather(*(collect(g) for g in generations))):
        assert isinstance(events[-1], Done)
        assert len(events[-1].tokens) == 4 + n % 5


async def test_a_step_wakes_the_readers_loop_once_and_not_before_the_model_is_asked(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight readers: one call for what is known before a forward pass, one for what came of it."""
    loop = asyncio.get_running_loop()
    wakes: list[int] = []
    real = loop.call_soon_threadsafe

    def counted(callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "coread-engine":
            wakes.append(len(harness.steps))
        return real(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    harness.gate.clear()  # all are there before the first step ends
    streams = [asyncio.create_task(collect(await harness.service.submit(request(n)))) for n in range(8)]
    await until(lambda: bool(wakes))  # progress is told while the forward pass still runs
    harness.gate.set()
    for events in await asyncio.gather(*streams):
        assert isinstance(events[-1], Done)
    assert len(wakes) <= 2 * len(harness.steps) + 1


async def test_a_slow_reader_costs_no_more_memory_than_its_answer(harness: Harness) -> None:
    """Nobody reads until the answer is done: unread text has run together, nothing is lost."""
    generation = await harness.service.submit(request(max_tokens=60))
    await until(lambda: not harness.engines[0].core.busy)
    assert len(generation._buffer) <= 4
    events = await collect(generation)
    [delta] = [e for e in events if isinstance(e, Delta)]
    assert len(delta.tokens) == 60
    assert isinstance(events[-1], Done)
    assert sum(isinstance(e, Waiting | Reading) for e in events) <= 1


async def test_a_slow_reader_of_several_choices_gets_each_text_whole(harness: Harness) -> None:
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=1)
    generation = await harness.service.submit(request(sampling=sampling, n=3))
    await until(lambda: not harness.engines[0].core.busy)
    assert len(generation._buffer) <= 1 + 3 * 3
    events = await collect(generation)
    for done in (e for e in events if isinstance(e, Done)):
        deltas = [e for e in events if isinstance(e, Delta) and e.choice == done.choice]
        assert "".join(d.text for d in deltas) == done.text
        assert tuple(t for d in deltas for t in d.tokens) == done.tokens
    assert sum(isinstance(e, Done) for e in events) == 3


async def test_abort_by_the_reader(harness: Harness) -> None:
    generation = await harness.service.submit(request(max_tokens=200))
    async for event in generation:
        if isinstance(event, Delta):
            break
    generation.abort()
    generation.abort()
    rest = await collect(generation)
    assert [type(e) for e in rest] == [Done]
    await until(lambda: harness.engines[0].core.memory.pool.held == 0)


async def test_a_reader_that_vanished_is_aborted(harness: Harness) -> None:
    """Nobody holds the generation any more: the engine does not write its answer to the end."""
    core = harness.engines[0].core
    harness.gate.clear()
    generation = await harness.service.submit(request(max_tokens=200))
    del generation
    gc.collect()
    harness.gate.set()
    await until(lambda: not core.busy)
    assert core.ledger.sums.output_tokens < 50
    assert core.memory.pool.held == 0


def test_a_reader_whose_event_loop_is_closed_is_aborted(harness: Harness) -> None:
    core = harness.engines[0].core
    harness.gate.clear()
    loop = asyncio.new_event_loop()
    generation = loop.run_until_complete(harness.service.submit(request(max_tokens=200)))
    loop.close()
    harness.gate.set()
    for _ in range(2000):
        if not core.busy:
            break
        time.sleep(0.005)
    assert not core.busy
    assert core.ledger.sums.output_tokens < 50
    assert generation._aborted


async def test_a_dead_thread_fails_its_requests_says_so_and_can_be_restarted(harness: Harness) -> None:
    service = harness.service

    def explode(*_: Any) -> Any:
        raise IntegrityError("block 3 is neither free nor used")

    read = [Segment(some_tokens(40), Scope.collection("k"), "document", "d"), Segment(some_tokens(6, 1), A)]
    await collect(await service.submit(request(segments=read)))
    assert set(service.documents()) == {"d"}
    harness.gate.clear()
    running = await service.submit(request(max_tokens=200))
    harness.engines[0].core.scheduler.schedule = explode  # type: ignore[method-assign]
    harness.gate.set()
    events = await asyncio.wait_for(collect(running), 20)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, EngineUnavailable)
    assert "block 3" in str(events[-1].error)
    await until(lambda: service.status().state == "failed")
    assert "block 3" in service.status().detail
    with pytest.raises(EngineUnavailable, match="block 3"):
        await service.submit(request())
    with pytest.raises(EngineUnavailable):
        service.memory()
    service.restart()
    await service.wait_ready(20)
    assert service.memory().retained == 0
    assert service.documents() == {}, "what was looked at before the restart is gone"
    assert isinstance((await collect(await service.submit(request())))[-1], Done)
    assert len(harness.engines) == 2


async def test_what_was_found_when_the_model_was_loaded_is_known_after_a_restart(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forgotten: /v1 refused every request, as a model whose context is of 0 tokens reads none."""
    made = Harness(model)
    service, make = made.service, made.service._make_core

    def load() -> Any:
        service._status = EngineStatus(
            "starting", "Tiny, on letters.", "tiny", "cpu", "float32", "reference", model.shape, 4, 64
        )
        return make

    service._make_core = None
    monkeypatch.setattr(service, "_load", load)
    with made:
        before = service.status()
        assert (before.shape, before.block_size, before.model) == (model.shape, 4, "tiny")
        made.engines[0].core.scheduler.schedule = lambda *_: 1 / 0  # type: ignore[method-assign, return-value]
        await collect(await service.submit(request()))
        await until(lambda: service.status().state == "failed")
        failed = service.status()
        service.restart()
        await service.wait_ready(20)
        assert service.status() == before
        assert replace(failed, state="ready", detail=before.detail) == before


async def test_even_an_exit_in_the_thread_leaves_nobody_waiting(harness: Harness) -> None:
    def leave(*_: Any) -> Any:
        raise SystemExit(3)

    harness.engines[0].core.step = leave  # type: ignore[method-assign]
    generation = await harness.service.submit(request())
    events = await asyncio.wait_for(collect(generation), 20)
    assert isinstance(events[-1], Failed)
    assert harness.service.status().state == "failed"


async def test_an_error_of_one_step_does_not_end_the_service(harness: Harness) -> None:
    harness.engines[0].runner.fail.append(RuntimeError("x"))
    events = await collect(await harness.service.submit(request()))
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, StepFailed)
    assert isinstance((await collect(await harness.service.submit(request())))[-1], Done)


async def test_stop_fails_what_is_open_and_start_begins_anew(harness: Harness) -> None:
    service = harness.service
    generation = await service.submit(request(max_tokens=200))
    await asyncio.to_thread(service.stop)
    events = await collect(generation)
    assert isinstance(events[-1], Failed)
    assert service.status().state == "stopped"
    with pytest.raises(EngineUnavailable, match="stopped"):
        await service.submit(request())
    service.start()
    await service.wait_ready(20)
    assert isinstance((await collect(await service.submit(request())))[-1], Done)


async def test_a_request_that_arrives_while_the_engine_stops_is_answered(harness: Harness) -> None:
    """Whichever comes first, nobody is left without an end."""
    service = harness.service
    stopping = asyncio.to_thread(service.stop)
    task = asyncio.ensure_future(stopping)
    ends = []
    for n in range(50):
        try:
            generation = await service.submit(request(n))
        except EngineUnavailable:
            break
        ends.append(asyncio.ensure_future(collect(generation)))
        await asyncio.sleep(0)
    await task
    for events in await asyncio.wait_for(asyncio.gather(*ends), 20):
        assert isinstance(events[-1], Done | Failed)


async def test_before_the_model_is_there(model: LoadedModel) -> None:
    made = Harness(model)
    gate, make = threading.Event(), made.service._make_core
    assert make is not None

    def slow() -> EngineCore:
        gate.wait(20)
        return make()

    made.service._make_core = slow
    made.service.start()
    with pytest.raises(EngineStarting):
        await made.service.submit(request())
    with pytest.raises(EngineStarting, match="within"):
        await made.service.wait_ready(0.01)
    gate.set()
    await made.service.wait_ready(20)
    assert isinstance((await collect(await made.service.submit(request())))[-1], Done)
    made.service.stop()


async def test_nobody_waits_for_a_model_whose_engine_is_stopped(model: LoadedModel) -> None:
    made = Harness(model)
    gate, make = threading.Event(), made.service._make_core
    assert make is not None

    def slow() -> EngineCore:
        assert gate.wait(60)
        return make()

    made.service._make_core = slow
    made.service.start()
    waiting = asyncio.create_task(made.service.wait_ready())
    with pytest.raises(EngineStarting):
        await made.service.wait_ready(0.05)
    with pytest.raises(EngineUnavailable, match="did not end"):
        await asyncio.to_thread(made.service.stop, 0.05)
    with pytest.raises(EngineUnavailable, match="while its model was being loaded"):
        await asyncio.wait_for(waiting, 20)
    gate.set()
    made.service.stop()
    made.service._make_core = make
    made.service.start()
    await made.service.wait_ready(20)
    made.service.stop()


async def test_a_failed_load_is_told_to_everybody(model: LoadedModel) -> None:
    made = Harness(model)

    def broken() -> EngineCore:
        raise RuntimeError("no such file")

    made.service._make_core = broken
    made.service.start()
    with pytest.raises(EngineUnavailable, match="no such file"):
        await made.service.wait_ready(20)
    assert made.service.status().state == "failed"


async def test_refusals_reach_the_caller(harness: Harness) -> None:
    with pytest.raises(InvalidRequest):
        await harness.service.submit(request(segments=[]))


async def test_what_the_screens_ask_for(harness: Harness) -> None:
    service = harness.service
    prompt = [
        Segment(some_tokens(12, 5), Scope.collection("k"), "document", "d"),
        Segment(some_tokens(3, 6), A),
    ]
    assert service.resident_tokens(prompt) == 0
    await collect(await service.submit(request(segments=prompt)))
    assert service.resident_tokens(prompt) == 15
    [view] = service.page_tables("c")
    assert (view.running, view.tokens, len(view.blocks)) == (False, 19, 5)
    assert service.page_tables("nobody") == []
    assert service.pin_document("d") == 3
    first = service.memory()
    assert first is service.memory(), "shared by all who look within a quarter of a second"
    assert first.pinned == 3
    assert set(first.open) == {"c"}
    service.touch_conversation("c")
    service.close_conversation("c")
    service.unpin_document("d")
    assert service.unlink_document("d") == 5
    assert service.resident_tokens(prompt) == 0
    kinds = {e.kind for e in service.events()}
    assert {"published", "unlinked"} <= kinds
    assert service.events(service.events()[-1].number) == []
    service.check_integrity()
