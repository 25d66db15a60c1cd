"""One SQLite file, one writing thread, one reading connection for each reading thread.

SQLite allows a single writer at a time; giving writes a thread of their own turns "database is locked"
into a queue. Readers use WAL snapshots and never wait for the writer. Nothing here runs on an event
loop: `write` and `read` hand the work to threads, `write_sync` and `read_sync` are for callers that may
block.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rag.errors import DatabaseError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of one owner's schema. An owner's versions count 1, 2, 3, …; `sql` may be many statements."""

    owner: str
    version: int
    sql: str


class Database:
    """Opens (and makes) the file, brings its schema up to date, and runs reads and writes.

    Raises `DatabaseError` where the file can't be opened, is no database, or was written by a newer
    program.
    """

    def __init__(
        self, path: str | os.PathLike[str], migrations: Iterable[Migration] = (), *, readers: int = 8
    ) -> None:
        self.path = Path(path)
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connections_lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Work[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._close_lock = threading.Lock()
        try:
            # Made here, readable by its user alone: SQLite gives its log and its index the same mode.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            self._writer = self._connect()
            mode = self._writer.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        except (sqlite3.Error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DatabaseError(f"The database {self.path} can't be opened: {reason}.") from error
        if mode != "wal":
            raise DatabaseError(f"The database {self.path} can't use a write-ahead log (got {mode!r}).")
        #: How many writes there were: what was read while it was the same is still so.
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="rag-database-writer", daemon=True)
        self._thread.start()
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="rag-database-reader")
        self.migrate(
            [
                Migration(
                    "database",
                    1,
                    "CREATE TABLE IF NOT EXISTS schema_migrations(owner TEXT NOT NULL, "
                    "version INTEGER NOT NULL, applied_at REAL NOT NULL, "
                    "PRIMARY KEY(owner, version)) WITHOUT ROWID",
                )
            ]
        )
        self.migrate(migrations)

    def migrate(self, migrations: Iterable[Migration]) -> None:
        """Apply what is missing, each step in a transaction of its own. Safe to call at every start."""
        by_owner: dict[str, list[Migration]] = {}
        for migration in migrations:
            by_owner.setdefault(migration.owner, []).append(migration)
        for owner, steps in by_owner.items():
            steps.sort(key=lambda m: m.version)
            if [m.version for m in steps] != list(range(1, len(steps) + 1)):
                raise ValueError(f"migrations of {owner!r} must be numbered 1, 2, 3, …")
            current = self.read_sync(partial(_schema_version, owner=owner))
            if current > len(steps):
                raise DatabaseError(
                    f"The database {self.path} was written by a newer program ({owner} schema {current}, "
                    f"this one knows {len(steps)}); upgrade, or use another data folder."
                )
            for step in steps[current:]:
                self._submit(partial(_apply, step=step), transaction=False).result()

    def write_sync(self, work: Work[T]) -> T:
        """Run `work(connection)` in one transaction on the writing thread and wait for its result.

        An exception rolls everything back and is raised here.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a write inside a write would wait for itself; use the connection you were given"
            )
        return self._submit(work).result()

    async def write(self, work: Work[T]) -> T:
        """`write_sync` for coroutines. A cancelled caller does not undo a write that has begun."""
        return await asyncio.wrap_future(self._submit(work))

    def read_sync(self, work: Work[T]) -> T:
        """Run `work(connection)` on this thread's reading connection, in one consistent snapshot."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if self._closed:
            raise DatabaseError("The database is closed.")
        if connection is None:
            connection = self._local.connection = self._connect()
            connection.execute("PRAGMA query_only=ON")
            # There may be dozens of reading threads; the operating system caches the file for all of them.
            connection.execute("PRAGMA cache_size=-4000")
            with self._connections_lock:
                self._connections.append(connection)
        if connection.in_transaction:  # a read inside a read sees the same snapshot
            return work(connection)
        connection.execute("BEGIN")
        try:
            return work(connection)
        finally:
            connection.rollback()

    async def read(self, work: Work[T]) -> T:
        """`read_sync` on a reading thread, for coroutines."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.read_sync, work)

    def close(self) -> None:
        """Finish queued writes and close every connection. Calling it again does nothing."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._pool.shutdown(wait=True)
        with self._connections_lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._writer.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, work: Work[T], *, transaction: bool = True) -> Future[T]:
        future: Future[T] = Future()
        with self._close_lock:  # nothing may be queued behind the sentinel: it would never be answered
            if self._closed:
                raise DatabaseError("The database is closed.")
            self._queue.put((work if not transaction else _in_transaction(work), future))
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work(self._writer)
            except BaseException as error:
                future.set_exception(error)
            else:
                self.commits += 1  # first, so that who waited for the write sees the new number
                future.set_result(result)
            # Dropped now, not when the next write comes: both may hold a whole document.
            del item, work, future

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=30.0, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.row_factory = sqlite3.Row
        for pragma in (
            "busy_timeout=30000",
            "foreign_keys=ON",
            "synchronous=NORMAL",
            "secure_delete=ON",
            "cache_size=-16000",
            "temp_store=MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection


def _in_transaction(work: Work[T]) -> Work[T]:
    def run(connection: sqlite3.Connection) -> T:
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    return run


def _schema_version(connection: sqlite3.Connection, owner: str) -> int:
    try:
        row = connection.execute(
            "SELECT COALESCE(MAX(version), 0) FROM schema_migrations WHERE owner = ?", (owner,)
        ).fetchone()
    except sqlite3.OperationalError:  # a new file has no such table yet
        return 0
    return int(row[0])


def _apply(connection: sqlite3.Connection, step: Migration) -> None:
    try:
        connection.executescript(f"BEGIN IMMEDIATE;\n{step.sql};")
        connection.execute(
            "INSERT INTO schema_migrations(owner, version, applied_at) VALUES (?, ?, ?)",
            (step.owner, step.version, time.time()),
        )
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise DatabaseError(f"Schema step {step.version} of {step.owner} failed: {error}.") from error
