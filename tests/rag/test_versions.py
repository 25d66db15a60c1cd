"""A document's versions are listed; an older database learns of those that it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rag.database import Database
from rag.errors import NotFound
from rag.library import Library
from rag.schema import MIGRATIONS

ALL = frozenset({"shared"})


def test_versions_are_listed_newest_first_to_those_who_may_read(
    library: Library, add: Callable[..., str]
) -> None:
    id = add("# Ferry\n\nThe ferry carries 32 cars.", "ferry.md")
    library.replace_document(id, "ferry 2.md", b"# Ferry\n\nThe ferry carries 40 cars by now.", "me")
    assert library.wait(id, 60).version == 2
    found = library.versions(id, ALL)
    assert [(v.version, v.name) for v in found] == [(2, "ferry 2.md"), (1, "ferry.md")]
    assert found[0].size == len(b"# Ferry\n\nThe ferry carries 40 cars by now.")
    assert found[0].ready >= found[1].ready
    assert found[0].passages == library.info(id, ALL).passages
    for readable in (frozenset[str](), frozenset({"other"})):
        with pytest.raises(NotFound):
            library.versions(id, readable)
    library.delete_document(id)
    assert library.database.read_sync(lambda c: c.execute("SELECT COUNT(*) FROM versions").fetchone()[0]) == 0


def test_a_database_from_before_gets_the_present_version_of_each(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with Database(path, MIGRATIONS[:1]) as old:

        def write(c: sqlite3.Connection) -> None:
            c.execute("INSERT INTO collections VALUES (1, 'k', 'K', 'me', 0)")
            for key, version in ((1, 3), (2, 0)):
                c.execute(
                    "INSERT INTO documents (key, id, collection, name, version, size, characters, passages, "
                    "created_by, created, updated) VALUES (?, ?, 1, 'n.md', ?, 10, 9, 2, 'me', 1, 5)",
                    (key, f"d-{key}", version),
                )

        old.write_sync(write)
    with Database(path, MIGRATIONS) as new:
        rows = new.read_sync(lambda c: c.execute("SELECT * FROM versions").fetchall())
    assert [tuple(row) for row in rows] == [(1, 3, "n.md", 10, 9, 2, 5.0)]


def test_what_would_go_with_a_document(library: Library, add: Callable[..., str]) -> None:
    text = "# Ferry\n\nThe ferry carries 32 cars."
    library.create_collection("Other", "me", "other")
    one = add(text, "ferry.md")
    assert library.stored_bytes(one) == len(text)
    two = add(text, "the same.md", collection="other")
    assert library.stored_bytes(one) == library.stored_bytes(two) == len(text), "what others have is not told"
    library.create_collection("Third", "owner", "third")
    three = add(text, "my own again.md", collection="third")
    assert library.stored_bytes(one) == library.stored_bytes(three) == 0, "each keeps the file for the other"
    library.delete_document(three)
    assert library.stored_bytes(one) == len(text)
    assert library.stored_bytes("d-nothing") == 0
    library.delete_document(one)
    with library.original(two, {"other"}) as file:
        assert file.read() == text.encode(), "the file stays for who still needs it"


def test_a_collection_is_renamed(library: Library) -> None:
    library.rename_collection("shared", "New\u202e  name")
    assert [c.name for c in library.collections(ALL)] == ["New name"]
    with pytest.raises(NotFound):
        library.rename_collection("nothing", "x")
