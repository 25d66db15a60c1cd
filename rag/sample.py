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
        documents = _most_wanted_first()
    library.create_collection("Sample knowledge base", OWNER, collection)
    present = {info.id: info for info in library.documents({collection})}
    queued: list[str] = []
    wanted: set[str] = set()
    for document in documents:
        data = document.text.encode("utf-8")
        id = document_id(document.name, collection)
        wanted.add(id)
        try:
            if id in present:
                library.replace_document(id, document.name, data, OWNER)
            else:
                library.add_document(collection, document.name, data, OWNER, document_id=id)
            queued.append(id)
        except DuplicateDocument:
            continue
    for id in present.keys() - wanted:
        library.delete_document(id)
    return queued


def _most_wanted_first() -> list[SampleDocument]:
    """The packaged documents; first those that answer the questions which an empty page suggests, so that
    the first question of the first visitor finds its document although the others are still being read."""
    from data import documents, questions, suggested_questions

    suggested = set(suggested_questions())
    wanted = {span.document for q in questions() if q.question in suggested for span in q.gold}
    return sorted(documents(), key=lambda document: document.name not in wanted)


def document_id(name: str, collection: str = COLLECTION) -> str:
    """The id of a sample document by its file name."""
    stem = name.rsplit(".", 1)[0]
    return f"{collection}-" + "".join(c if c.isalnum() and c.isascii() else "-" for c in stem)[:60]
