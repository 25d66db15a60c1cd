"""What the torch backend precomputes from a plan: which rows of the query meet which slots of the pool.

Built once a step for each sliding window that the model's layers use; the layers then only run products.
The constants come from timings on two AVX-512 cores with 3 KV heads of 64 in bfloat16: a call of the fused
attention costs 35 us, a merge 25 us, a gathered token 0.1 us and its products in a padded batch 0.15 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.plan import AttentionPlan, IntArray, Run, Segment

#: Query rows of one product: bounds explicit masks, and lets the tiles of a long chunk skip later keys.
TILE_ROWS = 512
#: Average run below which a segment is gathered into one contiguous copy instead of multiplied run by run.
VIEW_TOKENS = 512
#: A single decode with at least so many own tokens is computed on views, not in the gathered batch.
SOLO_TOKENS = 512
#: Padding (in tokens) that a gathered batch of decodes may waste before it is cut in two.
PADDING_TOKENS = 400
#: What the compiled kernel's merging and writing of a row costs, in tail tokens.
ROW_TOKENS = 4


@dataclass(slots=True)
class DensePass:
    """Rows of one or more sequences against one segment.

    rows      of the packed query, a slice where they are consecutive, else an index tensor
    runs      slots of keys that at least one row sees
    causal    the keys are the rows' own positions: row `i` sees keys `0..i`
    hidden    bool [rows, tokens], True where a row does not see a key; None: all see all (or `causal`)
    blind     bool [rows], True where a row sees no key at all; None: no such row
    gather    int64 [tokens]: slots, where the segment is too fragmented for views
    first     no earlier pass has touched any of these rows
    additive  scratch of the backend: `hidden` as a mask to be added
    """

    rows: slice | Tensor
    count: int
    tokens: int
    runs: tuple[Run, ...]
    causal: bool
    hidden: Tensor | None
    blind: Tensor | None
    gather: Tensor | None
    first: bool
    additive: Tensor | None = None


@dataclass(slots=True)
class DecodeBatch:
    """Single queries of many sequences against their own tails, gathered and padded to one length.

    slots   int64 [sequences * longest]; padding repeats a valid slot of the same sequence
    padding bool [sequences, longest], True where there is no key; None: all are of one length
    """

    rows: slice | Tensor
    count: int
    longest: int
    slots: Tensor
    padding: Tensor | None
    first: bool
    additive: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tails:
    """Own tails of single queries for the compiled kernel: row `r` of the packed query reads the runs
    `first[r]..first[r + 1]`, none where its work is done in passes.

    first    int64 [rows + 1]
    slot     int64 [runs], tokens int64 [runs]: stretches of the pool
    started  bool [rows]: a pass has left a partial result of this row
    work     int64 [rows + 1]: cumulative cost in tail tokens, by which threads share the rows
    """

    first: IntArray
    slot: IntArray
    tokens: IntArray
    started: npt.NDArray[np.bool_]
    work: IntArray


@dataclass(slots=True)
class Work:
    """All products of one layer, and the KV tokens that they read.

    mixed: some pass meets both rows that an earlier pass has touched and rows that none has.
    tails: what the compiled kernel does after the passes; None: the passes are all there is.
    """

    passes: list[DensePass | DecodeBatch]
    tokens_read: int
    tokens_logical: int
    shared_passes: int
    mixed: bool = False
    tails: Tails | None = None


def build_work(
    plan: AttentionPlan, window: int | None, device: torch.device, *, compiled: bool = False
) -> Work:
    """Lay out one layer's products for a sliding window (None: none).

    `compiled`: short tails of single queries go to the compiled kernel, not into gathered batches.
    """
    return _WorkBuilder(plan, window, device, compiled).build()


class _WorkBuilder:
    def __init__(self, plan: AttentionPlan, window: int | None, device: torch.device, compiled: bool) -> None:
        self.plan, self.window, self.device, self.compiled = plan, window, device, compiled
        self.touched = np.zeros(plan.rows, dtype=bool)
        self.work = Work([], 0, 0, 0)

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
                self._dense(segment, rows[a : a + TILE_ROWS], positions[a : a + TILE_ROWS])
        decodes: list[Segment] = []
        for segment in plan.own:
            s = segment.readers[0]
            first, count = plan.first_query(s), plan.query_lens[s]
            read = self._read(segment, first)
            work.tokens_read += read
            work.tokens_logical += plan.context_lens[s] - self._oldest(first)
            rows, positions = self._rows_of(s), self._positions_of(s)
            if count > 1:
                for a in range(0, count, TILE_ROWS):
                    b = min(a + TILE_ROWS, count)
                    self._dense(_until(segment, first + a), rows[a:b], positions[a:b])
                    square = _until(segment, first + b).clipped(first + a)
                    self._dense(square, rows[a:b], positions[a:b], causal=True)
            elif read >= SOLO_TOKENS and read >= VIEW_TOKENS * len(segment.runs):
                self._dense(segment, rows, positions)
            else:
                decodes.append(segment.clipped(self._oldest(first)))
        if self.compiled and decodes:
            work.tails = self._tails(decodes)
        else:
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

    def _dense(self, segment: Segment, rows: IntArray, positions: IntArray, *, causal: bool = False) -> None:
        segment = segment.clipped(self._oldest(int(positions.min())))
        if segment.tokens == 0:
            return
        hidden: npt.NDArray[np.bool_] | None = None
        blind: npt.NDArray[np.bool_] | None = None
        if self.window is not None and self._oldest(int(positions.max())) > segment.start:
            keys = np.arange(segment.start, segment.end)
            seen = keys[None, :] > positions[:, None] - self.window
            if causal:
                seen &= keys[None, :] <= positions[:, None]
            hidden = np.logical_not(seen)
            blind = np.asarray(hidden.all(axis=1))
        fragmented = segment.tokens < VIEW_TOKENS * len(segment.runs) and len(segment.runs) > 1
        by_mask = causal or hidden is not None  # a mask belongs to the whole segment, not to its runs
        gathered = fragmented or (by_mask and len(segment.runs) > 1)
        self.work.passes.append(
            DensePass(
                rows=self._row_index(rows),
                count=len(rows),
                tokens=segment.tokens,
                runs=segment.runs,
                causal=causal and hidden is None,
                hidden=None if hidden is None else self._tensor(hidden),
                blind=self._tensor(blind) if blind is not None and blind.any() else None,
                gather=self._tensor(_slots(segment.runs)) if gathered else None,
                first=self._first(rows),
            )
        )

    def _tails(self, segments: list[Segment]) -> Tails:
        rows = self.plan.rows
        runs: list[tuple[Run, ...]] = [()] * rows
        costs = np.full(rows, ROW_TOKENS, dtype=np.int64)
        for segment in segments:
            row = self.plan.query_starts[segment.readers[0]]
            runs[row] = segment.runs
            costs[row] += segment.tokens
        flat = [run for row_runs in runs for run in row_runs]
        return Tails(
            first=np.cumsum([0, *(len(row_runs) for row_runs in runs)], dtype=np.int64),
            slot=np.asarray([run.slot for run in flat], dtype=np.int64),
            tokens=np.asarray([run.tokens for run in flat], dtype=np.int64),
            started=self.touched.copy(),
            work=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(costs)]),
        )

    def _decodes(self, segments: list[Segment]) -> None:
        """Longest first; a batch ends where padding would waste more than another batch costs."""
        batch: list[Segment] = []
        wasted = 0
        for segment in sorted(segments, key=lambda g: -g.tokens):
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
        padding = np.zeros((len(segments), longest), dtype=np.bool_)
        for i, segment in enumerate(segments):
            own = _slots(segment.runs)
            slots[i, : len(own)] = own
            slots[i, len(own) :] = own[0]
            padding[i, len(own) :] = True
        rows = np.asarray([self.plan.query_starts[g.readers[0]] for g in segments], dtype=np.int64)
        self.work.passes.append(
            DecodeBatch(
                rows=self._row_index(rows),
                count=len(rows),
                longest=longest,
                slots=self._tensor(slots.reshape(-1)),
                padding=self._tensor(padding) if padding.any() else None,
                first=self._first(rows),
            )
        )

    def _first(self, rows: IntArray) -> bool:
        seen = self.touched[rows]
        first = not bool(seen.any())
        self.work.mixed |= not first and not bool(seen.all())
        self.touched[rows] = True
        return first

    def _row_index(self, rows: IntArray) -> slice | Tensor:
        if all(b == a + 1 for a, b in pairwise(rows.tolist())):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return self._tensor(rows)

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _slots(runs: tuple[Run, ...]) -> IntArray:
    return np.concatenate([np.arange(r.slot, r.slot + r.tokens, dtype=np.int64) for r in runs])


def _until(segment: Segment, end: int) -> Segment:
    """The part before logical position `end`; may be empty."""
    if end >= segment.end:
        return segment
    left = max(0, end - segment.start)
    runs: list[Run] = []
    for run in segment.runs:
        if left <= 0:
            break
        runs.append(Run(run.slot, min(run.tokens, left)))
        left -= run.tokens
    return Segment(segment.readers, segment.start, max(end, segment.start), tuple(runs))
