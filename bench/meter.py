"""What the pool holds while a trace is played, weighted with the time that each step takes.

Two moments of a step are told apart. *Between* two steps everything that was computed is accepted: this is
what "utilisation = filled slots of held blocks / all slots of held blocks" is about, and what the ledger's
snapshot shows to whoever looks then. *Inside* a step the slots that it is about to fill count as empty, so
the figure is lower by what a prefill chunk takes in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core import EngineCore, StepRunner
from engine.errors import IntegrityError
from engine.runner import Row, StepOutput
from engine.types import Copy

#: A full snapshot of the ledger is compared with the meter once in so many steps.
CHECK_EVERY = 250


@dataclass(slots=True)
class Moment:
    """Sums over time of one moment: slots held, slots filled, sequences, in slot-seconds and so on."""

    held_slots: float = 0.0
    filled_slots: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0

    def add(self, seconds: float, held: int, filled: int, sequences: int) -> None:
        """One step of `seconds`."""
        self.held_slots += seconds * held
        self.filled_slots += seconds * filled
        self.sequences += seconds * sequences
        self.seconds += seconds

    @property
    def utilisation(self) -> float:
        """Time-weighted; shared slots are counted once."""
        return self.filled_slots / self.held_slots if self.held_slots else 0.0

    @property
    def waste(self) -> float:
        """Empty slots of held blocks, for each running sequence."""
        return (self.held_slots - self.filled_slots) / self.sequences if self.sequences else 0.0


@dataclass(slots=True)
class Peak:
    """Most of something, and what the pool looked like then."""

    sequences: int = 0
    held_blocks: int = 0
    entries: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Meter:
    """Wraps a runner; `EngineCore` calls it in the middle of each step, `after_step` is called after it.

    between, inside   see the top of the file
    peak              most sequences that ran in one step
    fullest           the step that held the most blocks
    """

    runner: StepRunner
    core: EngineCore | None = None
    between: Moment = field(default_factory=Moment)
    inside: Moment = field(default_factory=Moment)
    peak: Peak = field(default_factory=Peak)
    fullest: Peak = field(default_factory=Peak)
    steps: int = 0
    checks: int = 0
    _now: tuple[int, int, int] = (0, 0, 0)

    def step(self, rows: Sequence[Row], copies: Sequence[Copy] = ()) -> StepOutput:
        """Look at the pool as it is prepared, then run the step."""
        core = self._watched()
        pool, running = core.memory.pool, core.scheduler.running
        self._now = (pool.held * pool.block_size, pool.held_filled, len(running))
        for peak, value, best in (
            (self.peak, len(running), self.peak.sequences),
            (self.fullest, pool.held, self.fullest.held_blocks),
        ):
            if value > best:
                peak.sequences, peak.held_blocks, peak.entries = len(running), pool.held, pool.entries
                peak.tokens = pool.held_filled
        return self.runner.step(rows, copies)

    def after_step(self, seconds: float) -> None:
        """The step took `seconds` and its results are accepted."""
        core = self._watched()
        pool, running = core.memory.pool, core.scheduler.running
        self.steps += 1
        self.inside.add(seconds, *self._now)
        if running:
            self.between.add(seconds, pool.held * pool.block_size, pool.held_filled, len(running))
        if self.steps % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """The ledger's own snapshot says the same, to the byte. Raises `IntegrityError` where not."""
        core = self._watched()
        pool, shot = core.memory.pool, core.ledger.snapshot()
        self.checks += 1
        filled = pool.held_filled / (pool.held * pool.block_size) if pool.held else None
        totals = shot.totals_running
        shares = sum(row.fair_share for row in shot.running.values())
        saved = sum(row.saved for row in shot.running.values())
        if shot.utilisation != filled or shares != totals.physical_bytes or saved != totals.saved_bytes:
            raise IntegrityError(
                f"the ledger shows a utilisation of {shot.utilisation} and {saved} bytes saved, the pool "
                f"{filled} and {totals.saved_bytes}"
            )

    def _watched(self) -> EngineCore:
        if self.core is None:
            raise IntegrityError("the meter was not told which engine it watches")
        return self.core
