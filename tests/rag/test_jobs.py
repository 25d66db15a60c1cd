"""Cancelling, retrying, replacing and quotas, also where they cross."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rag import ingest
from rag.errors import DuplicateDocument, QuotaExceeded, RagError
from rag.library import Library
from rag.types import LibraryLimits
from tests.rag import files
from tests.rag.conftest import HashEmbedder

ALL = frozenset({"shared"})
FERRY = "# Ferry\n\nThe ferry Kittiwake carries 32 cars."
NEWER = FERRY.replace("32 cars", "40 cars")


class Gate:
    """Holds the embedding of documents until it is opened, one pass at a time."""

    def __init__(self, embedder: HashEmbedder) -> None:
        self.reached = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._open = False
        embedder.before = self._wait

    def _wait(self) -> None:
        self.reached.release()
        if not self._open:
            assert self._go.acquire(timeout=60)

    def arrived(self) -> None:
        assert self.reached.acquire(timeout=60)

    def pass_one(self) -> None:
        self._go.release()

    def open(self) -> None:
        self._open = True
        self._go.release(8)


@pytest.fixture
def gate(embedder: HashEmbedder) -> Gate:
    return Gate(embedder)


def test_a_retry_is_not_failed_by_the_attempt_that_was_cancelled(library: Library, gate: Gate) -> None:
    id = library.add_document("shared", "a.md", FERRY.encode(), "me")
    gate.arrived()
    library.cancel_document(id)
    assert library.wait(id, 60).reason == "cancelled"
    library.retry_document(id)  # while the first attempt still sits in the embedder
    gate.arrived()
    gate.open()
    assert library.wait(id, 60).status == "ready"
    assert library.info(id, ALL).version == 1
    assert library.check().ok


def test_a_cancelled_job_that_waits_is_never_begun(library: Library, gate: Gate) -> None:
    held = [library.add_document("shared", f"{n}.md", f"note {n}".encode(), "me") for n in range(2)]
    for _ in held:
        gate.arrived()
    waiting = library.add_document("shared", "w.md", FERRY.encode(), "me")
    library.cancel_document(waiting)
    assert library.wait(waiting, 60).reason == "cancelled"
    gate.open()
    assert [library.wait(id, 60).status for id in held] == ["ready", "ready"]
    assert library.info(waiting, ALL).status == "failed"
    library.cancel_document(held[0])  # nothing to cancel: nothing happens
    assert library.info(held[0], ALL).status == "ready"


def test_a_cancelled_replacement_leaves_the_present_version(library: Library, gate: Gate) -> None:
    id = library.add_document("shared", "a.md", FERRY.encode(), "me")
    gate.arrived()
    gate.pass_one()
    library.wait(id, 60)
    library.replace_document(id, "b.md", NEWER.encode(), "me")
    gate.arrived()
    library.cancel_document(id)
    info = library.wait(id, 60)
    assert (info.status, info.version, info.reason, info.name) == ("ready", 1, "cancelled", "a.md")
    assert library.document(id, ALL).text == FERRY
    gate.open()
    library.retry_document(id)
    info = library.wait(id, 60)
    assert (info.version, info.reason, info.name) == (2, None, "b.md")
    assert "40 cars" in library.document(id, ALL).text
    assert library.check().ok


def test_a_newer_replacement_supersedes_one_that_is_being_read(library: Library, gate: Gate) -> None:
    id = library.add_document("shared", "a.md", FERRY.encode(), "me")
    gate.arrived()
    gate.pass_one()
    library.wait(id, 60)
    library.replace_document(id, "b.md", b"a version that nobody will see", "me")
    gate.arrived()
    library.replace_document(id, "c.md", NEWER.encode(), "me")
    gate.open()
    info = library.wait(id, 60)
    assert (info.version, info.name) == (2, "c.md")
    assert "40 cars" in library.document(id, ALL).text
    report = library.check()
    assert report.ok
    assert report.files == 1


def test_a_replacement_that_failed_is_nobody_elses_duplicate(
    library: Library, add: Callable[..., str]
) -> None:
    id = add(FERRY)
    scan = files.pdf(["", ""])
    library.replace_document(id, "scan.pdf", scan, "me")
    assert library.wait(id, 60).reason == "no text"
    library.replace_document(id, "scan.pdf", scan, "me")  # the same once more is a retry
    assert library.wait(id, 60).reason == "no text"
    other = library.add_document("shared", "scan.pdf", scan, "me")
    assert other != id
    assert library.wait(other, 60).status == "failed"
    with pytest.raises(DuplicateDocument):
        library.add_document("shared", "again.md", FERRY.encode(), "me")
    library.delete_document(other)
    library.delete_document(id)
    assert library.check().files == 0
    assert library.check().ok


def test_an_id_that_is_taken_is_refused_in_words(library: Library) -> None:
    library.add_document("shared", "a.md", FERRY.encode(), "me", document_id="d-1")
    with pytest.raises(RagError, match="id d-1 already"):
        library.add_document("shared", "b.md", NEWER.encode(), "me", document_id="d-1")
    library.wait("d-1", 60)
    assert library.check().files == 1


def test_quotas_count_the_larger_of_both_versions(tmp_path: Path, embedder: HashEmbedder) -> None:
    gate = Gate(embedder)
    library = Library.open(tmp_path / "d", embedder, limits=LibraryLimits(bytes_per_collection=100))
    library.create_collection("c", "me", "c")
    id = library.add_document("c", "a.txt", b"x " * 20, "me")
    gate.arrived()
    gate.pass_one()
    library.wait(id, 60)
    library.replace_document(id, "b.txt", b"y " * 45, "me")  # 90 bytes in the place of 40
    gate.arrived()
    library.replace_document(id, "c.txt", b"z " * 48, "me")  # 96 in the place of the 90 that wait
    with pytest.raises(QuotaExceeded, match="102 bytes in the collection; the limit is 100"):
        library.replace_document(id, "d.txt", b"w " * 51, "me")
    gate.open()
    assert library.wait(id, 60).size == 96
    library.wait(library.add_document("c", "e.txt", b"more", "me"), 60)
    with pytest.raises(QuotaExceeded, match="101 bytes"):
        library.add_document("c", "f.txt", b"m", "me")
    library.delete_document(id)
    library.wait(library.add_document("c", "g.txt", b"v " * 45, "me"), 60)
    assert library.check().ok
    library.close(all=True)


@pytest.mark.parametrize("step", ["_claim", "_fail", "settle"])
def test_a_database_that_refuses_for_a_while_ends_no_reading_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(ingest, "_AGAIN_S", 0.01)
    library = Library.open(tmp_path / "d", HashEmbedder(), threads=1)
    library.create_collection("Shared", "me", "shared")
    refusals = iter(range(3))
    right = getattr(library._ingest, step)

    def full(*args: object) -> object:
        # `settle` is also what `when_finished` asks: there whoever waits is told themselves.
        if threading.current_thread().name.startswith("rag-ingest") and next(refusals, None) is not None:
            raise sqlite3.OperationalError("database or disk is full")
        return right(*args)

    monkeypatch.setattr(library._ingest, step, full)
    try:
        bad = library.add_document("shared", "nothing.md", b"\n \n", "me")
        assert library.wait(bad, 60).reason == "no text"
        good = library.add_document("shared", "ferry.md", FERRY.encode(), "me")
        assert library.wait(good, 60).status == "ready"
        assert next(refusals, None) is None
    finally:
        library.close(all=True)


def test_a_database_that_never_works_again_does_not_keep_a_server_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library.open(tmp_path / "d", HashEmbedder(), threads=1)
    library.create_collection("Shared", "me", "shared")
    refused = threading.Event()

    def full(*_: object) -> None:
        refused.set()
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(library._ingest, "_fail", full)
        id = library.add_document("shared", "nothing.md", b"\n \n", "me")
        assert refused.wait(60)
        library.close(all=True)
    again = Library.open(tmp_path / "d", HashEmbedder())
    try:
        assert again.wait(id, 60).reason == "no text"
    finally:
        again.close(all=True)
