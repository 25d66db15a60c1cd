"""Is the answer likely in what was found? Better to say "not in the documents" than to have a model guess.

Two signs, added: how near the best passage is to the question (cosine), and how much of what the question
asks about occurs in one of the passages (telling words count more; a word that no document has counts most).
Words that only say *what kind* of answer is wanted ("how many", "which day") ask about nothing: passages with
the answer seldom have them. Leaving them out raised the area under the curve from 0.89 to 0.95. The threshold
is chosen on the development half of the sample questions (docs/evaluation.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag.split import lead
from rag.terms import UNSPACED, terms
from rag.types import Hit

#: Refuses 78 % of the unanswerable and 5 % of the answerable development questions.
THRESHOLD = 1.15
_LOOKED_AT = 5
#: Stands in where only words were searched for; about the mean over the development questions.
_USUAL_COSINE = 0.55
_ASKING_WORDS = """
    what which who when where why how many much does did long far high large big small heavy deep wide old
    often early late soon number name kind sort time day year today now last next first same am give take get
    make use have should may might must shall one there out up
    tell show say list describe explain summarise summarize summary more about please document documents text
"""
_ASKING = frozenset(terms(_ASKING_WORDS))
#: Of scripts without spaces only pairs of signs without hiragana, which writes grammar, are told from others.
_TELLING_PAIR = re.compile(rf"[{UNSPACED}]{{2}}")
_GRAMMAR = re.compile(r"[\u3041-\u309f何誰谁哪吗呢的了是在有几多少]")
_UNSPACED = re.compile(rf"[{UNSPACED}]")


@dataclass(frozen=True, slots=True)
class Answerability:
    """`score` = `cosine` + `coverage`; `missing`: telling terms of the question that no found passage has."""

    score: float
    cosine: float
    coverage: float
    missing: tuple[str, ...]

    @property
    def answerable(self) -> bool:
        return self.score >= THRESHOLD


def judge(hits: Sequence[Hit], weights: Mapping[str, float]) -> Answerability:
    """Judge the hits of a question, best first. `weights`: the question's terms and how telling each is.

    A question without telling terms ("What is this about?") passes: there is nothing to judge it by.
    """
    telling = {term: weight for term, weight in weights.items() if _tells(term)}
    if not hits:
        return Answerability(0.0, 0.0, 0.0, tuple(telling))
    total = sum(telling.values())
    present = [_terms(hit) for hit in hits[:_LOOKED_AT]]
    coverage = 1.0
    if total > 0:
        coverage = max(sum(w for t, w in telling.items() if t in found) for found in present) / total
    cosine = max(0.0, next((hit.cosine for hit in hits if hit.cosine is not None), _USUAL_COSINE))
    everywhere = set().union(*present)
    score = cosine + coverage if total > 0 else max(THRESHOLD, cosine + coverage)
    return Answerability(score, cosine, coverage, tuple(t for t in telling if t not in everywhere))


def _tells(term: str) -> bool:
    if _UNSPACED.match(term):
        return bool(_TELLING_PAIR.fullmatch(term)) and not _GRAMMAR.search(term)
    return term not in _ASKING


def _terms(hit: Hit) -> set[str]:
    return set(terms(f"{lead(hit.title, hit.section_title)}\n{hit.text}"))
