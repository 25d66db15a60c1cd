"""The soak on a small scale: `python -m bench.library_soak` has ten people with 200 documents each."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from bench.library_soak import READABLE, Log, Plan, compare, run
from bench.word_embedder import WordEmbedder
from rag.library import Library


@pytest.mark.slow
def test_nothing_that_was_reported_ready_is_lost(tmp_path: Path) -> None:
    # The seed's first kill comes soon: before all is done on any machine.
    plan = Plan(people=3, documents=8, kills=3, kill_after_s=(0.2, 1.5), seed=15, timeout_s=200)
    result = run(tmp_path, plan)
    assert result["faults"] == []
    assert result["documents"] == result["files"] == 24 - result["deleted"]
    assert (result["deleted"], result["replaced"]) == (3, 3)
    assert 1 <= result["kills"] <= 3
    # The comparison would see it if one of them were gone, or one too many there.
    library = Library.open(tmp_path / "data", WordEmbedder())
    library.delete_document("d-0-0")
    library.wait(library.add_document("soak", "x.md", b"# More\n\nThan was said.", "x"), 60)
    assert len(library.documents(READABLE)) == result["documents"]
    library.close(all=True)
    faults = compare(tmp_path, plan)["faults"]
    assert "d-0-0 was reported ready and is gone" in faults
    assert any("never reported" in fault for fault in faults)


@pytest.mark.slow
def test_few_documents_and_no_kill(tmp_path: Path) -> None:
    """Fewer than five: nobody deletes anything."""
    result = run(tmp_path, Plan(people=1, documents=2, searchers=1, kills=0, timeout_s=100))
    assert (result["faults"], result["documents"], result["deleted"]) == ([], 2, 0)


def test_a_child_that_hangs_is_a_fault_and_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hangs))
    result = run(tmp_path, Plan(kills=0, timeout_s=0.3))
    assert result["faults"] == ["not done after 0 s"]
    assert {child.pid for child in psutil.Process().children()} <= before


def test_what_was_said_is_read_back(tmp_path: Path) -> None:
    assert Log.read(tmp_path / "said") == {}
    log = Log(tmp_path / "said")
    log.say("open")
    log.say("ready", "d-1-2")
    log.say("ready", "d-1-3")
    assert Log.read(tmp_path / "said") == {"open": {"-"}, "ready": {"d-1-2", "d-1-3"}}
