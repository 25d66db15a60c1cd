from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rag import records
from rag.aio import AsyncLibrary
from rag.errors import (
    DuplicateDocument,
    InvalidQuery,
    NotFound,
    QuotaExceeded,
    RagError,
    UploadRefused,
)
from rag.library import Library
from rag.types import LibraryLimits
from tests.rag import files
from tests.rag.conftest import HashEmbedder

ALL = frozenset({"shared"})
FERRY = "# Ferry\n\nThe ferry Kittiwake carries 32 cars.\n\n## Crew\n\nCaptain Quill is the master."
BUOY = "# Buoy\n\nThe Petrel buoy measures waves.\n\n## Battery\n\nIts battery lasts two years."


def test_added_found_and_read(library: Library, add: Callable[..., str]) -> None:
    id = add(FERRY, "ferry.md")
    add(BUOY, "buoy.md")
    info = library.info(id, ALL)
    assert (info.status, info.title, info.version, info.format) == ("ready", "Ferry", 1, "markdown")
    hit = library.search("How many cars does the Kittiwake carry?", ALL, 1)[0]
    document = library.document(id, ALL)
    assert hit.document_id == id
    assert document.text[hit.start : hit.end] == hit.text
    assert set(hit.ranks) == {"dense", "lexical"}
    assert "".join(s.text for s in document.sections) == document.text == FERRY
    excerpt = library.excerpt(id, hit.version, hit.start, hit.end, ALL)
    assert excerpt.text == hit.text
    with library.original(id, ALL) as file:
        assert file.read() == FERRY.encode()
    assert library.check().ok


def test_who_may_not_read_finds_nothing_and_learns_nothing(library: Library, add: Callable[..., str]) -> None:
    library.create_collection("Private", "ann", "private")
    secret = add("# Secret\n\nThe vault code is 4711.", collection="private")
    public = add(FERRY)
    for readable in (ALL, frozenset[str](), frozenset({"unknown"})):
        assert secret not in {h.document_id for h in library.search("vault code 4711", readable, 10)}
        for read in (library.document, library.info, library.original):
            with pytest.raises(NotFound) as hidden:
                read(secret, readable)
            with pytest.raises(NotFound) as absent:
                read("d-nothing", readable)
            assert str(hidden.value) == str(absent.value)
        with pytest.raises(NotFound):
            library.excerpt(secret, 1, 0, 5, readable)
    assert library.search("vault code", frozenset({"private"}), 1)[0].document_id == secret
    assert [c.id for c in library.collections(ALL)] == ["shared"]
    assert [d.id for d in library.documents(ALL)] == [public]


def test_private_texts_move_no_public_score(library: Library, add: Callable[..., str]) -> None:
    add(FERRY)
    add(BUOY)
    before = [(h.passage_id, h.score, h.bm25, h.cosine) for h in library.search("ferry battery", ALL)]
    library.create_collection("Private", "ann", "private")
    for n in range(5):
        add(f"ferry battery ferry battery number {n}", collection="private")
    assert [(h.passage_id, h.score, h.bm25, h.cosine) for h in library.search("ferry battery", ALL)] == before


def test_a_small_collection_competes_with_a_large_one(library: Library, add: Callable[..., str]) -> None:
    texts = [f"# Note {n}\n\nThe harbour of town {n} has {n + 3} berths." for n in range(20)]
    for id in [library.add_document("shared", "n.md", text.encode(), "me") for text in texts]:
        library.wait(id, 60)
    library.create_collection("Mine", "ann", "mine")
    own = add("# Pump\n\nThe bilge pump needs oil every forty hours.", collection="mine")
    hits = library.search("How often does the bilge pump need oil?", {"shared", "mine"}, 3)
    assert hits[0].document_id == own
    assert hits[0].ranks["lexical"] == 1


def test_the_same_content_is_a_duplicate_within_a_collection_only(
    library: Library, add: Callable[..., str]
) -> None:
    id = add(FERRY, "one.md")
    with pytest.raises(DuplicateDocument, match=r"one\.md") as caught:
        library.add_document("shared", "two.md", FERRY.encode(), "me")
    assert caught.value.existing == id
    library.create_collection("Other", "me", "other")
    add(FERRY, collection="other")
    library.delete_document(id)
    add(FERRY)  # after a deletion it is no duplicate
    assert library.check().ok
    assert library.check().files == 1


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/abs/olute.md", "..\\..\\x.md", "nul\0byte.md", "n" * 300, "CON.txt", " dots. ",
     "\u202egpj.exe",      "<img src=x onerror=alert(1)>.md", "a\nb.md", "“quotes”:?.md", "\udcff.md", ""],
)  # fmt: skip
def test_hostile_names_are_only_data(library: Library, add: Callable[..., str], name: str) -> None:
    id = add("Some words to index.", name)
    shown = library.info(id, ALL).name
    assert library.info(id, ALL).status == "ready"
    assert 0 < len(shown) <= 255
    assert not set(shown) & {"\0", "\n", "\u202e"}
    root = library.data_dir.path
    assert {p.name for p in root.iterdir()} <= {
        "lock",
        "files",
        "tmp",
        "coread.sqlite",
        "coread.sqlite-wal",
        "coread.sqlite-shm",
    }
    assert all(len(p.name) in (2, 64) for p in library.data_dir.files.rglob("*"))


@pytest.mark.parametrize(
    ("data", "name", "reason"),
    [
        (files.pdf(["", ""]), "scan.pdf", "no text"),
        (b"   \n ", "blank.txt", "no text"),
        (b"\x7fELF\0\0\0" * 9, "a.txt", "not text"),
        (b"%PDF-1.4 broken", "a.pdf", "damaged"),
    ],
)
def test_unreadable_uploads_fail_with_a_reason_and_are_never_ready(
    library: Library, data: bytes, name: str, reason: str
) -> None:
    id = library.add_document("shared", name, data, "me")
    info = library.wait(id, 60)
    assert (info.status, info.reason, info.version, info.passages) == ("failed", reason, 0, 0)
    assert info.message is not None
    with pytest.raises(NotFound):
        library.document(id, ALL)
    assert library.search("broken", ALL) == []
    assert library.add_document("shared", "again.txt", data, "me") == id  # no "duplicate" of a failed one
    assert library.wait(id, 60).status == "failed"
    library.delete_document(id)
    assert library.check().ok
    assert library.check().files == 0


def test_uploads_questions_and_collections_that_are_refused(tmp_path: Path, embedder: HashEmbedder) -> None:
    limits = LibraryLimits(
        upload_bytes=100, documents_per_collection=2, bytes_per_collection=150, query_characters=50
    )
    library = Library.open(tmp_path / "d", embedder, limits=limits)
    library.create_collection("c", "me", "c")
    with pytest.raises(UploadRefused, match="empty"):
        library.add_document("c", "a", b"", "me")
    with pytest.raises(UploadRefused, match=r"101 bytes; at most 100"):
        library.add_document("c", "a", b"x" * 101, "me")
    with pytest.raises(NotFound):
        library.add_document("nowhere", "a", b"x", "me")
    library.add_document("c", "a", b"word " * 18, "me")
    with pytest.raises(QuotaExceeded, match="bytes"):
        library.add_document("c", "b", b"other" * 18, "me")
    library.add_document("c", "b", b"other", "me")
    with pytest.raises(QuotaExceeded, match="documents"):
        library.add_document("c", "c", b"third", "me")
    assert len(list(library.data_dir.stored())) == 2
    with pytest.raises(RagError, match="letters"):
        library.create_collection("x", "me", "../x")
    with pytest.raises(InvalidQuery, match="empty"):
        library.search("  \n", {"c"})
    with pytest.raises(InvalidQuery, match=r"51 characters; at most 50"):
        library.search("x" * 51, {"c"})
    library.close(all=True)


def test_a_long_question_is_searched_for_by_its_ends(library: Library, add: Callable[..., str]) -> None:
    id = add(BUOY)
    question = "unrelated filler words " * 3000 + " How long does the battery of the Petrel buoy last?"
    assert library.search(question, ALL, 1)[0].document_id == id


def test_deleting_empties_every_store_and_tells_the_cache(library: Library, add: Callable[..., str]) -> None:
    told: list[str] = []
    library.on_delete(told.append)
    gone, kept = add(FERRY), add(BUOY)
    assert library.search("ferry", ALL)
    library.delete_document(gone)
    assert told == [gone]
    assert {h.document_id for h in library.search("ferry cars Kittiwake Quill", ALL, 10)} <= {kept}
    report = library.check()
    assert report.ok
    assert (report.documents, report.files) == (1, 1)
    with pytest.raises(NotFound):
        library.delete_document(gone)
    library.close(all=True)
    assert b"Captain Quill" not in (library.data_dir.path / "coread.sqlite").read_bytes()


@pytest.mark.parametrize("where", ["vectors", "listener", "file"])
def test_a_failure_halfway_through_a_deletion_leaves_no_stale_hit(
    library: Library, add: Callable[..., str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gone, kept = add(FERRY), add(BUOY)
    library.search("ferry", ALL)  # the index is built and cached

    def fail(*args: object) -> None:
        raise OSError("injected")

    if where == "vectors":
        monkeypatch.setattr("rag.vectors.VectorIndex.remove", fail)
        library.delete_document(gone)
    elif where == "listener":
        library.on_delete(fail)
        library.delete_document(gone)
    else:
        monkeypatch.setattr("rag.datadir.DataDir.remove", fail)
        with pytest.raises(OSError, match="injected"):
            library.delete_document(gone)
    assert {h.document_id for h in library.search("ferry Kittiwake cars", ALL, 10)} <= {kept}
    with pytest.raises(NotFound):
        library.document(gone, ALL)
    monkeypatch.undo()
    if where == "file":
        library._uploads.sweep_files()  # what the next start does
    assert library.check().ok


def test_a_failing_vector_index_heals_itself(
    library: Library, add: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(BUOY)
    library.search("buoy", ALL)
    monkeypatch.setattr(
        "rag.vectors.VectorIndex.add", lambda *a: (_ for _ in ()).throw(MemoryError("injected"))
    )
    id = add(FERRY)
    monkeypatch.undo()
    assert library.info(id, ALL).status == "ready"
    assert library.search("ferry Kittiwake", ALL, 1)[0].document_id == id
    assert library.check().ok


def test_a_failing_write_leaves_nothing_of_the_document(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("rag.records.write_content", fail)
    id = library.add_document("shared", "a.md", FERRY.encode(), "me")
    info = library.wait(id, 60)
    assert (info.status, info.reason) == ("failed", "internal")
    assert library.check().passages == 0
    monkeypatch.undo()
    library.retry_document(id)
    assert library.wait(id, 60).status == "ready"
    assert library.check().ok


def test_replacing_keeps_the_old_version_until_the_new_one_is_ready(
    library: Library, add: Callable[..., str], embedder: HashEmbedder
) -> None:
    told: list[str] = []
    library.on_delete(told.append)
    id = add(FERRY)
    hit = library.search("Kittiwake cars", ALL, 1)[0]
    seen: list[str] = []
    embedder.before = lambda: seen.append(library.document(id, ALL).text)
    library.replace_document(id, "ferry2.md", FERRY.replace("32 cars", "40 cars").encode(), "me")
    info = library.wait(id, 60)
    assert (info.version, info.name, info.status) == (2, "ferry2.md", "ready")
    assert seen[0] == FERRY
    assert told == [id]
    assert "40 cars" in library.search("Kittiwake cars", ALL, 1)[0].text
    with pytest.raises(NotFound, match="no longer there"):
        library.excerpt(id, hit.version, hit.start, hit.end, ALL)
    with pytest.raises(DuplicateDocument):
        library.replace_document(id, "same.md", FERRY.replace("32 cars", "40 cars").encode(), "me")
    library.replace_document(id, "bad.pdf", files.pdf([""]), "me")
    after = library.wait(id, 60)
    assert (after.status, after.version, after.reason) == ("ready", 2, "no text")
    assert library.check().ok


@pytest.mark.parametrize("what", ["delete", "cancel"])
def test_stopping_an_upload_that_is_being_embedded(
    library: Library, embedder: HashEmbedder, what: str
) -> None:
    reached, go = threading.Event(), threading.Event()

    def before() -> None:
        reached.set()
        go.wait(30)

    embedder.before = before
    id = library.add_document("shared", "a.md", FERRY.encode(), "me")
    future = library.when_finished(id)
    assert reached.wait(30)
    assert library.info(id, ALL).status == "embedding"
    if what == "delete":
        library.delete_document(id)
        with pytest.raises(NotFound):
            future.result(30)
    else:
        library.cancel_document(id)
        assert future.result(30).reason == "cancelled"
    go.set()
    other = library.add_document("shared", "b.md", BUOY.encode(), "me")
    assert library.wait(other, 60).status == "ready"
    assert {h.document_id for h in library.search("ferry Kittiwake buoy", ALL, 10)} == {other}
    assert library.check().ok
    if what == "cancel":
        embedder.before = lambda: None
        library.retry_document(id)
        assert library.wait(id, 60).status == "ready"


def test_a_whole_collection_goes_at_once(library: Library, add: Callable[..., str]) -> None:
    library.create_collection("Other", "me", "other")
    told: list[str] = []
    library.on_delete(told.append)
    ids = {add(FERRY, collection="other"), add(BUOY, collection="other")}
    kept = add(FERRY)
    library.delete_collection("other")
    assert set(told) == ids
    assert [c.id for c in library.collections(None)] == ["shared"]
    assert library.search("buoy", {"other"}) == []
    assert library.info(kept, ALL).status == "ready"
    assert library.check().ok
    with pytest.raises(NotFound):
        library.delete_collection("other")


def test_everything_is_there_after_a_restart(tmp_path: Path, embedder: HashEmbedder) -> None:
    library = Library.open(tmp_path / "d", embedder)
    library.create_collection("c", "me", "c")
    id = library.add_document("c", "f.md", FERRY.encode(), "me")
    library.wait(id, 60)
    before = library.search("Who is the master?", {"c"})
    library.close(all=True)
    library = Library.open(tmp_path / "d", embedder)
    assert library.search("Who is the master?", {"c"}) == before
    assert library.check().ok
    library.close(all=True)


def test_an_interrupted_upload_is_taken_up_and_a_poisonous_one_given_up(
    tmp_path: Path, embedder: HashEmbedder
) -> None:
    library = Library.open(tmp_path / "d", embedder)
    library.create_collection("c", "me", "c")
    first = library.add_document("c", "f.md", FERRY.encode(), "me")
    second = library.add_document("c", "b.md", BUOY.encode(), "me")
    for id in (first, second):
        library.wait(id, 60)
    for id, attempts in ((first, 1), (second, 3)):
        # As a crash in the middle of reading leaves it.
        library.database.write_sync(
            lambda c, id=id, attempts=attempts: [
                records.remove_content(c, k)
                and c.execute("UPDATE documents SET version = 0 WHERE key = ?", (k,))
                and c.execute(
                    "INSERT INTO jobs(document, content_hash, name, size, status, attempts, queued) "
                    "SELECT key, content_hash, name, size, 'embedding', ?, 0 FROM documents WHERE key = ?",
                    (attempts, k),
                )
                for (k,) in [tuple(c.execute("SELECT key FROM documents WHERE id = ?", (id,)).fetchone())]
            ]
        )
    library.close(all=True)
    library = Library.open(tmp_path / "d", embedder)
    assert library.wait(first, 60).status == "ready"
    assert library.wait(second, 60).reason == "crashed"
    library.close(all=True)


def test_another_embedder_means_new_vectors(tmp_path: Path) -> None:
    library = Library.open(tmp_path / "d", HashEmbedder("one", 64))
    library.create_collection("c", "me", "c")
    id = library.add_document("c", "f.md", FERRY.encode(), "me")
    library.wait(id, 60)
    library.close(all=True)
    library = Library.open(tmp_path / "d", HashEmbedder("two", 32))
    for _ in range(600):
        if library.searcher.dense:
            break
        threading.Event().wait(0.05)
    assert library.search("Kittiwake", {"c"}, 1)[0].cosine is not None
    assert library.check().ok
    library.close(all=True)


def test_reindexing_gives_the_same_answers(library: Library, add: Callable[..., str]) -> None:
    add(FERRY)
    add(BUOY)
    before = library.search("battery of the ferry", ALL)
    library.reindex(embeddings=True)
    assert library.search("battery of the ferry", ALL) == before
    library.database.write_sync(lambda c: c.execute("DELETE FROM passage_terms WHERE passage = 1").rowcount)
    assert not library.check().ok
    library.reindex()
    assert library.check().ok


def test_uploads_searches_and_deletions_at_once(library: Library) -> None:
    errors: list[BaseException] = []
    deleted: set[str] = set()
    kept: set[str] = set()
    done = threading.Event()

    def guard(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        return run

    def upload(writer: int) -> Callable[[], None]:
        def run() -> None:
            for n in range(5):
                text = f"# Note {writer}-{n}\n\nThe harbour number {writer * 100 + n} has a crane."
                id = library.add_document("shared", f"{writer}-{n}.md", text.encode(), "me")
                if n % 2:
                    library.wait(id, 120)
                    library.delete_document(id)
                    deleted.add(id)
                elif n == 2:
                    library.delete_document(id)  # while it is queued or being read
                    deleted.add(id)
                else:
                    kept.add(id)

        return run

    def search() -> None:
        while not done.is_set():
            gone = set(deleted)
            for hit in library.search("harbour crane number", ALL, 20):
                assert hit.document_id not in gone
                assert "harbour" in hit.text

    threads = [threading.Thread(target=guard(upload(w))) for w in range(4)]
    readers = [threading.Thread(target=guard(search)) for _ in range(4)]
    for thread in threads + readers:
        thread.start()
    for thread in threads:
        thread.join()
    for id in kept:
        assert library.wait(id, 120).status == "ready"
    done.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert {h.document_id for h in library.search("harbour crane number", ALL, 100)} == kept
    report = library.check()
    assert report.ok
    assert report.files == len(kept)


async def test_waiting_holds_neither_loop_nor_threads(library: Library, embedder: HashEmbedder) -> None:
    go = threading.Event()
    embedder.before = lambda: go.wait(30) and None
    shared = AsyncLibrary(library, threads=2)
    ids = [await shared.add_document("shared", f"{n}.md", f"note {n}".encode(), "me") for n in range(6)]
    waiting = [asyncio.ensure_future(shared.wait(id)) for id in ids]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(shared.collections(ALL), 20)  # six waits hold no thread of two
    assert await asyncio.wait_for(shared.search("note", ALL), 20) == []
    go.set()
    assert {info.status for info in await asyncio.gather(*waiting)} == {"ready"}
    assert len(await shared.search("note", ALL, 10)) == 6
    await shared.delete_document(ids[0])
    with pytest.raises(NotFound):
        await shared.document(ids[0], ALL)
    assert (await shared.check()).ok
    shared.close()
