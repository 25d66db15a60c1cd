"""An embedder without a model: hashed words as vectors, a few microseconds a word.

For checks of everything round an embedder (uploads, deletions, crashes): a real one takes about 40 ms a
passage on one core, which thousands of documents don't have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rag.embed import Vectors
from rag.lexical import term_hash
from rag.terms import terms

_PIECE = re.compile(r"[A-Za-z]{1,6}|\d|[^\sA-Za-z\d]")


class WordEmbedder:
    """Texts that share words are near each other; the same everywhere and always."""

    name = "hashed-words-64"
    dimension = 64
    max_tokens = 256

    @property
    def measure(self) -> WordEmbedder:
        return self

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Pieces of at most six letters, as a word-piece tokenizer would make about as many."""
        return [match.span() for match in _PIECE.finditer(text)]

    def embed(self, texts: Sequence[str], *, query: bool = False) -> Vectors:
        """Unit float32 vectors `[len(texts), 64]`."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        vectors[:, 0] = 1e-3  # a text without words has a direction too
        for row, text in enumerate(texts):
            for term in terms(text):
                hashed = term_hash(term)
                vectors[row, hashed % self.dimension] += 1.0 if hashed >> 32 & 1 else -1.0
        # Words may cancel each other out exactly.
        norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
        return np.asarray(vectors / norms, dtype=np.float32)
