"""Which passage each sentence of an answer rests on, decided afterwards by the server, from the exact text
that stood in the prompt.

*verified*     every number, name and date of the sentence stands literally in the passage, most of its other
               words do too, and both affirm or both deny
*similar*      the words are largely the passage's, but a name is not literally there, or one of them denies
*unsupported*  neither; and whatever names a number or a date that the passage does not have

The rule is literal on purpose: it can be explained, and no wrong number is shown as anybody's for sounding
right.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rag.terms import STOP_WORDS, UNSPACED, terms

Verdict = Literal["verified", "similar", "unsupported"]
_VERIFIED_COVERAGE = 0.5
_SIMILAR_COVERAGE = 0.4

_SENTENCE_END = re.compile(
    r"(?<=[.!?…])[\"'”’)\]]*(?:\s+|\Z)|(?<=[。！？｡])[」』”’）]*\s*|\n\s*\n\s*|\n(?=\s*(?:[-*•]|\d+[.)])\s)"
)
# "Dr. Quill", "approx. 5", "J. Dow", "No. 4": a full stop that ends no sentence.
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Capt|No|Nr|vs|etc|e\.g|i\.e|approx|ca|fig|vol|pp?)|\b[A-Z])\.$", re.I
)
# A character of a word; numbers may touch the signs of scripts without spaces ("24个月").
_IN_WORD = rf"[^\W{UNSPACED}]"
_NUMBER = re.compile(
    rf"(?<!{_IN_WORD})[^\W\d_{UNSPACED}]+-?\d(?:{_IN_WORD}|-)*"  # codes: V-17, CL450
    rf"|(?<!{_IN_WORD})(?<![.,])[-+−]?\d+(?:[.,:]\d+)*"  # 12, 1,050.5, 14:30, and 46 of "46kWh"
)
_NAME = re.compile(r"\b[A-ZÀ-ÖØ-Þ][\w'’-]*")
#: Words that merely begin a sentence. Any other capitalised word must stand in the passage.
_OPENING_WORDS = """
according additionally all also although answer based because both during each every first furthermore however
instead many most no once only otherwise several since some therefore though thus under until usually while
yes yet
"""
_OPENERS = frozenset(_OPENING_WORDS.split())
_NEGATION = re.compile(
    r"\b(?:not|no|never|none|neither|nor|without|cannot|nobody|nothing)\b|n['’]t\b|不|没|沒|未|ない|ません|않|없|아니",
    re.I,
)
_NUMBER_WORDS = {
    word: str(value)
    for value, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
        ]
    )
}
#: Days and months, as far as one tells them from another word; longer and shorter forms are the same.
_DATES = re.compile(
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec|Mon|Tues?|Wed|Thu(?:rs?)?|Fri|Sat|Sun|"
    r"January|February|March|April|June|July|August|September|October|November|December|"
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?)\b"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: What a list puts before its items, and what points at a source: no numbers of the sentence.
_NO_CLAIM = re.compile(r"^\s*\d+[.)]\s+|\[\d+\]")


class Citable(Protocol):
    """A passage as it was sent to the model; `rag.types.Hit` is one."""

    @property
    def passage_id(self) -> int: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Attribution:
    """One sentence `answer[start:end]` and what it rests on.

    source              index into the passages, None for "unsupported"
    source_start, _end  the best sentence of that passage, offsets into the passage's text
    missing             facts of the sentence that do not stand in the passage (literally: a number may be
                        there in another form)
    """

    start: int
    end: int
    verdict: Verdict
    source: int | None
    source_start: int = 0
    source_end: int = 0
    coverage: float = 0.0
    missing: tuple[str, ...] = ()


def sentences(text: str) -> list[tuple[int, int]]:
    """Ranges of the sentences and list items of a text, without the white space around them."""
    cuts = [0]
    for match in _SENTENCE_END.finditer(text):
        if (
            not _ABBREVIATION.search(text[cuts[-1] : match.start()].rstrip("\"'”’)]"))
            or "\n" in match.group()
        ):
            cuts.append(match.end())
    found: list[tuple[int, int]] = []
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        part = text[start:end]
        if part.strip():
            lead = len(part) - len(part.lstrip())
            found.append((start + lead, start + lead + len(part.strip())))
    return found


def facts(sentence: str) -> list[str]:
    """The numbers, dates and names of a sentence, each as it is written.

    Every capitalised word counts as a name, but for function words, so that none is missed; codes like
    "V-17" count as numbers. Number words up to twelve are facts too. The number of a list item and "[1]" are
    none.
    """
    sentence = _NO_CLAIM.sub(" ", sentence)
    found: list[str] = [m.group() for m in _NUMBER.finditer(sentence)]
    for match in _NAME.finditer(sentence):
        bare = re.sub(r"['’]s$", "", match.group())
        if bare.lower() not in STOP_WORDS and bare.lower() not in _OPENERS:
            found.append(bare)
    found += [
        w
        for w in re.findall(r"\b[a-z]+\b", sentence.lower())
        if w in _NUMBER_WORDS and w not in ("one", "zero")
    ]
    return list(dict.fromkeys(found))


def attribute(answer: str, passages: Sequence[Citable]) -> list[Attribution]:
    """One attribution for each sentence of the answer, in order. Ties go to the earlier passage."""
    prepared = [_Prepared(p.text) for p in passages]
    weights = _weights(prepared)
    return [_best(answer, span, prepared, weights) for span in sentences(answer)]


def best_source(text: str, passages: Sequence[Citable]) -> Attribution | None:
    """While an answer is being written: what its last sentence seems to rest on; None for nothing yet.

    Its numbers may be half written, so that they decide nothing here.
    """
    spans = sentences(text)
    if not spans or not passages:
        return None
    prepared = [_Prepared(p.text) for p in passages]
    found = _best(text, spans[-1], prepared, _weights(prepared), finished=False)
    return found if found.source is not None else None


class _Prepared:
    """A passage with what every comparison needs of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.normal = _normal(text)
        self.spans = sentences(text)
        self.words = [Counter(_words(text[a:b])) for a, b in self.spans]
        self.all = set().union(*self.words) if self.words else set()


def _best(
    answer: str,
    span: tuple[int, int],
    passages: Sequence[_Prepared],
    weights: dict[str, float],
    *,
    finished: bool = True,
) -> Attribution:
    sentence = answer[span[0] : span[1]]
    words = set(_words(sentence))
    claims = facts(sentence)
    total = sum(weights.get(w, 1.0) for w in words) or 1.0
    best: tuple[tuple[int, float, float], Attribution] | None = None
    for index, passage in enumerate(passages):
        coverage = sum(weights.get(w, 1.0) for w in words & passage.all) / total if words else 0.0
        missing = tuple(c for c in claims if not _stands_in(c, passage))
        place = max(
            range(len(passage.spans)),
            key=lambda i: (sum(weights.get(w, 1.0) for w in words & passage.words[i].keys()), -i),
            default=None,
        )
        if place is None:
            continue
        start, end = passage.spans[place]
        denies = bool(_NEGATION.search(sentence)) != bool(_NEGATION.search(passage.text[start:end]))
        verdict: Verdict = "unsupported"
        if not missing and coverage >= _VERIFIED_COVERAGE and not denies and (claims or coverage >= 0.8):
            verdict = "verified"
        elif coverage >= _SIMILAR_COVERAGE and not (finished and any(_lacks(c, passage) for c in missing)):
            verdict = "similar"
        rank = ({"verified": 2, "similar": 1, "unsupported": 0}[verdict], coverage, -float(index))
        found = Attribution(
            span[0], span[1], verdict, index if verdict != "unsupported" else None,
            start if verdict != "unsupported" else 0, end if verdict != "unsupported" else 0,
            round(coverage, 4), missing,
        )  # fmt: skip
        if best is None or rank > best[0]:
            best = (rank, found)
    if best is None:
        return Attribution(span[0], span[1], "unsupported", None, missing=tuple(claims))
    return best[1]


def _weights(passages: Sequence[_Prepared]) -> dict[str, float]:
    """Rare words say more about where a sentence is from (idf over the passages' sentences)."""
    counts: Counter[str] = Counter()
    total = 0
    for passage in passages:
        for words in passage.words:
            counts.update(words.keys())
            total += 1
    return {w: math.log(1.0 + (total + 1.0) / (n + 0.5)) / math.log(2.0 + total) for w, n in counts.items()}


def _words(text: str) -> list[str]:
    return [w for w in terms(text) if w not in STOP_WORDS]


def _normal(text: str) -> str:
    """For literal comparison: compatibility forms, dashes and quotes made equal, white space collapsed."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("–", "-").replace("’", "'")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", " ", text)


def _after(fact: str) -> str:
    """What may not follow: a number may have its unit attached, but not another digit."""
    return r"\d" if re.fullmatch(r"[-+]?[\d.,:]+", fact) else _IN_WORD


def _stands_in(fact: str, passage: _Prepared) -> bool:
    """Literally, as a whole word; names without regard to case, "three" also as "3"."""
    wanted = _normal(fact)
    pattern = rf"(?<!{_IN_WORD})(?<![.,]){re.escape(wanted)}(?!{_after(wanted)}|[.,:]\d)"
    if re.search(pattern, passage.normal, re.I):
        return True
    other = _NUMBER_WORDS.get(wanted.lower()) or next(
        (w for w, d in _NUMBER_WORDS.items() if d == wanted), None
    )
    if other is None:
        return False
    return re.search(rf"(?<!{_IN_WORD}){other}(?!{_IN_WORD}|[.,:]\d)", passage.normal, re.I) is not None


def _lacks(fact: str, passage: _Prepared) -> bool:
    """Whether a fact that does not stand in the passage is a number or a date that it has in no other form
    ("46" for "46.0", "May" for "2021-05-03") either."""
    if _DATES.fullmatch(fact):
        short = fact[:3].lower()
        if any(other[:3].lower() == short for other in _DATES.findall(passage.normal)):
            return False
        month = _MONTHS.index(short) + 1 if short in _MONTHS else 0
        return not (month and re.search(rf"\b\d{{4}}[-/.]{month:02}\b", passage.normal))
    value = _value(_NUMBER_WORDS.get(fact.lower(), fact))
    if value is None:
        return any(c.isdigit() for c in fact)  # a code, a time
    # The day and the year of "2021-05-03" are numbers of the passage too.
    return all(_value(part) != value for part in re.findall(r"\d+(?:\.\d+)?", passage.normal))


def _value(number: str) -> float | None:
    try:
        return float(_normal(number))
    except ValueError:
        return None
