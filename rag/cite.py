"""Which passage each sentence of an answer rests on, decided afterwards by the server, from the exact text
that stood in the prompt.

*verified*     one place of the passage says it. A place is a sentence, a list item, or a row of a table with
               its header; a sentence that begins with "It", "She", "These"… may be joined to the one before
               it. At that place
               - stands every number, name and date of the sentence, literally, and most of its other words
                 (four fifths where it has no number, name or date). What the document's title or the
                 headings over the place say counts as standing there;
               - each number has the unit that the sentence gives it, and the words next to it in the
                 sentence do not stand next to another number;
               - nothing is borrowed: a word of the sentence that the section has, it has there too;
               - both affirm or both deny.
*similar*      the words are largely the passage's, but no one place says it like that
*unsupported*  neither; and whatever names a number or a date that the passage does not have, or has with
               other measures only

The rule is literal on purpose: it can be explained, and no wrong number is shown as anybody's for sounding
right. A true sentence in other words is only *similar*. The question plays no part in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

from rag import places
from rag.claims import NEGATION, facts, folded, lacks, normal, numbers_of, sentences, stands_in, without_marks
from rag.places import Place
from rag.quantities import EMPTY, Tokens, agrees, measured, measured_otherwise, words

__all__ = ["Attribution", "Citable", "Verdict", "attribute", "best_source", "facts", "sentences"]

Verdict = Literal["verified", "similar", "unsupported"]
_VERIFIED_COVERAGE = 0.5
_VERIFIED_COVERAGE_WITHOUT_FACTS = 0.8
_SIMILAR_COVERAGE = 0.4
#: Places of a passage that are asked whether they say a sentence, the likeliest first.
_TRIES = 200
#: While an answer is being written, `best_source` looks at the end of it, and at so much of the passages and
#: so many facts: it is asked again and again, and nobody has paid for it.
_LOOKED_AT = 1_000
_LOOKED_THROUGH = 200_000
_LOOKED_FOR = 64


class Citable(Protocol):
    """A passage as it was sent to the model.

    headings   (offset into the text, document's title and path of headings from there on), in order
    """

    @property
    def passage_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def headings(self) -> Sequence[tuple[int, str]]: ...


@dataclass(frozen=True, slots=True)
class Attribution:
    """One sentence `answer[start:end]` and what it rests on.

    source              index into the passages, None for "unsupported"
    source_start, _end  the best place of that passage, offsets into the passage's text
    missing             facts of the sentence that do not stand in the passage or over it (literally: a number
                        may be there in another form)
    """

    start: int
    end: int
    verdict: Verdict
    source: int | None
    source_start: int = 0
    source_end: int = 0
    coverage: float = 0.0
    missing: tuple[str, ...] = ()


def attribute(answer: str, passages: Sequence[Citable]) -> list[Attribution]:
    """One attribution for each sentence of the answer, in order. Ties go to the earlier passage. What claims
    nothing (the number of a list item on its own, the "The" at which an answer was cut) is no sentence."""
    prepared = [_Prepared(p.text, p.headings) for p in passages]
    weights = _weights(prepared)
    spans = [(a, b) for a, b in sentences(answer) if words(without_marks(answer[a:b]))]
    return [_best(answer, span, prepared, weights) for span in spans]


def best_source(text: str, passages: Sequence[Citable]) -> Attribution | None:
    """While an answer is being written: what its last sentence rests on; None for nothing yet. Offsets
    count from the last 1,000 characters of a longer text.

    Its numbers may be half written, so that they decide nothing here.
    """
    text = text[-_LOOKED_AT:]
    spans = sentences(text)
    if not spans:
        return None
    prepared: list[_Prepared] = []
    left = _LOOKED_THROUGH
    for passage in passages:
        if left > 0:
            prepared.append(_Prepared(passage.text[:left], passage.headings))
            left -= len(passage.text)
    if not prepared:
        return None
    found = _best(text, spans[-1], prepared, _weights(prepared), finished=False)
    return found if found.source is not None else None


class _Claim:
    """A sentence with what every comparison needs of it."""

    def __init__(self, text: str, most_facts: int | None = None) -> None:
        self.text = text = without_marks(text)
        self.facts = facts(text)[:most_facts]
        self.words = set(words(text))
        self.others = self.words.difference(EMPTY, *map(words, self.facts))
        self.denies = bool(NEGATION.search(text))

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.text)


class _Prepared:
    """A passage with what every comparison needs of it."""

    def __init__(self, text: str, headings: Sequence[tuple[int, str]]) -> None:
        self.places, tables = places.places(text, headings)
        self.row = {place.start: (table, row) for table, rows in tables if table.header
                    for row, place in enumerate(rows)}  # fmt: skip
        self.normal = normal("\n".join([text, *(heading for _, heading in headings)]))
        self.folded = folded(self.normal)
        heads = set().union(*(words(heading) for _, heading in headings)) if headings else set()
        self.all = heads.union(words(text))
        self.sections: dict[int, set[str]] = {}
        for place in self.places:
            self.sections.setdefault(place.section, set()).update(place.words)

    @cached_property
    def numbers(self) -> frozenset[float]:
        return numbers_of(self.normal)

    def measures_otherwise(self, claim: _Claim) -> bool:
        """Whether a number of the claim stands here, but only with other measures."""
        wanted = measured(claim.tokens)
        if not wanted:
            return False
        named = (place for place in self.places if self._names(place, wanted))
        read = (self._read(place, claim) or place for place in named)
        return measured_otherwise(wanted, ((place.tokens, place.heading_tokens) for place in read))

    def _names(self, place: Place, numbers: Collection[str]) -> bool:
        """Whether one of these numbers may stand in a place, or over the row that it is."""
        if place.start in self.row and not self.row[place.start][0].numbers.isdisjoint(numbers):
            return True
        return not place.tokens.numbers.keys().isdisjoint(numbers)

    def _read(self, place: Place, claim: _Claim) -> Place | None:
        """A row of a table with the headers that the claim speaks of; None where it contradicts them."""
        if place.start not in self.row:
            return place
        table, row = self.row[place.start]
        said = table.said(row, claim.words, claim.facts)
        return replace(place, said=said) if said is not None else None

    def says(self, claim: _Claim, index: int, weights: dict[str, float]) -> bool:
        """Whether this one place says it, by itself or with the sentence that it refers to."""
        readings = (self._read(self.places[index], claim), places.antecedent(self.places, index))
        return any(self._says(claim, one, weights) for one in readings if one is not None)

    def _says(self, claim: _Claim, place: Place, weights: dict[str, float]) -> bool:
        if claim.denies != place.denies:
            return False
        both = place.words | place.heading_words
        needed = _VERIFIED_COVERAGE if claim.facts else _VERIFIED_COVERAGE_WITHOUT_FACTS
        if claim.others and _covered(claim.others, both, weights) < needed:
            return False
        if not all(stands_in(f, place.folded) or stands_in(f, place.folded_heading) for f in claim.facts):
            return False
        if places.borrowed(claim.words, place, self.sections[place.section]):
            return False
        return agrees(claim.tokens, place.tokens, place.heading_tokens, place.words)


def _best(
    answer: str,
    span: tuple[int, int],
    passages: Sequence[_Prepared],
    weights: dict[str, float],
    *,
    finished: bool = True,
) -> Attribution:
    claim = _Claim(answer[span[0] : span[1]], None if finished else _LOOKED_FOR)
    best: tuple[tuple[int, float, float], Attribution] | None = None
    for index, passage in enumerate(passages):
        if not passage.places:
            continue
        coverage = _covered(claim.words, passage.all, weights)
        missing = tuple(c for c in claim.facts if not stands_in(c, passage.folded))
        shares = [_covered(claim.words, place.words, weights) for place in passage.places]
        # The likeliest place first, so that the one that is shown is the best of those that say it.
        order = sorted(range(len(shares)), key=lambda i: (-shares[i], i))
        at = order[0]
        verdict: Verdict = "unsupported"
        says = None
        if not missing and coverage >= _VERIFIED_COVERAGE:
            says = next((i for i in order[:_TRIES] if passage.says(claim, i, weights)), None)
        if says is not None:
            verdict, at = "verified", says
        elif coverage >= _SIMILAR_COVERAGE and not (
            finished
            and (
                any(lacks(c, passage.normal, passage.numbers) for c in missing)
                or passage.measures_otherwise(claim)
            )
        ):
            verdict = "similar"
        rank = ({"verified": 2, "similar": 1, "unsupported": 0}[verdict], coverage, -float(index))
        place = passage.places[at]
        found = Attribution(
            span[0], span[1], verdict, index if verdict != "unsupported" else None,
            place.start if verdict != "unsupported" else 0, place.end if verdict != "unsupported" else 0,
            round(coverage, 4), missing,
        )  # fmt: skip
        if best is None or rank > best[0]:
            best = (rank, found)
    if best is None:
        return Attribution(span[0], span[1], "unsupported", None, missing=tuple(claim.facts))
    return best[1]


def _covered(words: set[str], among: set[str] | frozenset[str], weights: dict[str, float]) -> float:
    """The weighted share of `words` that are `among` those; 0 of none."""
    total = sum(weights.get(w, 1.0) for w in words)
    return sum(weights.get(w, 1.0) for w in words & among) / total if total else 0.0


def _weights(passages: Sequence[_Prepared]) -> dict[str, float]:
    """Rare words say more about where a sentence is from (idf over the passages' places)."""
    counts: Counter[str] = Counter()
    total = 0
    for passage in passages:
        for place in passage.places:
            counts.update(place.words)
            total += 1
    return {w: math.log(1.0 + (total + 1.0) / (n + 0.5)) / math.log(2.0 + total) for w, n in counts.items()}
