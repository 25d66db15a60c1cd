"""The fuzzed files on a small scale: `python -m bench.fuzz_files` uploads 500."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.fuzz_corpus import NAME_A_FILE, harmful, sound
from bench.fuzz_files import Case, cases, left_behind, run, upload
from bench.word_embedder import WordEmbedder
from rag.errors import ParseFailed
from rag.library import Library
from rag.parse.client import _answer
from rag.parse.types import Limits, Parsed
from rag.split import split_passages


@pytest.mark.slow
def test_hostile_and_damaged_files_cost_one_job_each(tmp_path: Path) -> None:
    result = run(tmp_path / "data", 30, seed=3, limits=Limits(seconds=3.0, characters=300_000))
    assert result["faults"] == []
    assert result["files"] == 30
    assert result["results"]["ready"] > 5


def test_the_files_are_the_same_for_the_same_seed() -> None:
    first, again, other = ([(c.kind, c.name, c.data) for c in cases(10, seed)] for seed in (3, 3, 4))
    assert first == again != other
    assert len({data for _, _, data in first}) > 8
    assert len(harmful()) >= 50


def test_sound_files_are_ready(tmp_path: Path) -> None:
    library = Library.open(tmp_path / "data", WordEmbedder())
    library.create_collection("Fuzz", "fuzz", "fuzz")
    ids = [library.add_document("fuzz", name, data, "fuzz") for name, data in sound()]
    assert {library.wait(id, 60).status for id in ids} == {"ready"}
    library.close(all=True)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("unforeseen", "failed with 'internal'"),
        ("empty", "ready and empty"),
        (NAME_A_FILE[0], "ready with what another file holds"),
        ("partly", "characters that no passage holds"),
        ("reader", "ended without an answer"),
        ("path", "the message names"),
        ("raises", "raised ZeroDivisionError"),
    ],
)
def test_the_check_sees_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, fault: str
) -> None:
    """An error that nobody foresaw, here or in the reader; a document that is ready with nothing in it, more
    than was uploaded, or a part of which nothing can be found; a message that shows the inside."""
    library = Library.open(tmp_path / "data", WordEmbedder())
    library.create_collection("Fuzz", "fuzz", "fuzz")

    def fails(*_: object) -> Parsed:
        raise ParseFailed("damaged", f"{tmp_path / 'data'} cannot be read.")

    if what == "unforeseen":
        monkeypatch.setattr("rag.ingest.split_sections", lambda parsed: 1 // 0)
    elif what == "empty":
        monkeypatch.setattr("rag.library.Library.document", lambda *a: _Nothing())
    elif what == "partly":
        monkeypatch.setattr("rag.ingest.split_passages", lambda *a: split_passages(*a)[1:])
    elif what == "reader":
        monkeypatch.setattr("rag.parse.client._answer", lambda *a: _answer(b"", 1, False, Limits()))
    elif what == "path":
        monkeypatch.setattr("rag.ingest.parse_file", fails)
    elif what == "raises":
        monkeypatch.setattr("rag.library.Library.add_document", lambda *a: 1 // 0)
    outcome = upload(
        library, Case(what, "a.md", b"# Words\n\nSome words.\n\n# More\n\nOther words."), Limits()
    )
    assert any(fault in found for found in outcome.faults), outcome
    library.close(all=True)


def test_what_is_left_behind_is_a_fault(tmp_path: Path) -> None:
    for name in ("tmp", "data", "data/tmp", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "tmp" / "half").write_bytes(b"")
    before = psutil.Process().children(recursive=True)
    assert left_behind(tmp_path, before) == ["data/tmp/half is left", "elsewhere has appeared"]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert f"process {child.pid} is left" in left_behind(tmp_path, before)
    finally:
        child.kill()
        child.communicate()


class _Nothing:
    text = " "
    sections = ()
