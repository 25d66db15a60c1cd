"""Do SQLite, the vector indexes, the lexical indexes and the files agree? And making them agree."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

from rag import lexical, records
from rag.database import Database
from rag.datadir import DATABASE, DataDir, stored_files
from rag.embed import Embedder
from rag.errors import DatabaseError
from rag.indexes import Indexes
from rag.split import lead
from rag.types import CheckReport

_BATCH = 256


def check(database: Database, data_dir: DataDir, indexes: Indexes) -> CheckReport:
    """Compare every store with SQLite. Files of uploads that begin or end meanwhile may look like faults."""
    problems: list[str] = []
    rows = database.read_sync(
        lambda c: [(r["key"], r["id"]) for r in c.execute("SELECT key, id FROM collections ORDER BY key")]
    )
    passages = 0
    for key, id in rows:
        # Under the lock SQLite and the indexes can't change apart from each other.
        with indexes.locked(key):
            truth, stored = database.read_sync(partial(_collection_ids, key=key))
            stored |= {"vector index": indexes.vectors(key).ids(), "lexical index": indexes.words(key).ids()}
        passages += len(truth)
        problems += _disagreements(id, truth, stored)
    files = set(data_dir.stored())
    documents, others = database.read_sync(lambda c: _documents_and_files(c, files))
    return CheckReport(len(rows), documents, passages, len(files), tuple(problems + others))


def check_folder(path: Path) -> CheckReport | None:
    """`check` of what lies on the disk, beside whoever owns the folder and without a model; None where there
    is no database yet. Raises `DatabaseError`.

    The indexes in memory are made of what is compared here. As with `check`, files of uploads that begin or
    end meanwhile may look like faults.
    """
    if not (path / DATABASE).exists():
        return None
    try:
        with closing(sqlite3.connect(f"{(path / DATABASE).as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN")  # all rows are of one moment
            files = set(stored_files(path))
            rows = connection.execute("SELECT key, id FROM collections ORDER BY key").fetchall()
            problems: list[str] = []
            passages = 0
            for row in rows:
                truth, stored = _collection_ids(connection, row["key"])
                passages += len(truth)
                problems += _disagreements(row["id"], truth, stored)
            documents, others = _documents_and_files(connection, files)
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(f"The library in {path} can't be checked: {error}.") from error
    return CheckReport(len(rows), documents, passages, len(files), tuple(problems + others))


def _disagreements(collection: str, truth: set[int], stored: dict[str, set[int]]) -> list[str]:
    problems: list[str] = []
    for store, ids in stored.items():
        if missing := len(truth - ids):
            problems.append(f"Collection {collection}: {missing:,} passages are missing from the {store}.")
        if extra := len(ids - truth):
            problems.append(
                f"Collection {collection}: the {store} holds {extra:,} passages that no longer exist."
            )
    return problems


def _documents_and_files(connection: sqlite3.Connection, files: set[str]) -> tuple[int, list[str]]:
    """How many documents there are, and what is wrong with them and their files."""
    wanted = records.contents(connection)
    problems = [f"The file {h} is missing." for h in sorted(wanted - files)]
    problems += [f"The file {h} belongs to no document." for h in sorted(files - wanted)]
    problems += _broken_documents(connection)
    return int(connection.execute("SELECT COUNT(*) FROM documents").fetchone()[0]), problems


def reindex(database: Database, indexes: Indexes, embedder: Embedder, *, embeddings: bool) -> None:
    """Count every passage's terms anew, and embed it anew if wanted, from the texts; drop the indexes.

    Searches, uploads and deletions go on meanwhile: each batch is a transaction of its own, and a passage
    that is deleted before its turn comes is passed over.
    """
    for key in database.read_sync(lambda c: [r[0] for r in c.execute("SELECT key FROM collections")]):
        ids = sorted(database.read_sync(partial(_ids, key=key)))
        for first in range(0, len(ids), _BATCH):
            _restore(database, ids[first : first + _BATCH], embedder if embeddings else None)
        with indexes.locked(key):
            indexes.forget(key)


def restore_terms(database: Database) -> int:
    """Count the terms of passages that were stored without, or of all where a text is cut differently than it
    was; how many passages that were.

    Earlier versions kept an FTS5 table a collection instead; these are dropped.
    """
    version = str(lexical.VERSION)
    present = database.read_sync(lambda c: records.meta(c, "terms"))
    ids = database.read_sync(
        lambda c: [
            r[0]
            for r in c.execute(
                "SELECT p.id FROM passages p LEFT JOIN passage_terms t ON t.passage = p.id "
                "WHERE t.passage IS NULL OR ? ORDER BY p.id",
                (present != version,),
            )
        ]
    )
    for first in range(0, len(ids), _BATCH):
        _restore(database, ids[first : first + _BATCH], None)
    if present != version:
        database.write_sync(lambda c: records.set_meta(c, "terms", version))
    old = database.read_sync(
        lambda c: [
            r[0]
            for r in c.execute(
                "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%' "
                "AND name LIKE 'lexical\\_%' ESCAPE '\\' ORDER BY name DESC"
            )
        ]
    )
    if old:  # a vocabulary's name is longer than its table's, so it goes first
        database.write_sync(lambda c: [c.execute(f'DROP TABLE "{name}"').rowcount for name in old])
    return len(ids)


def _restore(database: Database, ids: list[int], embedder: Embedder | None) -> None:
    texts = database.read_sync(lambda c: _passage_texts(c, ids))
    prepared = [(lexical.prepare(text), id) for id, text in texts]
    vectors: list[tuple[bytes, int]] = []
    if embedder is not None and texts:
        made = embedder.embed([text for _, text in texts])
        vectors = [(v.astype("<f4").tobytes(), id) for (id, _), v in zip(texts, made, strict=True)]

    def write(connection: sqlite3.Connection) -> None:
        for table, column, rows in (("passage_terms", "terms", prepared), ("embeddings", "vector", vectors)):
            connection.executemany(
                f"INSERT OR REPLACE INTO {table}({column}, passage) "
                "SELECT ?1, id FROM passages WHERE id = ?2",
                rows,
            )

    database.write_sync(write)


def _ids(connection: sqlite3.Connection, key: int) -> set[int]:
    return {r[0] for r in connection.execute("SELECT id FROM passages WHERE collection = ?", (key,))}


def _collection_ids(connection: sqlite3.Connection, key: int) -> tuple[set[int], dict[str, set[int]]]:
    """The collection's passages, and those of them that have an embedding, and terms."""
    stored = {
        name: {
            r[0]
            for r in connection.execute(
                f"SELECT x.passage FROM {table} x JOIN passages p ON p.id = x.passage WHERE p.collection = ?",
                (key,),
            )
        }
        for name, table in (("embeddings", "embeddings"), ("stored terms", "passage_terms"))
    }
    return _ids(connection, key), stored


def _passage_texts(connection: sqlite3.Connection, ids: list[int]) -> list[tuple[int, str]]:
    """Each passage as it was embedded: where it is from, then its text."""
    marks = ",".join("?" * len(ids))
    rows = connection.execute(
        "SELECT p.id, d.title, s.title AS section, substr(t.text, p.start + 1, p.stop - p.start) AS text "
        "FROM passages p JOIN documents d ON d.key = p.document JOIN texts t ON t.document = p.document "
        "JOIN sections s ON s.document = p.document AND s.ordinal = p.section "
        f"WHERE p.id IN ({marks}) ORDER BY p.id",
        ids,
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
