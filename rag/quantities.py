"""Numbers and what belongs to them: the unit right after a number, and the words next to it in its clause.

That is all that is looked at: no grammar, no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rag.claims import DATES, IN_WORD, NUMBER, NUMBER_WORDS, OPENERS, normal
from rag.terms import STOP_WORDS, UNSPACED, stem, terms

#: The same unit in other words, one unit a line.
_UNIT_NAMES = """
kg kilo kilos kilogram kilograms kilogramme kilogrammes kilogramm 公斤 千克
g gram grams gramme grammes gramm
t tonne tonnes
l litre litres liter liters
ml millilitre millilitres milliliter milliliters
m metre metres meter meters
km kilometre kilometres kilometer kilometers
cm centimetre centimetres centimeter centimeters
mm millimetre millimetres millimeter millimeters
s sec second seconds sekunde sekunden
min mins minute minutes minuten
h hr hrs hour hours stunde stunden
day days tag tage tagen
week weeks woche wochen
month months monat monate monaten
year years jahr jahre jahren
w watt watts
kw kilowatt kilowatts
kwh kilowatt-hour kilowatt-hours
v volt volts
% percent prozent
£ pound pounds gbp
€ euro euros eur
$ dollar dollars usd
"""
_UNITS = {
    alias: names[0]
    for names in map(str.split, _UNIT_NAMES.strip().splitlines())
    for name in names
    for alias in (name, stem(name))
}
#: Units in the spelling that all others are compared in.
_MEASURES = frozenset(_UNITS.values())
_CURRENCY = "£€$"
_JOINING_WORDS = "and or but while whereas und oder aber et ou y o e"
_JOINING = frozenset(_JOINING_WORDS.split())
#: Words that say little about what is claimed, beside those that questions are stripped of.
_EMPTY_WORDS = """
    also after all at because before between both during each either every just not never no nor none only
    other out over per so through under until up very within without cannot therefore however should must may
    might shall need document documents text
"""
EMPTY = frozenset(map(stem, _EMPTY_WORDS.split()))
EMPTY_SIGNS = frozenset("的了是為为在有和與与及也就都而或每被把之其")
_TOKEN = re.compile(
    rf"(?P<number>{NUMBER.pattern})|(?P<money>[{_CURRENCY}])|(?P<unit>%|°\s?[CF]?\b)"
    rf"|(?P<sign>[{UNSPACED}])|(?P<word>{IN_WORD}+(?:'{IN_WORD}+)*)|(?P<stop>[,;|.!?()、，；：。！？\n])|(?P<mark>:)"
)


@dataclass(frozen=True, slots=True)
class Token:
    """`clause` counts clauses, `at` counts what stands in the text. Codes ("V-17") are words.

    named   the name that a number is part of: "kittiwake" of the 900 in "Kittiwake 900". Such a number says
            which thing is meant, as a word does.
    """

    kind: Literal["number", "word"]
    value: str
    clause: int
    at: int
    capital: bool = False
    empty: bool = False
    named: str | None = None

    @property
    def counts(self) -> bool:
        return self.kind == "number" and self.named is None


def words(text: str) -> list[str]:
    """Content words as they are compared: stems, units in one spelling."""
    return [_UNITS.get(w, w) for w in terms(text) if w not in STOP_WORDS]


def tokens(text: str) -> list[Token]:
    """Words and numbers of a text, clause by clause."""
    found: list[Token] = []
    clause = 0
    for at, match in enumerate(_TOKEN.finditer(normal(text.replace("\n", " ; ")))):
        kind, value = match.lastgroup, match.group()
        if kind == "stop" or value.lower() in _JOINING:
            clause += 1
        elif (kind == "number" and not value[0].isalpha()) or value.lower() in NUMBER_WORDS:
            number = NUMBER_WORDS.get(value.lower(), value)
            found.append(Token("number", number, clause, at, named=_name_before(found, at)))
        elif kind != "mark":
            plain = value.casefold()
            word = _UNITS.get(plain) or _UNITS.get(stem(plain)) or stem(plain)
            empty = plain in STOP_WORDS or word in EMPTY or value in EMPTY_SIGNS
            found.append(Token("word", word, clause, at, value[:1].isupper(), empty))
    return found


def agrees(
    sentence: Sequence[Token], here: Sequence[Token], over: Sequence[Token], about: frozenset[str]
) -> bool:
    """Whether the numbers of a sentence are used in a place as the sentence uses them.

    here    the place's tokens
    over    those of the headings over it
    about   the place's `words`, for a unit that stands apart from its number (in a table's header)

    A name's number ("Kittiwake 900") stands next to that name, here or in a heading. Any other has the unit
    here that it has in the sentence, and no word next to it there is said of another number here. A number
    that stands only in a heading counts where another number of the sentence stands here.
    """
    numbers = {t.value for t in here if t.kind == "number"}
    for i, token in enumerate(sentence):
        if token.kind != "number":
            continue
        if token.named is not None:
            if not any(_follows(tokens, token.named, token.value) for tokens in (here, over)):
                return False
            continue
        at = [k for k, t in enumerate(here) if t.kind == "number" and t.value == token.value]
        if not at and not any(t.kind == "number" and t.value in numbers for t in sentence):
            return False
        unit = _unit(sentence, i)
        if unit is not None:
            beside = [_beside(here, k) for k in at]
            known = any(unit in found or (not found and unit in about) for found in beside)
            above = (k for k, t in enumerate(over) if t.kind == "number" and t.value == token.value)
            if not known and not any(unit in _beside(over, k) for k in above):
                return False
        own: set[str] = set().union(*(_around(here, k) for k in at))
        others = [k for k, t in enumerate(here) if t.counts and t.value != token.value]
        foreign: set[str] = set().union(*(_around(here, k) for k in others))
        if at and (foreign - own) & _nearest(sentence, i):
            return False
    return True


def measured_otherwise(sentence: Sequence[Token], there: Sequence[tuple[Sequence[Token], Set[str]]]) -> bool:
    """Whether a number of the sentence stands in a text, but nowhere with the measure that the sentence gives
    it: "20 €" where the text only has 20 minutes. `there`: the tokens of each place,
    and all that is said there and over it, for a measure that stands apart (in a table's header)."""
    for i, token in enumerate(sentence):
        unit = _unit(sentence, i) if token.counts else None
        if unit not in _MEASURES:
            continue
        found = [
            (_beside(tokens, k), about)
            for tokens, about in there
            for k, t in enumerate(tokens)
            if t.kind == "number" and t.value == token.value
        ]
        if found and not any(unit in beside or (not beside and unit in about) for beside, about in found):
            return True
    return False


def _name_before(tokens: Sequence[Token], at: int) -> str | None:
    """The name that a number at `at`, right behind these tokens, is part of; not "May" of "May 3"."""
    if not tokens or tokens[-1].at != at - 1 or tokens[-1].kind != "word":
        return None
    name = tokens[-1]
    if not name.capital or name.empty or name.value in OPENERS or DATES.match(name.value.capitalize()):
        return None
    return name.value


def _follows(tokens: Sequence[Token], name: str, number: str) -> bool:
    return any(a.value == name and b.value == number for a, b in pairwise(tokens))


def _beside(tokens: Sequence[Token], i: int) -> list[str]:
    """The unit of a number, or what stands in its place: up to two words right after it, a sign before it."""
    found = []
    for step in (1, 2):
        if i + step >= len(tokens):
            break
        token = tokens[i + step]
        if token.kind != "word" or token.empty or token.at != tokens[i].at + step:
            break
        if (
            token.value in ("个", "個")
            or not token.capital
            or token.value in _UNITS
            or DATES.match(token.value.capitalize())
        ):
            found.append(token.value)
    if i and tokens[i - 1].value in _CURRENCY and tokens[i - 1].at == tokens[i].at - 1:
        found.append(tokens[i - 1].value)
    return found


def _unit(tokens: Sequence[Token], i: int) -> str | None:
    found = [value for value in _beside(tokens, i) if value not in ("个", "個")]
    return found[0] if found else None


def _around(tokens: Sequence[Token], i: int) -> set[str]:
    """What a number is said of: the words before it in its clause, and those after it to the next number."""
    return _left(tokens, i) | _right(tokens, i)


def _nearest(tokens: Sequence[Token], i: int) -> set[str]:
    """The words that a number surely belongs to: those after it, and the nearest one before it."""
    found = _right(tokens, i)
    before = tokens[:i]
    if not any(t.clause == tokens[i].clause and not t.empty for t in before):
        return found | _left(tokens, i)
    for k in range(i - 1, -1, -1):
        token = tokens[k]
        # The unit of the number before is that number's.
        if token.counts or token.clause != tokens[i].clause or (k and tokens[k - 1].counts):
            break
        if not token.empty:
            found.add(token.value)
            break
    return found


def _right(tokens: Sequence[Token], i: int) -> set[str]:
    found: set[str] = set()
    for token in tokens[i + 1 :]:
        if token.counts or token.clause != tokens[i].clause:
            break
        if not token.empty:
            found.add(token.value)
    return found


def _left(tokens: Sequence[Token], i: int) -> set[str]:
    """The words before a number in its clause. A clause that begins with its number shares what stands before
    the last number in front of it ("carries 180 passengers and 32 cars"), or else goes with the clause before
    ("Steam tip | 24 months")."""
    while True:
        before = [t for t in tokens[:i] if t.clause == tokens[i].clause]
        found = {t.value for t in before if not t.counts and not t.empty}
        first = i - len(before)
        if found or not first:
            return found
        clause = [t for t in tokens[:first] if t.clause == tokens[first - 1].clause]
        numbers = [k for k, t in enumerate(clause) if t.counts]
        if not numbers:
            return {t.value for t in clause if not t.empty}
        i = first - len(clause) + numbers[-1]
