"""What a parser returns, the limits it works under, and the builder that all formats write into.

Offsets are Python string indices (code points) into `Parsed.text`; every section and page is a half-open
range `[start, end)` of it. Sections cover the text completely, in order, without gaps.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from typing import Any

from rag.errors import ParseFailed


@dataclass(frozen=True, slots=True)
class Limits:
    """What one document may cost. Sizes in bytes, times in seconds."""

    seconds: float = 60.0
    memory_bytes: int = 1024 * 1024 * 1024
    pages: int = 2_000
    characters: int = 5_000_000
    #: Of everything in a DOCX or XLSX together, once unpacked.
    unpacked_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands under it. `title` is the path of headings, outermost first: "A › B"."""

    start: int
    end: int
    title: str
    level: int


@dataclass(frozen=True, slots=True)
class Page:
    """`number` counts from 1."""

    start: int
    end: int
    number: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """A document as plain text. `confidence` in [0, 1] is how sure the encoding is."""

    text: str
    title: str
    format: str
    sections: list[Section]
    pages: list[Page] = field(default_factory=list)
    encoding: str = "utf-8"
    confidence: float = 1.0

    def page_at(self, position: int) -> int | None:
        """The number of the page that holds this position; None where there are no pages."""
        index = bisect_right(self.pages, position, key=lambda page: page.start) - 1
        return self.pages[index].number if index >= 0 and position < self.pages[index].end else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Parsed:
        return cls(
            **{
                **value,
                "sections": [Section(**s) for s in value["sections"]],
                "pages": [Page(**p) for p in value["pages"]],
            }
        )


# Line ends become "\n"; other control characters, lone surrogates (pypdf can produce them) and the
# invisible tag characters that hide instructions from human readers never reach the stored text.
_DROP = dict.fromkeys(
    [c for c in range(0x20) if c not in (0x09, 0x0A)]
    + list(range(0x7F, 0xA0))
    + [0xFEFF]
    + list(range(0xE0000, 0xE0080))
)
_TABLE: dict[int, str | None] = {
    **_DROP,
    0x0B: "\n",
    0x0C: "\n",
    0x85: "\n",
    0x2028: "\n",
    0x2029: "\n\n",
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
}


def clean(text: str) -> str:
    """Text as it is stored: see the table above. Cleaning twice changes nothing."""
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_TABLE)


def one_line(text: str, limit: int = 200) -> str:
    """A heading or title: white space collapsed, at most `limit` characters."""
    return re.sub(r"\s+", " ", clean(text)).strip()[:limit]


class TextBuilder:
    """Collects text, headings and pages, and stops with `ParseFailed` at the character limit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: list[str] = []
        self._last = ""
        self.length = 0
        self._headings: list[tuple[int, int, str]] = []
        self._pages: list[int] = []

    def add(self, text: str) -> None:
        text = clean(text)
        if not text:
            return
        self.length += len(text)
        if self.length > self._limits.characters:
            raise ParseFailed(
                "too long", f"The document has more than {self._limits.characters:,} characters of text."
            )
        self._parts.append(text)
        self._last = text

    def block(self, text: str) -> None:
        """Add a paragraph, set off by an empty line."""
        text = clean(text).strip("\n")
        if text.strip():
            self.gap()
            self.add(text)

    def gap(self, lines: int = 2) -> None:
        """End the present line, and have at least `lines` - 1 empty lines after it."""
        if self.length:
            tail = self._last[-lines:] if len(self._last) >= lines else "".join(self._parts[-4:])[-lines:]
            self.add("\n" * (lines - (len(tail) - len(tail.rstrip("\n")))))

    def heading(self, title: str, level: int, *, write: bool = True) -> None:
        """Begin a section here; `write` also puts the heading into the text, as Markdown does."""
        title = one_line(title)
        if not title:
            return
        if write:
            self.gap()
        self._headings.append((self.length, level, title))
        if write:
            self.add(f"{'#' * max(1, min(level, 6))} {title}\n\n")

    def mark(self, offset: int, title: str, level: int) -> None:
        """Begin a section at an offset that is already written."""
        if one_line(title):
            self._headings.append((offset, level, one_line(title)))

    def page(self) -> None:
        """Begin a page here."""
        if len(self._pages) >= self._limits.pages:
            raise ParseFailed("too many pages", f"The document has more than {self._limits.pages:,} pages.")
        self._pages.append(self.length)

    def finish(self, title: str, format: str, encoding: str = "utf-8", confidence: float = 1.0) -> Parsed:
        """Raises `ParseFailed` where there is no text, or more than 1 % of it is replacement characters."""
        text = "".join(self._parts).rstrip()
        check_text(text)
        title = one_line(title) or "Untitled"
        ends = [*self._pages[1:], len(text)]
        pages = (
            [
                Page(start, min(end, len(text)), number)
                for number, (start, end) in enumerate(zip(self._pages, ends, strict=True), 1)
                if start < len(text)
            ]
            if self._pages
            else []
        )
        return Parsed(
            text, title, format, sections_from(text, self._headings, title), pages, encoding, confidence
        )


def check_text(text: str) -> None:
    """Raise `ParseFailed` for text that must never be indexed."""
    visible = len(re.sub(r"\s", "", text))
    if not visible:
        raise ParseFailed("no text", "The document holds no text.")
    if text.count("\ufffd") > 0.01 * visible:
        raise ParseFailed(
            "encoding", "The text can't be decoded: more than 1 % of its characters are unknown."
        )


def sections_from(text: str, headings: list[tuple[int, int, str]], title: str) -> list[Section]:
    """Headings (offset, level, title) to sections; what precedes the first belongs to `title`."""
    marks: list[tuple[int, int, str]] = []
    for offset, level, heading in sorted(headings, key=lambda h: h[0]):
        if offset >= len(text):
            continue
        if marks and marks[-1][0] == offset:
            marks.pop()
        marks.append((offset, level, heading))
    if marks and not text[: marks[0][0]].strip():
        marks[0] = (0, marks[0][1], marks[0][2])
    if not marks or marks[0][0] > 0:
        marks.insert(0, (0, 0, title))
    sections: list[Section] = []
    path: list[tuple[int, str]] = []
    for index, (start, level, heading) in enumerate(marks):
        while path and path[-1][0] >= level:
            path.pop()
        end = marks[index + 1][0] if index + 1 < len(marks) else len(text)
        titles = [h for _, h in path] + [heading]
        sections.append(Section(start, end, " › ".join(titles)[:400], level))
        if level > 0:  # what precedes the first heading is above nothing
            path.append((level, heading))
    return sections
