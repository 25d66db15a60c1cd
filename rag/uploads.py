"""What changes documents: adding, replacing, retrying, cancelling, deleting, and the files behind them.

A file is stored before the row that names it and removed after it, so a crash leaves at worst a file that
no row names; the next start removes it. A deletion is one transaction over everything that can be searched.
"""

from __future__ import annotations

import logging
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable

from rag import records
from rag.database import Database
from rag.datadir import DataDir
from rag.errors import DuplicateDocument, NotFound, QuotaExceeded, RagError, UploadRefused
from rag.indexes import Indexes
from rag.ingest import Ingest
from rag.types import LibraryLimits

log = logging.getLogger("coread.rag")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


class Uploads:
    """The changing half of a `Library`. Thread-safe; errors are described there."""

    def __init__(
        self, database: Database, data_dir: DataDir, indexes: Indexes, ingest: Ingest, limits: LibraryLimits
    ) -> None:
        self._db, self._data_dir, self._indexes, self._ingest = database, data_dir, indexes, ingest
        self._limits = limits
        self._files = threading.Lock()  # a file is stored and named by a row, or found unused and removed
        self.callbacks: list[Callable[[str], None]] = []
        ingest.replaced = self.replaced

    def add(
        self, collection_id: str, name: str, data: bytes, by: str, *, document_id: str | None = None
    ) -> str:
        """Store the file, then queue the job; return the document's id."""
        self._check_upload(data)
        name = records.clean_name(name)
        new_id = checked_id(document_id) if document_id is not None else f"d-{secrets.token_hex(8)}"
        self._db.read_sync(lambda c: records.collection_key(c, collection_id))

        def write(connection: sqlite3.Connection) -> str:
            key = records.collection_key(connection, collection_id)
            same = _same_content(connection, key, content_hash)
            if same is not None:
                if same["status"] != "failed" or same["version"]:
                    raise DuplicateDocument(same["id"], same["name"])
                _queue(connection, same["key"], content_hash, name, len(data))
                connection.execute("UPDATE documents SET name = ? WHERE key = ?", (name, same["key"]))
                return str(same["id"])
            if connection.execute("SELECT 1 FROM documents WHERE id = ?", (new_id,)).fetchone():
                raise RagError(
                    f"There is a document with the id {new_id} already; replace it, or take another id."
                )
            self._check_quota(connection, key, len(data))
            now = time.time()
            cursor = connection.execute(
                "INSERT INTO documents(id, collection, name, created_by, created, updated) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (new_id, key, name, by, now, now),
            )
            _queue(connection, int(cursor.lastrowid or 0), content_hash, name, len(data))
            return new_id

        with self._files:
            content_hash = self._data_dir.store(data)
            try:
                added = self._db.write_sync(write)
            except BaseException:
                self._remove_unused(content_hash)
                raise
        self._ingest.notify()
        return added

    def replace(self, document_id: str, name: str, data: bytes, by: str) -> None:
        """Queue a new version; one that still waits is superseded."""
        self._check_upload(data)
        name = records.clean_name(name)

        def write(connection: sqlite3.Connection) -> tuple[int, str | None]:
            row = connection.execute("SELECT * FROM documents WHERE id = ?", (document_id,)).fetchone()
            if row is None:
                raise NotFound("There is no such document.")
            same = _same_content(connection, row["collection"], content_hash)
            if same is not None and not (same["key"] == row["key"] and same["status"] == "failed"):
                raise DuplicateDocument(same["id"], same["name"])
            pending = connection.execute(
                "SELECT content_hash, size FROM jobs WHERE document = ?", (row["key"],)
            ).fetchone()
            counted = max(row["size"], pending["size"] if pending else 0)
            self._check_quota(
                connection, row["collection"], max(row["size"], len(data)) - counted, documents=0
            )
            _queue(connection, row["key"], content_hash, name, len(data))
            return row["key"], pending["content_hash"] if pending else None

        with self._files:
            content_hash = self._data_dir.store(data)
            try:
                key, superseded = self._db.write_sync(write)
            except BaseException:
                self._remove_unused(content_hash)
                raise
            if superseded:
                self._remove_unused(superseded)
        if superseded:
            self._ingest.cancel(key)
        self._ingest.notify()

    def retry(self, document_id: str) -> None:
        """Queue a failed job again."""

        def write(connection: sqlite3.Connection) -> None:
            info = records.document_info(connection, document_id)
            if info.reason is not None:
                connection.execute(
                    "UPDATE jobs SET status = 'queued', reason = NULL, message = NULL, attempts = 0, "
                    "queued = MAX(?, queued + 1e-6) WHERE status = 'failed' "
                    "AND document = (SELECT key FROM documents WHERE id = ?)",
                    (time.time(), document_id),
                )

        self._db.write_sync(write)
        self._ingest.notify()

    def cancel(self, document_id: str) -> None:
        """Mark the job as failed, then stop whoever works on it."""

        def write(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT key FROM documents WHERE id = ?", (document_id,)).fetchone()
            if row is None:
                raise NotFound("There is no such document.")
            connection.execute(
                "UPDATE jobs SET status = 'failed', reason = 'cancelled', "
                "message = 'The upload was cancelled.' WHERE document = ? AND status != 'failed'",
                (row["key"],),
            )
            return int(row["key"])

        self._ingest.cancel(self._db.write_sync(write))
        self._ingest.settle(document_id)

    def delete(self, document_id: str) -> None:
        """One transaction first; what follows it is made good at the next start if it fails."""
        row = self._db.read_sync(
            lambda c: c.execute(
                "SELECT key, collection FROM documents WHERE id = ?", (document_id,)
            ).fetchone()
        )
        if row is None:
            raise NotFound("There is no such document.")
        key, collection = int(row["key"]), int(row["collection"])

        def write(connection: sqlite3.Connection) -> tuple[list[int], set[str]]:
            hashes = {
                r[0]
                for r in connection.execute(
                    "SELECT content_hash FROM documents WHERE key = ? UNION SELECT content_hash FROM jobs "
                    "WHERE document = ?",
                    (key, key),
                )
                if r[0] is not None
            }
            removed = records.remove_content(connection, key)
            if not connection.execute("DELETE FROM documents WHERE key = ?", (key,)).rowcount:
                raise NotFound("There is no such document.")
            return removed, hashes

        with self._indexes.locked(collection):
            removed, hashes = self._db.write_sync(write)
            self._ingest.cancel(key)
            try:
                self._indexes.changed(collection, removed)
            except Exception:
                log.exception("the indexes of a collection are rebuilt")
        self.tell(document_id)
        with self._files:
            for content_hash in hashes:
                self._remove_unused(content_hash)
        self._ingest.settle(document_id)

    def replaced(self, document_id: str, old_hash: str) -> None:
        """A new version is ready: nobody needs the old one's KV or file."""
        self.tell(document_id)
        with self._files:
            self._remove_unused(old_hash)

    def tell(self, document_id: str) -> None:
        """Call the listeners: this document's text is gone, or another one has taken its place."""
        for callback in self.callbacks:
            try:
                callback(document_id)
            except Exception:  # what others cache must not keep a deletion from being finished
                log.exception("a listener failed when document %s was deleted", document_id)

    def _remove_unused(self, content_hash: str) -> None:
        if not self._db.read_sync(lambda c: records.content_in_use(c, content_hash)):
            self._data_dir.remove(content_hash)

    def sweep_files(self) -> None:
        """Remove files that a crash left without a row."""
        with self._files:
            wanted = self._db.read_sync(records.contents)
            for content_hash in self._data_dir.stored():
                if content_hash not in wanted:
                    self._data_dir.remove(content_hash)

    def _check_upload(self, data: bytes) -> None:
        if not data:
            raise UploadRefused("The file is empty.")
        if len(data) > self._limits.upload_bytes:
            raise UploadRefused(
                f"The file has {len(data):,} bytes; at most {self._limits.upload_bytes:,} can be uploaded."
            )

    def _check_quota(
        self, connection: sqlite3.Connection, collection: int, size: int, documents: int = 1
    ) -> None:
        row = connection.execute(
            "SELECT COUNT(*) AS documents, COALESCE(SUM(MAX(d.size, COALESCE(j.size, 0))), 0) AS bytes "
            "FROM documents d LEFT JOIN jobs j ON j.document = d.key WHERE d.collection = ?",
            (collection,),
        ).fetchone()
        if row["documents"] + documents > self._limits.documents_per_collection:
            raise QuotaExceeded(
                "documents in the collection",
                row["documents"] + documents,
                self._limits.documents_per_collection,
            )
        if row["bytes"] + size > self._limits.bytes_per_collection:
            raise QuotaExceeded(
                "bytes in the collection", row["bytes"] + size, self._limits.bytes_per_collection
            )


def _queue(connection: sqlite3.Connection, document: int, content_hash: str, name: str, size: int) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO jobs(document, content_hash, name, size, status, queued) "
        "VALUES (?, ?, ?, ?, 'queued', ?)",
        (document, content_hash, name, size, time.time()),
    )


def _same_content(connection: sqlite3.Connection, collection: int, content_hash: str) -> sqlite3.Row | None:
    """The collection's document of this content, ready, being read or failed; a replacement that failed is
    nobody's content."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT d.key, d.id, d.name, d.version, j.status FROM documents d "
        "LEFT JOIN jobs j ON j.document = d.key WHERE d.collection = ? "
        "AND (d.content_hash = ? OR j.content_hash = ? AND NOT (j.status = 'failed' AND d.version > 0)) "
        "ORDER BY d.key LIMIT 1",
        (collection, content_hash, content_hash),
    ).fetchone()
    return row


def checked_id(id: str) -> str:
    """The id, if it is one. Raises RagError."""
    if not _ID.fullmatch(id):
        raise RagError(f"The id {id[:80]!r} may only have letters, digits, '-', '_' and '.', at most 80.")
    return id
