"""The world of `tests.engine.world` as a hypothesis state machine: operations are found and shrunk."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.engine.world import World

BLOCK_SIZES = (1, 2, 16, 32)
anything = st.integers(0, (1 << 20) - 1)


class MemoryMachine(RuleBasedStateMachine):
    """Totals of all runs are added up in `totals`, so that a run can show that it was not vacuous."""

    totals: ClassVar[Counter[str]] = Counter()
    world: World | None = None

    @initialize(seed=anything, blocks=st.integers(2, 40), size=st.sampled_from(BLOCK_SIZES))
    def begin(self, seed: int, blocks: int, size: int) -> None:
        self.world = World(seed, blocks, size)

    @property
    def here(self) -> World:
        assert self.world is not None
        return self.world

    @rule(seed=anything, number=st.integers(1, 5), steps=st.integers(0, 2))
    def submit(self, seed: int, number: int, steps: int) -> None:
        for one in range(number):
            self.here.submit(seed + one)
        self.step(steps, seed)

    @rule(times=st.integers(1, 6), token=anything)
    def step(self, times: int, token: int) -> None:
        for _ in range(times):
            self.here.step(token)

    @rule(pick=anything, times=st.integers(0, 3))
    def failing_step(self, pick: int, times: int) -> None:
        self.here.failing_step(pick)
        self.step(times, pick)

    @rule(pick=anything)
    def abort(self, pick: int) -> None:
        self.here.abort(pick)

    @rule(pick=anything)
    def drop(self, pick: int) -> None:
        self.here.drop(pick)

    @rule(pick=anything, at=anything, times=st.integers(1, 4))
    def fork(self, pick: int, at: int, times: int) -> None:
        self.here.fork(pick, at)
        self.step(times, pick)

    @rule(pick=anything)
    def preempt(self, pick: int) -> None:
        self.here.preempt(pick)

    @rule()
    def evict(self) -> None:
        self.here.evict()

    @rule(pick=anything)
    def unlink(self, pick: int) -> None:
        self.here.unlink(pick)

    @rule(pick=anything)
    def pin(self, pick: int) -> None:
        self.here.pin(pick)

    @rule(pick=anything)
    def unpin(self, pick: int) -> None:
        self.here.unpin(pick)

    @rule(pick=anything)
    def close(self, pick: int) -> None:
        self.here.close(pick)

    @rule(seconds=st.integers(0, 200))
    def idle(self, seconds: int) -> None:
        self.here.idle(seconds)

    def teardown(self) -> None:
        if self.world is not None:
            sim = self.world.sim
            sim.drain()
            MemoryMachine.totals.update(counts(sim))


def counts(sim: object) -> Counter[str]:
    """What happened in a simulation, by kind."""
    from tests.engine.simulation import Simulation

    assert isinstance(sim, Simulation)
    memory, scheduler = sim.memory.counters, sim.scheduler.counters
    found = Counter(
        operations=sim.operations,
        tokens_computed=sim.computed_tokens,
        tokens_reused=sim.oracle.reuse,
        requests=scheduler.requests,
        steps=scheduler.steps,
        copies=memory.blocks_copied,
        takeovers=memory.takeovers,
        merges=memory.merges,
        published=memory.published,
        evictions=memory.evictions,
        preemptions=scheduler.preemptions,
        unlinks=memory.unlinked,
        refused=len(sim.failed),
    )
    found.update({name.replace(" ", "_"): n for name, n in sim.counts.items()})
    return found


#: Kinds of event without which a long run would prove nothing.
NEEDED = ("copies", "takeovers", "merges", "evictions", "preemptions", "unlinks", "pinned", "forks", "aborts")


def run(examples: int, steps: int = 60, *, seed: int | None = None, shrink: bool = True) -> Counter[str]:
    """Drive `examples` worlds of about `steps` rules each; returns what happened in all of them."""
    from hypothesis import seed as with_seed

    before = Counter(MemoryMachine.totals)
    machine = MemoryMachine if seed is None else with_seed(seed)(MemoryMachine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return MemoryMachine.totals - before
