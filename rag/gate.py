"""Is the answer likely in what was found? Better to say "not in the documents" than to have a model guess.

Two signs, added: how near the best passage is to the question (cosine), and how much of what the question
asks about occurs in one of the passages (telling words count more; a word that no document has counts most).
The threshold is chosen on the development half of the sample questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag.split import lead
from rag.terms import terms
from rag.types import Hit

#: Refuses 61 % of the unanswerable and 8 % of the answerable development questions.
THRESHOLD = 1.01
_LOOKED_AT = 5


@dataclass(frozen=True, slots=True)
class Answerability:
    """`score` = `cosine` + `coverage`; `missing`: terms of the question that no found passage has."""

    score: float
    cosine: float
    coverage: float
    missing: tuple[str, ...]

    @property
    def answerable(self) -> bool:
        return self.score >= THRESHOLD


def judge(hits: Sequence[Hit], weights: Mapping[str, float]) -> Answerability:
    """Judge the hits of a question, best first. `weights`: the question's terms and how telling each is."""
    if not hits:
        return Answerability(0.0, 0.0, 0.0, tuple(weights))
    total = sum(weights.values())
    present = [_terms(hit) for hit in hits[:_LOOKED_AT]]
    coverage = 1.0
    if total > 0:
        coverage = max(sum(w for t, w in weights.items() if t in found) for found in present) / total
    cosine = max(0.0, hits[0].cosine or 0.0)
    everywhere = set().union(*present)
    return Answerability(
        cosine + coverage, cosine, coverage, tuple(t for t in weights if t not in everywhere)
    )


def _terms(hit: Hit) -> set[str]:
    return set(terms(f"{lead(hit.title, hit.section_title)}\n{hit.text}"))
