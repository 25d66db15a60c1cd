from __future__ import annotations

from dataclasses import dataclass

from rag import sample
from rag.library import Library

READABLE = {sample.COLLECTION}


@dataclass(frozen=True)
class Document:
    name: str
    title: str
    text: str


ONE, TWO = Document("one.md", "One", "# One\n\nFerries."), Document("two.md", "Two", "# Two\n\nBuoys.")


def seed(library: Library, *documents: Document) -> list[str]:
    queued = sample.seed(library, documents)
    for id in queued:
        assert library.wait(id, 60).status == "ready"
    return queued


def test_seeding_is_idempotent_and_follows_the_documents(library: Library) -> None:
    assert seed(library, ONE, TWO) == ["sample-one", "sample-two"]
    assert seed(library, ONE, TWO) == []
    changed = Document("one.md", "One", "# One\n\nFerries and buses.")
    assert seed(library, changed) == ["sample-one"]
    infos = library.documents(READABLE)
    assert [(i.id, i.version) for i in infos] == [("sample-one", 2)]
    assert library.document("sample-one", READABLE).text == changed.text
    assert library.check().ok


def test_the_stored_text_is_the_documents_own_so_gold_spans_hold(library: Library) -> None:
    import data

    documents = data.documents()[:3]
    for id in sample.seed(library, documents):
        library.wait(id, 60)
    for document in documents:
        stored = library.document(sample.document_id(document.name), READABLE)
        assert stored.text == document.text.rstrip()
        assert stored.title == document.title
