"""What the torch backend precomputes from a plan: which rows of the query meet which slots of the pool.

Built once a step for each sliding window that the model's layers use; the layers then only run products.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.plan import AttentionPlan, IntArray, Run, Segment

#: Query rows (before GQA stacking) of one product: bounds the score matrix, and lets causal tiles skip keys.
TILE_ROWS = 128
#: Average run below which a segment is gathered into one contiguous copy instead of multiplied run by run.
VIEW_TOKENS = 96
#: A single decode with at least so many own tokens is computed on views, not in the gathered batch.
SOLO_TOKENS = 768
#: Padding (in tokens) that a gathered batch of decodes may waste before it is cut in two.
PADDING_TOKENS = 1024


@dataclass(slots=True)
class DensePass:
    """Rows of one or more sequences against one segment.

    rows      of the packed query, a slice where they are consecutive, else an index tensor
    segment   keys that at least one row sees
    positions int64 [rows]: logical positions of the rows, only where a mask is needed
    causal    the segment reaches into the rows' own positions
    gather    int64 [tokens]: slots, where the segment is too fragmented for views
    first     no earlier pass has touched any of these rows
    shared    more than one reader
    """

    rows: slice | Tensor
    count: int
    segment: Segment
    positions: Tensor | None
    causal: bool
    gather: Tensor | None
    first: bool
    shared: bool


@dataclass(slots=True)
class DecodeBatch:
    """Single queries of many sequences against their own tails, gathered and padded to one length.

    slots   int64 [sequences, longest]; padding repeats a valid slot of the same sequence
    padding bool [sequences, longest]: True where there is no key
    """

    rows: slice | Tensor
    count: int
    slots: Tensor
    padding: Tensor | None
    first: bool


@dataclass(slots=True)
class Work:
    """All products of one layer, and the KV tokens that they read."""

    dense: list[DensePass]
    batches: list[DecodeBatch]
    tokens_read: int
    tokens_logical: int
    shared_passes: int


def _slots(runs: tuple[Run, ...]) -> IntArray:
    if not runs:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(r.slot, r.slot + r.tokens, dtype=np.int64) for r in runs])


def build_work(plan: AttentionPlan, window: int | None, device: torch.device) -> Work:
    """Lay out one layer's products for a sliding window (None: none)."""
    return _WorkBuilder(plan, window, device).build()


class _WorkBuilder:
    def __init__(self, plan: AttentionPlan, window: int | None, device: torch.device) -> None:
        self.plan, self.window, self.device = plan, window, device
        self.touched = np.zeros(plan.rows, dtype=bool)
        self.work = Work([], [], 0, 0, 0)

    def build(self) -> Work:
        plan, work = self.plan, self.work
        for segment in plan.shared:
            rows = np.concatenate([self._rows_of(s) for s in segment.readers])
            positions = np.concatenate([self._positions_of(s) for s in segment.readers])
            read = self._read(segment, int(positions.min()))
            if read == 0:
                continue  # out of every reader's window
            work.tokens_read += read
            work.shared_passes += 1
            for a in range(0, len(rows), TILE_ROWS):
                self._dense(segment, rows[a : a + TILE_ROWS], positions[a : a + TILE_ROWS], causal=False)
        decodes: list[Segment] = []
        for segment in plan.own:
            s = segment.readers[0]
            first, count = plan.first_query(s), plan.query_lens[s]
            read = self._read(segment, first)
            work.tokens_read += read
            work.tokens_logical += plan.context_lens[s] - self._oldest(first)
            if count == 1 and (read < SOLO_TOKENS or read < VIEW_TOKENS * len(segment.runs)):
                decodes.append(segment.clipped(self._oldest(first)))
                continue
            rows, positions = self._rows_of(s), self._positions_of(s)
            for a in range(0, count, TILE_ROWS):
                b = min(a + TILE_ROWS, count)
                seen = _until(segment, first + b)
                self._dense(seen, rows[a:b], positions[a:b], causal=count > 1)
        self._decodes(decodes)
        return work

    def _rows_of(self, s: int) -> IntArray:
        start = self.plan.query_starts[s]
        return np.arange(start, start + self.plan.query_lens[s], dtype=np.int64)

    def _positions_of(self, s: int) -> IntArray:
        return np.arange(self.plan.first_query(s), self.plan.context_lens[s], dtype=np.int64)

    def _oldest(self, position: int) -> int:
        """First position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _read(self, segment: Segment, first_position: int) -> int:
        return max(0, segment.end - max(segment.start, self._oldest(first_position)))

    def _dense(self, segment: Segment, rows: IntArray, positions: IntArray, *, causal: bool) -> None:
        segment = segment.clipped(self._oldest(int(positions.min())))
        if segment.tokens == 0:
            return
        cut = self._oldest(int(positions.max())) > segment.start
        mask = causal or cut
        fragmented = len(segment.runs) > 1 and segment.tokens < VIEW_TOKENS * len(segment.runs)
        self.work.dense.append(
            DensePass(
                rows=self._row_index(rows),
                count=len(rows),
                segment=segment,
                positions=self._tensor(positions) if mask else None,
                causal=causal,
                gather=self._tensor(_slots(segment.runs)) if fragmented else None,
                first=self._first(rows),
                shared=len(segment.readers) > 1,
            )
        )

    def _decodes(self, segments: list[Segment]) -> None:
        """Longest first; a batch ends where padding would waste more than another batch costs."""
        segments = sorted(segments, key=lambda g: -g.tokens)
        batch: list[Segment] = []
        wasted = 0
        for segment in segments:
            if batch:
                wasted += batch[0].tokens - segment.tokens
                if wasted > PADDING_TOKENS:
                    self._batch(batch)
                    batch, wasted = [], 0
            batch.append(segment)
        if batch:
            self._batch(batch)

    def _batch(self, segments: list[Segment]) -> None:
        segments = sorted(segments, key=lambda g: g.readers)  # rows in order make a slice more likely
        longest = max(g.tokens for g in segments)
        slots = np.empty((len(segments), longest), dtype=np.int64)
        padding = np.zeros((len(segments), longest), dtype=bool)
        for i, segment in enumerate(segments):
            own = _slots(segment.runs)
            slots[i, : len(own)] = own
            slots[i, len(own) :] = own[0]
            padding[i, len(own) :] = True
        rows = np.asarray([self.plan.query_starts[g.readers[0]] for g in segments], dtype=np.int64)
        self.work.batches.append(
            DecodeBatch(
                rows=self._row_index(rows),
                count=len(rows),
                slots=self._tensor(slots),
                padding=self._tensor(padding) if padding.any() else None,
                first=self._first(rows),
            )
        )

    def _first(self, rows: IntArray) -> bool:
        first = not self.touched[rows].any()
        self.touched[rows] = True
        return bool(first)

    def _row_index(self, rows: IntArray) -> slice | Tensor:
        if all(b == a + 1 for a, b in pairwise(rows.tolist())):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return self._tensor(rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _until(segment: Segment, end: int) -> Segment:
    """The part before logical position `end`."""
    if end >= segment.end:
        return segment
    left = end - segment.start
    runs: list[Run] = []
    for run in segment.runs:
        if left <= 0:
            break
        runs.append(Run(run.slot, min(run.tokens, left)))
        left -= run.tokens
    return Segment(segment.readers, segment.start, end, tuple(runs))
