"""Seeds the sample collection from the documents that come with the program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rag.errors import DuplicateDocument
from rag.library import Library

COLLECTION = "sample"
OWNER = "server"


class SampleDocument(Protocol):
    """`name` is the file's name, unique among the documents; `text` its Markdown."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str: ...


def seed(
    library: Library, documents: Iterable[SampleDocument] | None = None, *, collection: str = COLLECTION
) -> list[str]:
    """Bring the sample collection in line with the program's documents and return the ids of what is queued.

    Idempotent by content: known documents are left alone, changed ones replaced, dropped ones deleted, so a
    start over old data and a start over an empty folder end the same. Document ids are made of the names,
    so that prompts lay documents out in the same order on every machine.
    """
    if documents is None:
        import data

        documents = data.documents()
    documents = list(documents)
    library.create_collection("Sample knowledge base", OWNER, collection)
    queued = _queue(library, documents, collection)
    wanted = {document_id(document.name, collection) for document in documents}
    for info in library.documents({collection}):
        if info.id not in wanted:
            library.delete_document(info.id)
    return queued


def seed_suggested(library: Library, *, collection: str = COLLECTION) -> list[str]:
    """Queue those packaged documents that answer the questions which an empty page suggests, and leave the
    others to `seed`: so the first question of the first visitor finds its document. The ids of those that are
    not read yet, also where an earlier start queued them."""
    import data

    suggested = set(data.suggested_questions())
    names = {span.document for q in data.questions() if q.question in suggested for span in q.gold}
    documents = [document for document in data.documents() if document.name in names]
    library.create_collection("Sample knowledge base", OWNER, collection)
    _queue(library, documents, collection)
    wanted = {document_id(document.name, collection) for document in documents}
    return [info.id for info in library.documents({collection}) if info.id in wanted and not info.finished]


def _queue(library: Library, documents: Iterable[SampleDocument], collection: str) -> list[str]:
    """Queue what is new or changed; the ids of that."""
    present = {info.id for info in library.documents({collection})}
    queued: list[str] = []
    for document in documents:
        data = document.text.encode("utf-8")
        id = document_id(document.name, collection)
        try:
            if id in present:
                library.replace_document(id, document.name, data, OWNER)
            else:
                library.add_document(collection, document.name, data, OWNER, document_id=id)
            queued.append(id)
        except DuplicateDocument:
            continue
    return queued


def document_id(name: str, collection: str = COLLECTION) -> str:
    """The id of a sample document by its file name."""
    stem = name.rsplit(".", 1)[0]
    return f"{collection}-" + "".join(c if c.isalnum() and c.isascii() else "-" for c in stem)[:60]
