"""What `bench.load` saw, as figures, and whether what it claims held."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
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
#: Growth of the resident memory after warm-up that still counts as flat, as a share of it.
FLAT = 0.03


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; there must be some."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(measured: Measured, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """One phase as figures."""
    busy = [sample for sample in samples if sample.running > 0]
    actions = {
        name: {
            "count": len(times), "p50_s": round(quantile(times, 0.5), 3),
            "p95_s": round(quantile(times, 0.95), 3), "max_s": round(max(times), 3),
        }
        for name, times in sorted(measured.times.items())
    }  # fmt: skip
    page = [t for name in PAGE_ACTIONS for t in measured.times.get(name, ())]
    return {
        "seconds": round(seconds, 1),
        "answers": measured.answers,
        "stopped": measured.stopped,
        "left_before_the_end": measured.left,
        "errors": measured.errors[:20],
        "error_count": len(measured.errors),
        "refusals": dict(measured.refusals),
        "page_actions": len(page),
        "page_p95_s": round(quantile(page, 0.95), 3) if page else None,
        "actions": actions,
        "engine_busy_share": round(len(busy) / max(1, len(samples)), 3),
        "running_mean": round(statistics.fmean(s.running for s in samples), 1) if samples else None,
        "queued_max": max((s.queued for s in samples), default=0),
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


def verdicts(
    loaded: dict[str, Any], over: dict[str, Any], recovery: dict[str, Any], *checks: dict[str, Any]
) -> dict[str, bool]:
    """What was claimed, and whether it held."""
    clean = all("again" in words or "line" in words or "full" in words for words in over["refusals"])
    memory = loaded["memory"]
    flat = memory["enough_samples"] and all(memory[part]["growth"] <= FLAT for part in ("all", "beside_pool"))
    return {
        "no errors and no refusals": not loaded["error_count"] and not loaded["refusals"],
        "page actions p95 under 1 s": (loaded["page_p95_s"] or P95_S) < P95_S,
        "resident memory flat": flat,
        "accounts add up": all(not check["problems"] for check in checks),
        "twice the load: no errors": not over["error_count"],
        "twice the load: refusals, and they are sentences": bool(over["refusals"]) and clean,
        "recovers": recovery.get("idle_s") is not None and bool(recovery.get("newcomer_answered")),
    }
