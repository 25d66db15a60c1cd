"""What sharing does on the real engine, shown on the sample documents: `python -m bench.sharing [--json]`.

    two      two readers, one document, two questions: reuse, copies, and answers equal to an unshared engine
    eight    eight readers at once on one document of about 2,000 tokens: computed once, peak memory
    again    regenerate: copies by the rule (none where aligned or sole reader, otherwise one block)
    soak     500 short requests with random aborts and vanished consumers: blocks and memory constant

Float32, greedy, the packaged model. Counts only; nothing here depends on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
from dataclasses import dataclass
from typing import Any

import psutil

from app.prompting import engine_segment
from data import documents
from engine.core import EngineCore
from engine.kv_pool import KVPool
from engine.runner import Runner
from engine.service import EngineService, Generation
from engine.types import (
    Delta,
    Done,
    EngineConfig,
    Failed,
    GenerationRequest,
    Reading,
    SamplingParams,
    Scope,
    Segment,
)
from rag.prompt import PromptDocument, PromptLayout

INSTRUCTIONS = "Answer the question from the document. Be brief."
QUESTIONS = [
    "What is this document about?",
    "Who is named in it?",
    "Which places does it mention?",
    "What dates does it give?",
    "What is the most important number in it?",
    "What should a reader do first?",
    "What went wrong?",
    "Who is responsible?",
]
#: Logits closer than this may be ordered differently by two orders of summation.
NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer and how it was paid for."""

    done: Done
    events: int


class Bench:
    """One engine, and prompts laid out as the product lays them out."""

    def __init__(self, *, sharing: bool = True, pool_mib: int = 512) -> None:
        config = EngineConfig(dtype="float32", kv_pool_bytes=pool_mib << 20, sharing=sharing)
        self.service = EngineService(config)
        self.service.start()
        self.service.wait_ready_sync()
        # Before anything is written: a slot that is read unwritten is noticed, and every page of memory is
        # resident, so that what grows later is a leak.
        self.pool().storage.fill_(float("nan"))
        self.layout = PromptLayout(self.service.tokenizer)

    def segments(self, document: str, question: str, account: str) -> list[Segment]:
        found = next(d for d in documents() if d.name == document)
        prompt = self.layout.build(
            instructions=INSTRUCTIONS,
            documents=[PromptDocument(found.name, "sample", found.title, found.text)],
            history=[],
            question=question,
            account=account,
            budget_tokens=7_000,
        )
        return [engine_segment(segment) for segment in prompt.segments]

    async def submit(
        self, segments: list[Segment], account: str, *, max_tokens: int = 32, conversation: str | None = None
    ) -> Generation:
        return await self.service.submit(
            GenerationRequest(
                segments,
                SamplingParams(max_tokens=max_tokens, logprobs=2),
                principal=account,
                conversation=conversation or account,
                output_scope=Scope.account(account),
            )
        )

    async def answer(self, segments: list[Segment], account: str, **options: Any) -> tuple[Done, list[Delta]]:
        generation = await self.submit(segments, account, **options)
        deltas: list[Delta] = []
        async for event in generation:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                deltas.append(event)
            if isinstance(event, Done):
                return event, deltas
        raise RuntimeError("the answer ended without an end")

    def pool(self) -> KVPool:
        runner = self.core().runner
        if not isinstance(runner, Runner):
            raise TypeError("the engine does not run a model")
        return runner.pool

    def core(self) -> EngineCore:
        core = self.service._core
        if core is None:
            raise RuntimeError("the engine is not running")
        return core


def document_of(bench: Bench, tokens: int) -> str:
    """The sample document whose length is nearest to `tokens`."""
    return min(
        (d.name for d in documents()),
        key=lambda name: abs(sum(len(s.tokens) for s in bench.segments(name, "?", "x")) - tokens),
    )


def first_difference(one: list[Delta], other: list[Delta]) -> dict[str, Any] | None:
    """Where two greedy answers part, and how close the two best logits were there; None: nowhere."""
    flat = [
        [(t, p) for d in deltas for t, p in zip(d.tokens, d.logprobs, strict=True)] for deltas in (one, other)
    ]
    for place, ((a, best), (b, _)) in enumerate(zip(*flat, strict=False)):
        if a != b:
            gap = best.top[0][1] - best.top[1][1]
            return {"token": place, "gap": gap, "near_tie": gap < NEAR_TIE}
    return None


async def two_readers(bench: Bench) -> dict[str, Any]:
    """The second reader of a document computes its own question only."""
    name = document_of(bench, 2_000)
    shared: list[tuple[Done, list[Delta]]] = []
    prompts = [bench.segments(name, QUESTIONS[i], f"reader-{i}") for i in range(2)]
    for i, segments in enumerate(prompts):
        shared.append(await bench.answer(segments, f"reader-{i}"))
    common = sum(len(s.tokens) for s in prompts[0] if not s.scope.private)
    receipt = shared[1][0].receipt
    size = bench.service.status().block_size
    plain = Bench(sharing=False, pool_mib=256)
    differences = []
    for i, segments in enumerate(prompts):
        alone = await plain.answer(segments, f"reader-{i}")
        differences.append(first_difference(shared[i][1], alone[1]))
    plain.service.stop()
    return {
        "document": name,
        "common_tokens": common,
        "reused_tokens": receipt.reused_tokens,
        "not_reused_of_common": common - receipt.reused_tokens,
        "at_most_one_partial_block": common - receipt.reused_tokens < size,
        "blocks_copied": receipt.blocks_copied,
        "bytes_copied": receipt.bytes_copied,
        "block_bytes": bench.core().ledger.block_bytes,
        "answers": [done.text for done, _ in shared],
        "differences_from_unshared": differences,
    }


async def eight_readers(bench: Bench) -> dict[str, Any]:
    """Eight people open one document together."""
    name = document_of(bench, 2_300)
    prompts = [bench.segments(name, QUESTIONS[i], f"eight-{i}") for i in range(8)]
    core = bench.core()
    before, peak_held, peak_unshared = core.ledger.since_start(), 0, 0
    answers = [
        asyncio.create_task(bench.answer(p, f"eight-{i}", max_tokens=48)) for i, p in enumerate(prompts)
    ]
    while not all(a.done() for a in answers):
        await asyncio.sleep(0.002)
        with core.lock:
            peak_held = max(peak_held, core.memory.pool.held)
            peak_unshared = max(peak_unshared, core.memory.pool.entries)
    done = [(await a)[0] for a in answers]
    after = core.ledger.since_start()
    common = sum(len(s.tokens) for s in prompts[0] if not s.scope.private)
    private = sum(len(s.tokens) for p in prompts for s in p if s.scope.private)
    return {
        "document": name,
        "common_tokens": common,
        "private_tokens_of_all": private,
        "computed_tokens": after.prefill_tokens_computed - before.prefill_tokens_computed,
        "computed_if_unshared": sum(d.receipt.prompt_tokens for d in done),
        "largest_copy_bytes": max(d.receipt.bytes_copied for d in done[1:]),
        "block_bytes": core.ledger.block_bytes,
        "peak_held_blocks": peak_held,
        "peak_unshared_blocks": peak_unshared,
    }


async def regenerate(bench: Bench) -> dict[str, Any]:
    """Ask the same again: an aligned prompt copies nothing, another one copies one block."""
    size = bench.service.status().block_size
    account, copies = Scope.account("again"), {}
    base = [
        token for s in bench.segments(document_of(bench, 1_000), QUESTIONS[0], "again") for token in s.tokens
    ]
    for label, length in (("aligned", 20 * size), ("not_aligned", 20 * size + 5)):
        segments = [Segment(base[-length:], account, "text")]
        await bench.answer(segments, "again", max_tokens=24, conversation=f"again-{label}")
        done, _ = await bench.answer(segments, "again", max_tokens=24, conversation=f"again-{label}")
        copies[label] = done.receipt.blocks_copied
        copies[f"{label}_reused"] = done.receipt.reused_tokens
    # Stopped inside its first block of answer: the tail is nobody else's and is continued in place.
    segments = [Segment(base[-(20 * size + 5) - 7 :], account, "text")]
    await bench.answer(segments, "again", max_tokens=1, conversation="again-tail")
    done, _ = await bench.answer(segments, "again", max_tokens=8, conversation="again-tail")
    copies["sole_reader_of_open_tail"] = done.receipt.blocks_copied
    return copies


async def soak(bench: Bench, requests: int = 500) -> dict[str, Any]:
    """Short requests, a third of them aborted at a random moment, some consumers never read."""
    rng, core, process = random.Random(7), bench.core(), psutil.Process()
    prompts = [bench.segments(d.name, QUESTIONS[0], "soak")[:1] for d in documents()[:3]]
    resident: list[int] = []

    async def one(i: int) -> str:
        who = f"soak-{i % 9}"
        words = [
            *prompts[i % 3],
            Segment([rng.randrange(100, 9_000) for _ in range(rng.randrange(4, 60))], Scope.account(who)),
        ]
        generation = await bench.submit(words, who, max_tokens=rng.randrange(1, 12))
        fate = rng.random()
        if fate < 0.1:
            await asyncio.sleep(rng.random() / 20)
            generation.abort()
            return "vanished"
        seen = 0
        async for event in generation:
            seen += isinstance(event, Delta | Reading)
            if fate < 0.35 and seen > rng.randrange(5):
                generation.abort()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                return event.reason
        return "ended"

    outcomes: dict[str, int] = {}
    for start in range(0, requests, 10):
        for outcome in await asyncio.gather(*(one(i) for i in range(start, start + 10))):
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        gc.collect()
        resident.append(process.memory_info().rss)
    while core.busy:  # noqa: ASYNC110 (the engine has no event for idleness)
        await asyncio.sleep(0.01)
    bench.service.check_integrity()
    snapshot = core.ledger.snapshot()
    warm = resident[len(resident) // 5]
    return {
        "requests": requests,
        "outcomes": outcomes,
        "total_blocks": snapshot.total_blocks,
        "free_retained_held": [snapshot.free, snapshot.retained, snapshot.held],
        "constant": snapshot.free + snapshot.retained + snapshot.held == snapshot.total_blocks,
        "held_at_the_end": snapshot.held,
        "evictions": snapshot.since_start.evictions,
        "resident_growth_mib_after_warm_up": round((resident[-1] - warm) / 2**20, 1),
    }


async def run(parts: list[str]) -> dict[str, Any]:
    bench = Bench(pool_mib=256 if parts == ["soak"] else 512)
    try:
        result: dict[str, Any] = {"model": bench.service.status().detail}
        for name, part in (
            ("two", two_readers),
            ("eight", eight_readers),
            ("again", regenerate),
            ("soak", soak),
        ):
            if name in parts:
                result[name] = await part(bench)
        return result
    finally:
        bench.service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["two", "eight", "again", "soak"])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args()
    result = asyncio.run(run(args.parts))
    if args.json:
        print(json.dumps(result))
        return
    for part, figures in result.items():
        print(f"{part}:" if isinstance(figures, dict) else f"{part}: {figures}")
        if isinstance(figures, dict):
            for key, value in figures.items():
                print(f"  {key}: {value}")


if __name__ == "__main__":
    main()
