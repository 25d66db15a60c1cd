"""The fuzzed files on a small scale: `python -m bench.fuzz_files` uploads 500."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fuzz_corpus import NAMES_A_FILE, harmful, sound
from bench.fuzz_files import Case, cases, run, upload
from bench.word_embedder import WordEmbedder
from rag.library import Library
from rag.parse.types import Limits


@pytest.mark.slow
def test_hostile_and_damaged_files_cost_one_job_each(tmp_path: Path) -> None:
    result = run(tmp_path / "data", 30, limits=Limits(seconds=3.0, characters=300_000))
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


@pytest.mark.parametrize("what", ["unforeseen", "empty", NAMES_A_FILE])
def test_the_check_sees_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """An error that nobody foresaw, a document that is ready with nothing in it, and one with more in it than
    was uploaded."""
    library = Library.open(tmp_path / "data", WordEmbedder())
    library.create_collection("Fuzz", "fuzz", "fuzz")
    if what == "unforeseen":
        monkeypatch.setattr("rag.ingest.split_sections", lambda parsed: 1 // 0)
    elif what == "empty":
        monkeypatch.setattr("rag.library.Library.document", lambda *a: _Nothing())
    outcome = upload(library, Case(what, "a.md", b"# Words\n\nSome words."), Limits())
    assert outcome.faults
    library.close(all=True)


class _Nothing:
    text = " "
    sections = ()
