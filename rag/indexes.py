"""The caches that serve a search: for each collection its vectors and its counted terms, in memory.

SQLite is the truth. An index is built from it when first asked, told of every committed change from then on,
and simply dropped where that fails: it is then built again.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rag.database import Database
from rag.embed import Embedder, Vectors
from rag.lexical import LexicalIndex
from rag.vectors import VectorIndex


class Indexes:
    """Thread-safe. Collections are named by their integer keys."""

    def __init__(self, database: Database, embedder: Embedder) -> None:
        self._db, self._embedder = database, embedder
        self._guard = threading.Lock()
        self._locks: dict[int, threading.RLock] = {}
        self._vectors: dict[int, VectorIndex] = {}
        self._words: dict[int, LexicalIndex] = {}

    def vectors(self, collection: int) -> VectorIndex:
        """The collection's vector index, built now if need be."""
        index = self._vectors.get(collection)
        if index is None:
            with self.locked(collection):
                index = self._vectors.get(collection)
                if index is None:
                    index = self._vectors[collection] = self._build_vectors(collection)
        return index

    def words(self, collection: int) -> LexicalIndex:
        """The collection's lexical index, built now if need be."""
        index = self._words.get(collection)
        if index is None:
            with self.locked(collection):
                index = self._words.get(collection)
                if index is None:
                    index = self._words[collection] = self._build_words(collection)
        return index

    @contextmanager
    def locked(self, collection: int) -> Iterator[None]:
        """Hold while a change of this collection is committed *and* told to its indexes, so that an index
        that is being built sees all of the change or is told of it, never half. Searches don't wait."""
        with self._guard:
            lock = self._locks.setdefault(collection, threading.RLock())
        with lock:
            yield

    def changed(
        self,
        collection: int,
        removed: Sequence[int],
        added: Sequence[int] = (),
        vectors: Vectors | None = None,
        prepared: Sequence[bytes] = (),
    ) -> None:
        """Tell the indexes of a committed change. If that fails they are dropped, and built when next asked.

        added       ids of new passages
        vectors     their unit vectors, `[len(added), dimension]`
        prepared    what `lexical.prepare` made of each
        """
        try:
            if (index := self._vectors.get(collection)) is not None:
                index.remove(removed)
                if vectors is not None:
                    index.add(added, vectors)
            if (words := self._words.get(collection)) is not None:
                words.remove(removed)
                words.add(added, prepared)
        except Exception:
            self.forget(collection)
            raise

    def forget(self, collection: int) -> None:
        """Drop what is cached of one collection."""
        self._vectors.pop(collection, None)
        self._words.pop(collection, None)

    def _build_vectors(self, collection: int) -> VectorIndex:
        dimension = self._embedder.dimension
        ids, blobs = self._stored(collection, "embeddings", "vector")
        # While another embedder's vectors replace the old ones, these may have another size.
        fitting = [(i, b) for i, b in zip(ids, blobs, strict=True) if len(b) == 4 * dimension]
        matrix = np.frombuffer(b"".join(b for _, b in fitting), dtype="<f4").astype(np.float32)
        return VectorIndex.build(dimension, [i for i, _ in fitting], matrix.reshape(-1, dimension))

    def _build_words(self, collection: int) -> LexicalIndex:
        return LexicalIndex.build(*self._stored(collection, "passage_terms", "terms"))

    def _stored(self, collection: int, table: str, column: str) -> tuple[list[int], list[bytes]]:
        def read(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            return connection.execute(
                f"SELECT p.id, x.{column} FROM passages p JOIN {table} x ON x.passage = p.id "
                "WHERE p.collection = ? ORDER BY p.id",
                (collection,),
            ).fetchall()

        rows = self._db.read_sync(read)
        return [row[0] for row in rows], [row[1] for row in rows]
