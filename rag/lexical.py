"""Lexical search with BM25 over counted terms: one index a collection, in memory, beside the vectors.

One index each, so that how often a word stands in documents that a person may not read never moves the
scores they see: a search counts over the collections it was given and no others (Robertson and Zaragoza
2009, with the never negative idf of Lucene), and passages of a collection of one page and of a collection of
thousands compare. Only passages that hold a term of the question are returned: nothing has a score of zero.

SQLite keeps each passage's terms (`rag.terms`) as counted 64-bit hashes, written in the transaction that
writes the passage: enough to build an index quickly, and one format for every script. Among 200,000 terms
two share a hash with a chance of one in 10^9.

An index is a tuple of immutable segments, as Lucene has them: a change builds a new tuple and swaps one
reference, so searches run beside it and see the state before or after. Small segments are merged as they
come, so that there are never more than a few.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rag.terms import query_terms, terms

#: Raised with every change of what `rag.terms.terms` or `prepare` make of a text: stored terms are then
#: counted anew at the next start.
VERSION = 1
K1, B = 1.2, 0.75
#: A term in more than this share of the passages decides nothing, but costs the most.
_COMMON = 0.4
_SMALL = 64
_HASH_BYTES, _COUNT_BYTES = 8, 2
_MAX_COUNT = 2**16 - 1

Ints = npt.NDArray[np.int64]


@lru_cache(maxsize=200_000)
def term_hash(term: str) -> int:
    """64 bits, the same on every machine."""
    digest = hashlib.blake2b(term.encode("utf-8"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


def prepare(text: str) -> bytes:
    """A passage as SQLite keeps it: n sorted hashes (uint64), then how often each occurs (n uint16), little
    endian. Takes time, so it is done before the write begins."""
    counted = sorted((term_hash(term), n) for term, n in Counter(terms(text)).items())
    hashes = np.array([h for h, _ in counted], dtype="<u8")
    counts = np.array([min(n, _MAX_COUNT) for _, n in counted], dtype="<u2")
    return hashes.tobytes() + counts.tobytes()


@dataclass(frozen=True, slots=True)
class _Segment:
    """Postings of passages `[n]`: those of term `terms[i]` are `rows[starts[i]:starts[i + 1]]`."""

    ids: Ints
    lengths: npt.NDArray[np.float64]
    alive: npt.NDArray[np.bool_]
    #: True where every passage is alive: the usual case, and then nothing is filtered.
    whole: bool
    terms: npt.NDArray[np.uint64]
    starts: Ints
    rows: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint16]

    @property
    def live(self) -> int:
        return len(self.ids) if self.whole else int(self.alive.sum())

    def postings(self, hash: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]] | None:
        """Rows and counts of the living passages that hold the term; None where there are none."""
        index = int(np.searchsorted(self.terms, np.uint64(hash)))
        if index == len(self.terms) or int(self.terms[index]) != hash:
            return None
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        rows, counts = self.rows[part], self.counts[part]
        if not self.whole:
            keep = self.alive[rows]
            rows, counts = rows[keep], counts[keep]
        return (rows, counts) if len(rows) else None


class LexicalIndex:
    """The terms of one collection's passages, by integer id. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # writers only; readers take the present segments
        self._segments: tuple[_Segment, ...] = ()

    @classmethod
    def build(cls, ids: Sequence[int], prepared: Sequence[bytes]) -> LexicalIndex:
        """An index over ids and what `prepare` made of each passage."""
        index = cls()
        index.add(ids, prepared)
        return index

    @property
    def segments(self) -> tuple[_Segment, ...]:
        """The present state; it never changes."""
        return self._segments

    def __len__(self) -> int:
        return sum(s.live for s in self._segments)

    def ids(self) -> set[int]:
        """All ids that a search can return."""
        return {int(i) for s in self._segments for i in s.ids[s.alive]}

    def add(self, ids: Sequence[int], prepared: Sequence[bytes]) -> None:
        """Add passages. Raises ValueError for an id that is there, or what `prepare` never made."""
        if not len(ids):
            return
        segment = _segment(ids, prepared)
        with self._lock:
            new = set(segment.ids.tolist())
            if len(new) != len(segment.ids):
                raise ValueError("the same id twice in one call")
            for present in self._segments:
                if clash := np.isin(present.ids, segment.ids).nonzero()[0].tolist():
                    raise ValueError(f"id {int(present.ids[clash[0]])} is already in the index")
            segments = [*self._segments, segment]
            while len(segments) > 1 and 2 * len(segments[-1].ids) > len(segments[-2].ids):
                last = segments.pop()
                segments[-1] = _merged([segments[-1], last])
            self._segments = tuple(segments)

    def remove(self, ids: Iterable[int]) -> int:
        """Remove ids, unknown ones included; return how many were there."""
        wanted = np.fromiter(ids, dtype=np.int64)
        removed = 0
        with self._lock:
            segments: list[_Segment] = []
            for segment in self._segments:
                gone = np.isin(segment.ids, wanted) & segment.alive
                count = int(gone.sum())
                removed += count
                if not count:
                    segments.append(segment)
                    continue
                alive = segment.alive & ~gone
                dead = len(alive) - int(alive.sum())
                if dead == len(alive):
                    continue
                changed = _with_alive(segment, alive)
                # What was removed should not stay in memory for long.
                segments.append(_merged([changed]) if dead > max(64, len(alive) // 8) else changed)
            self._segments = tuple(segments)
        return removed


def search(indexes: Sequence[LexicalIndex], query: str, k: int) -> list[tuple[int, float]]:
    """The `k` best (passage id, BM25 score > 0) over all these indexes together, best first; ties by smaller
    id."""
    segments = [s for index in indexes for s in index.segments]
    wanted = {term: term_hash(term) for term in query_terms(query)}
    count = sum(s.live for s in segments)
    if not wanted or not count or k < 1:
        return []
    length = sum(float(s.lengths.sum() if s.whole else s.lengths[s.alive].sum()) for s in segments)
    found = [{t: p for t, h in wanted.items() if (p := s.postings(h)) is not None} for s in segments]
    frequency: Counter[str] = Counter()
    for postings in found:
        frequency.update({t: len(rows) for t, (rows, _) in postings.items()})
    telling = [t for t, n in frequency.items() if count <= _SMALL or n <= _COMMON * count] or list(frequency)
    weights = {t: _idf(count, frequency[t]) for t in telling}
    ids: list[Ints] = []
    scores: list[npt.NDArray[np.float64]] = []
    for segment, postings in zip(segments, found, strict=True):
        total = np.zeros(len(segment.ids))
        for term, weight in weights.items():
            if term in postings:
                rows, counts = postings[term]
                times = counts.astype(np.float64)
                norm = K1 * (1.0 - B + B * (count / length) * segment.lengths[rows])
                total[rows] += weight * (K1 + 1.0) * times / (times + norm)
        best = _best(total, k)
        ids.append(segment.ids[best])
        scores.append(total[best])
    candidates = zip(np.concatenate(ids).tolist(), np.concatenate(scores).tolist(), strict=True)
    return sorted(candidates, key=lambda item: (-item[1], item[0]))[:k]


def idf(indexes: Sequence[LexicalIndex], wanted: Sequence[str]) -> dict[str, float]:
    """How telling each term is in these collections; terms that don't occur at all are the most telling."""
    segments = [s for index in indexes for s in index.segments]
    count = sum(s.live for s in segments)
    return {
        term: _idf(count, sum(len(p[0]) for s in segments if (p := s.postings(term_hash(term))) is not None))
        for term in wanted
    }


def _idf(count: int, frequency: int) -> float:
    return math.log(1.0 + (count - frequency + 0.5) / (frequency + 0.5))


def _best(scores: npt.NDArray[np.float64], k: int) -> Any:
    """Positions of the `k` best positive scores, and of all that tie with the last of them."""
    positive = scores.nonzero()[0]
    if len(positive) <= k:
        return positive
    values = scores[positive]
    return positive[values >= np.partition(values, len(values) - k)[len(values) - k]]


def _segment(ids: Sequence[int], prepared: Sequence[bytes]) -> _Segment:
    if len(ids) != len(prepared):
        raise ValueError(f"{len(ids)} ids for {len(prepared)} passages")
    sizes = [divmod(len(blob), _HASH_BYTES + _COUNT_BYTES) for blob in prepared]
    if any(rest for _, rest in sizes):
        raise ValueError("a passage's terms are damaged")
    number = np.array([n for n, _ in sizes], dtype=np.int64)
    split = [n * _HASH_BYTES for n, _ in sizes]
    hashes = np.frombuffer(b"".join(b[:n] for b, n in zip(prepared, split, strict=True)), dtype="<u8")
    counts = np.frombuffer(b"".join(b[n:] for b, n in zip(prepared, split, strict=True)), dtype="<u2")
    rows = np.repeat(np.arange(len(ids), dtype=np.int32), number)
    lengths = np.bincount(rows, weights=counts, minlength=len(ids))
    return _sorted(np.asarray(ids, dtype=np.int64).reshape(-1), lengths, hashes, rows, counts)


def _merged(parts: Sequence[_Segment]) -> _Segment:
    """One segment of what is alive in these."""
    hashes: list[Any] = []
    rows: list[Any] = []
    counts: list[Any] = []
    first = 0
    for part in parts:
        keep = part.alive[part.rows]
        place = (first + np.cumsum(part.alive) - 1).astype(np.int32)
        hashes.append(np.repeat(part.terms, np.diff(part.starts))[keep])
        rows.append(place[part.rows[keep]])
        counts.append(part.counts[keep])
        first += part.live
    return _sorted(
        np.concatenate([p.ids[p.alive] for p in parts]),
        np.concatenate([p.lengths[p.alive] for p in parts]),
        np.concatenate(hashes),
        np.concatenate(rows),
        np.concatenate(counts),
    )


def _sorted(ids: Ints, lengths: Any, hashes: Any, rows: Any, counts: Any) -> _Segment:
    order = np.argsort(hashes, kind="stable")
    hashes = np.ascontiguousarray(hashes[order], dtype=np.uint64)
    first = np.ones(len(hashes), dtype=bool)
    first[1:] = hashes[1:] != hashes[:-1]
    starts = np.append(first.nonzero()[0], len(hashes)).astype(np.int64)
    alive = np.ones(len(ids), dtype=bool)
    return _Segment(
        ids,
        np.asarray(lengths, dtype=np.float64),
        alive,
        True,
        hashes[first],
        starts,
        np.ascontiguousarray(rows[order], dtype=np.int32),
        np.ascontiguousarray(counts[order], dtype=np.uint16),
    )


def _with_alive(segment: _Segment, alive: npt.NDArray[np.bool_]) -> _Segment:
    return _Segment(
        segment.ids, segment.lengths, alive, False,
        segment.terms, segment.starts, segment.rows, segment.counts,
    )  # fmt: skip
