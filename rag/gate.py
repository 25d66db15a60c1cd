"""Is the answer likely in what was found? Better to say "not in the documents" than to have a model guess.

Two signs, added: how much of what the question asks about occurs in one of the passages (telling words count
more; a word that no document has counts most), and how near the nearest sentence of the passages is to the
question (cosine, twice). A passage as a whole is near to many questions that it doesn't answer; the sentence
that answers is nearer. Sentences are compared only where the passages' own cosines don't decide already.

Words that only say *what kind* of answer is wanted ("how many", "which day") ask about nothing: passages with
the answer seldom have them. Signs and threshold were chosen on the development half of the sample questions
(docs/evaluation.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rag.cite import sentences
from rag.split import lead
from rag.terms import UNSPACED, terms
from rag.types import Hit

#: Refuses 12 of the 18 unanswerable and 4 of the 98 answerable development questions, for which more than
#: 9.1 % false refusals are unlikely (one-sided 95 %): some distance from the 10 % that are allowed, as a
#: threshold looks better where it was chosen.
THRESHOLD = 1.73
_NEARNESS = 2.0
_LOOKED_AT = 5
#: At most so many sentences are compared; each costs a few milliseconds on a CPU.
_SENTENCES = 40
#: Stands in where only words were searched for; about the mean over the development questions.
_USUAL = 0.64
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
    """`score` = `coverage` + 2 `nearness`; `missing`: telling terms of the question that no passage has."""

    score: float
    nearness: float
    coverage: float
    missing: tuple[str, ...]

    @property
    def answerable(self) -> bool:
        return self.score >= THRESHOLD


#: How near the nearest of these sentences is to the question: a cosine.
Nearest = Callable[[Sequence[str]], float]


def judge(hits: Sequence[Hit], weights: Mapping[str, float], nearest: Nearest | None = None) -> Answerability:
    """Judge the hits of a question, best first. `weights`: the question's terms and how telling each is;
    `nearest`: None where sentences can't be compared, as only words were searched for.

    A question without telling terms ("What is this about?") passes: there is nothing to judge it by.
    """
    telling = {term: weight for term, weight in weights.items() if _tells(term)}
    if not hits:
        return Answerability(0.0, 0.0, 0.0, tuple(telling))
    looked_at = hits[:_LOOKED_AT]
    present = [_terms(hit) for hit in looked_at]
    everywhere = set().union(*present)
    missing = tuple(t for t in telling if t not in everywhere)
    total = sum(telling.values())
    coverage = 1.0
    if total > 0:
        coverage = max(sum(w for t, w in telling.items() if t in found) for found in present) / total
    cosines = [hit.cosine for hit in looked_at if hit.cosine is not None]
    nearness = max([0.0, *cosines]) if cosines else _USUAL
    score = coverage + _NEARNESS * nearness
    if total == 0:
        score = max(THRESHOLD, score)
    elif score < THRESHOLD and nearest is not None:
        texts = [hit.text[a:b] for hit in looked_at for a, b in sentences(hit.text)]
        nearness = max(nearness, nearest(texts[:_SENTENCES])) if texts else nearness
        score = coverage + _NEARNESS * nearness
    return Answerability(score, nearness, coverage, missing)


def _tells(term: str) -> bool:
    if _UNSPACED.match(term):
        return bool(_TELLING_PAIR.fullmatch(term)) and not _GRAMMAR.search(term)
    return term not in _ASKING


def _terms(hit: Hit) -> set[str]:
    return set(terms(f"{lead(hit.title, hit.section_title)}\n{hit.text}"))
