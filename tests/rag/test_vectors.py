from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rag import vectors
from rag.vectors import VectorIndex

DIMENSION = 8


def unit(seed: int) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return vector / np.linalg.norm(vector)


class AgainstBruteForce(RuleBasedStateMachine):
    """Any sequence of adds, removals and merges answers like a plain list of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.index = VectorIndex(DIMENSION)
        self.plain: dict[int, np.ndarray] = {}
        self.next = 0

    @rule(count=st.integers(1, 12), seed=st.integers(0, 10**6))
    def add(self, count: int, seed: int) -> None:
        ids = list(range(self.next, self.next + count))
        made = np.stack([unit(seed + i) for i in range(count)])
        self.next += count
        self.index.add(ids, made)
        self.plain.update(zip(ids, made, strict=True))

    @precondition(lambda self: self.next)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.integers(0, self.next), max_size=6))
        assert self.index.remove(ids) == len(ids & self.plain.keys())
        for id in ids:
            self.plain.pop(id, None)

    @rule()
    def merge(self) -> None:
        self.index.merge()

    @rule(seed=st.integers(0, 10**6), k=st.integers(0, 20))
    def search(self, seed: int, k: int) -> None:
        query = unit(seed)
        best = sorted(((float(v @ query), id) for id, v in self.plain.items()), key=lambda x: (-x[0], x[1]))[
            :k
        ]
        found = self.index.search(query, k)
        assert len(found) == len(best)
        np.testing.assert_allclose([s for _, s in found], [s for s, _ in best], atol=1e-5)
        assert {i for i, _ in found} <= self.plain.keys()
        assert len({i for i, _ in found}) == len(found)

    @invariant()
    def ids_agree(self) -> None:
        assert self.index.ids() == set(self.plain)
        assert len(self.index) == len(self.plain)


AgainstBruteForce.TestCase.settings = settings(max_examples=60, deadline=None)
TestAgainstBruteForce = AgainstBruteForce.TestCase


def test_a_full_delta_is_merged_and_heavy_tombstones_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "MERGE_AT", 10)
    index = VectorIndex.build(DIMENSION, range(100), np.stack([unit(i) for i in range(100)]))
    index.add(range(100, 110), np.stack([unit(i) for i in range(100, 110)]))
    assert len(index._state.delta_ids) == 0
    index.remove(range(70))
    assert not index._state.tombstones
    assert index.search(unit(75), 1)[0][0] == 75


def test_wrong_input_is_refused_and_changes_nothing() -> None:
    index = VectorIndex.build(DIMENSION, [1], unit(1))
    for ids, made in (
        ([1], unit(2)),
        ([2, 2], np.stack([unit(2), unit(3)])),
        ([2], np.stack([unit(2), unit(3)])),
        ([-1], unit(2)),
        ([3], np.full(DIMENSION, np.nan)),
    ):
        with pytest.raises(ValueError):
            index.add(ids, made)
    with pytest.raises(ValueError, match="dimensions"):
        index.search(np.ones(3, np.float32), 1)
    assert index.ids() == {1}


def test_four_writers_and_four_readers() -> None:
    """Searches during changes see a state before or after, and the process survives."""
    index = VectorIndex(DIMENSION)
    pinned = np.stack([unit(i) for i in range(50)])
    index.add(range(50), pinned)
    errors: list[BaseException] = []
    done = threading.Event()

    def write(writer: int) -> None:
        try:
            for step in range(40):
                ids = [1000 + writer * 10_000 + step * 10 + i for i in range(5)]
                index.add(ids, np.stack([unit(i) for i in ids]))
                if step % 3:
                    index.remove(ids[:3])
                if step % 10 == 9:
                    index.merge()
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                for id in range(0, 50, 7):
                    assert index.search(pinned[id], 1)[0][0] == id
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert len(index) == 50 + 4 * (40 * 5 - 3 * sum(1 for s in range(40) if s % 3))
