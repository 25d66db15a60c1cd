"""`GET /metrics` in Prometheus' text format: the ledger's own snapshot, named as vLLM names such things.

Nothing is counted here. A scrape reads the snapshot that the page and `/api/memory` read, so the three can
only agree; queries and hits are tokens, as vLLM counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.memory_feed import STATES
from app.runtime import Runtime

if TYPE_CHECKING:
    from engine.histogram import HistogramValue
    from engine.ledger import MemorySnapshot
    from engine.service import EngineStatus

Source = Callable[[], "tuple[EngineStatus, MemorySnapshot] | None"]


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"coread:{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"coread:{name}", help, value=value)


def _labelled(name: str, help: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(f"coread:{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, help: str, value: HistogramValue) -> Metric:
    family = HistogramMetricFamily(f"coread:{name}", help)
    buckets, sum_so_far = [], 0
    for bound, count in zip([*value.bounds, float("inf")], value.counts, strict=True):
        sum_so_far += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(sum_so_far)))
    family.add_metric([], buckets, value.total)
    return family


class LedgerCollector(Collector):
    """Turns the snapshot into metric families at each scrape; before it is ready, `coread:up` alone."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not take a snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families of one moment."""
        found = self._source()
        yield _gauge("up", "1 while questions can be answered.", float(found is not None))
        if found is not None:
            yield from self._now(*found)
            yield from self._since_start(found[1])

    def _now(self, status: EngineStatus, snapshot: MemorySnapshot) -> Iterator[Metric]:
        yield _gauge("num_requests_running", "Sequences that are being computed.", status.running)
        yield _gauge("num_requests_waiting", "Requests in line.", status.queued)
        states = {name: float(snapshot.state.count(code)) for code, name in enumerate(STATES)}
        yield _labelled("kv_blocks", "Blocks of the KV pool by state.", "state", states)
        yield _gauge("kv_blocks_total", "Blocks of the KV pool.", snapshot.total_blocks)
        yield _gauge("kv_block_bytes", "Bytes of one block.", snapshot.block_bytes)
        usage = snapshot.held / snapshot.total_blocks
        yield _gauge("kv_cache_usage_perc", "Share of the pool that running sequences hold, 0 to 1.", usage)
        views = {"running": snapshot.totals_running, "open": snapshot.totals_open}
        for name, help, figure in (
            ("saved_bytes", "Bytes that page tables name more than once.", "saved_bytes"),
            ("physical_bytes", "Bytes of the blocks that page tables name.", "physical_bytes"),
            ("unshared_bytes", "Bytes with paging but without sharing.", "unshared_bytes"),
            ("reserved_bytes", "Bytes of contiguous caches.", "reserved_bytes"),
            ("conversations", "Conversations.", "conversations"),
        ):
            values = {view: float(getattr(totals, figure)) for view, totals in views.items()}
            yield _labelled(name, f"{help} The two views are never to be added.", "view", values)

    def _since_start(self, snapshot: MemorySnapshot) -> Iterator[Metric]:
        since = snapshot.since_start
        for name, help, value in (
            ("requests", "Requests that were admitted.", since.requests),
            ("answers", "Answers that have ended.", since.answers),
            ("prompt_tokens", "Prompt tokens of admitted requests.", since.prompt_tokens),
            ("generation_tokens", "Tokens generated.", since.output_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", since.prompt_tokens),
            ("prefix_cache_hits", "Of these, tokens found there.", since.prefill_tokens_skipped),
            ("prefill_tokens_skipped", "Prompt tokens not computed.", since.prefill_tokens_skipped),
            ("prefill_tokens_computed", "Prompt tokens computed.", since.prefill_tokens_computed),
            ("kv_bytes_logical", "KV bytes that attention looked at.", since.kv_bytes_logical),
            ("kv_bytes_read", "KV bytes that were really read.", since.kv_bytes_read),
            ("kv_bytes_not_read", "The difference.", since.kv_bytes_logical - since.kv_bytes_read),
            ("block_copies", "Blocks copied where texts part.", since.blocks_copied),
            ("copied_bytes", "Bytes of these copies.", since.bytes_copied),
            ("evictions", "Blocks evicted.", since.evictions),
            ("num_preemptions", "Sequences put back.", since.preemptions),
            ("saved_byte_seconds", "Bytes saved, over time (running).", since.saved_byte_seconds),
        ):
            yield _counter(name, help, value)
        yield _gauge("peak_saved_bytes", "Most bytes saved at one moment (running).", since.peak_saved_bytes)
        yield _histogram("time_to_first_token_seconds", "From submission to the first token.", since.ttft)
        yield _histogram("time_per_output_token_seconds", "Per token after the first.", since.tpot)


def _source(runtime: Runtime) -> Source:
    def read() -> tuple[EngineStatus, MemorySnapshot] | None:
        return (runtime.engine.status(), runtime.engine.memory()) if runtime.ready else None

    return read


def metrics_router(runtime: Runtime) -> APIRouter:
    """The route, for programs on this machine and for holders of the data directory's token."""
    router = APIRouter()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(_source(runtime)))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        runtime.access.require_watcher(request)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
