"""What the empty page suggests to ask about is read first."""

from __future__ import annotations

import threading

from data import documents, questions, suggested_questions
from rag import sample
from rag.library import Library
from tests.rag.conftest import HashEmbedder


def unread(library: Library) -> set[str]:
    return {info.id for info in library.documents({sample.COLLECTION}) if not info.finished}


def test_documents_of_suggested_questions_come_first_and_none_is_lost(
    library: Library, embedder: HashEmbedder
) -> None:
    asked = set(suggested_questions())
    names = {span.document for q in questions() if q.question in asked for span in q.gold}
    wanted = {sample.document_id(name) for name in names}
    assert len(wanted) >= 4
    go_on = threading.Event()
    embedder.before = lambda: go_on.wait(60)
    first = sample.seed_suggested(library)
    assert set(first) == wanted == unread(library)
    assert set(sample.seed_suggested(library)) == wanted  # as after a start that was ended before it had read
    rest = sample.seed(library)
    assert wanted.isdisjoint(rest)
    assert wanted.union(rest) == {sample.document_id(document.name) for document in documents()}
    go_on.set()
    for id in first:
        assert library.wait(id, 60).status == "ready"
    assert sample.seed_suggested(library) == []
