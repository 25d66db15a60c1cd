"""The sample knowledge base: documents about an invented ferry cooperative, and questions with gold spans.

Everything here is fiction written for this project (see README.md beside this file). The loaders
return the files' exact text, so that a gold span is a pair of offsets into `SampleDocument.text`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = [
    "GoldSpan",
    "HistoryTurn",
    "Kind",
    "Question",
    "SampleDataError",
    "SampleDocument",
    "Split",
    "documents",
    "questions",
    "suggested_questions",
]

Split = Literal["dev", "test"]
Kind = Literal["single", "followup", "unanswerable"]
Role = Literal["user", "assistant"]

FOLDER = Path(__file__).resolve().parent
DOCUMENT_FOLDER = FOLDER / "kb"
QUESTION_FILE = FOLDER / "questions.jsonl"


class SampleDataError(Exception):
    """A file of the sample knowledge base is missing or malformed; the message names file and fault."""


@dataclass(frozen=True, slots=True)
class SampleDocument:
    """One Markdown document; `name` is its file name, `title` its first heading, `text` the whole file."""

    name: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class HistoryTurn:
    """One earlier message of a follow-up question's conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class GoldSpan:
    """Characters `start` (inclusive) to `end` (exclusive) of a document's text: a passage with the answer."""

    document: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Question:
    """One evaluation question.

    `answers[0]` stands literally in the first gold span (ignoring case), and every gold span holds one of the
    answers; a fact that stands in several documents has several spans, any of which is a right source.
    Unanswerable questions have neither answers nor gold spans.
    """

    id: str
    split: Split
    kind: Kind
    question: str
    history: tuple[HistoryTurn, ...]
    answers: tuple[str, ...]
    gold: tuple[GoldSpan, ...]


#: The packaged model answers these right at the first click: `python -m bench.suggested` asks it, and with
#: `--all` what they were chosen from.
_SUGGESTED = (
    "How long does the crossing from Ardmoor to Pellan take?",
    "How large was the loss in the fire at Corran Slip?",
    "How many votes does a member with ten shares have?",
    "What is the goat on Outer Ebb called?",
)


def documents() -> list[SampleDocument]:
    """All sample documents in the order of their file names.

    Raises SampleDataError when the folder is empty or a document does not begin with a `# Title` line.
    """
    return list(_all_documents())


@cache
def _all_documents() -> tuple[SampleDocument, ...]:
    paths = sorted(DOCUMENT_FOLDER.glob("*.md"))
    if not paths:
        raise SampleDataError(f"no sample documents in {DOCUMENT_FOLDER}")
    return tuple(_read_document(path) for path in paths)


def _read_document(path: Path) -> SampleDocument:
    # Decoded from bytes: text mode would translate line ends and so move every offset behind them.
    text = path.read_bytes().decode("utf-8")
    first_line = text.split("\n", 1)[0]
    if not first_line.startswith("# "):
        raise SampleDataError(f"{path.name} must begin with '# Title', not {first_line[:40]!r}")
    return SampleDocument(name=path.name, title=first_line[2:].strip(), text=text)


def questions(split: Split | None = None) -> list[Question]:
    """The questions of one split, or all of them, in file order.

    The test half is for reporting only: choose defaults and thresholds on the dev half.
    Raises SampleDataError for an unknown split, a missing file or a malformed line.
    """
    if split is not None and split not in get_args(Split):
        raise SampleDataError(f"unknown split {split!r}: expected 'dev' or 'test'")
    return [question for question in _all_questions() if split is None or question.split == split]


@cache
def _all_questions() -> tuple[Question, ...]:
    try:
        lines = QUESTION_FILE.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise SampleDataError(f"no question file at {QUESTION_FILE}") from error
    return tuple(_parse_question(line, number) for number, line in enumerate(lines, start=1))


def _parse_question(line: str, number: int) -> Question:
    try:
        record: dict[str, Any] = json.loads(line)
        question = Question(
            id=record["id"],
            split=record["split"],
            kind=record["kind"],
            question=record["question"],
            history=tuple(HistoryTurn(turn["role"], turn["content"]) for turn in record["history"]),
            answers=tuple(record["answers"]),
            gold=tuple(GoldSpan(span["document"], span["start"], span["end"]) for span in record["gold"]),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise SampleDataError(f"{QUESTION_FILE.name} line {number} is malformed: {error!r}") from error
    if question.split not in get_args(Split) or question.kind not in get_args(Kind):
        raise SampleDataError(
            f"{QUESTION_FILE.name} line {number}: unknown split or kind {question.split!r}, {question.kind!r}"
        )
    return question


def suggested_questions() -> list[str]:
    """Four questions of the dev half that the documents answer, for an empty chat page."""
    return list(_SUGGESTED)
