"""Random operations over few tokens, few documents and tiny pools, so that everything collides.

`World` has one method for each thing that can happen; its arguments are plain integers, so that both a
`random.Random` and hypothesis can drive it. An operation that is not possible now does nothing.
"""

from __future__ import annotations

import contextlib
import random

from engine.errors import LimitReached, PoolTooSmall
from engine.scheduler import Limits, Step
from engine.sequence import Sequence
from engine.types import Priority, Scope, Segment
from tests.engine.simulation import Simulation

DOCUMENTS = 4


class World:
    def __init__(self, seed: int, num_blocks: int, block_size: int) -> None:
        r = random.Random(seed)
        self.sim = Simulation(
            num_blocks,
            block_size,
            limits=Limits(
                max_batch_tokens=r.choice([3, 8, 40]),
                max_running=r.choice([2, 4, 8]),
                max_running_per_principal=r.choice([2, 8]),
                max_overtakes=3,
                stalled_rounds=r.choice([0, 8, 8]),
                pool_share_per_principal=r.choice([1.0, 0.5]),
            ),
            document_bonus=r.choice([0, 32]),
        )
        size = block_size
        # Each document begins with a token of its own: which document a token belongs to is then a
        # question of the tokens alone, as the oracle has it.
        self.documents = {
            f"d{i}": [10 + i, *(r.randrange(3) for _ in range(r.randrange(3 * size + 2)))]
            for i in range(DOCUMENTS)
        }
        self.prompts: list[list[Segment]] = []

    # -- arrivals --------------------------------------------------------------------------------------

    def segments(self, seed: int) -> list[Segment]:
        r, size = random.Random(seed), self.sim.memory.block_size
        kind = r.random()
        if self.prompts and kind < 0.35:  # the same again
            return [*r.choice(self.prompts)]
        account = Scope.account(r.choice("ab"))
        question = Segment([r.randrange(3) for _ in range(r.randrange(1, size + 3))], account, "question")
        if self.sim.finished and kind < 0.55:  # the next turn of a conversation
            done: Sequence = r.choice(self.sim.finished[-6:])
            if isinstance(done.owner, list):
                answer = Segment(done.tokens[done.prompt_len :], done.output_scope, "history")
                return [*done.owner, answer, question]
        out = [Segment([r.randrange(2)] * r.randrange(1, size + 2), Scope.public(), "instructions")]
        for name in r.sample(sorted(self.documents), r.randrange(0, 3)):
            scope = Scope.collection(f"c{int(name[1]) % 2}")
            out.append(Segment(self.documents[name], scope, "document", name))
        out.append(question)
        return out

    def submit(self, seed: int) -> None:
        r, size = random.Random(seed), self.sim.memory.block_size
        if len(self.sim.scheduler.waiting) >= 12:  # a longer line only means more of the same steps
            return
        segments = self.segments(seed)
        self.prompts = [*self.prompts, segments][-6:]
        who = r.choice("ab")
        self.sim.submit(
            segments,
            principal=who,
            conversation=f"{who}{r.randrange(3)}",
            output_scope=Scope.account(who),
            max_tokens=r.randrange(1, 2 * size + 2),
            priority=r.choice([Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH]),
            owner=segments,
            width=r.choice([1, 1, 1, 2]),
        )

    # -- what happens to those that are here -----------------------------------------------------------

    def step(self, token: int) -> None:
        self.sim.step(token % 3)

    def failing_step(self, pick: int) -> None:
        running = self.sim.scheduler.running
        chosen = {running[pick % len(running)]} if running else set()
        self.sim.step(pick % 3, fail=chosen)

    def abort(self, pick: int) -> None:
        everybody = [*self.sim.scheduler.running, *self.sim.scheduler.waiting]
        if everybody:
            self.sim.scheduler.remove(everybody[pick % len(everybody)])
            self.sim.counts["aborts"] += 1
        self.sim.verify()

    def drop(self, pick: int) -> None:
        """As after broken numbers: nothing private is kept."""
        running = self.sim.scheduler.running
        if running:
            self.sim.scheduler.remove(running[pick % len(running)], keep_tail=False)
            self.sim.counts["losses"] += 1
        self.sim.verify()

    def fork(self, pick: int, at: int) -> None:
        running = self.sim.scheduler.running
        if running and len(running) < 10:
            parent = running[pick % len(running)]
            if parent.computed:
                child = parent.sibling(pick % 5 + 1, at % parent.computed + 1)
                child.max_tokens = parent.max_tokens + parent.prompt_len - child.prompt_len
                if parent.id in self.sim.oracle.limit:
                    self.sim.oracle.limit[child.id] = self.sim.oracle.limit[parent.id]
                with contextlib.suppress(PoolTooSmall):
                    self.sim.scheduler.fork(parent, child)
                    self.sim.counts["forks"] += 1
        self.sim.verify()

    def preempt(self, pick: int) -> None:
        running = self.sim.scheduler.running
        if len(running) > 1:
            self.sim.scheduler._preempt(running[pick % len(running)], Step())
        self.sim.verify()

    # -- memory ----------------------------------------------------------------------------------------

    def evict(self) -> None:
        self.sim.evict()
        self.sim.verify()

    def unlink(self, pick: int) -> None:
        self.sim.unlink(f"d{pick % DOCUMENTS}")
        self.sim.verify()

    def pin(self, pick: int) -> None:
        with contextlib.suppress(LimitReached):
            self.sim.counts["pinned"] += self.sim.memory.pin_document(f"d{pick % DOCUMENTS}")
        self.sim.verify()

    def unpin(self, pick: int) -> None:
        self.sim.unpin(f"d{pick % DOCUMENTS}")
        self.sim.verify()

    def close(self, pick: int) -> None:
        self.sim.close(f"{'ab'[pick % 2]}{pick // 2 % 3}")
        self.sim.verify()

    def idle(self, seconds: int) -> None:
        self.sim.now += seconds
        self.sim.verify()

    # -- random ----------------------------------------------------------------------------------------

    def operate(self, r: random.Random) -> None:
        """One operation, chosen by `r`."""
        pick = r.randrange(1 << 30)
        operations = (
            (18, lambda: self.submit(pick)),
            (50, lambda: self.step(pick)),
            (3, lambda: self.failing_step(pick)),
            (6, lambda: self.abort(pick)),
            (1, lambda: self.drop(pick)),
            (6, lambda: self.fork(pick, r.randrange(1 << 20))),
            (3, lambda: self.preempt(pick)),
            (2, self.evict),
            (2, lambda: self.unlink(pick)),
            (3, lambda: self.pin(pick)),
            (3, lambda: self.unpin(pick)),
            (2, lambda: self.close(pick)),
            (1, lambda: self.idle(pick % 120)),
        )
        r.choices([do for _, do in operations], [weight for weight, _ in operations])[0]()


class RandomDriver(World):
    """A world driven by a seeded generator."""

    def __init__(self, seed: int, num_blocks: int, block_size: int) -> None:
        super().__init__(seed, num_blocks, block_size)
        self.random = random.Random(seed + 1)

    def run(self, operations: int, *, drain: bool = True) -> None:
        for _ in range(operations):
            self.operate(self.random)
        if drain:
            self.sim.drain()
