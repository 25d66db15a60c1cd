"""Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009):
the score is the sum over the legs of weight / (K + rank).

Ranks fuse where scores can't: a cosine and a BM25 score have no common unit. Each leg's rank is kept, so
that a page can say why something was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The paper's 60 flattens the first ranks. 20, and twice the weight for words, were best on the development
#: half of the sample questions (recall at 1 of single questions 0.90 instead of 0.84, at 5 equal).
K = 20
WEIGHTS = {"dense": 1.0, "lexical": 2.0}


@dataclass(frozen=True, slots=True)
class Fused:
    """`ranks`: leg -> rank from 1, only for legs that found it."""

    id: int
    score: float
    ranks: dict[str, int]


def fuse(legs: Mapping[str, Sequence[int]], weights: Mapping[str, float] | None = None) -> list[Fused]:
    """Fuse ranked ids (best first, each at most once a leg). Ties by best single rank, then by smaller id."""
    ranks: dict[int, dict[str, int]] = {}
    for leg, ids in legs.items():
        for rank, id in enumerate(ids, 1):
            ranks.setdefault(id, {}).setdefault(leg, rank)
    weight = weights or {}
    fused = [
        Fused(id, sum(weight.get(leg, 1.0) / (K + r) for leg, r in found.items()), found)
        for id, found in ranks.items()
    ]
    fused.sort(key=lambda f: (-f.score, min(f.ranks.values()), f.id))
    return fused
