"""The real pool, tree and scheduler over a fake KV cache whose slots hold the token that was written.

Every step executes its copies and writes on the fake cache, then reads every sequence back through its
page table: what it finds must be exactly the sequence's own (scope, token) pairs. An unwritten slot holds
`EMPTY`, which no pair equals.
"""

from __future__ import annotations

import contextlib
import random
from fractions import Fraction

import numpy as np

from engine.errors import EngineError, LimitReached, PoolTooSmall
from engine.integrity import check
from engine.memory import KVMemory
from engine.scheduler import Limits, Scheduler, Step
from engine.sequence import Sequence, State
from engine.types import Priority, Scope, Segment

EMPTY = -1


class Simulation:
    def __init__(
        self, num_blocks: int, block_size: int, *, limits: Limits | None = None, sharing: bool = True
    ) -> None:
        self.memory = KVMemory(num_blocks, block_size, sharing=sharing)
        self.scheduler = Scheduler(self.memory, limits or Limits(max_batch_tokens=64, max_running=8))
        self.cache = np.full((num_blocks, block_size), EMPTY, dtype=np.int64)
        self.finished: list[Sequence] = []
        self.failed: list[tuple[Sequence, EngineError]] = []
        self.operations = 0
        self.computed_tokens = 0

    def sequence(self, segments: list[Segment], **options: object) -> Sequence:
        settings: dict[str, object] = dict(
            output_scope=Scope.account("a"), principal="p", conversation="c", max_tokens=4
        )
        settings.update(options)
        return Sequence(segments, self.memory.scopes, **settings)  # type: ignore[arg-type]

    def submit(self, segments: list[Segment], **options: object) -> Sequence | None:
        sequence = self.sequence(segments, **options)
        try:
            self.scheduler.add(sequence)
        except EngineError as error:
            self.failed.append((sequence, error))
            return None
        return sequence

    def execute(self, step: Step) -> None:
        """What the runner does, on integers."""
        size = self.memory.block_size
        for copy in step.copies:
            self.cache[copy.target, : copy.slots] = self.cache[copy.source, : copy.slots]
            self.cache[copy.target, copy.slots :] = EMPTY
        written: set[tuple[int, int]] = set()
        for chunk in step.chunks:
            s = chunk.sequence
            for position in range(chunk.start, chunk.end):
                if position < chunk.write_from:
                    continue
                slot = (s.table[position // size], position % size)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.cache[slot] = s.pairs[position]
                self.computed_tokens += 1
        for chunk in step.chunks:
            self.read_back(chunk.sequence, chunk.end)

    def read_back(self, s: Sequence, end: int) -> None:
        size = self.memory.block_size
        for position in range(end):
            found = self.cache[s.table[position // size], position % size]
            assert found == s.pairs[position], f"{s} reads another's token at {position}"

    def step(self, token: int | None = None, *, fail: set[Sequence] = frozenset(), now: float = 0.0) -> Step:
        """Schedule, execute, accept; each sequence that samples gets `token` (or its length modulo 7)."""
        step = self.scheduler.schedule(now)
        self.failed.extend(step.failed)
        self.execute(step)
        self.memory.finish_copies()
        for chunk in step.chunks:
            s = chunk.sequence
            if s in fail:
                self.scheduler.remove(s, keep_tail=False)
                continue
            self.scheduler.accept(chunk)
            if chunk.sample:
                s.append(len(s) % 7 if token is None else token, self.memory.scopes)
                if s.generated >= s.max_tokens:
                    self.scheduler.remove(s)
                    self.finished.append(s)
        self.verify()
        return step

    def verify(self) -> None:
        self.operations += 1
        check(self.memory)
        pool = self.memory.pool
        assert pool.free + pool.retained + pool.held == pool.num_blocks
        for s in self.memory.live:
            self.read_back(s, s.computed)
        shares = sum(
            (Fraction(1, len(pool.readers[b])) for s in self.scheduler.running for b in s.table), Fraction(0)
        )
        assert shares == pool.held

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError(f"work did not end in {limit} steps")


class RandomDriver:
    """Random operations over few tokens, few documents and tiny pools, so that everything collides."""

    def __init__(self, seed: int, num_blocks: int, block_size: int) -> None:
        self.random = random.Random(seed)
        limits = Limits(
            max_batch_tokens=self.random.choice([3, 8, 40]),
            max_running=self.random.choice([2, 4, 8]),
            max_overtakes=3,
            pool_share_per_principal=self.random.choice([1.0, 0.5]),
        )
        self.sim = Simulation(num_blocks, block_size, limits=limits)
        self.documents = {
            f"d{i}": [self.random.randrange(3) for _ in range(self.random.randrange(1, 3 * block_size + 2))]
            for i in range(4)
        }
        self.conversations: list[list[Segment]] = []

    def segments(self) -> list[Segment]:
        r, size = self.random, self.sim.memory.block_size
        if self.conversations and r.random() < 0.4:
            return [*r.choice(self.conversations)]
        out = [Segment([r.randrange(2)] * r.randrange(1, size + 2), Scope.public(), "instructions")]
        for name in r.sample(sorted(self.documents), r.randrange(0, 3)):
            out.append(
                Segment(self.documents[name], Scope.collection(f"c{int(name[1]) % 2}"), "document", name)
            )
        account = Scope.account(r.choice("ab"))
        out.append(
            Segment([r.randrange(3) for _ in range(r.randrange(1, 2 * size + 2))], account, "question")
        )
        self.conversations = [*self.conversations, out][-6:]
        return out

    def operate(self) -> None:
        r, sim = self.random, self.sim
        running, waiting = sim.scheduler.running, sim.scheduler.waiting
        roll = r.random()
        if roll < 0.22:
            who = r.choice("ab")
            sim.submit(
                self.segments(),
                principal=who,
                conversation=f"{who}{r.randrange(3)}",
                output_scope=Scope.account(who),
                max_tokens=r.randrange(1, 3 * sim.memory.block_size),
                priority=r.choice(list(Priority)),
            )
        elif roll < 0.75:
            failing = {r.choice(running)} if running and r.random() < 0.05 else set()
            sim.step(r.randrange(3), fail=failing)
            return
        elif roll < 0.80 and running:
            sim.scheduler.remove(r.choice(running), keep_tail=r.random() < 0.7)
        elif roll < 0.83 and waiting:
            sim.scheduler.remove(r.choice(waiting))
        elif roll < 0.88 and running:
            parent = r.choice(running)
            if parent.computed and len(running) < 10:
                child = parent.sibling(r.randrange(1, 5), r.randrange(1, parent.computed + 1))
                child.max_tokens = parent.max_tokens + parent.prompt_len - child.prompt_len
                with contextlib.suppress(PoolTooSmall):
                    sim.scheduler.fork(parent, child)
        elif roll < 0.91 and len(running) > 1:
            victim = r.choice(running)
            sim.scheduler._preempt(victim, Step())
        elif roll < 0.94:
            sim.memory.unlink_document(r.choice(sorted(self.documents)))
        elif roll < 0.97:
            with contextlib.suppress(LimitReached):
                sim.memory.pin_document(r.choice(sorted(self.documents)))
        else:
            sim.memory.unpin_document(r.choice(sorted(self.documents)))
        sim.verify()
