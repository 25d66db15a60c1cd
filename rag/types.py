"""What the knowledge base tells others: collections, documents, sections, hits. Offsets are code points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["queued", "parsing", "embedding", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    """What the server allows. Sizes in bytes."""

    upload_bytes: int = 20 * 1024 * 1024
    documents_per_collection: int = 10_000
    bytes_per_collection: int = 2 * 1024 * 1024 * 1024
    query_characters: int = 200_000


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """`owner` is a principal's id, in the words of whoever asks; `bytes` counts the stored files, `failed`
    the documents that were never ready and could not be read."""

    id: str
    name: str
    owner: str
    created: float
    documents: int
    passages: int
    bytes: int
    failed: int = 0


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document and how far its last upload has come.

    `version` counts ready versions from 1; 0 means that none is ready yet. While a replacement is worked on
    `status` is the replacement's and the present version stays searchable; where a replacement failed the
    document is "ready" and `reason` and `message` say why its new version isn't.
    """

    id: str
    collection_id: str
    name: str
    title: str
    status: Status
    reason: str | None
    message: str | None
    progress: float
    version: int
    size: int
    format: str
    encoding: str
    confidence: float
    characters: int
    pages: int
    passages: int
    created_by: str
    created: float
    updated: float

    @property
    def finished(self) -> bool:
        """True once nothing more will happen by itself."""
        return self.status in ("ready", "failed")


@dataclass(frozen=True, slots=True)
class DocumentVersion:
    """What one version of a document was when it became ready. Only the newest one can still be read."""

    version: int
    name: str
    size: int
    characters: int
    passages: int
    ready: float


@dataclass(frozen=True, slots=True)
class SectionText:
    """One section; sections follow each other without gaps, so their texts join to the document's."""

    index: int
    title: str
    level: int
    start: int
    end: int
    text: str
    page: int | None


@dataclass(frozen=True, slots=True)
class DocumentText:
    """A ready document with its whole text."""

    id: str
    collection_id: str
    name: str
    title: str
    version: int
    text: str
    sections: tuple[SectionText, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A found passage. `text` is exactly `document.text[start:end]`.

    `score` is the fused score, `ranks` each leg's rank from 1 (under "rerank" the cross-encoder's, which then
    decides the order), `cosine` the similarity to the question where the dense leg found it.
    """

    passage_id: int
    document_id: str
    version: int
    collection_id: str
    name: str
    title: str
    section: int
    section_title: str
    start: int
    end: int
    text: str
    page: int | None
    score: float
    ranks: dict[str, int] = field(default_factory=dict)
    cosine: float | None = None
    bm25: float | None = None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `Library.check` found. `problems` are sentences; empty means that every store agrees."""

    collections: int
    documents: int
    passages: int
    files: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems
