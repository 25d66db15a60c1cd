"""What the empty page suggests to ask about is read first."""

from __future__ import annotations

from data import documents, questions, suggested_questions
from rag.sample import _most_wanted_first


def test_documents_of_suggested_questions_come_first_and_none_is_lost() -> None:
    ordered = [document.name for document in _most_wanted_first()]
    asked = set(suggested_questions())
    wanted = {span.document for q in questions() if q.question in asked for span in q.gold}
    assert wanted
    assert set(ordered[: len(wanted)]) == wanted
    assert sorted(ordered) == sorted(document.name for document in documents())
