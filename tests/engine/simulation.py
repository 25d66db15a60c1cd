"""The real pool, tree, scheduler and ledger over a fake KV cache whose slots hold what was written.

Every step executes its copies and writes on the fake cache, then reads every sequence back through its
page table: what it finds must be exactly the sequence's own (scope, token) pairs, up to where it has
computed. An unwritten slot holds `EMPTY`, which no pair equals, and a freed block is emptied. After every
operation `verify` recomputes all accounts and asks the oracle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.integrity import check
from engine.ledger import Ledger
from engine.memory import KVMemory, Match
from engine.scheduler import Limits, Scheduler, Step
from engine.sequence import Sequence, State
from engine.types import ModelShape, Scope, Segment
from tests.engine.oracle import WHOLE, Oracle

EMPTY = -1
SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=3, itemsize=2, max_context=64)


class Simulation:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        limits: Limits | None = None,
        sharing: bool = True,
        document_bonus: int = 32,
    ) -> None:
        self.memory = KVMemory(num_blocks, block_size, sharing=sharing, document_bonus=document_bonus)
        self.scheduler = Scheduler(self.memory, limits or Limits(max_batch_tokens=64, max_running=8))
        self.ledger = Ledger(self.memory, self.scheduler, SHAPE, idle_s=100.0)
        self.oracle = Oracle(block_size, sharing)
        self.cache = np.full((num_blocks, block_size), EMPTY, dtype=np.int64)
        self.finished: list[Sequence] = []
        self.failed: list[tuple[Sequence, EngineError]] = []
        self.counts: Counter[str] = Counter()
        self.operations = 0
        self.computed_tokens = 0
        self.now = 0.0
        self.freed = [0] * num_blocks
        self._meaning: dict[int, tuple[Scope, int]] = {}
        self._asked = self._skipped = 0
        self._pinned: set[Any] = set()
        self._watch()

    def _watch(self) -> None:
        """See frees, admissions and releases from outside."""
        pool, memory = self.memory.pool, self.memory
        add, admit, released, admitted = pool.extents.add, memory.admit, memory.on_release, memory.on_admit

        def freeing(block: int) -> None:
            self.freed[block] += 1
            add(block)
            self.cache[block] = EMPTY

        def admitting(sequence: Sequence, match: Match) -> None:
            self._check_hit(sequence, match.tokens(memory.block_size))
            if match.takeover:
                assert match.partial is not None
                assert match.slots == len(match.partial.key), "a tail is taken over that says something else"
                assert not pool.readers[match.partial.block], "a tail that somebody reads is taken over"
            admit(sequence, match)

        def releasing(sequence: Sequence) -> None:
            assert released is not None
            released(sequence)
            if not sequence.closed:
                blocks = sequence.table[: memory.blocks_for(sequence.computed)]
                kept = self.oracle.stored.setdefault(sequence.conversation, {})
                kept[sequence.id] = [(b, self.freed[b]) for b in blocks]

        def reading(sequence: Sequence) -> None:
            assert admitted is not None
            admitted(sequence)
            stored = self.oracle.stored.get(sequence.conversation, {})
            others = any(
                s.conversation == sequence.conversation and s is not sequence for s in self.scheduler.running
            )
            alive = {s.id for s in memory.live}
            for key in list(stored):
                if key == sequence.id or not (others or key in alive):
                    del stored[key]

        pool.extents.add = freeing  # type: ignore[method-assign]
        memory.admit = admitting  # type: ignore[method-assign]
        memory.on_release, memory.on_admit = releasing, reading

    def _check_hit(self, sequence: Sequence, hit: int) -> None:
        must, may = self.oracle.bounds(sequence)
        assert hit <= may, f"{sequence} hits {hit} tokens and only {may} of it were ever accepted"
        if not self.memory.counters.evictions:
            spare = self.memory.pool.num_blocks - self.memory.pool.held
            if spare > 2 * self.memory.need(sequence) + 4 and self.memory.promised == 0:
                self.counts["lower bound"] += must > 0
                assert hit >= must, f"{sequence} hits {hit} tokens and {must} of it are published"
        self.oracle.reuse += hit

    # -- what callers do -------------------------------------------------------------------------------

    def sequence(self, segments: list[Segment], **options: Any) -> Sequence:
        settings: dict[str, Any] = {
            "output_scope": Scope.account("a"),
            "principal": "p",
            "conversation": "c",
            "max_tokens": 4,
            **options,
        }
        sequence = Sequence(segments, self.memory.scopes, **settings)
        spelled = [(segment.scope, token) for segment in segments for token in segment.tokens]
        for pair, meaning in zip(sequence.pairs, spelled, strict=True):
            assert self._meaning.setdefault(pair, meaning) == meaning, "two scopes or tokens are one pair"
        return sequence

    def submit(self, segments: list[Segment], **options: Any) -> Sequence | None:
        sequence = self.sequence(segments, **options)
        try:
            self.scheduler.add(sequence)
        except EngineError as error:
            self.failed.append((sequence, error))
            return None
        return sequence

    def unlink(self, document: str) -> int:
        self._pinned = set()
        gone = self.memory.unlink_document(document)
        self.oracle.unlink(document, self.memory.live)
        return gone

    def unpin(self, document: str) -> None:
        self._pinned = set()
        self.memory.unpin_document(document)

    def close(self, conversation: str) -> None:
        self.ledger.close(conversation)
        self.oracle.stored.pop(conversation, None)

    def evict(self) -> bool:
        """What an allocation does when nothing is free."""
        victim = self.memory.tree.next_victim()
        if victim is not None:
            self.memory._evict(victim)
        return victim is not None

    # -- a step ----------------------------------------------------------------------------------------

    def execute(self, step: Step) -> None:
        """What the runner does, on integers."""
        size, pool = self.memory.block_size, self.memory.pool
        for copy in step.copies:
            assert not pool.readers[copy.target] - {c.sequence for c in step.chunks}, "a copy for nobody"
            self.cache[copy.target, : copy.slots] = self.cache[copy.source, : copy.slots]
            self.cache[copy.target, copy.slots :] = EMPTY
        indexed = {node.block for node in self.memory.tree.walk()}
        written: set[tuple[int, int]] = set()
        for chunk in step.chunks:
            s = chunk.sequence
            for position in range(max(chunk.start, chunk.write_from), chunk.end):
                block = s.table[position // size]
                slot = (block, position % size)
                assert slot not in written, "two sequences write one slot"
                assert block not in indexed, f"published block {block} is written"
                assert pool.readers[block] == {s}, f"block {block} is written beside another reader"
                written.add(slot)
                self.cache[slot] = s.pairs[position]
                self.computed_tokens += 1
        for chunk in step.chunks:
            self.read_back(chunk.sequence, chunk.end)

    def read_back(self, s: Sequence, end: int) -> None:
        size = self.memory.block_size
        table = np.asarray(s.table[: -(-end // size)], dtype=np.int64)
        found = self.cache[table].reshape(-1)[:end].tolist()
        assert found == s.pairs[:end], f"{s} reads another's token"

    def step(self, token: int | None = None, *, fail: set[Sequence] = frozenset(), now: float = 0.0) -> Step:
        """Schedule, execute, accept; each sequence that samples gets `token` (or its length modulo 7)."""
        running = list(self.scheduler.running)
        hits = {s: s.admitted_at is None for s in self.scheduler.waiting}
        step = self.scheduler.schedule(now)
        self.failed.extend(step.failed)
        self._check_step(step, running)
        for s, reused in step.admitted:
            if hits[s] and s.choice == 0:
                self._asked, self._skipped = self._asked + s.prompt_len, self._skipped + reused
        self.execute(step)
        for s in fail:
            self.scheduler.remove(s)
            self.counts["failures"] += 1
            self.counts["losses"] += 1
        self.memory.finish_copies()
        for chunk in step.chunks:
            s = chunk.sequence
            if s in fail:
                continue
            self.scheduler.accept(chunk)
            self.oracle.accept(s, chunk.end)
            if chunk.sample:
                s.append(len(s) % 7 if token is None else token, self.memory.scopes)
                if s.generated >= s.max_tokens:
                    self.scheduler.remove(s)
                    self.finished.append(s)
                    self.counts["finished"] += 1
        self.verify()
        return step

    def _check_step(self, step: Step, running: list[Sequence]) -> None:
        """The scheduler's promises about one step."""
        limits = self.scheduler.limits
        gone = {s for s, _ in step.failed}
        assert step.tokens <= limits.max_batch_tokens, "a step is larger than its budget"
        assert len({c.sequence for c in step.chunks}) == len(step.chunks), "a sequence runs twice in a step"
        busy = self.scheduler.running or self.scheduler.waiting
        assert step.chunks or not busy, "somebody is in line and nothing runs"
        assert all(c.count > 0 for c in step.chunks), "an empty chunk"
        oldest = min(
            (s for s in running if s not in gone),
            key=lambda s: (s.priority.value, s.arrival, s.choice),
            default=None,
        )
        assert oldest is None or oldest not in step.preempted, "the protected sequence was preempted"
        for s in self.scheduler.waiting:
            if s.waiting_for == "prefill":
                assert limits.stalled_rounds, "it waits, and should not"
                pending = self.memory.match(s).pending
                assert pending is not None, "it waits for a prefill that nobody does"
                assert s.wait_on is pending.producer, "it waits for another's prefill"
                assert pending.producer.state is State.RUNNING, "it waits for one that does not run"

    # -- after every operation -------------------------------------------------------------------------

    def verify(self) -> None:
        self.operations += 1
        memory, pool = self.memory, self.memory.pool
        check(memory)
        assert pool.free + pool.retained + pool.held == pool.num_blocks
        for s in memory.live:
            self.read_back(s, s.computed)
        for node in memory.tree.walk():
            found = self.cache[node.block, : len(node.key)].tolist()
            assert found == list(node.key), f"the index says another thing than block {node.block} holds"
        self.oracle.check_sharing(memory.live)
        for node in self._pinned:
            assert node.alive, f"pinned block {node.block} was evicted"
        self._pinned = set(memory.tree.pinned)
        done = self.scheduler.counters
        assert (done.prompt_tokens, done.prompt_tokens_skipped) == (self._asked, self._skipped)
        self._check_ledger()

    def _check_ledger(self) -> None:
        """Both views: every row against the oracle's, the sum to the byte."""
        self.now += 1.0
        self.ledger.tick(self.now)
        snapshot = self.ledger.snapshot()
        open_now = set(self.ledger._open)
        self.oracle.stored = {name: kept for name, kept in self.oracle.stored.items() if name in open_now}
        views = self.oracle.shares(self.scheduler.running, self.freed)
        for rows, totals, (want, blocks) in (
            (snapshot.running, snapshot.totals_running, views[0]),
            (snapshot.open, snapshot.totals_open, views[1]),
        ):
            unit = self.ledger.block_bytes
            found = {name: row.fair_share * WHOLE for name, row in rows.items() if row.blocks}
            assert found == {name: share * unit for name, share in want.items()}, "a fair share is wrong"
            assert sum(row.fair_share for row in rows.values()) == totals.physical_bytes == blocks * unit
            assert sum(row.unshared_bytes for row in rows.values()) == totals.unshared_bytes
            assert all(row.saved >= 0 for row in rows.values()), "somebody saves less than nothing"
        assert (snapshot.free, snapshot.held, snapshot.retained) == (
            self.memory.pool.free,
            self.memory.pool.held,
            self.memory.pool.retained,
        )
        assert snapshot.utilisation is None or 0 < snapshot.utilisation <= 1

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError(f"work did not end in {limit} steps")
