"""The places of a passage where something is said: a sentence, a list item, a row of a table with its
header."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from rag.claims import NEGATION, NUMBER, OPENERS, folded, sentences, stands_in, without_marks
from rag.quantities import EMPTY, EMPTY_SIGNS, Tokens, words
from rag.terms import UNSPACED

_REFERS_BACK = re.compile(r"\s*(?:It|Its|She|Her|Hers|He|His|They|Their|This|These|Those|That)\b")
_ROW = re.compile(r"^[^\n|]*\|[^\n]*$", re.M)
#: A line that a writer ended on purpose: "Weight: 38 kg". Lines wrapped for width are longer.
_SHORT_LINE = 40
#: A heading of a column is read up to here, a row up to there: what is longer is no heading and no row, and
#: every row would say it again.
_MAX_HEAD = 120
_MAX_ROW = 4_000
_KEY = re.compile(r"\s*[^\s:;.][^:;.\n]{0,60}: ")


@dataclass(frozen=True)
class Place:
    """`text[start:end]` of a passage. `said` is how it reads: a cell stands after its column's header.

    section   where it stands: places of one section tell of one thing
    heading   title and headings over it; they count as standing here
    """

    start: int
    end: int
    said: str
    section: int = 0
    heading: str = ""

    @cached_property
    def folded(self) -> str:
        return folded(without_marks(self.said))

    @cached_property
    def folded_heading(self) -> str:
        return folded(self.heading)

    @cached_property
    def denies(self) -> bool:
        return bool(NEGATION.search(self.said))

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words(self.said))

    @cached_property
    def heading_words(self) -> frozenset[str]:
        return frozenset(words(self.heading))

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(without_marks(self.said))

    @cached_property
    def heading_tokens(self) -> Tokens:
        return Tokens(self.heading)


class Table:
    """Rows of one table. `header` is empty where nothing shows that the first row is one."""

    def __init__(self, lines: Sequence[tuple[int, int]], text: str) -> None:
        cells = [_cells(text[a:b]) for a, b in lines]
        self.header: list[str] = []
        self.rows: list[tuple[int, int, list[str]]] = []
        first = 0
        ruled = len(lines) > 1 and _is_rule(text[slice(*lines[1])])
        numeric = len(lines) > 2 and all(any(map(str.isdigit, "".join(row))) for row in cells[1:])
        if ruled or (numeric and not any(map(str.isdigit, "".join(cells[0])))):
            self.header, first = [head[:_MAX_HEAD] for head in cells[0]], 1
        for (a, b), row in list(zip(lines, cells, strict=True))[first:]:
            if not _is_rule(text[a:b]):
                self.rows.append((a, b, row))
        #: Columns that a number heads, as it is written, and the numbers of all headers, as compared.
        self.headed: dict[str, list[int]] = {}
        for column, head in enumerate(self.header):
            for match in NUMBER.finditer(head):
                self.headed.setdefault(match.group(), []).append(column)
        self.numbers = frozenset(Tokens("; ".join(self.header)).numbers)
        self._words: dict[int, list[frozenset[str]]] = {}

    def said(self, row: int, wanted: Set[str], facts: Collection[str]) -> str | None:
        """`rows[row]` of a table with a header, as a sentence with these facts reads it: the cells that
        it speaks of, after their headers. None where it names a number that heads another column, or the row
        is too long to be read."""
        cells = self.rows[row][2]
        if row not in self._words:
            self._words[row] = [frozenset(words(cell)) for cell in cells]
        used = {i for i, found in enumerate(self._words[row]) if not found.isdisjoint(wanted)} | {0}
        said = "; ".join(
            f"{self.header[i]}: {cell}" if i < len(self.header) else cell
            for i, cell in enumerate(cells)
            if i in used
        )
        if len(said) > _MAX_ROW:
            return None
        elsewhere = [n for n in facts if not used.issuperset(self.headed.get(n, ()))]
        there = folded(said) if elsewhere else ""
        return said if all(stands_in(n, there) for n in elsewhere) else None


def lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts a stretch where a writer ended a line on purpose."""
    begin = at = start
    for line in text[start:end].splitlines(keepends=True):
        following = at + len(line)
        width = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line.rstrip())
        if following < end and (width < _SHORT_LINE or _KEY.match(text, following, end)):
            yield begin, following
            begin = following
        at = following
    if begin < end:
        yield begin, end


def places(
    text: str, headings: Sequence[tuple[int, str]] = ()
) -> tuple[list[Place], list[tuple[Table, list[Place]]]]:
    """The places of a text in order, and its tables with the places of their rows.

    headings   (offset from which it holds, title and path of headings), in order
    """
    found: list[Place] = []
    tables: list[tuple[Table, list[Place]]] = []
    rows = _tables(text)

    begins = [at for at, _ in headings]

    def add(start: int, end: int, said: str) -> Place:
        index = bisect_right(begins, start) - 1
        place = Place(start, end, said, index, headings[index][1] if index >= 0 else "")
        found.append(place)
        return place

    at = 0
    for block in [*rows, None]:
        stop = block[0][0] if block else len(text)
        for a, b in sentences(text[at:stop]):
            for start, end in lines(text, at + a, at + b):
                if part := text[start:end].strip():
                    start += len(text[start:end]) - len(text[start:end].lstrip())
                    add(start, start + len(part), part)
        if block:
            table = Table(block, text)
            tables.append((table, [add(a, b, "; ".join(row)) for a, b, row in table.rows]))
            at = block[-1][1]
    return found, tables


def antecedent(places: Sequence[Place], index: int) -> Place | None:
    """Two sentences as one place, where the second refers back to the first ("It weighs 38 kg.")."""
    place = places[index]
    if not index or not _REFERS_BACK.match(place.said) or places[index - 1].section != place.section:
        return None
    before = places[index - 1]
    return Place(place.start, place.end, f"{before.said}\n{place.said}", place.section, place.heading)


def borrowed(sentence: set[str], place: Place, elsewhere: Set[str]) -> set[str]:
    """Words of a sentence that the passage has, but says of something else."""
    return {
        w
        for w in (sentence & elsewhere) - place.words - place.heading_words
        if w not in EMPTY
        and w not in OPENERS
        and not (re.match(f"[{UNSPACED}]", w) and (len(w) == 1 or EMPTY_SIGNS & set(w)))
        and not re.fullmatch(r"[\u3041-\u309f]+.?|.?[\u3041-\u309f]+", w)
    }


def _is_rule(line: str) -> bool:
    """Whether a line is the one under a table's header: dashes and what parts them. No expression: each of
    the dashes could be the one that must be there, and a row of them was tried from each."""
    return "-" in line and not "".join(line.split()).strip("|:-")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _tables(text: str) -> list[list[tuple[int, int]]]:
    blocks: list[list[tuple[int, int]]] = []
    for match in _ROW.finditer(text):
        if not match.group().strip():
            continue
        if blocks and text[blocks[-1][-1][1] : match.start()] == "\n":
            blocks[-1].append(match.span())
        else:
            blocks.append([match.span()])
    return [block for block in blocks if len(block) > 1]
