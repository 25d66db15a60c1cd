from __future__ import annotations

from collections.abc import Callable

from rag.gate import judge
from rag.library import Library

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
    assert good.score == good.cosine + good.coverage > bad.score


def test_nothing_found_is_not_answerable() -> None:
    nothing = judge([], {"mayor": 2.0})
    assert (nothing.answerable, nothing.missing) == (False, ("mayor",))
