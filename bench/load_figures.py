"""What `bench.load` saw, as figures, and whether what it claims held."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.load_page import Measured
from bench.load_server import Sample

#: What a person waits for while looking at the page; answers are the engine's and are reported apart.
PAGE_ACTIONS = (
    "page load", "conversation list", "search conversations", "new conversation",
    "open conversation", "memory feed", "memory page", "block hover", "export", "question taken",
)  # fmt: skip
P95_S = 1.0
#: Growth of the resident memory after warm-up that still counts as flat, as a share of it.
FLAT = 0.03


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


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
    """Resident memory after the first third: medians of its first and last quarter, and the slope between."""
    after = samples[len(samples) // 3 :]
    if len(after) < 8:
        return {"enough_samples": False}
    quarter = len(after) // 4
    first = statistics.median(s.resident for s in after[:quarter])
    last = statistics.median(s.resident for s in after[-quarter:])
    slope = statistics.linear_regression([s.at / 60 for s in after], [s.resident for s in after]).slope
    return {
        "enough_samples": True,
        "start_mib": round(samples[0].resident / 2**20),
        "first_quarter_mib": round(first / 2**20),
        "last_quarter_mib": round(last / 2**20),
        "growth": round(last / first - 1, 4),
        "mib_a_minute": round(slope / 2**20, 2),
    }


def verdicts(
    loaded: dict[str, Any], over: dict[str, Any], recovery: dict[str, Any], *checks: dict[str, Any]
) -> dict[str, bool]:
    """What was claimed, and whether it held."""
    clean = all("again" in words or "line" in words or "full" in words for words in over["refusals"])
    flat = loaded["memory"].get("growth")
    return {
        "no errors and no refusals": not loaded["error_count"] and not loaded["refusals"],
        "page actions p95 under 1 s": (loaded["page_p95_s"] or P95_S) < P95_S,
        "resident memory flat": flat is not None and flat <= FLAT,
        "accounts add up": all(not check["problems"] for check in checks),
        "twice the load: no errors, refusals are sentences": not over["error_count"] and clean,
        "recovers": recovery.get("idle_s") is not None and bool(recovery.get("newcomer_answered")),
    }
