"""Turning uploads into searchable documents, one step after another, on threads of its own.

    queued ──► parsing ──► embedding ──► (one transaction) ──► ready
                  │            │
                  └────────────┴──────► failed: reason

Everything a document consists of is written in the one transaction at the end, so a crash at any moment
leaves a document that is ready or one whose job starts again; three starts that ended the process fail it.
Owners take turns (`rag.fair_queue`): where one has two documents in work and another begins to wait, one of
the two pauses between passages until the other's is read.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from rag import lexical, records
from rag.database import Database
from rag.datadir import DataDir
from rag.embed import Courtesy, Embedder, Vectors
from rag.errors import NotFound, ParseFailed, RagError
from rag.fair_queue import Job, choose, oldest_of_each_owner
from rag.indexes import Indexes
from rag.parse.client import parse_file
from rag.parse.types import Limits, Parsed, Section
from rag.split import Passage, split_passages, split_sections
from rag.types import DocumentInfo

log = logging.getLogger("coread.rag")

_MAX_ATTEMPTS = 3
#: The job's row, unless somebody has cancelled it or put another one in its place.
_MINE = "document = ? AND queued = ? AND status IN ('parsing', 'embedding')"
#: Seconds until a database that refused (a full disk) is asked again.
_AGAIN_S = 1.0
#: Passages between two looks at whether somebody is being answered.
_EMBED_BATCH = 8


class Ingest:
    """Works through the `jobs` table. Thread-safe."""

    def __init__(
        self,
        database: Database,
        data_dir: DataDir,
        indexes: Indexes,
        embedder: Embedder,
        *,
        limits: Limits | None = None,
        courtesy: Courtesy | None = None,
        threads: int = 2,
    ) -> None:
        self._db, self._data_dir, self._indexes, self._embedder = database, data_dir, indexes, embedder
        self._limits = limits or Limits()
        self._courtesy = courtesy or Courtesy()
        #: Called with (document id, old content hash) once a new version has taken the old one's place.
        self.replaced: Callable[[str, str], None] = lambda document_id, content_hash: None
        self._wake = threading.Condition()
        self._stopping = False
        self._working: set[Job] = set()
        #: Those of them whose thread reads somebody else's document first.
        self._paused: set[Job] = set()
        self._claiming = threading.Lock()  # two threads that choose at once must not choose the same owner
        #: The number of the last turn of those who have documents in work or waiting.
        self._turns: dict[str, int] = {}
        self._cancelled: set[Job] = set()
        self._waiters: dict[str, list[Future[DocumentInfo]]] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"rag-ingest-{i}", daemon=True) for i in range(threads)
        ]

    def start(self) -> None:
        """Take up what an earlier run left unfinished, and begin to work."""
        self._db.write_sync(_recover)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread end; a document that is not ready yet starts again at the next start."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        with self._wake:
            waiters, self._waiters = self._waiters, {}
        for future in (f for futures in waiters.values() for f in futures):
            if future.set_running_or_notify_cancel():  # who waited may have given up before
                future.set_exception(
                    RagError("The server is stopping; the document will be read at its next start.")
                )

    def notify(self) -> None:
        """There is a new job."""
        with self._wake:
            self._wake.notify_all()

    def cancel(self, document: int) -> None:
        """Stop work on a document (integer key) soon. The caller has changed its rows already."""
        with self._wake:
            self._cancelled |= {job for job in self._working if job.document == document}

    def when_finished(self, document_id: str) -> Future[DocumentInfo]:
        """Done when the document is ready or failed; its exception is `NotFound` where it was deleted."""
        future: Future[DocumentInfo] = Future()
        with self._wake:
            self._waiters.setdefault(document_id, []).append(future)
        self.settle(document_id)
        return future

    def settle(self, document_id: str) -> None:
        """Answer those who wait for a document, if it is finished or gone."""
        try:
            info: DocumentInfo | None = self._db.read_sync(lambda c: records.document_info(c, document_id))
        except NotFound:
            info = None
        if info is not None and not info.finished:
            return
        with self._wake:
            waiters = self._waiters.pop(document_id, [])
        for future in waiters:
            if not future.set_running_or_notify_cancel():
                continue
            if info is None:
                future.set_exception(NotFound("The document was deleted."))
            else:
                future.set_result(info)

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._stopping:
                    return
            try:
                job = self._claim()
            except Exception:  # the thread must outlive it, or no upload would ever be read again
                log.exception("the queue of uploads could not be used; it is tried again")
                job = None
            if job is None:
                with self._wake:
                    if not self._stopping:
                        # The time-out only matters where a notification came between claim and wait.
                        self._wake.wait(_AGAIN_S)
                continue
            self._attempt(job)

    def _attempt(self, job: Job, *, may_pause: bool = True) -> None:
        """Read a claimed document and note what became of it; raises nothing."""
        fault: tuple[str, str] | None = None
        try:
            self._work(job, may_pause)
        except ParseFailed as error:
            fault = error.reason, error.message
        except RagError as error:
            fault = error.code, str(error)
        except Exception:
            log.exception("document %s could not be indexed", job.document_id)
            fault = "internal", "The document could not be indexed; the server's log says why."
        self._conclude(job, fault)

    def _conclude(self, job: Job, fault: tuple[str, str] | None) -> None:
        """Note what became of a job and tell who waits. A database that refuses is asked until it works again
        or the server stops; the next start then takes the job up anew."""
        while True:
            try:
                if fault is not None:
                    self._fail(job, *fault)
                    fault = None
                self.settle(job.document_id)
                break
            except Exception:
                log.exception("what became of document %s could not be noted", job.document_id)
            with self._wake:
                if self._stopping or self._wake.wait_for(lambda: self._stopping, _AGAIN_S):
                    break
        with self._wake:
            self._working.discard(job)
            self._cancelled.discard(job)

    def _claim(self, *, idle_owner: bool = False) -> Job | None:
        """Take the next job, or with `idle_owner` that of an owner of whose documents none is being read."""
        with self._claiming:
            with self._wake:
                running = Counter(job.owner for job in self._working - self._paused)
            # Most wake-ups find nothing: look before taking the write lock.
            waiting = self._db.read_sync(oldest_of_each_owner)
            known = {*running, *(job.owner for job in waiting)}
            self._turns = {o: n for o, n in self._turns.items() if o in known}
            if choose(waiting, running, self._turns, idle_owner=idle_owner) is None:
                return None

            def write(connection: sqlite3.Connection) -> Job | None:
                waiting = oldest_of_each_owner(connection)
                job = choose(waiting, running, self._turns, idle_owner=idle_owner)
                if job is not None:
                    connection.execute(
                        "UPDATE jobs SET status = 'parsing', progress = 0, attempts = attempts + 1 "
                        "WHERE document = ?",
                        (job.document,),
                    )
                return job

            job = self._db.write_sync(write)
            if job is not None:
                self._turns[job.owner] = max(self._turns.values(), default=0) + 1
                with self._wake:
                    self._working.add(job)
            return job

    def _give_way(self, job: Job) -> None:
        """First read the documents of owners who have none in work, as long as `job`'s owner has another."""
        while True:
            with self._wake:
                mine = sum(other.owner == job.owner for other in self._working - self._paused)
                if mine < 2 or self._stopping or job in self._cancelled:
                    return
                self._paused.add(job)
            try:
                other = self._claim(idle_owner=True)
                if other is None:
                    return
                self._attempt(other, may_pause=False)
            except Exception:  # no fault of this document's
                log.exception("the queue of uploads could not be used; nobody is given way to")
                return
            finally:
                with self._wake:
                    self._paused.discard(job)

    def _work(self, job: Job, may_pause: bool) -> None:
        self._courtesy.wait()  # reading a file starts a process, which costs as much as some embedding
        parsed = parse_file(
            self._data_dir.file(job.content_hash), job.name, self._limits, lambda: self._abandoned(job)
        )
        sections = split_sections(parsed)
        passages = split_passages(parsed, sections, self._embedder.measure, self._embedder.max_tokens)
        if not passages:
            raise ParseFailed("no text", "The document holds no text that could be found again.")
        self._progress(job, 0.0, "embedding")
        vectors = self._embed(job, passages, may_pause)
        prepared = [lexical.prepare(p.embedding_text) for p in passages]
        if self._abandoned(job):
            raise _cancelled()
        with self._indexes.locked(job.collection):
            done = self._db.write_sync(
                lambda c: _commit(c, job, parsed, sections, passages, vectors, prepared)
            )
            if done is None:
                return
            removed, added, old_hash = done
            try:
                self._indexes.changed(job.collection, removed, added, vectors, prepared)
            except Exception:
                log.exception("the indexes of collection %s are rebuilt", job.collection)
        if old_hash is not None:
            self.replaced(job.document_id, old_hash)

    def _embed(self, job: Job, passages: Sequence[Passage], may_pause: bool) -> Vectors:
        parts: list[Vectors] = []
        told = time.monotonic()
        for first in range(0, len(passages), _EMBED_BATCH):
            if self._abandoned(job):
                raise _cancelled()
            if may_pause:  # whoever is read in somebody's pause is read to its end
                self._give_way(job)
            self._courtesy.wait()
            parts.append(
                self._embedder.embed([p.embedding_text for p in passages[first : first + _EMBED_BATCH]])
            )
            if time.monotonic() - told > 0.5:
                told = time.monotonic()
                self._progress(job, (first + _EMBED_BATCH) / len(passages), "embedding")
        return np.concatenate(parts)

    def _abandoned(self, job: Job) -> bool:
        with self._wake:
            return self._stopping or job in self._cancelled

    def _progress(self, job: Job, progress: float, status: str) -> None:
        """Say how far the job has come. Raises `ParseFailed` where it is no longer wanted."""
        wanted = self._db.write_sync(
            lambda c: (
                c.execute(
                    f"UPDATE jobs SET status = ?, progress = ? WHERE {_MINE}",
                    (status, min(progress, 0.99), job.document, job.queued),
                ).rowcount
            )
        )
        if not wanted:
            raise _cancelled()

    def _fail(self, job: Job, reason: str, message: str) -> None:
        with self._wake:
            stopping = self._stopping and reason == "cancelled"

        def write(connection: sqlite3.Connection) -> None:
            if stopping:  # not the document's fault: it starts again, and this start doesn't count
                connection.execute(
                    f"UPDATE jobs SET status = 'queued', attempts = attempts - 1 WHERE {_MINE}",
                    (job.document, job.queued),
                )
            else:
                connection.execute(
                    f"UPDATE jobs SET status = 'failed', reason = ?, message = ? WHERE {_MINE}",
                    (reason, message, job.document, job.queued),
                )

        self._db.write_sync(write)


def _cancelled() -> ParseFailed:
    return ParseFailed("cancelled", "The upload was cancelled.")


def _recover(connection: sqlite3.Connection) -> None:
    connection.execute(
        "UPDATE jobs SET status = 'failed', reason = 'crashed', message = "
        "'The server ended ' || attempts || ' times while it read this document; it is not tried again.' "
        "WHERE status IN ('parsing', 'embedding') AND attempts >= ?",
        (_MAX_ATTEMPTS,),
    )
    connection.execute(
        "UPDATE jobs SET status = 'queued', progress = 0 WHERE status IN ('parsing', 'embedding')"
    )


def _commit(
    connection: sqlite3.Connection,
    job: Job,
    parsed: Parsed,
    sections: Sequence[Section],
    passages: Sequence[Passage],
    vectors: Vectors,
    prepared: Sequence[bytes],
) -> tuple[list[int], list[int], str | None] | None:
    """Put the new version in the place of the old one. None where the job is no longer wanted."""
    row = connection.execute(
        "SELECT d.version, d.content_hash FROM documents d JOIN jobs j ON j.document = d.key "
        "WHERE d.key = ? AND j.queued = ? AND j.status = 'embedding'",
        (job.document, job.queued),
    ).fetchone()
    if row is None:
        return None
    removed = records.remove_content(connection, job.document)
    added = records.write_content(
        connection, job.document, job.collection, parsed, sections, passages, vectors, prepared
    )
    now = time.time()
    connection.execute(
        "UPDATE documents SET name = ?, version = version + 1, content_hash = ?, size = ?, title = ?, "
        "format = ?, encoding = ?, confidence = ?, characters = ?, pages = ?, passages = ?, updated = ? "
        "WHERE key = ?",
        (
            job.name, job.content_hash, job.size, parsed.title, parsed.format, parsed.encoding,
            parsed.confidence, len(parsed.text), len(parsed.pages), len(passages), now, job.document,
        ),
    )  # fmt: skip
    connection.execute(
        "INSERT OR REPLACE INTO versions "
        "SELECT key, version, name, size, characters, passages, updated FROM documents WHERE key = ?",
        (job.document,),
    )
    connection.execute("DELETE FROM jobs WHERE document = ?", (job.document,))
    return removed, added, row["content_hash"]
