"""A look at the passages is taken beside the turn, one at a time, at what is newest."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from app import looks
from app.looks import Look, Looks
from rag.cite import Attribution, Citable

WAIT_S = 60.0


@dataclass(slots=True)
class Slow:
    """In the place of the real look: tells when it begins, and ends when it may."""

    texts: list[str] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self, text: str, passages: Sequence[Citable]) -> Attribution | None:
        self.texts.append(text)
        self.begun.release()
        assert self.may.acquire(timeout=WAIT_S)
        return None

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=WAIT_S)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(looks, "best_source", made)
    yield made
    made.may.release(100)  # whatever still waits


def ended(look: Look) -> None:
    assert look._running is not None
    look._running.exception(WAIT_S)


def test_what_came_meanwhile_is_looked_at_once_and_only_the_newest(slow: Slow) -> None:
    look = Looks().of(())
    look.at("one")
    slow.wait_begun()
    for text in ("two", "three", "four"):
        look.at(text)
        assert look.found() is None
    slow.may.release()
    ended(look)
    look.found()  # takes the first one's, and lets the next begin
    slow.wait_begun()
    assert slow.texts == ["one", "four"]
    slow.may.release()
    ended(look)
    look.found()
    assert look.found() is None
    assert slow.texts == ["one", "four"]


def test_few_look_at_once_and_a_turn_that_has_gone_does_not(slow: Slow) -> None:
    all_turns = Looks()
    first = [all_turns.of(()) for _ in range(looks._AT_ONCE)]
    for number, look in enumerate(first):
        look.at(f"turn {number}")
        slow.wait_begun()
    gone, late = all_turns.of(()), all_turns.of(())
    gone.at("gone")
    late.at("late")
    assert len(slow.texts) == looks._AT_ONCE
    gone.close()
    slow.may.release()
    slow.wait_begun()
    assert slow.texts[-1] == "late"
    assert "gone" not in slow.texts
