"""The trace through the production memory and scheduler, in virtual time and without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.meter import Meter
from bench.play import NoText, Player, VirtualClock, VirtualRunner
from bench.policies import BLOCK, RESERVATION, Policy
from bench.trace import Trace
from engine.core import EngineCore
from engine.scheduler import Limits
from engine.types import ModelShape

BUDGET_SLOTS = 524_288
#: 80 layers, 8 KV heads of 128, bfloat16: 320 KiB a token. Accounting only; no such model is run.
SHAPE_70B = ModelShape(layers=80, kv_heads=8, head_dim=128, itemsize=2, max_context=RESERVATION)
#: Memory is the limit that is looked for: nobody is refused, nobody waits for a place, and a step takes
#: enough tokens to fill the pool although each prompt is computed anew where nothing is shared.
LIMITS = Limits(
    max_batch_tokens=8_192,
    max_running=100_000,
    max_queued=100_000,
    max_running_per_principal=100_000,
    max_queued_per_principal=100_000,
)


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """One policy on the trace.

    utilisation, waste_tokens        between steps, time-weighted; `*_inside` inside steps
    peak_sequences, mean_sequences   running in one step; time-weighted mean
    saved_gib                        peak of what page tables name more than once, for the 70B-class shape
    """

    policy: str
    block_size: int
    blocks: int
    utilisation: float
    utilisation_inside: float
    waste_tokens: float
    waste_tokens_inside: float
    peak_sequences: int
    mean_sequences: float
    blocks_at_peak: int
    entries_at_peak: int
    requests: int
    refused: int
    failed: int
    preemptions: int
    blocks_copied: int
    prompt_tokens: int
    prompt_tokens_skipped: int
    evictions: int
    saved_gib: float
    virtual_s: float
    steps: int
    snapshots_checked: int

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def play(trace: Trace, policy: Policy, *, slots: int = BUDGET_SLOTS, pace: float = 0.0) -> MemoryResult:
    """Play `trace` under `policy` in a pool of `slots` token slots."""
    clock = VirtualClock()
    blocks, limits = policy.pool(slots, LIMITS)
    meter = Meter(VirtualRunner(clock))
    core = EngineCore(
        meter,
        NoText(),
        SHAPE_70B,
        num_blocks=blocks,
        block_size=policy.block_size,
        limits=limits,
        clock=clock,
        sharing=policy.sharing,
    )
    played = Player(core, meter, trace, clock, pace=pace).run()
    core.check_integrity()
    totals = core.ledger.since_start()
    return MemoryResult(
        policy=policy.name,
        block_size=policy.block_size,
        blocks=blocks,
        utilisation=meter.between.utilisation,
        utilisation_inside=meter.inside.utilisation,
        waste_tokens=meter.between.waste,
        waste_tokens_inside=meter.inside.waste,
        peak_sequences=meter.peak.sequences,
        mean_sequences=meter.inside.sequences / meter.inside.seconds,
        blocks_at_peak=meter.peak.held_blocks,
        entries_at_peak=meter.peak.entries,
        requests=played.completed,
        refused=sum(played.refused.values()),
        failed=sum(played.failed.values()),
        preemptions=totals.preemptions,
        blocks_copied=totals.blocks_copied,
        prompt_tokens=totals.prompt_tokens,
        prompt_tokens_skipped=totals.prefill_tokens_skipped,
        evictions=totals.evictions,
        saved_gib=totals.peak_saved_bytes / 2**30,
        virtual_s=played.seconds,
        steps=meter.steps,
        snapshots_checked=meter.checks,
    )


def play_all(
    trace: Trace, policies: Sequence[Policy], *, slots: int = BUDGET_SLOTS, pace: float = 0.0
) -> dict[str, MemoryResult]:
    """Each policy on the same trace, by name."""
    return {policy.name: play(trace, policy, slots=slots, pace=pace) for policy in policies}


__all__ = ["BLOCK", "BUDGET_SLOTS", "LIMITS", "SHAPE_70B", "MemoryResult", "play", "play_all"]
