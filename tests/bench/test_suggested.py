"""Which answers to suggested questions count as right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import data
from bench import suggested
from bench.suggested import Outcome, asked, main
from rag.sample import document_id


def got(answer: str, document: str) -> dict[str, Any]:
    source = {"document": document_id(document), "verdict": "verified"}
    return {"answer": answer, "sources": [source]}


def test_what_is_asked_stands_on_the_page() -> None:
    assert [question.question for question in asked(False)] == data.suggested_questions()
    assert {question.kind for question in asked(True)} == {"single"}
    assert {question.split for question in asked(True)} == {"dev"}


def test_an_answer_is_right_with_a_gold_answer_from_a_gold_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = asked(False)[0]
    (document,) = {span.document for span in question.gold}
    right = Outcome(question, got(f"It is {question.answers[0]}.", document))
    wrong = Outcome(question, got("It is far.", document))
    elsewhere = Outcome(question, got(f"It is {question.answers[0]}.", "about.md"))
    assert [outcome.right for outcome in (right, wrong, elsewhere)] == [True, False, False]
    assert wrong.line().startswith(f"WRONG  {document}")

    found = [right, right]

    async def measure(_folder: Path, _every: bool) -> list[Outcome]:
        return found

    monkeypatch.setattr(suggested, "measure", measure)
    monkeypatch.setattr("sys.argv", ["suggested"])
    main()
    assert "2 of 2 answered right" in capsys.readouterr().out
    found.append(wrong)
    with pytest.raises(SystemExit, match="1"):
        main()
