"""What `coread reindex` does, in this process or through the server that holds the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.client import Door
from app.data_dir import resolve_data_dir
from app.settings import Settings
from rag.errors import DataDirLocked

if TYPE_CHECKING:
    from rag.types import CheckReport


def report_json(report: CheckReport) -> dict[str, Any]:
    """Keys: `collections`, `documents`, `passages`, `files`, `problems` (sentences; empty: all is well)."""
    return {
        "collections": report.collections,
        "documents": report.documents,
        "passages": report.passages,
        "files": report.files,
        "problems": list(report.problems),
    }


def reindex(settings: Settings, embeddings: bool) -> dict[str, Any]:
    """Count the terms of every passage anew, embed it anew if wanted, then compare the stores.

    Needs no language model. Raises `DataDirLocked` where another process holds the data and has no door.
    """
    from rag.embed import SentenceEmbedder
    from rag.library import Library

    path = resolve_data_dir(settings.data_dir)
    embedder = SentenceEmbedder(settings.embedder)
    try:
        library = Library.open(path, embedder)
    except DataDirLocked as locked:
        url = locked.holder.get("url")
        if not isinstance(url, str):
            raise
        return Door(path, url).post("reindex", {"embeddings": embeddings}, patient=True)
    try:
        library.reindex(embeddings=embeddings)
        return report_json(library.check())
    finally:
        library.close(all=True)
        embedder.close()
