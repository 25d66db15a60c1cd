"""What `bench.load` saw, as figures, and whether what it claims held."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.load_page import Measured
from bench.load_server import Sample
from bench.resident import Resident

#: What a person waits for while looking at the page; answers are the engine's and are reported apart.
PAGE_ACTIONS = (
    "page load", "conversation list", "search conversations", "new conversation",
    "open conversation", "memory feed", "memory page", "block hover", "export", "question taken",
)  # fmt: skip
P95_S = 1.0
#: Kinds of action that were seen less often are judged together: the p95 of a handful is its maximum.
ENOUGH = 20
#: Growth of the resident memory after warm-up that still counts as flat, as a share of it.
FLAT = 0.03
#: Share of the time in which the engine must have been at work for the figures to say anything.
BUSY = 0.5
#: What somebody who finds no place in line is told: which limit, and when to come back.
NO_PLACE = re.compile(r"The limit of [\d,]+ waiting requests is reached; try again in a few seconds\.")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; there must be some."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def slowest_kind(times: Mapping[str, Sequence[float]]) -> tuple[str, float] | None:
    """Which kind of page action has the largest p95, and that p95 in seconds; None where nothing was done.

    Judged kind by kind: of all actions nineteen in twenty are updates of the memory panel, which would hide
    however slow a page load is.
    """
    kinds = {name: list(times.get(name, ())) for name in PAGE_ACTIONS}
    often = {name: seen for name, seen in kinds.items() if len(seen) >= ENOUGH}
    rare = [t for name, seen in kinds.items() if name not in often for t in seen]
    judged = often | ({"rare ones": rare} if rare else {})
    p95 = {name: quantile(seen, 0.95) for name, seen in judged.items()}
    return max(p95.items(), key=lambda item: item[1], default=None)


def summary(measured: Measured, samples: Sequence[Sample], began: float, seconds: float) -> dict[str, Any]:
    """One phase as figures; it began at `began` (`time.monotonic`) and took `seconds`."""
    told = [sample for sample in samples if sample.running >= 0]
    busy = [sample for sample in told if sample.running > 0]
    actions = {
        name: {
            "count": len(times), "p50_s": round(quantile(times, 0.5), 3),
            "p95_s": round(quantile(times, 0.95), 3), "max_s": round(max(times), 3),
        }
        for name, times in sorted(measured.times.items())
    }  # fmt: skip
    slowest = slowest_kind(measured.times)
    return {
        "seconds": round(seconds, 1),
        "answers": measured.answers,
        "stopped": measured.stopped,
        "left_before_the_end": measured.left,
        "errors": measured.errors[:20],
        "error_count": len(measured.errors),
        "measuring_failed": measured.broken,
        "refusals": dict(measured.refusals),
        "refused": sum(n for words, n in measured.refusals.items() if NO_PLACE.search(words)),
        "first_refused_after_s": round(measured.refused_at[0] - began, 1) if measured.refused_at else None,
        "page_actions": sum(len(measured.times.get(name, ())) for name in PAGE_ACTIONS),
        "page_p95_s": None if slowest is None else round(slowest[1], 3),
        "page_slowest": None if slowest is None else slowest[0],
        "actions": actions,
        "looks": len(samples),
        "looks_without_answer": len(samples) - len(told),
        "engine_busy_share": round(len(busy) / max(1, len(samples)), 3),
        "running_mean": round(statistics.fmean(s.running for s in told), 1) if told else None,
        "queued_max": max((s.queued for s in told), default=0),
        "server_cores": round(
            (samples[-1].cpu_s - samples[0].cpu_s) / (samples[-1].at - samples[0].at), 2
        ) if len(samples) > 1 else None,
        "memory": memory(samples),
    }  # fmt: skip


def memory(samples: Sequence[Sample]) -> dict[str, Any]:
    """Resident memory after the first third: medians of its first and last quarter, and the slope between;
    all of it, the KV pool's part, and what lies beside the pool."""
    after = samples[len(samples) // 3 :]
    if len(after) < 8:
        return {"enough_samples": False}
    return {
        "enough_samples": True,
        "all": _course(samples, after, lambda memory: memory.total),
        "pool": _course(samples, after, lambda memory: memory.pool),
        "beside_pool": _course(samples, after, lambda memory: memory.beside_pool),
        "of_it_files": _course(samples, after, lambda memory: memory.files),
        "pool_mapping_mib": round(samples[0].memory.pool_mapping / 2**20, 1),
    }


def _course(
    samples: Sequence[Sample], after: Sequence[Sample], part: Callable[[Resident], int]
) -> dict[str, float]:
    quarter = len(after) // 4
    values = [part(sample.memory) / 2**20 for sample in after]
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    slope = statistics.linear_regression([sample.at / 60 for sample in after], values).slope
    return {
        "start_mib": round(part(samples[0].memory) / 2**20),
        "first_quarter_mib": round(first),
        "last_quarter_mib": round(last),
        "max_mib": round(max(values)),
        "growth": round(last / first - 1, 4) if first else 0.0,
        "mib_a_minute": round(slope, 2),
    }


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """What was claimed, and whether it held, of a whole result of `bench.load.measure`. What was not reached
    (no refusal at twice the load, an idle engine, too few looks at the memory) has not held."""
    loaded, over, recovery, stored = (result[part] for part in ("readers", "twice", "recovery", "stored"))
    memory, phases = loaded["memory"], (loaded, over)
    flat = memory["enough_samples"] and all(memory[part]["growth"] <= FLAT for part in ("all", "beside_pool"))
    p95 = loaded["page_p95_s"]
    return {
        "the measuring itself": not any(phase["measuring_failed"] for phase in phases),
        "no errors and no refusals": not loaded["error_count"] and not loaded["refusals"],
        "p95 under 1 s of each kind of page action": p95 is not None and p95 < P95_S,
        "the engine was busy meanwhile": loaded["engine_busy_share"] >= BUSY,
        "nothing hangs: the server always said how it is": all(
            phase["looks"] > 0 and not phase["looks_without_answer"] for phase in phases
        ),
        "resident memory flat": flat,
        "accounts add up": not result["check_after"]["problems"] and not result["check_at_end"]["problems"],
        "twice the load: no errors": not over["error_count"],
        "twice the load: refusals were reached": over["refused"] > 0,
        "twice the load: each refusal says which limit, and when to come back": bool(over["refusals"])
        and all(NO_PLACE.search(words) for words in over["refusals"]),
        "every answer that was seen is stored": not stored["problems"]
        and 0 < stored["seen"] <= stored["stored"],
        "recovers": recovery["idle_s"] is not None and bool(recovery["newcomer"].get("answered")),
        "the server ended in order": bool(result["ended_well"]),
        "no errors in the log": not result["log_problems"],
    }
