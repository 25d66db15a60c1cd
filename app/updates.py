"""What a running turn tells whoever shows it: stages, text, sources, the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.store import Message, Ranking

StageName = Literal["searching", "waiting", "reading", "writing"]


@dataclass(frozen=True, slots=True)
class Source:
    """One numbered source as it is shown. `text` is "" and `available` False where the document is gone or
    may no longer be read: a tombstone; `replaced` where a newer version stands in its place. `section`: the
    headings below the title that it stands under. `found` says how search found it, if it did."""

    number: int
    document_id: str
    title: str
    text: str
    page: int | None = None
    section: str | None = None
    verdict: str | None = None
    found: Ranking | None = None
    available: bool = True
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """What is happening now, in words (mostly a `Phrase`); sent again at least every half second as a sign of
    life."""

    name: StageName
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """The sources that went into the prompt, before the answer begins."""

    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Best:
    """The one sentence of the prompt's passages that is nearest to the question or, later, to what was just
    written: shown while the answer is not there yet. `source` is the passage that it stands in."""

    source: Source
    sentence: str


@dataclass(frozen=True, slots=True)
class Text:
    """New text of the answer."""

    delta: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn has ended and `message` is stored. `notes` says what was left out and why."""

    message: Message
    sources: tuple[Source, ...]
    notes: tuple[str, ...] = ()


Update = Stage | Found | Best | Text | Finished
