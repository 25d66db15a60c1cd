"""Numbers and what belongs to them: the unit right after a number, and the words next to it in its clause.

That is all that is looked at: no grammar, no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
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
#: Tokens of the longest sentence or row whose numbers are compared.
_MAX_TOKENS = 600
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


class Tokens:
    """The tokens of a text with what its numbers belong to, each worked out once: a row of numbers is asked
    about as often as there are sentences, and each number of it would be compared with all others."""

    def __init__(self, text: str) -> None:
        self.all = tokens(text)
        #: Where each number stands.
        self.numbers: dict[str, list[int]] = {}
        for i, token in enumerate(self.all):
            if token.kind == "number":
                self.numbers.setdefault(token.value, []).append(i)
        self._nearest: dict[int, set[str]] = {}

    @cached_property
    def values(self) -> frozenset[str]:
        return frozenset(token.value for token in self.all)

    @cached_property
    def _belonging(self) -> tuple[dict[str, set[str]], set[str]]:
        """What each number is said of, and all that is said of numbers that count."""
        of: dict[str, set[str]] = {}
        counted: set[str] = set()
        for i, left in self._lefts.items():
            around = left | _right(self.all, i)
            of.setdefault(self.all[i].value, set()).update(around)
            if self.all[i].counts:
                counted |= around
        return of, counted

    @cached_property
    def _lefts(self) -> dict[int, set[str]]:
        """For each number the words before it in its clause. A clause that begins with its number shares what
        stands before the last number in front of it ("carries 180 passengers and 32 cars"), or else goes with
        the clause before ("Steam tip | 24 months")."""
        found: dict[int, set[str]] = {}
        before: set[str] = set()
        shared: set[str] = set()
        last: int | None = None
        for i, token in enumerate(self.all):
            if i and token.clause != self.all[i - 1].clause:
                shared = before if last is None else found[last]
                before, last = set(), None
            if token.kind == "number":
                found[i] = set(before) or shared
                last = i if token.counts else last
            if not token.counts and not token.empty:
                before.add(token.value)
        return found

    def said_of_others(self, words: Set[str], number: str) -> bool:
        """Whether one of these words is said of other numbers than this one only."""
        of, counted = self._belonging
        return not words & counted <= set(of.get(number, ()))

    def nearest(self, i: int) -> set[str]:
        """The words that a number surely belongs to: those after it, and the nearest one before it."""
        if i not in self._nearest:
            self._nearest[i] = self._find_nearest(i)
        return self._nearest[i]

    def _find_nearest(self, i: int) -> set[str]:
        found = _right(self.all, i)
        for k in range(i - 1, -1, -1):
            if self.all[k].clause != self.all[i].clause:
                return found | self._lefts[i]
            if not self.all[k].empty:
                break
        else:
            return found | self._lefts[i]
        for k in range(i - 1, -1, -1):
            token = self.all[k]
            # The unit of the number before is that number's.
            if token.counts or token.clause != self.all[i].clause or (k and self.all[k - 1].counts):
                break
            if not token.empty:
                found.add(token.value)
                break
        return found


def agrees(sentence: Tokens, here: Tokens, over: Tokens, about: frozenset[str]) -> bool:
    """Whether the numbers of a sentence are used in a place as the sentence uses them.

    here    the place's tokens
    over    those of the headings over it
    about   the place's `words`, for a unit that stands apart from its number (in a table's header)

    A name's number ("Kittiwake 900") stands next to that name, here or in a heading. Any other has the unit
    here that it has in the sentence, and no word next to it there is said of another number here. A number
    that stands only in a heading counts where another number of the sentence stands here. What is longer than
    any sentence or row is not read for it.
    """
    if not sentence.numbers:
        return True
    if len(here.all) > _MAX_TOKENS:
        return False
    some_here = not sentence.numbers.keys().isdisjoint(here.numbers)
    for i, token in enumerate(sentence.all):
        if token.kind != "number":
            continue
        if token.named is not None:
            if not any(_follows(there, token.named, token.value) for there in (here, over)):
                return False
            continue
        at = here.numbers.get(token.value, [])
        if not at and not some_here:
            return False
        unit = _unit(sentence.all, i)
        if unit is not None:
            beside = [_beside(here.all, k) for k in at]
            known = any(unit in found or (not found and unit in about) for found in beside)
            above = over.numbers.get(token.value, [])
            if not known and not any(unit in _beside(over.all, k) for k in above):
                return False
        if at and here.said_of_others(sentence.nearest(i), token.value):
            return False
    return True


def measured(sentence: Tokens) -> dict[str, set[str]]:
    """The numbers of a sentence that have a measure, and which."""
    found: dict[str, set[str]] = {}
    for i, token in enumerate(sentence.all):
        unit = _unit(sentence.all, i) if token.counts else None
        if unit in _MEASURES:
            found.setdefault(token.value, set()).add(unit)
    return found


def measured_otherwise(wanted: Mapping[str, Set[str]], there: Iterable[tuple[Tokens, Tokens]]) -> bool:
    """Whether a number with its measure (`measured`) stands in a text, but nowhere with that measure: "20 €"
    where the text only has 20 minutes. `there`: the tokens of each place and of what stands over it, for a
    measure that stands apart (in a table's header)."""
    missing = {(number, unit) for number, units in wanted.items() for unit in units}
    stands: set[str] = set()
    for here, over in there:
        for number in wanted.keys() & here.numbers.keys():
            stands.add(number)
            besides = [_beside(here.all, k) for k in here.numbers[number]]
            apart = here.values | over.values if not all(besides) else frozenset[str]()
            near = set[str]().union(*besides)
            missing -= {(number, unit) for unit in wanted[number] if unit in near or unit in apart}
    return any(number in stands for number, _ in missing)


def _name_before(tokens: Sequence[Token], at: int) -> str | None:
    """The name that a number at `at`, right behind these tokens, is part of; not "May" of "May 3"."""
    if not tokens or tokens[-1].at != at - 1 or tokens[-1].kind != "word":
        return None
    name = tokens[-1]
    if not name.capital or name.empty or name.value in OPENERS or DATES.match(name.value.capitalize()):
        return None
    return name.value


def _follows(tokens: Tokens, name: str, number: str) -> bool:
    """Whether a number stands right behind a name. A code or a part of a name may be a word that looks so."""
    return any(a.value == name and b.value == number for a, b in pairwise(tokens.all))


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


def _right(tokens: Sequence[Token], i: int) -> set[str]:
    """The words after a number, to the next one or the end of its clause."""
    found: set[str] = set()
    for k in range(i + 1, len(tokens)):
        token = tokens[k]
        if token.counts or token.clause != tokens[i].clause:
            break
        if not token.empty:
            found.add(token.value)
    return found
