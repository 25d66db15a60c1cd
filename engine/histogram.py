"""Counts of durations by bucket, in the shape that Prometheus histograms have. No torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

#: Upper bounds in seconds. Wide: one engine serves from small CPU machines to large GPUs.
TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A histogram at one moment: `counts[i]` values lie at or below `bounds[i]` and above the bound before;
    one more count is of the values above the last bound. `total` is their sum in seconds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)


class Histogram:
    """Adds durations up. `bounds` are ascending upper bounds in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of a histogram must ascend, got {bounds}")
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Add one value."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._total += seconds

    def value(self) -> HistogramValue:
        """The counts up to now."""
        return HistogramValue(self.bounds, tuple(self._counts), self._total)
