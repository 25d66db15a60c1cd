"""Lexical search with BM25: one FTS5 index a collection, in the same database as the passages.

One index each, so that how often a word stands in documents that a person may not read never moves the
scores they see; in the same database, so that passages and index change in one transaction. FTS5 sees terms
that are already cut (`rag.terms`), since its own tokenizers take a Chinese sentence for one word.

FTS5 finds and pre-sorts the candidates of each collection; the final score counts words over all readable
collections together (Robertson and Zaragoza 2009, with the never negative idf of Lucene), so that passages
of a collection of one page and of a collection of thousands compare. Only passages that contain a term of
the question are returned: nothing is found with a score of zero.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from rag.terms import query_terms, terms

K1, B = 1.2, 0.75
#: A term in more than this share of the passages decides nothing, but costs the most.
_COMMON = 0.4
_SMALL = 64


def create(connection: sqlite3.Connection, collection: int) -> None:
    """Make the index of the collection with this integer key."""
    table = _table(collection)
    # "ascii" keeps everything outside ASCII together, so every term arrives as `terms` cut it.
    connection.execute(f"CREATE VIRTUAL TABLE {table} USING fts5(terms, tokenize=\"ascii tokenchars '-._'\")")
    connection.execute(f"CREATE VIRTUAL TABLE {table}_vocabulary USING fts5vocab('{table}', 'row')")
    connection.execute(
        "INSERT INTO lexical_totals(collection, passages, terms) VALUES (?, 0, 0)", (collection,)
    )


def drop(connection: sqlite3.Connection, collection: int) -> None:
    """Remove the index with everything in it; it may already be gone."""
    connection.execute(f"DROP TABLE IF EXISTS {_table(collection)}_vocabulary")
    connection.execute(f"DROP TABLE IF EXISTS {_table(collection)}")
    connection.execute("DELETE FROM lexical_totals WHERE collection = ?", (collection,))


def prepare(text: str) -> str:
    """A passage as the index stores it. Takes time, so it is done before the write begins."""
    return " ".join(terms(text))


def add(connection: sqlite3.Connection, collection: int, passages: Iterable[tuple[int, str]]) -> None:
    """Add (passage id, prepared text)."""
    rows = list(passages)
    connection.executemany(f"INSERT INTO {_table(collection)}(rowid, terms) VALUES (?, ?)", rows)
    _count(connection, collection, len(rows), sum(_length(text) for _, text in rows))


def remove(connection: sqlite3.Connection, collection: int, passages: Iterable[int]) -> None:
    """Remove passages by id; unknown ids are no error."""
    table = _table(collection)
    for passage in passages:
        row = connection.execute(f"SELECT terms FROM {table} WHERE rowid = ?", (passage,)).fetchone()
        if row is not None:
            connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (passage,))
            _count(connection, collection, -1, -_length(row[0]))


def ids(connection: sqlite3.Connection, collection: int) -> set[int]:
    """The ids of all passages in the index."""
    return {int(row[0]) for row in connection.execute(f"SELECT rowid FROM {_table(collection)}")}


def search(
    connection: sqlite3.Connection, collections: Sequence[int], query: str, k: int
) -> list[tuple[int, float]]:
    """The `k` best (passage id, BM25 score > 0) of these collections, best first; ties by smaller id."""
    wanted = query_terms(query)
    totals = {c: _totals(connection, c) for c in collections}
    count = sum(n for n, _ in totals.values())
    if not wanted or not count:
        return []
    average = sum(length for _, length in totals.values()) / count
    found_in = {c: _document_frequencies(connection, c, wanted) for c in collections}
    frequency: Counter[str] = Counter()
    for counts in found_in.values():
        frequency.update(counts)
    telling = [t for t, n in frequency.items() if count <= _SMALL or n <= _COMMON * count] or list(frequency)
    idf = {t: math.log(1.0 + (count - frequency[t] + 0.5) / (frequency[t] + 0.5)) for t in telling}
    scored: list[tuple[int, float]] = []
    for collection in collections:
        present = [t for t in telling if t in found_in[collection]]
        for passage, text in _candidates(connection, collection, present, 4 * k):
            scored.append((passage, _score(text, idf, average)))
    scored.sort(key=lambda item: (-item[1], item[0]))
    return scored[:k]


def idf(
    connection: sqlite3.Connection, collections: Sequence[int], wanted: Sequence[str]
) -> dict[str, float]:
    """How telling each term is in these collections; terms that don't occur at all are the most telling."""
    count = sum(_totals(connection, c)[0] for c in collections)
    frequency: Counter[str] = Counter()
    for collection in collections:
        frequency.update(_document_frequencies(connection, collection, list(wanted)))
    return {t: math.log(1.0 + (count - frequency[t] + 0.5) / (frequency[t] + 0.5)) for t in wanted}


def _score(text: str, idf: dict[str, float], average: float) -> float:
    words = text.split(" ")
    norm = K1 * (1.0 - B + B * len(words) / average)
    counts = Counter(w for w in words if w in idf)
    return sum(idf[t] * n * (K1 + 1.0) / (n + norm) for t, n in counts.items())


def _candidates(
    connection: sqlite3.Connection, collection: int, wanted: list[str], limit: int
) -> list[tuple[int, str]]:
    if not wanted:
        return []
    table = _table(collection)
    # A quoted FTS5 string has no operators in it, whatever the person typed.
    match = " OR ".join('"' + term.replace('"', '""') + '"' for term in wanted)
    rows = connection.execute(
        f"SELECT rowid, terms FROM {table} WHERE {table} MATCH ? ORDER BY rank LIMIT ?", (match, limit)
    )
    return [(int(row[0]), row[1]) for row in rows]


def _document_frequencies(
    connection: sqlite3.Connection, collection: int, wanted: list[str]
) -> dict[str, int]:
    counts: dict[str, int] = {}
    for term in wanted:
        row = connection.execute(
            f"SELECT doc FROM {_table(collection)}_vocabulary WHERE term = ?", (term,)
        ).fetchone()
        if row is not None:
            counts[term] = int(row[0])
    return counts


def _totals(connection: sqlite3.Connection, collection: int) -> tuple[int, int]:
    row = connection.execute(
        "SELECT passages, terms FROM lexical_totals WHERE collection = ?", (collection,)
    ).fetchone()
    return (int(row[0]), int(row[1])) if row else (0, 0)


def _count(connection: sqlite3.Connection, collection: int, passages: int, length: int) -> None:
    connection.execute(
        "UPDATE lexical_totals SET passages = passages + ?, terms = terms + ? WHERE collection = ?",
        (passages, length, collection),
    )


def _length(text: str) -> int:
    return text.count(" ") + 1


def _table(collection: int) -> str:
    return f"lexical_{int(collection)}"
