"""Texts cheap to write that would cost much to compare: time grows with what is compared, not with its
square. Each of these took between seconds and hours; now all take well under a second."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from rag import cite, claims
from rag.cite import attribute, best_source
from rag.claims import facts, folded, lacks, normal, numbers_of, sentences, stands_in, without_marks
from rag.places import antecedent, places
from rag.quantities import Tokens, agrees, words
from rag.terms import compatible

LONG = 100_000
NAMES = " ".join(chr(65 + i % 26) + chr(97 + i // 26 % 26) + chr(97 + i // 676) for i in range(1_000))
ROWS = [f"w{chr(97 + r % 26)}{chr(97 + r // 26)}" for r in range(40)]
TABLE = f"{'|'.join(map(str, range(1_000, 1_050)))}\n{'|'.join('-' * 50)}\n" + "".join(
    f"{row}|z\n" for row in ROWS
)


@dataclass(frozen=True)
class Passage:
    passage_id: int
    text: str
    headings: tuple[tuple[int, str], ...] = ()


@contextmanager
def quickly(seconds: float = 10.0) -> Iterator[None]:
    """Some twenty times what it takes, and far below what its square would."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


WORST = {
    "dashes": "|" + "-" * (LONG // 2) + "x\n|" + "-" * (LONG // 2) + "x\n",
    "rules": "|\n" + "-|" * (LONG // 2) + "\n",
    "abbreviations": "e.g. " * (LONG // 5),
    "initials": "A. B " * (LONG // 5),
    "stops": "." * LONG,
    "quotes": "." + '"' * LONG + "x",
    "spaces": "a" + " " * LONG + "b",
    "tabs behind a line": "a\n" + "\t" * LONG + "b",
    "lines": "a\n" * (LONG // 2),
    "separators": "a\u2028" * (LONG // 2),
    "long lines": ("a" * 50 + "\n" + " " * 50) * (LONG // 100),
    "digits": "\n" + "1" * LONG,
    "decimals": "1." * (LONG // 2),
    "thousands": "1" + ",000" * (LONG // 4),
    "letters": "a" * LONG + "-",
    "capitals": "A" * LONG,
    "apostrophes": "A" + "'" * LONG,
    "codes": "A-1" + "-" * LONG,
    "brackets": "[1" * (LONG // 2),
    "pipes": "|" * LONG,
    "table": "a|b\n" * (LONG // 4),
    "numbers": "1 " * (LONG // 2),
    "different numbers": " ".join(map(str, range(LONG // 6))),
    "clauses": "1, " * (LONG // 3),
    "units": "5 kg " * (LONG // 5),
    "names": "Ab " * (LONG // 3),
    "stops before names": ".ab" * (LONG // 3),
    "it": "It is 5. " * (LONG // 9),
    "signs": "不" * LONG,
    "kana": "の" * LONG,
    "marks": "a" + "\u0301" * (LONG // 2) + "\u0323" * (LONG // 2),
    "marks of width": "a" + "\uff9e\u0334" * (LONG // 2),
}


@pytest.mark.parametrize("name", WORST)
def test_every_part_of_a_comparison_is_in_proportion_to_a_text(name: str) -> None:
    text = WORST[name]
    with quickly():
        sentences(text)
        facts(text)
        without_marks(text)
        words(text)
        numbers_of(normal(text))
        found, _ = places(text)
        for index in range(min(len(found), 200)):
            antecedent(found, index)
        for fact in ("Ab", "1", "A-1", "three", "May"):
            stands_in(fact, folded(text))
            lacks(fact, normal(text), frozenset())
        read, few = Tokens(text), Tokens("Ab is 1 or 5 kg, and 5 g.")
        agrees(few, read, read, frozenset())
    with quickly(20.0):
        best_source("Is Ab, A or 1 not 5 kg or 5 g?", [Passage(0, text)])


@pytest.mark.parametrize("question", [NAMES, " ".join(ROWS) * 100, WORST["abbreviations"], WORST["marks"]])
def test_a_long_question_is_compared_in_proportion(question: str) -> None:
    passages = [Passage(0, "word " * 400), Passage(1, TABLE), Passage(2, NAMES)]
    with quickly():
        best_source(question, passages)


def test_the_end_of_an_answer_is_looked_at_and_so_many_of_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(fact: str, text: str) -> bool:
        asked.append(fact)
        return stands_in(fact, text)

    monkeypatch.setattr(cite, "stands_in", noted)
    best_source(NAMES, [Passage(0, "word " * 400)])
    assert 0 < len(asked) <= 64
    said = "MV Kittiwake was built in 2006."
    for long in (" ".join(["word"] * 9_000), "Kittiwake. " * 3_000):
        found = best_source(f"{long}. {said}", [Passage(0, "Nothing."), Passage(1, said)])
        assert found is not None
        assert found.source == 1
    far = [Passage(0, "Nothing much. " * 20_000), Passage(1, said)]
    assert best_source(said, far) is None
    assert attribute(said, far)[0].source == 1


def test_a_sentences_facts_are_found_once_however_many_headers_have_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def noted(sentence: str) -> list[str]:
        asked.append(sentence)
        return claims.facts(sentence)

    monkeypatch.setattr(cite, "facts", noted)
    attribute(" ".join(ROWS), [Passage(0, TABLE)])
    assert len(asked) == 1


def test_many_places_under_many_headings_belong_to_the_last_before_them() -> None:
    text = "One.\n\n" * 20_000
    headings = tuple((6 * i, f"H{i}") for i in range(20_000))
    with quickly():
        found, _ = places(text, headings)
    assert [place.heading for place in found] == [heading for _, heading in headings]
    assert places("One. Two.", [(5, "H")])[0][0].heading == ""


def test_a_long_row_of_numbers_is_compared_with_itself_in_proportion() -> None:
    def row(count: int) -> Tokens:
        return Tokens(", ".join(f"{named(i)} {1_000 + i}" for i in range(count)))

    def named(i: int) -> str:
        return f"w{chr(97 + i % 26)}{chr(97 + i // 26)}k"

    nothing, most = Tokens(""), row(300)
    with quickly():
        assert len(most.all) == 600
        assert agrees(most, most, nothing, frozenset())
        for i in range(299):
            assert agrees(Tokens(f"{named(i)} {1_000 + i}"), most, nothing, frozenset())
            assert not agrees(Tokens(f"{named(i)} {1_001 + i}"), most, nothing, frozenset())
        # Longer than any sentence or row: its words are compared, its numbers are not.
        assert not agrees(Tokens(f"{named(3)} 1003"), row(301), nothing, frozenset())


def test_a_text_of_any_script_keeps_its_marks() -> None:
    for text in (
        "Zürich",
        "e\u0301\u0323",
        "ใต้",
        "हिन्दी",
        "\u0e01" + "\u0e49" * 20,
        "─" * 500,
        "。" * 500,
        "カ\uff9e" * 99,
    ):
        assert compatible(text) == unicodedata.normalize("NFKC", text)
    assert len(compatible("a" + "\u0323" * 500)) <= 31


def test_no_mark_is_missed() -> None:
    """Of all characters, those whose decomposition begins with a mark: in a row of 500 most are dropped."""
    for code in range(0x80, sys.maxunicode + 1):
        first = unicodedata.normalize("NFKD", chr(code))[0]
        if unicodedata.combining(first):
            assert len(compatible("a" + chr(code) * 500)) < 100, hex(code)
