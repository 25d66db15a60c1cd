"""Reading and writing single rows of the knowledge base. Functions over a connection, no state."""

from __future__ import annotations

import json
import re
import sqlite3
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import cast

from rag.embed import Vectors
from rag.errors import NotFound
from rag.parse.types import Parsed, Section
from rag.split import Passage
from rag.types import CollectionInfo, DocumentInfo, DocumentText, DocumentVersion, SectionText, Status

_DOCUMENT = (
    "SELECT d.*, c.id AS collection_id, j.status AS job_status, j.reason, j.message, j.progress, "
    "j.size AS job_size "
    "FROM documents d JOIN collections c ON c.key = d.collection LEFT JOIN jobs j ON j.document = d.key "
)
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def clean_name(name: str) -> str:
    """A name as it is shown: one line of at most 255 characters, nothing invisible, no direction overrides.

    It is only ever data: no path is made of it, so "../../x" stays as it is.
    """
    visible = "".join(
        "\ufffd" if unicodedata.category(c) == "Cs" else c
        for c in name
        if unicodedata.category(c) not in _INVISIBLE or unicodedata.category(c) == "Cs"
    )
    return re.sub(r"\s+", " ", unicodedata.normalize("NFC", visible)).strip()[:255] or "Untitled"


def collection_key(connection: sqlite3.Connection, collection_id: str) -> int:
    row = connection.execute("SELECT key FROM collections WHERE id = ?", (collection_id,)).fetchone()
    if row is None:
        raise NotFound("There is no such collection.")
    return int(row[0])


def collections(connection: sqlite3.Connection, readable: Collection[str] | None) -> list[CollectionInfo]:
    rows = connection.execute(
        "SELECT c.*, COUNT(d.key) AS documents, COALESCE(SUM(d.passages), 0) AS passages, "
        "COALESCE(SUM(d.size), 0) AS bytes, "
        "COALESCE(SUM(d.version = 0 AND j.status = 'failed'), 0) AS failed "
        "FROM collections c LEFT JOIN documents d ON d.collection = c.key "
        "LEFT JOIN jobs j ON j.document = d.key "
        "GROUP BY c.key ORDER BY c.key"
    )
    return [
        CollectionInfo(
            r["id"],
            r["name"],
            r["owner"],
            r["created"],
            r["documents"],
            r["passages"],
            r["bytes"],
            r["failed"],
        )
        for r in rows
        if readable is None or r["id"] in readable
    ]


def documents(connection: sqlite3.Connection, collection_ids: Collection[str]) -> list[DocumentInfo]:
    found: list[DocumentInfo] = []
    for collection_id in sorted(set(collection_ids)):
        rows = connection.execute(f"{_DOCUMENT} WHERE c.id = ? ORDER BY d.name, d.key", (collection_id,))
        found += [_info(row) for row in rows]
    return found


def document_info(connection: sqlite3.Connection, document_id: str) -> DocumentInfo:
    row = connection.execute(f"{_DOCUMENT} WHERE d.id = ?", (document_id,)).fetchone()
    if row is None:
        raise NotFound("There is no such document.")
    return _info(row)


def document_info_by_key(connection: sqlite3.Connection, key: int) -> DocumentInfo:
    row = connection.execute(f"{_DOCUMENT} WHERE d.key = ?", (key,)).fetchone()
    if row is None:
        raise NotFound("There is no such document.")
    return _info(row)


def versions(connection: sqlite3.Connection, document_id: str) -> list[DocumentVersion]:
    """The versions that became ready, newest first."""
    rows = connection.execute(
        "SELECT v.version, v.name, v.size, v.characters, v.passages, v.ready FROM versions v "
        "JOIN documents d ON d.key = v.document WHERE d.id = ? ORDER BY v.version DESC",
        (document_id,),
    )
    return [DocumentVersion(*row) for row in rows]


def document_text(
    connection: sqlite3.Connection, document_id: str, readable: Collection[str]
) -> DocumentText:
    row = connection.execute(
        "SELECT d.*, c.id AS collection_id, t.text FROM documents d "
        "JOIN collections c ON c.key = d.collection JOIN texts t ON t.document = d.key WHERE d.id = ?",
        (document_id,),
    ).fetchone()
    if row is None or row["collection_id"] not in readable:
        raise NotFound("There is no such document.")
    text: str = row["text"]
    sections = tuple(
        SectionText(
            s["ordinal"],
            s["title"],
            s["level"],
            s["start"],
            s["stop"],
            text[s["start"] : s["stop"]],
            s["page"],
        )
        for s in connection.execute(
            "SELECT * FROM sections WHERE document = ? ORDER BY ordinal", (row["key"],)
        )
    )
    return DocumentText(
        row["id"], row["collection_id"], row["name"], row["title"], row["version"], text, sections
    )


def remove_content(connection: sqlite3.Connection, key: int) -> list[int]:
    """Remove text, sections and passages of a document, embeddings and terms with them; return the passages'
    ids."""
    ids = [r[0] for r in connection.execute("SELECT id FROM passages WHERE document = ?", (key,))]
    for table in ("passages", "sections", "texts"):
        connection.execute(f"DELETE FROM {table} WHERE document = ?", (key,))
    return ids


def write_content(
    connection: sqlite3.Connection,
    key: int,
    collection: int,
    parsed: Parsed,
    sections: Sequence[Section],
    passages: Sequence[Passage],
    vectors: Vectors,
    prepared: Sequence[bytes],
) -> list[int]:
    """Write a document's content; return the new passages' ids. `prepared` is `lexical.prepare` of each."""
    connection.execute("INSERT INTO texts(document, text) VALUES (?, ?)", (key, parsed.text))
    connection.executemany(
        "INSERT INTO sections(document, ordinal, start, stop, title, level, page) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(key, i, s.start, s.end, s.title, s.level, parsed.page_at(s.start)) for i, s in enumerate(sections)],
    )
    ids: list[int] = []
    for passage, vector, terms in zip(passages, vectors, prepared, strict=True):
        cursor = connection.execute(
            "INSERT INTO passages(document, collection, section, start, stop, page, tokens) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (key, collection, passage.section, passage.start, passage.end, passage.page, passage.tokens),
        )
        ids.append(int(cursor.lastrowid or 0))
        connection.execute(
            "INSERT INTO embeddings(passage, vector) VALUES (?, ?)", (ids[-1], vector.astype("<f4").tobytes())
        )
        connection.execute("INSERT INTO passage_terms(passage, terms) VALUES (?, ?)", (ids[-1], terms))
    return ids


def content_in_use(connection: sqlite3.Connection, content_hash: str) -> bool:
    """True while any document or job needs the stored file."""
    return (
        connection.execute(
            "SELECT 1 FROM documents WHERE content_hash = ? "
            "UNION ALL SELECT 1 FROM jobs WHERE content_hash = ? LIMIT 1",
            (content_hash, content_hash),
        ).fetchone()
        is not None
    )


def homes(connection: sqlite3.Connection, document_ids: Iterable[str]) -> dict[str, str]:
    """The collection of each document that exists, by id."""
    rows = connection.execute(
        "SELECT d.id, c.id FROM documents d JOIN collections c ON c.key = d.collection "
        "WHERE d.id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(document_ids)),),
    )
    return {row[0]: row[1] for row in rows}


def present_versions(connection: sqlite3.Connection, document_ids: Iterable[str]) -> dict[str, int]:
    """The version of each document that exists, by id; 0 where none has been ready yet."""
    rows = connection.execute(
        "SELECT id, version FROM documents WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(document_ids)),),
    )
    return {row[0]: int(row[1]) for row in rows}


def sole_bytes(connection: sqlite3.Connection, document_id: str) -> int:
    """Bytes of the stored files, the version's and the waiting upload's, that no other document needs of the
    same person in collections of the same owner.

    Whether somebody else has stored the same file must not show: it would tell what they have.
    """
    needed = (
        "SELECT d.key, d.content_hash, d.size FROM documents d WHERE d.content_hash IS NOT NULL "
        "UNION SELECT j.document, j.content_hash, j.size FROM jobs j"
    )
    row = connection.execute(
        f"WITH needed(key, content_hash, size) AS ({needed}), "
        "whose(key, id, person, owner) AS (SELECT d.key, d.id, d.created_by, c.owner "
        "FROM documents d JOIN collections c ON c.key = d.collection) "
        "SELECT COALESCE(SUM(n.size), 0) FROM needed n JOIN whose w ON w.key = n.key WHERE w.id = ? "
        "AND NOT EXISTS (SELECT 1 FROM needed o JOIN whose v ON v.key = o.key WHERE o.key != n.key "
        "AND o.content_hash = n.content_hash AND v.person = w.person AND v.owner = w.owner)",
        (document_id,),
    ).fetchone()
    return int(row[0])


def contents(connection: sqlite3.Connection) -> set[str]:
    """The content hashes of all files that must be stored."""
    rows = connection.execute(
        "SELECT content_hash FROM documents WHERE content_hash IS NOT NULL "
        "UNION SELECT content_hash FROM jobs"
    )
    return {row[0] for row in rows}


def meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute("SELECT value FROM rag_meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO rag_meta(key, value) VALUES (?, ?)", (key, value))


def _info(row: sqlite3.Row) -> DocumentInfo:
    job: str | None = row["job_status"]
    ready = row["version"] > 0
    status = cast(Status, "ready" if job is None or (job == "failed" and ready) else job)
    return DocumentInfo(
        id=row["id"],
        collection_id=row["collection_id"],
        name=row["name"],
        title=row["title"] or row["name"],
        status=status,
        reason=row["reason"],
        message=row["message"],
        progress=1.0 if job is None else float(row["progress"]),
        version=row["version"],
        size=row["size"] if ready else (row["job_size"] or 0),
        format=row["format"],
        encoding=row["encoding"],
        confidence=row["confidence"],
        characters=row["characters"],
        pages=row["pages"],
        passages=row["passages"],
        created_by=row["created_by"],
        created=row["created"],
        updated=row["updated"],
    )
