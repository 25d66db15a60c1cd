"""The sample library and, where answers are wanted, the whole product, in a data folder of their own.

A server's own data is neither read nor locked. Retrieval needs no language model, so none is loaded for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import data
from app.errors import AppError
from app.knowledge import Knowledge
from app.prompting import EngineResidency, Prompter
from app.runtime import Runtime
from app.settings import Settings
from engine.service import EngineService
from rag.embed import SentenceEmbedder
from rag.library import Library
from rag.sample import COLLECTION, document_id, seed
from rag.types import DocumentText

READABLE = frozenset({COLLECTION})


class EvaluationError(AppError):
    """What was to be measured could not be; the message says why."""

    code = "evaluation_failed"


@contextmanager
def open_library(settings: Settings, folder: Path) -> Iterator[Library]:
    """The library in `folder`, with the sample documents in it (those that are there already stay).

    Raises `rag.errors.DataDirLocked`, `ModelNotFound` of the embedder, `EvaluationError`.
    """
    embedder = SentenceEmbedder(settings.embedder)
    try:
        library = Library.open(folder, embedder)
        try:
            for id in seed(library):
                info = library.wait(id)
                if info.status != "ready":
                    raise EvaluationError(
                        f"The sample document {info.name} could not be read: {info.message}."
                    )
            yield library
        finally:
            library.close(all=True)
    finally:
        embedder.close()


def sample_documents(library: Library) -> dict[str, DocumentText]:
    """The sample documents by id."""
    return {info.id: library.document(info.id, READABLE) for info in library.documents(READABLE)}


@dataclass(slots=True)
class Bed:
    """What answers are measured on: the product's own parts.

    documents   the sample documents by id
    answered    answers by prompt and token limit: greedy, so that the same prompt need not be asked again
    """

    settings: Settings
    knowledge: Knowledge
    engine: EngineService
    prompter: Prompter
    documents: dict[str, DocumentText]
    answered: dict[tuple[tuple[int, ...], int], str] = field(default_factory=dict)

    def prompter_for(self, settings: Settings) -> Prompter:
        """A prompter with other settings over the same layout."""
        made = self.prompter
        return Prompter(
            settings, self.knowledge, made.layout, EngineResidency(self.engine), made.model, made.max_context
        )


@asynccontextmanager
async def open_bed(settings: Settings, folder: Path) -> AsyncIterator[Bed]:
    """Start the product without its doors on `folder`. Raises what its start failed with."""
    runtime = Runtime(settings.model_copy(update={"data_dir": folder}))
    try:
        runtime.open()
        runtime.start()
        await runtime.wait_seeded()
        knowledge = runtime.knowledge
        ids = [document_id(document.name) for document in data.documents()]
        documents = {id: await knowledge.document(READABLE, id) for id in ids}
        yield Bed(settings, knowledge, runtime.engine, runtime.prompter, documents)
    finally:
        await runtime.stop()
