"""The rule on the sample documents: what they say is verified, and with another number in it, it is not.

`docs/evaluation.md` states these counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import data
from rag.cite import attribute, sentences
from rag.claims import NUMBER
from rag.parse.decode import decode
from rag.parse.plain import parse_markdown
from rag.parse.types import Limits
from rag.split import heading_over, split_sections


@dataclass(frozen=True)
class Passage:
    passage_id: int
    text: str
    headings: tuple[tuple[int, str], ...] = ()


@cache
def _gold_sentences() -> tuple[tuple[str, Passage], ...]:
    """Sentences and list items of the development questions' gold spans, each with its section."""
    parsed = {d.name: parse_markdown(decode(d.text.encode()), d.name, Limits()) for d in data.documents()}
    found: list[tuple[str, Passage]] = []
    for question in data.questions("dev"):
        for gold in question.gold[:1]:
            document = parsed[gold.document]
            section = next(s for s in split_sections(document) if s.start <= gold.start < s.end)
            passage = Passage(
                0,
                document.text[section.start : section.end],
                ((0, heading_over(document.title, section.title)),),
            )
            said = document.text[gold.start : gold.end]
            found += [(said[a:b], passage) for a, b in sentences(said) if "|" not in said[a:b]]
    return tuple(found)


def _verified(sentence: str, passage: Passage) -> bool:
    return all(found.verdict == "verified" for found in attribute(sentence, [passage]))


def _with_other_numbers() -> Iterator[tuple[str, Passage]]:
    chosen = random.Random(1)
    for sentence, passage in _gold_sentences():
        known = [m.group() for m in NUMBER.finditer(passage.text)]
        for match in NUMBER.finditer(sentence):
            if others := sorted({n for n in known if n not in sentence}):
                other = chosen.choice(others)
                yield sentence[: match.start()] + other + sentence[match.end() :], passage


def _with_exchanged_numbers() -> Iterator[tuple[str, Passage]]:
    for sentence, passage in _gold_sentences():
        numbers = list(NUMBER.finditer(sentence))
        for match in numbers:
            other = min(
                (m for m in numbers if m.group() != match.group()), key=lambda m: m.group(), default=None
            )
            if other is None:
                continue
            x, y = sorted((match, other), key=lambda m: m.start())
            between = sentence[x.end() : y.start()]
            yield f"{sentence[: x.start()]}{y.group()}{between}{x.group()}{sentence[y.end() :]}", passage


def test_what_the_documents_say_is_verified() -> None:
    assert len(_gold_sentences()) > 100
    assert [s for s, passage in _gold_sentences() if not _verified(s, passage)] == []


def test_another_number_of_the_same_section_is_not() -> None:
    wrong = [s for s, passage in _with_other_numbers() if _verified(s, passage)]
    assert len(list(_with_other_numbers())) > 120
    assert len(wrong) <= 1, wrong


def test_two_numbers_that_changed_places_are_seldom() -> None:
    wrong = [s for s, passage in _with_exchanged_numbers() if _verified(s, passage)]
    assert len(list(_with_exchanged_numbers())) > 90
    assert len(wrong) <= 12, wrong
