"""Do SQLite, the vector indexes, the lexical indexes and the files agree? And making them agree."""

from __future__ import annotations

import sqlite3

from rag import lexical, records
from rag.database import Database
from rag.datadir import DataDir
from rag.embed import Embedder
from rag.search import Searcher
from rag.split import lead
from rag.types import CheckReport

_BATCH = 256


def check(database: Database, data_dir: DataDir, searcher: Searcher) -> CheckReport:
    """Compare every store with SQLite. Files of uploads that begin or end meanwhile may look like faults."""
    problems: list[str] = []
    rows = database.read_sync(
        lambda c: [(r["key"], r["id"]) for r in c.execute("SELECT key, id FROM collections ORDER BY key")]
    )
    passages = 0
    for key, id in rows:
        # Under the lock SQLite and index can't change apart from each other.
        with searcher.locked(key):
            truth, embedded, words, totals = database.read_sync(lambda c, k=key: _collection_ids(c, k))  # type: ignore[misc]
            vectors = searcher.index(key).ids()
        passages += len(truth)
        for store, ids in (("embeddings", embedded), ("vector index", vectors), ("lexical index", words)):
            if missing := len(truth - ids):
                problems.append(f"Collection {id}: {missing:,} passages are missing from the {store}.")
            if extra := len(ids - truth):
                problems.append(
                    f"Collection {id}: the {store} holds {extra:,} passages that no longer exist."
                )
        if totals != len(truth):
            problems.append(
                f"Collection {id}: the lexical totals count {totals:,} of {len(truth):,} passages."
            )
    wanted = database.read_sync(records.contents)
    stored = set(data_dir.stored())
    problems += [f"The file {h} is missing." for h in sorted(wanted - stored)]
    problems += [f"The file {h} belongs to no document." for h in sorted(stored - wanted)]
    problems += database.read_sync(_broken_documents)
    documents = database.read_sync(lambda c: int(c.execute("SELECT COUNT(*) FROM documents").fetchone()[0]))
    return CheckReport(len(rows), documents, passages, len(stored), tuple(problems))


def reembed(database: Database, searcher: Searcher, embedder: Embedder, *, embeddings: bool) -> None:
    """Rebuild the lexical indexes, and the embeddings if wanted, from the texts; drop the vector indexes.

    Each collection changes in one transaction, and searches go on meanwhile.
    """
    keys = database.read_sync(lambda c: [r[0] for r in c.execute("SELECT key FROM collections ORDER BY key")])
    for key in keys:
        with searcher.locked(key):
            texts = database.read_sync(lambda c, k=key: _passage_texts(c, k))  # type: ignore[misc]
            prepared = [(id, lexical.prepare(text)) for id, text in texts]
            vectors: list[tuple[int, bytes]] = []
            for first in range(0, len(texts) if embeddings else 0, _BATCH):
                part = texts[first : first + _BATCH]
                made = embedder.embed([text for _, text in part])
                vectors += [(id, v.astype("<f4").tobytes()) for (id, _), v in zip(part, made, strict=True)]

            def write(
                connection: sqlite3.Connection,
                key: int = key,
                prepared: list[tuple[int, str]] = prepared,
                vectors: list[tuple[int, bytes]] = vectors,
            ) -> None:
                lexical.drop(connection, key)
                lexical.create(connection, key)
                lexical.add(connection, key, prepared)
                connection.executemany(
                    "INSERT OR REPLACE INTO embeddings(passage, vector) VALUES (?, ?)", vectors
                )

            database.write_sync(write)
            searcher.forget(key)


def _collection_ids(connection: sqlite3.Connection, key: int) -> tuple[set[int], set[int], set[int], int]:
    truth = {r[0] for r in connection.execute("SELECT id FROM passages WHERE collection = ?", (key,))}
    embedded = {
        r[0]
        for r in connection.execute(
            "SELECT e.passage FROM embeddings e JOIN passages p ON p.id = e.passage WHERE p.collection = ?",
            (key,),
        )
    }
    row = connection.execute("SELECT passages FROM lexical_totals WHERE collection = ?", (key,)).fetchone()
    return truth, embedded, lexical.ids(connection, key), int(row[0]) if row else 0


def _passage_texts(connection: sqlite3.Connection, key: int) -> list[tuple[int, str]]:
    """Each passage as it was embedded: where it is from, then its text."""
    rows = connection.execute(
        "SELECT p.id, d.title, s.title AS section, substr(t.text, p.start + 1, p.stop - p.start) AS text "
        "FROM passages p JOIN documents d ON d.key = p.document JOIN texts t ON t.document = p.document "
        "JOIN sections s ON s.document = p.document AND s.ordinal = p.section "
        "WHERE p.collection = ? ORDER BY p.id",
        (key,),
    )
    return [(r["id"], f"{lead(r['title'], r['section'])}\n{r['text']}") for r in rows]


def _broken_documents(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT d.id, d.version, d.passages, d.characters, length(t.text) AS length, "
        "(SELECT COUNT(*) FROM passages p WHERE p.document = d.key) AS counted, "
        "(SELECT 1 FROM jobs j WHERE j.document = d.key) AS job "
        "FROM documents d LEFT JOIN texts t ON t.document = d.key"
    )
    problems: list[str] = []
    for r in rows:
        if r["version"] == 0 and r["job"] is None:
            problems.append(f"Document {r['id']} is neither ready nor queued.")
        if r["version"] > 0 and (r["length"] is None or r["length"] != r["characters"]):
            problems.append(f"Document {r['id']} has lost its text.")
        if r["version"] > 0 and (r["counted"] != r["passages"] or not r["counted"]):
            problems.append(f"Document {r['id']} has {r['counted']:,} of {r['passages']:,} passages.")
    return problems
