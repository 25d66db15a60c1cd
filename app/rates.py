"""Token buckets: so much at once, so much a minute, and when to come back where it is used up."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

#: Buckets kept at a time; full ones say nothing and are dropped first come, first out beyond it.
_MAX_BUCKETS = 50_000


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class Rate:
    """One limit, a bucket for each key: `capacity` at once, refilled evenly within `period_s`.

    A single amount above the capacity is let through by a full bucket and leaves a debt, so that nothing is
    refused for ever. Not thread-safe: for one event loop.
    """

    def __init__(
        self, capacity: float, period_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if capacity <= 0 or period_s <= 0:
            raise ValueError(f"capacity {capacity} and period {period_s} must be positive")
        self.capacity, self.period_s, self._clock = float(capacity), period_s, clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, key: str, amount: float = 1.0) -> float:
        """Seconds until `amount` would be let through; 0 for now."""
        bucket = self._bucket(key)
        missing = min(amount, self.capacity) - bucket.level
        # Rounding must not refuse what the sums say is there.
        return max(0.0, missing * self.period_s / self.capacity) if missing > 1e-9 * self.capacity else 0.0

    def take(self, key: str, amount: float = 1.0) -> float:
        """Take `amount` and return 0, or take nothing and return the seconds to wait."""
        wait = self.wait_s(key, amount)
        if not wait:
            self._bucket(key).level -= amount
        return wait

    def give_back(self, key: str, amount: float) -> None:
        """Return what was taken and not needed."""
        bucket = self._bucket(key)
        bucket.level = min(self.capacity, bucket.level + amount)

    def left(self, key: str) -> float:
        """What is there now; 0 while in debt."""
        return max(0.0, self._bucket(key).level)

    def clear(self, key: str) -> None:
        """Forget a key: its bucket is full again."""
        self._buckets.pop(key, None)

    def _bucket(self, key: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self.capacity, now)
            self._shrink(now)
            return bucket
        refill = max(0.0, now - bucket.at) * self.capacity / self.period_s
        bucket.level, bucket.at = min(self.capacity, bucket.level + refill), now
        return bucket

    def _shrink(self, now: float) -> None:
        """Keep memory bounded: a flood of made-up keys pushes out the oldest buckets, most of them full."""
        while len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
