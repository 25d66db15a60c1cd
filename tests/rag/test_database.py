from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from rag.database import Database, Migration
from rag.errors import DatabaseError

TABLE = Migration("test", 1, "CREATE TABLE numbers (value INTEGER PRIMARY KEY)")


@pytest.fixture
def database(tmp_path: Path):
    with Database(tmp_path / "x.sqlite", [TABLE]) as opened:
        yield opened


def insert(value: int):
    return lambda c: c.execute("INSERT INTO numbers VALUES (?)", (value,)).rowcount


def values(c: sqlite3.Connection) -> list[int]:
    return [r[0] for r in c.execute("SELECT value FROM numbers ORDER BY value")]


def test_a_failed_write_changes_nothing(database: Database) -> None:
    def half(c: sqlite3.Connection) -> None:
        c.execute("INSERT INTO numbers VALUES (1)")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        database.write_sync(half)
    database.write_sync(insert(2))
    assert database.read_sync(values) == [2]


def test_reading_connections_cannot_write(database: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.read_sync(insert(1))


def test_a_read_sees_one_snapshot(database: Database) -> None:
    def read(c: sqlite3.Connection) -> tuple[list[int], list[int]]:
        before = values(c)
        database.write_sync(insert(7))
        return before, values(c)

    assert database.read_sync(read) == ([], [])
    assert database.read_sync(values) == [7]


def test_a_write_inside_a_write_is_refused_instead_of_waiting_for_itself(database: Database) -> None:
    with pytest.raises(RuntimeError, match="inside a write"):
        database.write_sync(lambda c: database.write_sync(insert(1)))


def test_many_writers_and_readers_lock_nobody_out(database: Database) -> None:
    errors: list[BaseException] = []

    def write(start: int) -> None:
        try:
            for value in range(start, start + 25):
                database.write_sync(insert(value))
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            seen = 0
            for _ in range(100):
                now = len(database.read_sync(values))
                assert now >= seen
                seen = now
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i * 100,)) for i in range(10)]
    threads += [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(database.read_sync(values)) == 250


async def test_the_event_loop_goes_on_while_a_write_runs(database: Database) -> None:
    release = threading.Event()
    writing = asyncio.create_task(database.write(lambda c: release.wait(10)))
    reading = await asyncio.wait_for(database.read(values), 5)  # would time out if the loop were blocked
    release.set()
    assert reading == []
    assert await writing is True


def test_migrations_run_once_and_a_newer_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    second = Migration(
        "test", 2, "ALTER TABLE numbers ADD COLUMN note TEXT; CREATE INDEX n ON numbers (note)"
    )
    for _ in range(2):
        with Database(path, [TABLE, second, Migration("other", 1, "CREATE TABLE o (x)")]) as database:
            database.read_sync(lambda c: c.execute("SELECT note FROM numbers").fetchall())
    with pytest.raises(DatabaseError, match="newer program"):
        Database(path, [TABLE])


def test_a_failing_migration_leaves_no_half_step(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    broken = Migration("test", 1, "CREATE TABLE a (x); CREATE TABLE a (x)")
    with pytest.raises(DatabaseError, match="Schema step 1 of test"):
        Database(path, [broken])
    with Database(path) as database:
        names = database.read_sync(lambda c: [r[0] for r in c.execute("SELECT name FROM sqlite_master")])
    assert "a" not in names


def test_a_file_that_is_no_database_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"hello, this is not a database at all" * 100)
    with pytest.raises(DatabaseError, match="can't be opened"):
        Database(path)


def test_a_closed_database_answers_instead_of_hanging(tmp_path: Path) -> None:
    database = Database(tmp_path / "x.sqlite")
    database.close()
    with pytest.raises(DatabaseError, match="closed"):
        database.write_sync(lambda c: None)
    with pytest.raises(DatabaseError, match="closed"):
        database.read_sync(lambda c: None)
