"""Limits: what is refused, with when to come back, and that nothing is charged that was not computed."""

from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import TooMany, UploadRefused
from app.limits import Limits, Stored
from app.principal import Principal
from app.rates import Rate
from app.runtime import Runtime
from app.settings import load_settings
from engine.errors import LimitReached
from engine.types import Delta, Done, Failed, GenerationRequest, Reading, SamplingParams, Scope, Segment
from tests.app.conftest import FakeParts
from tests.app.fakes import FakeEngine, receipt

ANN, BOB = Principal("anonymous", "b-ann"), Principal("anonymous", "b-bob")
URL = "/v1/chat/completions"
NOTHING = Stored(0, 0, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(tokens: int, answer: int, principal: str = "p", n: int = 1) -> GenerationRequest:
    scope = Scope.account(principal)
    return GenerationRequest(
        segments=(Segment((7,) * tokens, scope, "messages"),), sampling=SamplingParams(max_tokens=answer),
        principal=principal, conversation="c", output_scope=scope, n=n,
    )  # fmt: skip


# Rates


def test_a_rate_says_when_to_come_back_and_keeps_its_word() -> None:
    clock = Clock()
    rate = Rate(10, 60.0, clock)
    assert rate.take("a", 10) == 0.0
    wait = rate.take("a", 4)
    assert wait == pytest.approx(24.0)
    clock.now += wait - 0.01
    assert rate.take("a", 4) > 0
    clock.now += 0.02
    assert rate.take("a", 4) == 0.0
    assert rate.take("b", 10) == 0.0, "another key has a bucket of its own"


def test_more_than_the_capacity_passes_a_full_bucket_and_leaves_a_debt() -> None:
    clock = Clock()
    rate = Rate(10, 60.0, clock)
    assert rate.take("a", 25) == 0.0
    assert rate.left("a") == 0.0
    clock.now += 60.0
    assert rate.take("a", 1) > 0
    clock.now += 60.0
    assert rate.take("a", 1) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.1, 12.0)), max_size=60))
def test_nobody_gets_more_than_capacity_and_refill(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    rate = Rate(10, 60.0, clock)
    start, taken = clock.now, 0.0
    for pause, amount in steps:
        clock.now += pause
        if rate.take("a", amount) == 0.0:
            taken += amount
        # A single amount over the capacity may be borrowed once from a full bucket.
        assert taken <= 10 + (clock.now - start) / 6 + 2 + 1e-6


def test_a_flood_of_keys_keeps_memory_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.rates._MAX_BUCKETS", 100)
    rate = Rate(1)
    for number in range(1_000):
        rate.take(str(number))
    assert len(rate._buckets) == 100


@pytest.mark.parametrize(("capacity", "period"), [(0, 60), (-1, 60), (1, 0)])
def test_a_rate_of_nothing_is_a_mistake(capacity: float, period: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Rate(capacity, period)


# Tokens


def limits(tmp_path: Path, clock: Clock, **settings: Any) -> Limits:
    return Limits(load_settings(data_dir=tmp_path, **settings), tmp_path, clock)


async def test_only_what_is_computed_is_charged(tmp_path: Path) -> None:
    clock, engine = Clock(), FakeEngine()
    some = limits(tmp_path, clock, max_tokens_per_minute=1_000)
    engine.script = [Reading(900, 900, 850), Delta(0, "Hi", (1, 2)), Done(0, "stop", "Hi", (1, 2),
                     receipt(900, 850, 2))]  # fmt: skip
    generation = await some.submit(engine, request(900, 100))
    assert some.usage("p", NOTHING)["tokens_left"] == 0
    async for _ in generation:
        pass
    assert some.usage("p", NOTHING)["tokens_left"] == 1_000 - 50 - 2
    generation.abort()  # once more changes nothing
    assert some.usage("p", NOTHING)["tokens_left"] == 948


async def test_an_abort_and_a_failure_pay_for_what_was_computed(tmp_path: Path) -> None:
    for ending in ("abort", "fail"):
        some, engine = limits(tmp_path, Clock(), max_tokens_per_minute=1_000), FakeEngine()
        end: Any = "hold" if ending == "abort" else Failed(RuntimeError("x"))
        engine.script = [Reading(60, 200, 20), Delta(0, "Hi", (1, 2)), end]
        generation = await some.submit(engine, request(200, 100))
        await anext(generation)
        await anext(generation)
        if ending == "abort":
            generation.abort()
        else:
            await anext(generation)
        assert some.usage("p", NOTHING)["tokens_left"] == 1_000 - 40 - 2


async def test_a_refused_request_costs_nothing(tmp_path: Path) -> None:
    some, engine = limits(tmp_path, Clock(), max_tokens_per_minute=1_000), FakeEngine()
    engine.refuse = LimitReached("waiting requests", 256)
    with pytest.raises(LimitReached):
        await some.submit(engine, request(500, 100))
    assert some.usage("p", NOTHING)["tokens_left"] == 1_000


async def test_the_limit_is_each_persons_own_and_ends(tmp_path: Path) -> None:
    clock, engine = Clock(), FakeEngine()
    some = limits(tmp_path, clock, max_tokens_per_minute=1_000)
    await some.submit(engine, request(900, 100))
    with pytest.raises(TooMany, match=r"1,000 tokens a minute.*30 seconds") as refused:
        await some.submit(engine, request(400, 100))
    assert refused.value.retry_after_s == 30
    await some.submit(engine, request(900, 100, "other"))
    clock.now += 30
    await some.submit(engine, request(400, 100))


async def test_a_prompt_in_memory_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some, engine = limits(tmp_path, Clock(), max_tokens_per_minute=1_000), FakeEngine()
    await some.submit(engine, request(700, 100))
    monkeypatch.setattr(FakeEngine, "resident_tokens", lambda self, segments: 890)
    await some.submit(engine, request(900, 100))
    assert len(engine.requests) == 2


async def test_zero_is_no_limit(tmp_path: Path) -> None:
    some, engine = limits(tmp_path, Clock(), max_tokens_per_minute=0, max_uploads_per_hour=0), FakeEngine()
    for _ in range(5):
        await some.submit(engine, request(1_000_000, 100))
        some.check_upload("p", 1, NOTHING)
    assert some.token_headers("p") == {}
    assert some.usage("p", NOTHING)["max_tokens_per_minute"] is None


# Documents


@pytest.mark.parametrize(
    ("stored", "size", "message"),
    [
        (NOTHING, 1_001, "has 1,001 bytes; at most 1,000"),
        (Stored(3, 0, 0), 1, "already keep 3 documents"),
        (Stored(1, 4_500, 4_500), 600, "would keep 5,100 bytes; at most 5,000"),
        (Stored(0, 0, 9_500), 600, "storage for documents is full"),
    ],
)
def test_storage(tmp_path: Path, stored: Stored, size: int, message: str) -> None:
    some = limits(
        tmp_path, Clock(), max_upload_bytes=1_000, max_documents_per_person=3,
        max_storage_per_person=5_000, max_storage=10_000,
    )  # fmt: skip
    with pytest.raises(UploadRefused, match=message):
        some.check_upload("p", size, stored)


def test_uploads_an_hour(tmp_path: Path) -> None:
    clock = Clock()
    some = limits(tmp_path, clock, max_uploads_per_hour=2)
    some.check_upload("p", 1, NOTHING)
    some.check_upload("p", 1, NOTHING)
    with pytest.raises(TooMany, match=r"At most 2 files are taken at once; .* Try again in 30 minutes"):
        some.check_upload("p", 1, NOTHING)
    assert some.usage("p", NOTHING)["uploads_left"] == 0
    some.check_upload("other", 1, NOTHING)


def test_a_nearly_full_disk_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 10**6))
    with pytest.raises(UploadRefused, match="disk is nearly full"):
        limits(tmp_path, Clock()).check_upload("p", 1, NOTHING)


async def test_storage_counts_everybodys_documents_apart(runtime: Runtime) -> None:
    before = (await runtime.knowledge.stored(ANN)).total_bytes
    text = b"# Hens\n\nA hen lays an egg.\n"
    document = await runtime.knowledge.upload(ANN, "hens.md", text)
    async for _ in runtime.knowledge.progress(ANN, document, 0.05):
        pass
    assert await runtime.knowledge.stored(ANN) == Stored(1, len(text), before + len(text))
    assert (await runtime.knowledge.stored(BOB)).documents == 0


# At the doors


async def limited(tmp_path: Path, **settings: Any) -> tuple[Runtime, httpx.AsyncClient]:
    import gradio as gr

    from app.server import create_app

    runtime = Runtime(load_settings(data_dir=tmp_path / "d", answer_tokens=64, **settings), FakeParts())
    runtime.open()
    runtime.start()
    await runtime.wait_seeded()
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 1))
    return runtime, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_v1_says_429_with_retry_after_in_openais_words(tmp_path: Path) -> None:
    runtime, client = await limited(tmp_path, max_tokens_per_minute=2_000)
    body = {"model": "fake-model", "max_tokens": 1_500, "messages": [{"role": "user", "content": "Hi"}]}
    try:
        first = await client.post(URL, json=body | {"stream": True})
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "2000"
        await runtime.limits.submit(FakeEngine(), request(1_500, 400, "local-api"))  # never ends
        refused = await client.post(URL, json=body)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "try again in" in refused.json()["error"]["message"].lower()
    finally:
        await client.aclose()
        await runtime.stop()


async def test_the_engines_own_limits_are_429_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refuse = LimitReached("waiting requests of your own", 32)
    body = {"model": "coread", "messages": [{"role": "user", "content": "Hi"}]}
    refused = await client.post(URL, json=body)
    assert refused.status_code == 429
    assert "retry-after" in refused.headers


async def test_a_question_over_the_limit_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    runtime, client = await limited(tmp_path, max_tokens_per_minute=100)
    try:
        talk = await runtime.store.create(ANN)
        await runtime.limits.submit(FakeEngine(), request(50, 50, ANN.id))
        with pytest.raises(TooMany):
            async for _ in runtime.chat.ask(ANN, talk.id, "When does the bakery open?"):
                pass
        assert await runtime.store.path(ANN, talk.id) == []
    finally:
        await client.aclose()
        await runtime.stop()
    await asyncio.sleep(0)
