"""Search over the collections that somebody may read.

The filter comes first: collections that are not readable are neither opened nor counted. What the indexes
return is looked up in SQLite before it is shown, so a deleted passage can't appear, whatever a cache holds.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import faiss

from rag import lexical
from rag.database import Database
from rag.embed import Embedder, Vectors
from rag.errors import InvalidQuery
from rag.followup import resolve
from rag.fuse import WEIGHTS, Fused, fuse
from rag.gate import Answerability, judge
from rag.indexes import Indexes
from rag.rerank import CANDIDATES, Reranker, rerank
from rag.terms import query_terms
from rag.types import Hit

#: Candidates of each leg before fusion.
DEPTH = 50
#: Of a long question beginning and end are searched for: people paste a text and ask below it.
_QUERY_END = 1_000


class Searcher:
    """Thread-safe."""

    def __init__(
        self,
        database: Database,
        embedder: Embedder,
        indexes: Indexes,
        *,
        reranker: Reranker | None = None,
        query_characters: int = 200_000,
    ) -> None:
        self._db = database
        self._embedder = embedder
        self._indexes = indexes
        self._reranker = reranker
        self._limit = query_characters
        # A collection to a thread: FAISS's own threads share out queries, of which there is one, and wait for
        # each other by spinning.
        self._pool = ThreadPoolExecutor(
            max(1, min(8, os.cpu_count() or 1)),
            thread_name_prefix="rag-vectors",
            initializer=faiss.omp_set_num_threads,
            initargs=(1,),
        )
        #: False while embeddings of another model are being replaced: then only words are searched.
        self.dense = True

    def search(
        self,
        query: str,
        readable: Collection[str],
        k: int = 5,
        *,
        history: Sequence[str] = (),
        legs: Collection[str] = ("dense", "lexical"),
    ) -> list[Hit]:
        """The `k` best passages, best first.

        readable    ids of the collections that may be searched; unknown ids are ignored
        history     the conversation's earlier questions, oldest first, for questions like "and on Sundays?"
        legs        which searches to fuse; where a reranker is set it reads the best of all legs again

        Raises `InvalidQuery` for a question that is empty or longer than the limit, `RerankerUnavailable`
        where one is set that can't be loaded.
        """
        query = query.strip()
        if not query:
            raise InvalidQuery("The question is empty.")
        if len(query) > self._limit:
            raise InvalidQuery(
                f"The question has {len(query):,} characters; at most {self._limit:,} are searched for."
            )
        keys = self._keys(readable)
        if not keys or k < 1:
            return []
        depth = max(DEPTH, 4 * k)
        ranked: dict[str, list[int]] = {}
        cosines: dict[int, float] = {}
        scores: dict[int, float] = {}
        weights: dict[str, float] = {}
        variants = resolve(_shorten(query), history)
        vectors = (
            self._embedder.embed([v.text for v in variants], query=True)
            if "dense" in legs and self.dense
            else None
        )
        for index, variant in enumerate(variants):
            suffix = "" if index == 0 else "_with_history"
            if vectors is not None:
                found = self._dense(keys, vectors[index], depth)
                ranked["dense" + suffix] = [id for id, _ in found]
                weights["dense" + suffix] = WEIGHTS["dense"] * variant.weight
                for id, cosine in found:
                    cosines[id] = max(cosine, cosines.get(id, -1.0))
            if "lexical" in legs:
                found = lexical.search([self._indexes.words(key) for key in keys], variant.text, depth)
                ranked["lexical" + suffix] = [id for id, _ in found]
                weights["lexical" + suffix] = WEIGHTS["lexical"] * variant.weight
                for id, score in found:
                    scores[id] = max(score, scores.get(id, 0.0))
        fused = fuse(ranked, weights)
        reranker = self._reranker if len(legs) > 1 else None
        wanted = k if reranker is None else max(k, CANDIDATES)
        hits = self._db.read_sync(lambda c: _hits(c, keys, fused, wanted, cosines, scores))
        if reranker is not None and hits:
            hits = rerank(reranker, variants[0].text, hits)[:k]
        return hits

    def close(self) -> None:
        """Give the threads back. Searches that are running end first."""
        self._pool.shutdown(wait=True)

    def answerability(
        self, query: str, hits: Sequence[Hit], readable: Collection[str], history: Sequence[str] = ()
    ) -> Answerability:
        """Whether these hits of `search` look as if they held an answer; see `rag.gate`. May embed a few
        dozen sentences."""
        wanted = query_terms(_shorten(query))
        words = [self._indexes.words(key) for key in self._keys(readable)]

        def nearest(texts: Sequence[str]) -> float:
            asked = [variant.text for variant in resolve(_shorten(query), history)]
            # Sentences go the way of questions, like with like: on the documents' way they would stand in
            # line behind an upload while somebody waits.
            vectors = self._embedder.embed([*asked, *texts], query=True)
            return float((vectors[len(asked) :] @ vectors[: len(asked)].T).max())

        return judge(hits, lexical.idf(words, wanted), nearest if self.dense else None)

    def _dense(self, keys: Sequence[int], vector: Vectors, depth: int) -> list[tuple[int, float]]:
        parts = self._pool.map(lambda key: self._indexes.vectors(key).search(vector, depth), keys)
        found = [item for part in parts for item in part]
        found.sort(key=lambda item: (-item[1], item[0]))
        return found[:depth]

    def _keys(self, readable: Collection[str]) -> list[int]:
        wanted = sorted(set(readable))

        def read(connection: sqlite3.Connection) -> list[int]:
            found: list[int] = []
            for first in range(0, len(wanted), 500):
                part = wanted[first : first + 500]
                marks = ",".join("?" * len(part))
                found += [
                    row[0]
                    for row in connection.execute(f"SELECT key FROM collections WHERE id IN ({marks})", part)
                ]
            return found

        return self._db.read_sync(read)


def _hits(
    connection: sqlite3.Connection,
    keys: Sequence[int],
    fused: Sequence[Fused],
    k: int,
    cosines: dict[int, float],
    scores: dict[int, float],
) -> list[Hit]:
    hits: list[Hit] = []
    allowed = set(keys)
    for candidate in fused:
        row = connection.execute(
            "SELECT p.*, d.id AS document_id, d.version, d.name, d.title, c.id AS collection_id, "
            "s.title AS section_title, substr(t.text, p.start + 1, p.stop - p.start) AS text "
            "FROM passages p JOIN documents d ON d.key = p.document "
            "JOIN collections c ON c.key = p.collection "
            "JOIN texts t ON t.document = p.document "
            "JOIN sections s ON s.document = p.document AND s.ordinal = p.section WHERE p.id = ?",
            (candidate.id,),
        ).fetchone()
        if row is None or row["collection"] not in allowed:
            continue
        hits.append(
            Hit(
                passage_id=candidate.id,
                document_id=row["document_id"],
                version=row["version"],
                collection_id=row["collection_id"],
                name=row["name"],
                title=row["title"],
                section=row["section"],
                section_title=row["section_title"],
                start=row["start"],
                end=row["stop"],
                text=row["text"],
                page=row["page"],
                score=candidate.score,
                ranks=dict(candidate.ranks),
                cosine=cosines.get(candidate.id),
                bm25=scores.get(candidate.id),
            )
        )
        if len(hits) == k:
            break
    return hits


def _shorten(query: str) -> str:
    if len(query) <= 2 * _QUERY_END:
        return query
    return f"{query[:_QUERY_END]}\n{query[-_QUERY_END:]}"
