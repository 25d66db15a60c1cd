from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import app
from app.evaluation import report
from app.evaluation.answers import Given, accuracy, share
from app.evaluation.layout import POLICIES, Asked, Part, Words, compare, question_log, replay
from app.evaluation.match import declines, facts_stand_in, holds_answer, stands_in, words
from data import GoldSpan, Question
from rag.types import DocumentText, Hit, SectionText


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("It weighs 84 kilograms.", ["84 kilograms", "84"], True),
        ("It weighs 184 kilograms.", ["84"], False),
        ("It weighs 84.5 kilograms.", ["84"], False),
        ("It costs 1,050 crowns.", ["1050"], True),
        ("There are three of them", ["3"], True),
        ("Captain Samuel OJO commands her.", ["Samuel Ojo"], True),
        ("Captain Ojo Samuel commands her.", ["Samuel Ojo"], False),
        ("Zoë leads it.", ["Zoe"], True),
        ("", ["84"], False),
        ("Anything", [], False),
    ],
)
def test_an_answer_is_right_by_whole_words(answer: str, gold: list[str], right: bool) -> None:
    assert holds_answer(answer, gold) is right


@pytest.mark.parametrize(
    ("answer", "declined"),
    [
        ("The documents do not say.", True),
        ("The document doesn't mention a salary.", True),
        ("That is not stated in the text.", True),
        ("  ", True),
        ("The Kittiwake carries 32 cars.", False),
        ("Dogs may not enter the galley.", False),
    ],
)
def test_declining_is_told_from_answering(answer: str, declined: bool) -> None:
    assert declines(answer) is declined


def test_facts_must_stand_in_one_text() -> None:
    assert facts_stand_in("The Petrel 90 weighs 84 kilograms.", ["A Petrel 90 has 84 kilograms."])
    assert not facts_stand_in("The Petrel 90 weighs 84 kilograms.", ["A Petrel 90.", "84 kilograms."])
    assert not facts_stand_in("It weighs 84 kilograms.", ["It weighs 184 kilograms."])
    assert words("Twenty-one") == ["20", "1"]
    assert not stands_in("…", "anything")


def question(id: str, answers: tuple[str, ...] = (), document: str = "a.md") -> Question:
    gold = (GoldSpan(document, 0, 5),) if answers else ()
    return Question(id, "dev", "single" if answers else "unanswerable", f"What of {id}?", (), answers, gold)


def test_an_unanswerable_question_that_is_answered_counts_as_wrong() -> None:
    good, none = question("good", ("84",)), question("none")
    given = [
        Given(good, "It is 84.", False, None, 100),
        Given(good, "It is 85.", False, None, 100),
        Given(good, "", True, None),
        Given(none, "It is 84.", False, None, 100),
        Given(none, "The documents do not say.", False, None, 100),
        Given(none, "", True, None),
    ]
    found = accuracy(given)
    assert found["answer_accuracy"] == 3 / 6
    assert found["answer_accuracy_answerable"] == 1 / 3
    assert (found["refusal_rate"], found["false_refusal_rate"]) == (2 / 3, 1 / 3)
    assert (found["gate_refusal_rate"], found["gate_false_refusal_rate"]) == (1 / 3, 1 / 3)
    assert share([]) is None


# -- the replayed log ----------------------------------------------------------------------------------------


def asked(number: int, parts: list[Part]) -> Asked:
    scores = tuple(1.0 - n / 100 for n in range(len(parts)))
    return Asked(
        number % 3, number, (900 + number,), tuple(parts), scores, (False,) * len(parts), frozenset({0})
    )


def part(name: str, first: int, length: int = 32) -> Part:
    return Part("sample", name, 0, tuple(range(first, first + length)))


def test_with_room_for_all_an_order_that_varies_computes_more() -> None:
    a, b = part("a", 1), part("b", 101)
    log = [asked(0, [a, b]), asked(1, [b, a]), asked(2, [a, b])]
    lead = tuple(range(2_000, 2_016))
    counted = {p: replay(log, p, blocks=64, instructions=lead, running=1).computed_tokens for p in POLICIES}
    # Questions of one token each. By relevance the second prompt computes both documents again.
    assert counted == {"relevance": 64 + 1 + 64 + 1 + 1, "canonical": 67, "reordered": 67, "reuse": 67}


def test_what_is_in_memory_comes_first() -> None:
    """Canonical order puts the unknown document first here, and computes the known one again."""
    a, b = part("a", 1), part("b", 101)
    log = [asked(0, [b]), asked(1, [b, a])]
    lead = tuple(range(2_000, 2_016))
    counted = {p: replay(log, p, blocks=64, instructions=lead, running=1).computed_tokens for p in POLICIES}
    assert counted == {"relevance": 32 + 1 + 33, "canonical": 98, "reordered": 66, "reuse": 66}


def test_a_place_that_is_free_goes_to_what_is_in_memory_and_the_needed_stays() -> None:
    a, b, c = part("a", 1), part("b", 101), part("c", 201)
    log = [
        asked(0, [c]),
        Asked(1, 1, (901,), (a, b, c), (1.0, 0.5, 0.4), (True, False, False), frozenset({1})),
    ]
    lead = tuple(range(2_000, 2_016))
    played = {p: replay(log, p, blocks=64, instructions=lead, running=1, places=2) for p in POLICIES}
    # Needed is "a" alone; "c" costs nothing, "b" would cost 32 tokens.
    assert played["reuse"].computed_tokens == 32 + 1 + 33
    assert played["reordered"].computed_tokens == 32 + 1 + 65
    assert {p: r.sections for p, r in played.items()} == dict.fromkeys(POLICIES, 3)
    # What that costs in recall is counted, not assumed: here "b" held the answer.
    assert {p: r.recall for p, r in played.items()} == {
        "relevance": 1.0, "canonical": 1.0, "reordered": 1.0, "reuse": 0.5
    }  # fmt: skip


def test_every_policy_plays_every_question_in_a_small_pool() -> None:
    chance = random.Random(4)
    parts = [part(f"d{i}", 1 + 100 * i, 20 + i) for i in range(12)]
    log = [asked(n, chance.sample(parts, 3)) for n in range(60)]
    found = compare(log, blocks=40, instructions=tuple(range(5_000, 5_010)), running=4)
    total = sum(len(p.tokens) for line in log for p in line.found) + len(log)
    assert found["layout_prompt_tokens"] == dict.fromkeys(POLICIES, total)
    assert all(0 < count <= total for count in found["tokens_computed"].values())
    assert found["layout_recall"] == dict.fromkeys(POLICIES, 1.0)
    assert found["layout_sections"] == dict.fromkeys(POLICIES, 180)
    assert found["tokens_computed_ratio"]["relevance"] == 1.0


def library() -> tuple[list[Question], dict[str, list[Hit]], dict[str, DocumentText]]:
    documents, found, questions = {}, {}, []
    for n in range(4):
        id = f"sample-d{n}"
        texts = [f"# D{n}\n\nFirst part {n}. ", f"Second part {n}."]
        sections = tuple(
            SectionText(i, f"S{i}", 1, 0 if i == 0 else len(texts[0]), len("".join(texts[: i + 1])), t, None)
            for i, t in enumerate(texts)
        )
        documents[id] = DocumentText(id, "sample", f"d{n}.md", f"D{n}", 1, "".join(texts), sections)
        asks = question(f"q{n}", (str(n),), f"d{n}.md")
        questions.append(asks)
        found[asks.id] = [
            Hit(
                2 * n + i, id, 1, "sample", f"d{n}.md", f"D{n}", i, f"S{i}", s.start, s.end, s.text, None, 1.0
            )
            for i, s in enumerate(sections)
        ]
    return questions, found, documents


def spans(text: str) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(len(text))]


def test_the_log_is_fixed_and_each_prompt_holds_a_section_once() -> None:
    questions, found, documents = library()
    first = question_log(questions, found, documents, Words(spans), longest=3, count=200, people=5)
    again = question_log(questions, found, documents, Words(spans), longest=3, count=200, people=5)
    assert first == again
    assert len(first) == 200
    for line in first:
        keys = [(p.document_id, p.part) for p in line.found]
        assert len(set(keys)) == len(keys)
        assert line.gold == frozenset({0})  # the gold passage is the document's beginning
    popular = [sum(line.found[0].document_id == id for line in first) for id in documents]
    assert max(popular) > 2 * min(popular)
    with pytest.raises(ValueError, match="at least one question"):
        question_log([], {}, documents, Words(spans))


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_prints_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake(settings: Any, **options: Any) -> dict[str, Any]:
        seen.update(options)
        return {"retrieval": {}, "refusal_rate": 0.5}

    monkeypatch.setattr(report, "evaluate", fake)
    done = CliRunner().invoke(app, ["eval", "--json", "--split", "dev", "--limit", "8", "--no-answers"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"retrieval": {}, "refusal_rate": 0.5}
    assert (seen["split"], seen["limit"], seen["answers"], seen["folder"]) == ("dev", 8, False, None)


def test_a_wrong_split_and_a_missing_folder_are_one_sentence(tmp_path: Path) -> None:
    wrong = CliRunner().invoke(app, ["eval", "--split", "all"])
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (1, 1)
    assert "'all'" in wrong.stderr
    gone = CliRunner().invoke(app, ["eval", "--beir", str(tmp_path / "none")])
    assert gone.exit_code == 1
    assert "can't be read" in gone.stderr


def test_a_limit_keeps_every_kind() -> None:
    few = report.chosen("dev", 20)
    assert len(few) == 20
    assert {q.kind for q in few} == {"single", "followup", "unanswerable"}
    assert report.chosen("dev", 10_000) == report.chosen("dev", None)
