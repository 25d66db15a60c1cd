from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from rag.embed import Vectors
from rag.gate import judge
from rag.library import Library
from rag.terms import query_terms
from rag.types import Hit
from tests.rag.conftest import HashEmbedder

ALL = frozenset({"shared"})


def test_what_stands_in_a_passage_is_answerable_and_what_does_not_is_not(
    library: Library, add: Callable[..., str]
) -> None:
    add("# Ferry\n\nThe ferry Kittiwake carries 32 cars and leaves Pellan at noon.")
    add("# Harbour\n\nThe harbour of Millhaven has two cranes and a slip.")
    asked = "How many cars does the ferry Kittiwake carry?"
    good = library.answerability(asked, library.search(asked, ALL), ALL)
    other = "What is the salary of the mayor of Ardmoor?"
    bad = library.answerability(other, library.search(other, ALL), ALL)
    assert good.answerable
    assert not bad.answerable
    assert {"salari", "mayor", "ardmoor"} <= set(bad.missing)
    assert good.score == good.coverage + 2 * good.nearness > bad.score


def test_sentences_are_compared_without_standing_behind_an_upload(
    library: Library, embedder: HashEmbedder, add: Callable[..., str]
) -> None:
    add("# Harbour\n\nThe harbour of Millhaven has two cranes and a slip. Its pier is of stone.")
    other = "What is the salary of the harbour's mayor?"
    hits = library.search(other, ALL)
    asked: list[tuple[list[str], bool]] = []
    embed = embedder.embed

    def watched(texts: Sequence[str], *, query: bool = False) -> Vectors:
        asked.append((list(texts), query))
        return embed(texts, query=query)

    embedder.embed = watched  # type: ignore[method-assign]
    found = library.answerability(other, hits, ALL)
    [(texts, query)] = asked
    assert query, "on the way of questions, which uploads do not take"
    assert {other, "Its pier is of stone."} <= set(texts)
    vectors = embed([other, *(text for text in texts if text != other)])
    nearest = float((vectors[1:] @ vectors[0]).max())
    assert found.nearness == pytest.approx(max(nearest, *(hit.cosine or 0.0 for hit in hits), 0.0), abs=1e-6)


def test_nothing_found_is_not_answerable() -> None:
    nothing = judge([], {"mayor": 2.0})
    assert (nothing.answerable, nothing.missing) == (False, ("mayor",))


def hit(text: str, cosine: float | None) -> Hit:
    return Hit(1, "d", 1, "shared", "d.md", "Ferry", 0, "", 0, len(text), text, None, 1.0, {}, cosine)


def test_words_that_only_ask_do_not_count_as_missing() -> None:
    hits = [hit("The Kittiwake carries 32 cars.", 0.6)]
    asked = judge(hits, {"mani": 6.0, "car": 2.0, "doe": 5.0, "kittiwak": 3.0})
    assert (asked.coverage, asked.missing) == (1.0, ())
    assert judge(hits, {"mani": 6.0, "wheel": 5.0, "kittiwak": 3.0}).missing == ("wheel",)


def test_a_question_about_nothing_in_particular_passes() -> None:
    asked = judge([hit("Anything.", 0.05)], {"document": 4.0, "summari": 5.0})
    assert asked.answerable
    assert asked.missing == ()


def test_scripts_without_spaces_are_judged_by_pairs_that_carry_meaning() -> None:
    found = [hit("伊崎健太先生は結索を教えています。", 0.4)]
    asked = dict.fromkeys(query_terms("健太先生は何を?"), 3.0)
    assert judge(found, asked).coverage == 1.0
    assert judge(found, dict.fromkeys(query_terms("料金は何円?"), 3.0)).coverage == 0.0


def test_where_only_words_were_searched_words_decide() -> None:
    hits = [hit("The Kittiwake carries 32 cars.", None)]
    assert judge(hits, {"kittiwak": 3.0, "car": 2.0}).answerable
    assert not judge(hits, {"mayor": 5.0, "pellan": 3.0}).answerable


def test_sentences_are_compared_only_where_the_passages_do_not_decide() -> None:
    compared: list[list[str]] = []

    def nearest(texts: Sequence[str]) -> float:
        compared.append(list(texts))
        return 0.7

    sure = judge([hit("The Kittiwake carries 32 cars.", 0.6)], {"kittiwak": 3.0, "car": 2.0}, nearest)
    assert (sure.answerable, sure.nearness, compared) == (True, 0.6, [])
    two = hit("The school has 84 pupils. It opened in 1921.", 0.3)
    close = judge([two], {"school": 3.0, "children": 1.0}, nearest)
    assert compared == [["The school has 84 pupils.", "It opened in 1921."]]
    assert (close.nearness, close.answerable) == (0.7, True)
    assert not judge([two], {"school": 3.0, "children": 1.0}).answerable
    assert not judge([two], {"mayor": 3.0, "salary": 1.0}, nearest).answerable


def test_a_passage_that_is_nearer_than_its_sentences_counts_as_near() -> None:
    assert judge([hit("One. Two.", 0.5)], {"mayor": 1.0}, lambda texts: 0.1).nearness == 0.5
