"""The knowledge base: collections of documents that can be added, read, searched and deleted.

Every method may be called from any thread and may block; on an event loop use `rag.aio.AsyncLibrary`.
Methods that read take the ids of the collections that the caller may read. Who may change something is
decided by whoever calls.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import BinaryIO

from rag import records
from rag.check import check, reindex, restore_terms
from rag.database import Database, Migration
from rag.datadir import DataDir
from rag.embed import Courtesy, Embedder
from rag.errors import NotFound, RagError
from rag.gate import Answerability
from rag.indexes import Indexes
from rag.ingest import Ingest
from rag.parse.types import Limits
from rag.rerank import Reranker
from rag.schema import MIGRATIONS
from rag.search import Searcher
from rag.types import (
    CheckReport,
    CollectionInfo,
    DocumentInfo,
    DocumentText,
    DocumentVersion,
    Hit,
    LibraryLimits,
    SectionText,
)
from rag.uploads import Uploads, checked_id

log = logging.getLogger("coread.rag")


class Library:
    """Opens the knowledge base in a data folder that the caller owns (`DataDir`), and works until `close`.

    embedder     makes vectors; is not closed by `close`
    courtesy     lets embedding of uploads yield to answers being written
    reranker     orders what a search found anew; none by default
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
        reranker: Reranker | None = None,
        threads: int = 2,
    ) -> None:
        database.migrate(MIGRATIONS)
        self.limits = limits or LibraryLimits()
        self._data_dir, self._db, self._embedder = data_dir, database, embedder
        if restored := restore_terms(database):
            log.info("the terms of %d passages were counted", restored)
        self.indexes = Indexes(database, embedder)
        self.searcher = Searcher(
            database,
            embedder,
            self.indexes,
            reranker=reranker,
            query_characters=self.limits.query_characters,
        )
        self._ingest = Ingest(
            database,
            data_dir,
            self.indexes,
            embedder,
            limits=parse_limits,
            courtesy=courtesy,
            threads=threads,
        )
        self._uploads = Uploads(database, data_dir, self.indexes, self._ingest, self.limits)
        self._uploads.sweep_files()
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
        reranker: Reranker | None = None,
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
                    limits=limits, parse_limits=parse_limits, courtesy=courtesy, reranker=reranker,
                    threads=threads,
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
        self.searcher.close()
        if all:
            self._db.close()
            self._data_dir.close()

    def on_delete(self, callback: Callable[[str], None]) -> None:
        """Have `callback(document_id)` called when a document's text is gone: deleted, or replaced.

        It is called from the deleting thread after the deletion is durable, before the caller is answered.
        """
        self._uploads.callbacks.append(callback)

    # Collections

    def create_collection(self, name: str, owner: str, id: str | None = None) -> CollectionInfo:
        """Make a collection; with an `id` that exists already, return that one.

        Raises RagError for an id with other characters than letters, digits, "-", "_" and ".".
        """
        wanted = checked_id(id) if id is not None else f"c-{secrets.token_hex(8)}"

        def write(connection: sqlite3.Connection) -> None:
            if connection.execute("SELECT 1 FROM collections WHERE id = ?", (wanted,)).fetchone():
                return
            connection.execute(
                "INSERT INTO collections(id, name, owner, created) VALUES (?, ?, ?, ?)",
                (wanted, records.clean_name(name), owner, time.time()),
            )

        self._db.write_sync(write)
        return self.collections({wanted})[0]

    def collections(self, readable: Collection[str] | None) -> list[CollectionInfo]:
        """The collections among `readable`, or all of them for None, in the order they were made."""
        return self._db.read_sync(lambda c: records.collections(c, readable))

    def rename_collection(self, collection_id: str, name: str) -> None:
        """Give a collection another name. Raises `NotFound`."""

        def write(connection: sqlite3.Connection) -> None:
            key = records.collection_key(connection, collection_id)
            connection.execute(
                "UPDATE collections SET name = ? WHERE key = ?", (records.clean_name(name), key)
            )

        self._db.write_sync(write)

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
            connection.execute("DELETE FROM collections WHERE key = ?", (key,))
            return key

        self.indexes.forget(self._db.write_sync(write))

    # Documents

    def add_document(
        self, collection_id: str, name: str, data: bytes, by: str, *, document_id: str | None = None
    ) -> str:
        """Store an upload and queue it; return the document's id. `wait` tells when it can be found.

        A failed upload with the same content is tried again under its old id.
        Raises `UploadRefused`, `NotFound` (collection), `DuplicateDocument`, `QuotaExceeded`.
        """
        return self._uploads.add(collection_id, name, data, by, document_id=document_id)

    def replace_document(self, document_id: str, name: str, data: bytes, by: str) -> None:
        """Queue a new version; the present one stays until the new one is ready.

        Raises `UploadRefused`, `NotFound`, `QuotaExceeded`, `DuplicateDocument` (also if nothing changes).
        """
        self._uploads.replace(document_id, name, data, by)

    def retry_document(self, document_id: str) -> None:
        """Queue a failed upload again. Raises `NotFound`; does nothing for one that has not failed."""
        self._uploads.retry(document_id)

    def cancel_document(self, document_id: str) -> None:
        """Stop reading an upload; it then counts as failed and can be retried. Raises `NotFound`."""
        self._uploads.cancel(document_id)

    def delete_document(self, document_id: str) -> None:
        """Delete a document from every store: SQLite in one transaction, then vector and lexical index,
        the KV cache (through `on_delete`) and the file. Raises `NotFound`.

        After the transaction nothing finds it any more; should the process end before the rest is done, the
        rest is made good at the next start.
        """
        self._uploads.delete(document_id)

    def documents(self, collection_ids: Collection[str]) -> list[DocumentInfo]:
        """All documents of these collections, failed ones and such being read included, by name."""
        return self._db.read_sync(lambda c: records.documents(c, collection_ids))

    def info(self, document_id: str, readable: Collection[str]) -> DocumentInfo:
        """One document's state. Raises `NotFound`, also where its collection is not readable."""
        found = self._db.read_sync(lambda c: records.document_info(c, document_id))
        if found.collection_id not in readable:
            raise NotFound("There is no such document.")
        return found

    def versions(self, document_id: str, readable: Collection[str]) -> list[DocumentVersion]:
        """The versions that a document has had, newest first. Raises `NotFound` as `info` does."""
        self.info(document_id, readable)
        return self._db.read_sync(lambda c: records.versions(c, document_id))

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

    def original(self, document_id: str, readable: Collection[str]) -> BinaryIO:
        """The uploaded file of the ready version, open to be read; the caller closes it. It stays whole where
        the document is deleted meanwhile. Raises `NotFound`."""
        self.info(document_id, readable)
        row = self._db.read_sync(
            lambda c: c.execute("SELECT content_hash FROM documents WHERE id = ?", (document_id,)).fetchone()
        )
        if row is None or row[0] is None:
            raise NotFound("The document is not ready yet.")
        try:
            return self._data_dir.file(row[0]).open("rb")
        except FileNotFoundError as error:
            raise NotFound("The uploaded file is no longer stored.") from error

    def homes(self, document_ids: Iterable[str]) -> dict[str, str]:
        """The collection of each of these documents; those that do not exist are left out."""
        return self._db.read_sync(lambda c: records.homes(c, document_ids))

    def tell_stale(self, read: Collection[tuple[str, int]]) -> bool:
        """For who has just handed on the text of documents that were read earlier, each with its version:
        whether one has been deleted or replaced since. `on_delete`'s listeners are then called once more for
        it, as their first call may have come before the text did."""
        present = self._db.read_sync(lambda c: records.present_versions(c, {id for id, _ in read}))
        stale = {id for id, version in read if present.get(id) != version}
        for id in stale:
            self._uploads.tell(id)
        return bool(stale)

    def stored_bytes(self, document_id: str) -> int:
        """Bytes of the files that would go with the document: those that no other document of the same person
        in collections of the same owner needs. What others have stored does not show in it; the file itself
        stays for as long as anybody needs it."""
        return self._db.read_sync(lambda c: records.sole_bytes(c, document_id))

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

    def answerability(
        self, query: str, hits: Sequence[Hit], readable: Collection[str], history: Sequence[str] = ()
    ) -> Answerability:
        """Whether the hits of a search for `query` look as if they held an answer; see `rag.gate`."""
        return self.searcher.answerability(query, hits, readable, history)

    def warm_up(self) -> None:
        """Wait until what a search needs is loaded. Raises `EmbedderUnavailable` where it can't be."""
        _ = self._embedder.dimension

    def check(self) -> CheckReport:
        """Compare SQLite, vector index, lexical index and files. Changes nothing."""
        return check(self._db, self._data_dir, self.indexes)

    def reindex(self, *, embeddings: bool = False) -> None:
        """Rebuild vector and lexical indexes from SQLite; with `embeddings` compute those anew as well."""
        reindex(self._db, self.indexes, self._embedder, embeddings=embeddings)

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
