"""What `check` finds and `reindex` mends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rag.library import Library
from tests.rag.conftest import HashEmbedder

ALL = frozenset({"shared"})
FERRY = "# Ferry\n\nThe ferry Kittiwake carries 32 cars.\n\n## Crew\n\nCaptain Quill is the master."


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("DELETE FROM passage_terms WHERE passage = 1", "1 passages are missing from the stored terms"),
        ("DELETE FROM embeddings WHERE passage = 1", "1 passages are missing from the embeddings"),
        ("DELETE FROM passages WHERE id = 1", "the vector index holds 1 passages that no longer exist"),
        ("UPDATE texts SET text = substr(text, 2)", "has lost its text"),
        ("UPDATE documents SET content_hash = NULL", "belongs to no document"),
        ("UPDATE documents SET version = 0", "neither ready nor queued"),
    ],
)
def test_every_kind_of_disagreement_is_named(
    library: Library, add: Callable[..., str], damage: str, said: str
) -> None:
    add(FERRY)
    library.search("ferry", ALL)
    assert library.check().ok
    library.database.write_sync(lambda c: c.execute(damage).rowcount)
    assert any(said in problem for problem in library.check().problems), library.check().problems


def test_a_missing_file_is_named(library: Library, add: Callable[..., str]) -> None:
    add(FERRY)
    [content] = library.data_dir.stored()
    library.data_dir.remove(content)
    assert library.check().problems == (f"The file {content} is missing.",)


def test_reindexing_mends_terms_and_embeddings(library: Library, add: Callable[..., str]) -> None:
    add(FERRY)
    before = library.search("Quill the master", ALL)
    library.database.write_sync(
        lambda c: [c.execute(f"DELETE FROM {t}").rowcount for t in ("passage_terms", "embeddings")]
    )
    assert len(library.check().problems) == 2
    library.reindex(embeddings=True)
    assert library.check().ok
    assert library.search("Quill the master", ALL) == before


def test_documents_are_deleted_while_everything_is_embedded_anew(
    library: Library, add: Callable[..., str], embedder: HashEmbedder
) -> None:
    gone = add(FERRY)
    kept = add("# Buoy\n\nThe Petrel buoy measures waves.")

    def delete() -> None:
        embedder.before = lambda: None
        library.delete_document(gone)

    embedder.before = delete
    library.reindex(embeddings=True)
    assert library.check().ok
    assert {hit.document_id for hit in library.search("ferry buoy", ALL)} == {kept}


def test_a_library_of_an_earlier_version_is_taken_over(tmp_path: Path, embedder: HashEmbedder) -> None:
    """Terms stood in an FTS5 table a collection, with a vocabulary beside it."""
    library = Library.open(tmp_path / "d", embedder)
    library.create_collection("c", "me", "c")
    id = library.add_document("c", "f.md", FERRY.encode(), "me")
    library.wait(id, 60)
    before = library.search("Quill the master", {"c"})

    def as_it_was(connection: object) -> None:
        for statement in (
            "DELETE FROM passage_terms",
            "CREATE VIRTUAL TABLE lexical_1 USING fts5(terms)",
            "CREATE VIRTUAL TABLE lexical_1_vocabulary USING fts5vocab('lexical_1', 'row')",
            "INSERT INTO lexical_1(rowid, terms) VALUES (1, 'captain quill')",
        ):
            connection.execute(statement)  # type: ignore[attr-defined]

    library.database.write_sync(as_it_was)
    library.close(all=True)
    library = Library.open(tmp_path / "d", embedder)
    assert library.search("Quill the master", {"c"}) == before
    assert library.check().ok
    tables = library.database.read_sync(
        lambda c: [r[0] for r in c.execute("SELECT name FROM sqlite_master WHERE name LIKE 'lexical%'")]
    )
    assert tables == []
    library.close(all=True)


def test_terms_are_counted_anew_where_texts_are_cut_differently(
    tmp_path: Path, embedder: HashEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library.open(tmp_path / "d", embedder)
    library.create_collection("c", "me", "c")
    library.wait(library.add_document("c", "f.md", FERRY.encode(), "me"), 60)
    before = library.search("Quill the master", {"c"})
    library.database.write_sync(lambda c: c.execute("UPDATE passage_terms SET terms = x''").rowcount)
    library.close(all=True)
    library = Library.open(tmp_path / "d", embedder)
    assert all(hit.bm25 is None for hit in library.search("Quill the master", {"c"}))
    library.close(all=True)
    monkeypatch.setattr("rag.lexical.VERSION", 99)
    library = Library.open(tmp_path / "d", embedder)
    assert library.search("Quill the master", {"c"}) == before
    library.close(all=True)
