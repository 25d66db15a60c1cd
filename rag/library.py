"""The knowledge base: collections of documents that can be added, read, searched and deleted.

Every method may be called from any thread and may block; on an event loop use `rag.aio.AsyncLibrary`.
Methods that read take the ids of the collections that the caller may read. Who may change something is
decided by whoever calls.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future

from rag import lexical, records
from rag.check import check, reembed
from rag.database import Database, Migration
from rag.datadir import DataDir
from rag.embed import Courtesy, Embedder
from rag.errors import DuplicateDocument, NotFound, QuotaExceeded, RagError, UploadRefused
from rag.gate import Answerability
from rag.ingest import Ingest
from rag.parse.types import Limits
from rag.schema import MIGRATIONS
from rag.search import Searcher
from rag.types import (
    CheckReport,
    CollectionInfo,
    DocumentInfo,
    DocumentText,
    Hit,
    LibraryLimits,
    SectionText,
)

log = logging.getLogger("coread.rag")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


class Library:
    """Opens the knowledge base in a data folder that the caller owns (`DataDir`), and works until `close`.

    embedder     makes vectors; is not closed by `close`
    courtesy     lets embedding of uploads yield to answers being written
    threads      documents that are read at the same time
    """

    def __init__(
        self,
        data_dir: DataDir,
        database: Database,
        embedder: Embedder,
        *,
        limits: LibraryLimits | None = None,
        parse_limits: Limits | None = None,
        courtesy: Courtesy | None = None,
        threads: int = 2,
    ) -> None:
        database.migrate(MIGRATIONS)
        self.limits = limits or LibraryLimits()
        self._data_dir, self._db, self._embedder = data_dir, database, embedder
        self._files = threading.Lock()  # a file is stored and named by a row, or found unused and removed
        self._callbacks: list[Callable[[str], None]] = []
        self.searcher = Searcher(database, embedder, query_characters=self.limits.query_characters)
        self._ingest = Ingest(
            database,
            data_dir,
            self.searcher,
            embedder,
            limits=parse_limits,
            courtesy=courtesy,
            threads=threads,
            replaced=self._on_replaced,
        )
        self._sweep_files()
        self._adopt_embedder()
        self._ingest.start()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        embedder: Embedder,
        *,
        migrations: Iterable[Migration] = (),
        limits: LibraryLimits | None = None,
        parse_limits: Limits | None = None,
        courtesy: Courtesy | None = None,
        threads: int = 2,
    ) -> Library:
        """Own the folder, open its database (and further schemas) and library; end with `close(all=True)`.

        Raises `DataDirUnwritable`, `DataDirLocked`, `DatabaseError`.
        """
        data_dir = DataDir(path)
        try:
            database = Database(data_dir.database, migrations)
            try:
                return cls(
                    data_dir, database, embedder,
                    limits=limits, parse_limits=parse_limits, courtesy=courtesy, threads=threads,
                )  # fmt: skip
            except BaseException:
                database.close()
                raise
        except BaseException:
            data_dir.close()
            raise

    @property
    def database(self) -> Database:
        return self._db

    @property
    def data_dir(self) -> DataDir:
        return self._data_dir

    def close(self, *, all: bool = False) -> None:
        """End the work on uploads; with `all` also close the database and give up the data folder."""
        self._ingest.stop()
        if all:
            self._db.close()
            self._data_dir.close()

    def on_delete(self, callback: Callable[[str], None]) -> None:
        """Have `callback(document_id)` called when a document's text is gone: deleted, or replaced.

        It is called from the deleting thread after the deletion is durable, before the caller is answered.
        """
        self._callbacks.append(callback)

    # Collections

    def create_collection(self, name: str, owner: str, id: str | None = None) -> CollectionInfo:
        """Make a collection; with an `id` that exists already, return that one.

        Raises RagError for an id with other characters than letters, digits, "-", "_" and ".".
        """
        wanted = _checked_id(id) if id is not None else f"c-{secrets.token_hex(8)}"

        def write(connection: sqlite3.Connection) -> None:
            if connection.execute("SELECT 1 FROM collections WHERE id = ?", (wanted,)).fetchone():
                return
            cursor = connection.execute(
                "INSERT INTO collections(id, name, owner, created) VALUES (?, ?, ?, ?)",
                (wanted, records.clean_name(name), owner, time.time()),
            )
            lexical.create(connection, int(cursor.lastrowid or 0))

        self._db.write_sync(write)
        return self.collections({wanted})[0]

    def collections(self, readable: Collection[str] | None) -> list[CollectionInfo]:
        """The collections among `readable`, or all of them for None, in the order they were made."""
        return self._db.read_sync(lambda c: records.collections(c, readable))

    def delete_collection(self, collection_id: str) -> None:
        """Delete a collection with all its documents. Raises `NotFound`."""
        for info in self.documents({collection_id}):
            self.delete_document(info.id)

        def write(connection: sqlite3.Connection) -> int:
            key = records.collection_key(connection, collection_id)
            if connection.execute("SELECT 1 FROM documents WHERE collection = ?", (key,)).fetchone():
                raise RagError(
                    "A document was added while the collection was being deleted; delete it again."
                )
            lexical.drop(connection, key)
            connection.execute("DELETE FROM collections WHERE key = ?", (key,))
            return key

        self.searcher.forget(self._db.write_sync(write))

    # Documents

    def add_document(
        self, collection_id: str, name: str, data: bytes, by: str, *, document_id: str | None = None
    ) -> str:
        """Store an upload and queue it; return the document's id. `wait` tells when it can be found.

        A failed upload with the same content is tried again under its old id.
        Raises `UploadRefused`, `NotFound` (collection), `DuplicateDocument`, `QuotaExceeded`.
        """
        self._check_upload(data)
        name = records.clean_name(name)
        new_id = _checked_id(document_id) if document_id is not None else f"d-{secrets.token_hex(8)}"
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

    def replace_document(self, document_id: str, name: str, data: bytes, by: str) -> None:
        """Queue a new version; the present one stays until the new one is ready.

        Raises `UploadRefused`, `NotFound`, `QuotaExceeded`, `DuplicateDocument` (also if nothing changes).
        """
        self._check_upload(data)
        name = records.clean_name(name)

        def write(connection: sqlite3.Connection) -> tuple[int, str | None]:
            row = connection.execute("SELECT * FROM documents WHERE id = ?", (document_id,)).fetchone()
            if row is None:
                raise NotFound("There is no such document.")
            same = _same_content(connection, row["collection"], content_hash)
            if same is not None and not (same["key"] == row["key"] and same["status"] == "failed"):
                raise DuplicateDocument(same["id"], same["name"])
            self._check_quota(connection, row["collection"], len(data) - row["size"], documents=0)
            pending = connection.execute(
                "SELECT content_hash FROM jobs WHERE document = ?", (row["key"],)
            ).fetchone()
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

    def retry_document(self, document_id: str) -> None:
        """Queue a failed upload again. Raises `NotFound`; does nothing for one that has not failed."""

        def write(connection: sqlite3.Connection) -> None:
            info = records.document_info(connection, document_id)
            if info.reason is not None:
                connection.execute(
                    "UPDATE jobs SET status = 'queued', reason = NULL, message = NULL, attempts = 0, "
                    "queued = ? WHERE document = (SELECT key FROM documents WHERE id = ?) "
                    "AND status = 'failed'",
                    (time.time(), document_id),
                )

        self._db.write_sync(write)
        self._ingest.notify()

    def cancel_document(self, document_id: str) -> None:
        """Stop reading an upload; it then counts as failed and can be retried. Raises `NotFound`."""

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

    def delete_document(self, document_id: str) -> None:
        """Delete a document from every store: SQLite and lexical index in one transaction, then the vectors,
        the KV cache (through `on_delete`) and the file. Raises `NotFound`.

        After the transaction nothing finds it any more; should the process end before the rest is done, the
        rest is made good at the next start.
        """
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
            removed = records.remove_content(connection, key, collection)
            if not connection.execute("DELETE FROM documents WHERE key = ?", (key,)).rowcount:
                raise NotFound("There is no such document.")
            return removed, hashes

        with self.searcher.locked(collection):
            removed, hashes = self._db.write_sync(write)
            self._ingest.cancel(key)
            try:
                self.searcher.changed(collection, removed)
            except Exception:
                log.exception("the vector index of a collection is rebuilt")
        self._tell_deleted(document_id)
        with self._files:
            for content_hash in hashes:
                self._remove_unused(content_hash)
        self._ingest.settle(document_id)

    def documents(self, collection_ids: Collection[str]) -> list[DocumentInfo]:
        """All documents of these collections, failed ones and such being read included, by name."""
        return self._db.read_sync(lambda c: records.documents(c, collection_ids))

    def info(self, document_id: str, readable: Collection[str]) -> DocumentInfo:
        """One document's state. Raises `NotFound`, also where its collection is not readable."""
        found = self._db.read_sync(lambda c: records.document_info(c, document_id))
        if found.collection_id not in readable:
            raise NotFound("There is no such document.")
        return found

    def document(self, document_id: str, readable: Collection[str]) -> DocumentText:
        """A ready document's text. Raises `NotFound`, also where it is not ready or not readable."""
        return self._db.read_sync(lambda c: records.document_text(c, document_id, readable))

    def excerpt(
        self, document_id: str, version: int, start: int, end: int, readable: Collection[str]
    ) -> SectionText:
        """The text that a stored reference names, with the section it begins in.

        Raises `NotFound` where the document, this version of it, or the right to read it is gone.
        """
        document = self.document(document_id, readable)
        if document.version != version or not 0 <= start < end <= len(document.text):
            raise NotFound("The passage that was cited is no longer there.")
        section = next(s for s in document.sections if s.start <= start < s.end)
        return SectionText(
            section.index, section.title, section.level, start, end, document.text[start:end], section.page
        )

    def original(self, document_id: str, readable: Collection[str]) -> bytes:
        """The uploaded file of the ready version. Raises `NotFound`."""
        self.info(document_id, readable)
        row = self._db.read_sync(
            lambda c: c.execute("SELECT content_hash FROM documents WHERE id = ?", (document_id,)).fetchone()
        )
        if row is None or row[0] is None:
            raise NotFound("The document is not ready yet.")
        try:
            return self._data_dir.file(row[0]).read_bytes()
        except FileNotFoundError as error:
            raise NotFound("The uploaded file is no longer stored.") from error

    def when_finished(self, document_id: str) -> Future[DocumentInfo]:
        """Done when the document is ready or failed; its exception is `NotFound` where it was deleted."""
        return self._ingest.when_finished(document_id)

    def wait(self, document_id: str, timeout: float | None = None) -> DocumentInfo:
        """Block until the document is ready or failed. Raises `NotFound`, TimeoutError."""
        return self.when_finished(document_id).result(timeout)

    # Search and upkeep

    def search(
        self, query: str, readable: Collection[str], k: int = 5, *, history: Sequence[str] = ()
    ) -> list[Hit]:
        """The `k` best passages of the readable collections; see `Searcher.search`."""
        return self.searcher.search(query, readable, k, history=history)

    def answerability(self, query: str, hits: Sequence[Hit], readable: Collection[str]) -> Answerability:
        """Whether the hits of a search for `query` look as if they held an answer; see `rag.gate`."""
        return self.searcher.answerability(query, hits, readable)

    def check(self) -> CheckReport:
        """Compare SQLite, vector index, lexical index and files. Changes nothing."""
        return check(self._db, self._data_dir, self.searcher)

    def reindex(self, *, embeddings: bool = False) -> None:
        """Rebuild vector and lexical indexes from SQLite; with `embeddings` compute those anew as well."""
        reembed(self._db, self.searcher, self._embedder, embeddings=embeddings)

    def _on_replaced(self, document_id: str, old_hash: str) -> None:
        self._tell_deleted(document_id)
        with self._files:
            self._remove_unused(old_hash)

    def _tell_deleted(self, document_id: str) -> None:
        for callback in self._callbacks:
            try:
                callback(document_id)
            except Exception:  # what others cache must not keep a deletion from being finished
                log.exception("a listener failed when document %s was deleted", document_id)

    def _remove_unused(self, content_hash: str) -> None:
        if not self._db.read_sync(lambda c: records.content_in_use(c, content_hash)):
            self._data_dir.remove(content_hash)

    def _sweep_files(self) -> None:
        """Remove files that a crash left without a row."""
        with self._files:
            wanted = self._db.read_sync(records.contents)
            for content_hash in self._data_dir.stored():
                if content_hash not in wanted:
                    self._data_dir.remove(content_hash)

    def _adopt_embedder(self) -> None:
        """Note whose vectors these are; with another embedder than last time compute them anew in the
        background, with lexical searches only until that is done."""
        name = self._embedder.name
        before = self._db.read_sync(lambda c: records.meta(c, "embedder"))
        if before is None:
            self._db.write_sync(lambda c: records.set_meta(c, "embedder", name))
        elif before != name:
            log.warning("the embedder changed from %s to %s: all passages are embedded anew", before, name)
            self.searcher.dense = False
            threading.Thread(target=self._embed_anew, args=(name,), name="rag-reembed", daemon=True).start()

    def _embed_anew(self, name: str) -> None:
        try:
            self.reindex(embeddings=True)
            self._db.write_sync(lambda c: records.set_meta(c, "embedder", name))
            self.searcher.dense = True
        except Exception:  # searches stay lexical, and the next start tries again
            log.exception("the passages could not be embedded anew")

    def _check_upload(self, data: bytes) -> None:
        if not data:
            raise UploadRefused("The file is empty.")
        if len(data) > self.limits.upload_bytes:
            raise UploadRefused(
                f"The file has {len(data):,} bytes; at most {self.limits.upload_bytes:,} can be uploaded."
            )

    def _check_quota(
        self, connection: sqlite3.Connection, collection: int, size: int, documents: int = 1
    ) -> None:
        row = connection.execute(
            "SELECT COUNT(*) AS documents, COALESCE(SUM(MAX(d.size, COALESCE(j.size, 0))), 0) AS bytes "
            "FROM documents d LEFT JOIN jobs j ON j.document = d.key WHERE d.collection = ?",
            (collection,),
        ).fetchone()
        if row["documents"] + documents > self.limits.documents_per_collection:
            raise QuotaExceeded(
                "documents in the collection",
                row["documents"] + documents,
                self.limits.documents_per_collection,
            )
        if row["bytes"] + size > self.limits.bytes_per_collection:
            raise QuotaExceeded(
                "bytes in the collection", row["bytes"] + size, self.limits.bytes_per_collection
            )


def _queue(connection: sqlite3.Connection, document: int, content_hash: str, name: str, size: int) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO jobs(document, content_hash, name, size, status, queued) "
        "VALUES (?, ?, ?, ?, 'queued', ?)",
        (document, content_hash, name, size, time.time()),
    )


def _same_content(connection: sqlite3.Connection, collection: int, content_hash: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        "SELECT d.key, d.id, d.name, d.version, j.status FROM documents d "
        "LEFT JOIN jobs j ON j.document = d.key WHERE d.collection = ? "
        "AND (d.content_hash = ? OR j.content_hash = ?) ORDER BY d.key LIMIT 1",
        (collection, content_hash, content_hash),
    ).fetchone()
    return row


def _checked_id(id: str) -> str:
    if not _ID.fullmatch(id):
        raise RagError(f"The id {id[:80]!r} may only have letters, digits, '-', '_' and '.', at most 80.")
    return id
