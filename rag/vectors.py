"""Exact nearest neighbours of one collection: an immutable FAISS base, a small delta, tombstones.

Searching and changing may overlap freely. A change builds a new state and swaps one reference, so a
search sees the state before or the state after, never something between; FAISS itself is only ever
searched, never changed after it was built (removing from an index while it is searched ends the process).
The index is a cache of the embeddings in SQLite and is never written to disk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

#: Once the delta holds this many vectors it is merged into the base.
MERGE_AT = 2_048


@dataclass(frozen=True, slots=True)
class _State:
    base: faiss.IndexIDMap2 | None
    base_ids: frozenset[int]
    delta_ids: Ids
    delta: Matrix
    #: Ids of the base that were removed since it was built; the delta drops its own at once.
    tombstones: frozenset[int]


class VectorIndex:
    """Inner product over unit vectors of one dimension, by integer id. All methods are thread-safe."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._lock = threading.Lock()  # writers only; readers take the present state
        self._state = _empty(dimension)

    @classmethod
    def build(cls, dimension: int, ids: Sequence[int] | Ids, vectors: Matrix) -> VectorIndex:
        """An index over ids `[n]` and vectors `[n, dimension]`, all in the base."""
        index = cls(dimension)
        id_array, matrix = index._checked(ids, vectors)
        index._state = _State(
            _base(id_array, matrix, dimension),
            frozenset(id_array.tolist()),
            *_no_delta(dimension),
            frozenset(),
        )
        return index

    def __len__(self) -> int:
        state = self._state
        return len(state.base_ids) - len(state.tombstones) + len(state.delta_ids)

    def ids(self) -> set[int]:
        """All ids that a search can return."""
        state = self._state
        return (set(state.base_ids) - state.tombstones) | set(state.delta_ids.tolist())

    def add(self, ids: Sequence[int] | Ids, vectors: Matrix) -> None:
        """Add vectors `[n, dimension]`. Raises ValueError for a wrong shape, or an id that is there."""
        id_array, matrix = self._checked(ids, vectors)
        with self._lock:
            state = self._state
            new = set(id_array.tolist())
            if clash := (state.base_ids & new) | new.intersection(state.delta_ids.tolist()):
                raise ValueError(f"id {min(clash)} is already in the index; ids are never used twice")
            state = _State(
                state.base,
                state.base_ids,
                np.concatenate([state.delta_ids, id_array]),
                np.concatenate([state.delta, matrix]),
                state.tombstones,
            )
            self._state = self._merged(state) if len(state.delta_ids) >= MERGE_AT else state

    def remove(self, ids: Iterable[int]) -> int:
        """Remove ids, unknown ones included; return how many were there."""
        wanted = set(ids)
        with self._lock:
            state = self._state
            keep = np.array([i not in wanted for i in state.delta_ids.tolist()], dtype=bool)
            tombstones = state.tombstones | (state.base_ids & wanted)
            removed = len(tombstones) - len(state.tombstones) + int((~keep).sum())
            state = _State(state.base, state.base_ids, state.delta_ids[keep], state.delta[keep], tombstones)
            # Removed text should not stay in memory for long, and dead vectors cost every search.
            heavy = len(tombstones) > max(64, len(state.base_ids) // 8)
            self._state = self._merged(state) if heavy else state
        return removed

    def search(self, query: Matrix, k: int) -> list[tuple[int, float]]:
        """The `k` best (id, cosine) for a unit vector `[dimension]`, best first; ties by smaller id."""
        state = self._state
        vector = np.ascontiguousarray(query, dtype=np.float32).reshape(1, -1)
        if vector.shape[1] != self.dimension:
            raise ValueError(f"the query has {vector.shape[1]} dimensions, the index {self.dimension}")
        found: list[tuple[int, float]] = []
        live = len(state.base_ids) - len(state.tombstones)
        if state.base is not None and live and k > 0:
            parameters: Any = None
            if state.tombstones:
                dead = np.fromiter(state.tombstones, dtype=np.int64)
                parameters = faiss.SearchParameters(sel=faiss.IDSelectorNot(faiss.IDSelectorBatch(dead)))  # type: ignore[call-arg]
            scores, ids = state.base.search(vector, min(k, live), params=parameters)
            found += [(int(i), float(s)) for i, s in zip(ids[0], scores[0], strict=True) if i >= 0]
        if len(state.delta_ids) and k > 0:
            similar = state.delta @ vector[0]
            best = np.argpartition(-similar, k - 1)[:k] if k < len(similar) else np.arange(len(similar))
            found += [(int(state.delta_ids[i]), float(similar[i])) for i in best]
        found.sort(key=lambda item: (-item[1], item[0]))
        return found[:k]

    def merge(self) -> None:
        """Fold delta and tombstones into a new base. Searches go on with the old one meanwhile."""
        with self._lock:
            self._state = self._merged(self._state)

    def _merged(self, state: _State) -> _State:
        ids, vectors = state.delta_ids, state.delta
        if state.base is not None:
            base_ids = faiss.vector_to_array(state.base.id_map)
            flat = faiss.downcast_index(state.base.index)
            matrix = flat.reconstruct_n(0, flat.ntotal).reshape(-1, self.dimension)
            if state.tombstones:
                keep = ~np.isin(base_ids, np.fromiter(state.tombstones, dtype=np.int64))
                base_ids, matrix = base_ids[keep], matrix[keep]
            ids, vectors = np.concatenate([base_ids, ids]), np.concatenate([matrix, vectors])
        return _State(
            _base(ids, vectors, self.dimension),
            frozenset(ids.tolist()),
            *_no_delta(self.dimension),
            frozenset(),
        )

    def _checked(self, ids: Sequence[int] | Ids, vectors: Matrix) -> tuple[Ids, Matrix]:
        id_array = np.asarray(ids, dtype=np.int64).reshape(-1)
        matrix = np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1, self.dimension)
        if len(id_array) != len(matrix):
            raise ValueError(f"{len(id_array)} ids for {len(matrix)} vectors")
        if len(set(id_array.tolist())) != len(id_array):
            raise ValueError("the same id twice in one call")
        if len(id_array) and int(id_array.min()) < 0:
            raise ValueError("ids are not negative")
        if not np.isfinite(matrix).all():
            raise ValueError("a vector is not finite")
        return id_array, matrix


def _empty(dimension: int) -> _State:
    return _State(None, frozenset(), *_no_delta(dimension), frozenset())


def _no_delta(dimension: int) -> tuple[Ids, Matrix]:
    return np.zeros(0, dtype=np.int64), np.zeros((0, dimension), dtype=np.float32)


def _base(ids: Ids, vectors: Matrix, dimension: int) -> faiss.IndexIDMap2 | None:
    if not len(ids):
        return None
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
    index.add_with_ids(
        np.ascontiguousarray(vectors, dtype=np.float32), np.ascontiguousarray(ids, dtype=np.int64)
    )
    return index
