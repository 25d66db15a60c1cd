"""Retrieval measures, and intervals that say how much a difference between two of them is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T", bound=Hashable)


def recall(ranked: Sequence[Hashable], relevant: Collection[Hashable], k: int) -> float:
    """The share of the relevant items among the first `k`. Raises ValueError without relevant items."""
    if not relevant:
        raise ValueError("recall is not defined where nothing is relevant")
    return len(set(ranked[:k]) & set(relevant)) / len(set(relevant))


def success(ranked: Sequence[Hashable], relevant: Collection[Hashable], k: int) -> float:
    """1 where any relevant item is among the first `k`: one right source is enough to answer from."""
    return float(any(item in relevant for item in ranked[:k]))


def reciprocal_rank(ranked: Sequence[Hashable], relevant: Collection[Hashable]) -> float:
    """1 / rank of the first relevant item, 0 where there is none."""
    return next((1.0 / rank for rank, item in enumerate(ranked, 1) if item in relevant), 0.0)


def ndcg(ranked: Sequence[T], gains: Mapping[T, float], k: int) -> float:
    """Normalised discounted cumulative gain (Järvelin and Kekäläinen 2002): Σ gain / log2(rank + 1), divided
    by the best order's. Raises ValueError where no gain is positive."""
    best = sorted((g for g in gains.values() if g > 0), reverse=True)[:k]
    if not best:
        raise ValueError("nDCG is not defined where nothing is relevant")
    seen: set[T] = set()
    total = 0.0
    for rank, item in enumerate(ranked[:k], 1):
        if item not in seen:
            seen.add(item)
            total += gains.get(item, 0.0) / math.log2(rank + 1)
    return total / sum(g / math.log2(rank + 1) for rank, g in enumerate(best, 1))


def paired(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The mean of `values` less that of `others`, question by question, and its 95 % bootstrap interval."""
    differences = [a - b for a, b in zip(values, others, strict=True)]
    low, high = bootstrap(differences)
    return sum(differences) / len(differences), low, high


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[np.ndarray], float] = lambda sample: float(sample.mean()),
    *,
    level: float = 0.95,
    rounds: int = 2_000,
    seed: int = 0,
) -> tuple[float, float]:
    """A percentile bootstrap interval for a statistic of `values`; pass differences to compare pairs."""
    if not values:
        raise ValueError("an interval needs at least one value")
    data = np.asarray(values, dtype=np.float64)
    chance = np.random.default_rng(seed)
    samples = [statistic(data[chance.integers(0, len(data), len(data))]) for _ in range(rounds)]
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
