"""Readers, blocks and pins of each document, against page tables and against what unlinking takes out."""

from __future__ import annotations

import pytest

from engine.document_memory import document_memory
from tests.app.small_engine import SmallEngine


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine()


def test_readers_are_counted_once_each_however_long_the_document(engine: SmallEngine) -> None:
    for reader in range(3):
        engine.ask(f"c{reader}", document=0, question=reader, tokens=4)
    engine.ask("c3", document=1, question=9, tokens=40)
    engine.run_until(lambda: len(engine.done()) == 3)
    engine.run_until(lambda: len(engine.core.scheduler.running) == 1)
    found = document_memory(engine.core.memory)
    assert set(found) == {"d0", "d1"}
    assert (found["d0"].running, found["d0"].open_readers) == (0, 3)
    assert (found["d1"].running, found["d1"].open_readers) == (1, 1)
    # 20 tokens of instructions and 100 of the document: it begins in the second block and ends in the eighth.
    assert found["d0"].blocks >= 6
    assert found["d0"].behind >= found["d0"].blocks
    assert found["d0"].held == 0 < found["d1"].held
    assert not found["d0"].kept


def test_unlinking_takes_out_what_was_said_before(engine: SmallEngine) -> None:
    for reader in range(3):
        engine.ask(f"c{reader}", document=0, question=reader, tokens=30)
    engine.ask("c3", document=1, question=9, tokens=4)
    engine.run_until(lambda: len(engine.done()) == 4)
    said = document_memory(engine.core.memory)["d0"].behind
    assert engine.unlink_document("d0") == said > 0
    assert set(document_memory(engine.core.memory)) == {"d1"}


def test_pins_are_counted_and_a_document_may_be_kept_before_it_is_read(
    engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.service.TREE_INTERVAL_S", 3600.0)
    engine.ask("c", document=0, question=0, tokens=4)
    engine.run_until(lambda: len(engine.done()) == 1)
    pinned = engine.pin_document("d0")
    engine.pin_document("d5")
    found = engine.documents(fresh=True)
    assert found["d0"].pinned == pinned >= found["d0"].blocks > 0
    assert found["d0"].kept
    assert (found["d5"].kept, found["d5"].pinned, found["d5"].blocks) == (True, 0, 0)
    assert engine.documents() is engine.documents(), "looks that follow at once share one walk"
    engine.unpin_document("d0")
    assert engine.documents(fresh=True)["d0"].pinned == 0
