"""The build of the question file: sentence bounds, and a clear refusal of every faulty source."""

from __future__ import annotations

import pytest

from data import SampleDataError, build

TEXT = """# Title

First fact is 12 crowns. Second fact is 3.5 metres! "Third," she said. Last one

1. Numbered item. *Done in 2020.*
| Table | 88 |
"""
TEXTS = {"a.md": TEXT}


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [
        ("First fact", "First fact is 12 crowns."),
        ("fact is 3.5", "Second fact is 3.5 metres!"),
        ("12 crowns. Second", "First fact is 12 crowns. Second fact is 3.5 metres!"),
        ("she said", '"Third," she said.'),
        ("Last one", "Last one"),
        ("Numbered", "1. Numbered item."),
        ("2020", "*Done in 2020.*"),
        ("| Table", "| Table | 88 |"),
    ],
)
def test_an_anchor_grows_to_its_sentence(anchor: str, expected: str) -> None:
    start, end = build.sentence_around(TEXT, anchor)
    assert TEXT[start:end] == expected


@pytest.mark.parametrize(("anchor", "count"), [("absent", 0), ("fact", 2)])
def test_an_anchor_must_occur_exactly_once(anchor: str, count: int) -> None:
    with pytest.raises(SampleDataError, match=f"occurs {count} times"):
        build.sentence_around(TEXT, anchor)


def test_a_source_gives_questions_in_order() -> None:
    source = """# a comment

dev price: What does it cost?
  = 12 crowns | 12
  @ a.md: First fact

test length-next: And how long is it?
  user: What does it cost?
  assistant: It costs 12 crowns.
  = 3.5 metres
  @ a.md: Second fact

dev none: What colour is it?
"""
    price, length, none = build.parse(source, TEXTS)
    assert (price.kind, price.split, price.answers) == ("single", "dev", ("12 crowns", "12"))
    assert (length.kind, length.split) == ("followup", "test")
    assert TEXT[length.gold[0].start : length.gold[0].end] == "Second fact is 3.5 metres!"
    assert (none.kind, none.answers, none.gold) == ("unanswerable", (), ())
    assert build.to_jsonl([price]).endswith("\n")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("train x: Why?", "expected '<dev|test>"),
        ("dev x: Why?\n  ? 12", "expected '  = '"),
        ("dev x: Why?\n  = 12", "needs both"),
        ("dev x: Why?\n  @ a.md: First fact", "needs both"),
        ("dev x: Why?\n  = 12\n  @ b.md: First fact", "no document 'b.md'"),
        ("dev x: Why?\n  = 13\n  @ a.md: First fact", "not in the first gold span"),
        ("dev x: Why?\n  = 12\n  @ a.md: First fact\n  @ a.md: Second fact", "none of"),
        ("dev x: Why?\n  user: Eh?\n  = 12\n  @ a.md: First fact", "history must alternate"),
        ("dev x: Why?\n\ntest x: How?", "id 'x' occurs twice"),
        ("dev x: Why?\n\ntest y: why?", "occurs twice"),
    ],
)
def test_a_faulty_source_is_refused(source: str, message: str) -> None:
    with pytest.raises(SampleDataError, match="line") as raised:
        build.parse(source, TEXTS)
    assert message in str(raised.value)
