"""One moment told four times: the ledger, the page, `/api/memory` and `/metrics` agree to the byte."""

from __future__ import annotations

import base64
import zlib
from fractions import Fraction
from typing import Any

import gradio as gr
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.dashboard.feed import Asked, DashboardFeed
from app.memory_feed import STATES, open_readers
from app.metrics import LedgerCollector
from app.runtime import Runtime
from app.server import create_app
from engine.ledger import MemorySnapshot
from engine.types import Done, Receipt
from tests.app.small_engine import SmallEngine


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, first label's value) -> value."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def engine() -> SmallEngine:
    """Replaces the fake engine: real memory, scheduler, ledger and step loop under a scripted model."""
    return SmallEngine()


async def work(engine: SmallEngine) -> list[Receipt]:
    """Six readers of two documents; four have their answers, two still write."""
    done: list[Receipt] = []
    for number in range(6):
        engine.ask(f"c{number}", document=number % 2, question=number, tokens=24 if number > 3 else 5)
        engine.run(3)
    engine.run_until(lambda: len(engine.done()) == 4)
    for event in engine.done():
        assert isinstance(event, Done)
        done.append(event.receipt)
    return done


async def test_page_metrics_api_receipts_and_ledger_agree(
    runtime: Runtime, client: httpx.AsyncClient, engine: SmallEngine
) -> None:
    receipts = await work(engine)
    engine.fresh()
    feed = await DashboardFeed(runtime).read(None, Asked.everything())
    api = (await client.get("/api/memory")).json()
    scraped = samples((await client.get("/metrics")).text)
    snapshot = engine.memory()
    assert api["number"] == feed["number"] == snapshot.number, "all must have seen one snapshot"

    assert len(snapshot.running) == 2
    assert len(snapshot.open) == 6
    assert snapshot.totals_open.saved_bytes > 0
    for view in ("running", "open"):
        totals = snapshot.totals_running if view == "running" else snapshot.totals_open
        for figure in ("saved_bytes", "physical_bytes", "unshared_bytes", "reserved_bytes", "conversations"):
            value = getattr(totals, figure)
            assert scraped[f"coread:{figure}", view] == value, (view, figure)
            assert feed[view]["everybody"][figure] == api[view]["everybody"][figure] == value
        rows = feed["rows"][view]
        assert api["rows"][view] == rows
        assert sum(row["fair_share_bytes"] for row in rows) == totals.physical_bytes
        assert sum(row["saved_bytes"] for row in rows) == totals.saved_bytes
        assert sum(row["unshared_bytes"] for row in rows) == totals.unshared_bytes

    assert api["tree"] == feed["tree"]
    shown = sum(node["blocks"] + node["left_out"] for node in api["tree"]["nodes"]) + api["tree"]["left_out"]
    assert 0 < shown == api["tree"]["blocks"] <= snapshot.held + snapshot.retained
    check_map(feed, api, snapshot, scraped)
    since, start = snapshot.since_start, feed["since_start"]
    assert api["since_start"] == start
    for metric, key in (
        ("prompt_tokens", "prompt_tokens"), ("prefill_tokens_skipped", "prefill_tokens_skipped"),
        ("generation_tokens", "output_tokens"), ("block_copies", "blocks_copied"),
        ("copied_bytes", "bytes_copied"), ("evictions", "evictions"), ("num_preemptions", "preemptions"),
        ("kv_bytes_logical", "kv_bytes_logical"), ("kv_bytes_read", "kv_bytes_read"),
        ("saved_byte_seconds", "saved_byte_seconds"), ("answers", "answers"),
    ):  # fmt: skip
        assert scraped[f"coread:{metric}_total", ""] == start[key] == getattr(since, key), metric
    assert scraped["coread:kv_bytes_not_read_total", ""] == since.kv_bytes_logical - since.kv_bytes_read > 0
    assert scraped["coread:prefix_cache_hits_total", ""] == since.prefill_tokens_skipped > 0

    # The receipts of all answers, two of them still to come, are the same counts again.
    engine.run_until(lambda: len(engine.done()) == 6)
    receipts = [event.receipt for event in engine.done()]
    total = engine.core.ledger.since_start()
    assert sum(r.prompt_tokens for r in receipts) == total.prompt_tokens
    assert sum(r.reused_tokens for r in receipts) == total.prefill_tokens_skipped
    assert sum(r.computed_tokens for r in receipts) == total.prefill_tokens_computed
    assert sum(r.output_tokens for r in receipts) == total.output_tokens
    assert sum(r.blocks_copied for r in receipts) == total.blocks_copied > 0
    assert sum(r.bytes_copied for r in receipts) == total.bytes_copied
    assert sum(r.kv_bytes_logical for r in receipts) == pytest.approx(
        total.kv_bytes_logical, abs=len(receipts)
    )
    assert sum(r.kv_bytes_read for r in receipts) == pytest.approx(total.kv_bytes_read)
    assert total.ttft.count == total.answers == 6
    assert total.ttft.total == pytest.approx(sum(r.ttft_s or 0.0 for r in receipts))


def check_map(
    feed: dict[str, Any], api: dict[str, Any], snapshot: MemorySnapshot, scraped: dict[Any, float]
) -> None:
    """The packed map of the page, the plain one of the API and the metrics' states are one."""
    cells = zlib.decompress(base64.b64decode(feed["map"]["packed"]))
    state, readers = base64.b64decode(api["map"]["state"]), base64.b64decode(api["map"]["readers"])
    opened = base64.b64decode(api["map"]["open_readers"])
    assert state == snapshot.state
    assert opened == open_readers(snapshot)
    assert [c // 25 for c in cells] == list(state)
    assert [c // 5 % 5 for c in cells] == [min(r, 4) for r in readers]
    assert [c % 5 for c in cells] == [min(r, 4) for r in opened]
    for code, name in enumerate(STATES):
        assert scraped["coread:kv_blocks", name] == state.count(code)
    assert scraped["coread:kv_cache_usage_perc", ""] == snapshot.held / snapshot.total_blocks
    # What the map shows adds up to the bars beside it.
    assert sum(r > 0 for r in readers) * snapshot.block_bytes == snapshot.totals_running.physical_bytes
    assert sum(r > 0 for r in opened) * snapshot.block_bytes == snapshot.totals_open.physical_bytes
    assert sum(opened) * snapshot.block_bytes == snapshot.totals_open.unshared_bytes


async def test_the_history_ends_with_what_is_saved_now(runtime: Runtime, engine: SmallEngine) -> None:
    await work(engine)
    engine.fresh()
    feed = await DashboardFeed(runtime).read(None, Asked.everything())
    ages = [age for age, _, _ in feed["history"]]
    assert ages == sorted(ages, reverse=True)
    assert max(saved for _, saved, _ in feed["history"]) <= feed["since_start"]["peak_saved_bytes"]


async def test_only_this_machine_or_the_token_may_scrape(runtime: Runtime) -> None:
    app = create_app(runtime, gr.Blocks())
    far = httpx.ASGITransport(app, client=("192.0.2.7", 50_000))
    async with httpx.AsyncClient(transport=far, base_url="http://127.0.0.1:7860") as client:
        assert (await client.get("/metrics")).status_code == 403
        allowed = await client.get("/metrics", headers={"x-coread-token": runtime.token})
        assert allowed.status_code == 200
        assert allowed.headers["content-type"].startswith("text/plain")
    near = httpx.ASGITransport(app, client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=near, base_url="http://127.0.0.1:7860") as client:
        lured = await client.get("/metrics", headers={"origin": "https://example.org"})
        assert lured.status_code == 403


def test_before_it_is_ready_only_that_is_told() -> None:
    [family] = LedgerCollector(lambda: None).collect()
    assert family.name == "coread:up"
    assert family.samples[0].value == 0.0


def test_fair_shares_are_rounded_so_that_they_add_up() -> None:
    from app.dashboard.tables import whole_parts

    assert whole_parts([Fraction(10, 3)] * 3) == [4, 3, 3]
    assert whole_parts([Fraction(5, 2), Fraction(1, 4), Fraction(1, 4)]) == [3, 0, 0]
    assert whole_parts([]) == []
    with pytest.raises(ValueError, match="not a whole number"):
        whole_parts([Fraction(1, 2)])
