"""A library on a temporary folder with an embedder that needs no model: hashed words as vectors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from rag.embed import Vectors
from rag.library import Library
from rag.terms import terms

# The clock of a busy machine says nothing about an example.
settings.register_profile("rag", deadline=None)
settings.load_profile("rag")


class WordMeasure:
    """One token a word, number or other character; additive at white space, as real tokenizers are."""

    def spans(self, text: str) -> list[tuple[int, int]]:
        return [m.span() for m in re.finditer(r"[A-Za-z]{1,6}|\d|[^\sA-Za-z\d]", text)]


class HashEmbedder:
    """Texts that share terms are near each other. Deterministic, no model."""

    def __init__(self, name: str = "hash-64", dimension: int = 64, max_tokens: int = 128) -> None:
        self.name, self.dimension, self.max_tokens = name, dimension, max_tokens
        self.measure = WordMeasure()
        self.calls = 0
        self.before: Callable[[], None] = lambda: None

    def embed(self, texts: Sequence[str], *, query: bool = False) -> Vectors:
        self.calls += 1
        if not query:
            self.before()
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            for term in terms(text):
                digest = hashlib.blake2b(f"{self.name}:{term}".encode(), digest_size=8).digest()
                vectors[row, digest[0] % self.dimension] += 1.0 if digest[1] & 1 else -1.0
            vectors[row, 0] += 1e-3
            vectors[row] /= np.linalg.norm(vectors[row])
        return vectors


@pytest.fixture
def embedder() -> HashEmbedder:
    return HashEmbedder()


@pytest.fixture
def library(tmp_path: Path, embedder: HashEmbedder) -> Iterator[Library]:
    opened = Library.open(tmp_path / "data", embedder)
    opened.create_collection("Shared", "owner", "shared")
    yield opened
    opened.close(all=True)


@pytest.fixture
def add(library: Library) -> Callable[..., str]:
    """Add a text to a collection and wait until it is finished; return the id."""

    def run(text: str | bytes, name: str = "note.md", collection: str = "shared") -> str:
        data = text.encode("utf-8") if isinstance(text, str) else text
        id = library.add_document(collection, name, data, "me")
        library.wait(id, 60)
        return id

    return run
