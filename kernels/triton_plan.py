"""From an `AttentionPlan` to the integer arrays that the Triton kernels walk. Numpy only.

Every program of the attention kernel takes one *tile*: some query tokens (all heads of one KV head's
group stacked) against one stretch of one segment's keys. A tile either covers all that its tokens see and
writes the output itself, or writes a partial result that the merge kernel collects:

    segments ──rows──► row tiles ──split over keys──► tiles ──► partial rows ──CSR lists──► merge

All arrays of a step lie in one int32 vector, so one copy brings them to the device. With a `Capacity`
the vector has a fixed layout and size whatever the batch (unused tiles are empty and return at once),
which is what a captured CUDA graph needs. Block ids come last: of a fixed layout only what is used is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.plan import AttentionPlan, PlanError, Segment
from kernels.triton_config import Launch, TileConfig

Int32 = npt.NDArray[np.int32]

#: int32 fields of a tile, in the kernel's order.
TILE_FIELDS = ("row_start", "row_count", "block_base", "key_start", "key_full", "key_end", "target", "unused")
#: A split shorter than this costs more to merge than it gains in parallelism.
SHORTEST_SPLIT = 256
#: Programs that a multiprocessor should have to choose from.
WAVES = 2


class Tiles(NamedTuple):
    """One launch of the attention kernel."""

    config: TileConfig
    table: Int32  # [tiles, 8]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Fixed sizes for a captured graph. `tokens` is the padded T, the others count array elements."""

    tokens: int
    narrow_tiles: int
    wide_tiles: int
    rows: int
    blocks: int
    merges: int
    partials: int


@dataclass(slots=True)
class TilePlan:
    """The arrays of one step for one sliding window.

    rows       packed query row of each entry of a tile's row list
    positions  logical position of each packed query row
    blocks     physical ids, segment by segment: a tile's position `p` is in `blocks[block_base + p // size]`
    merge_from `[T + 1]`: partial rows of token `t` are `merge_list[merge_from[t]:merge_from[t + 1]]`; none
               where a tile has written the token's output itself
    partials   number of partial rows
    """

    narrow: Tiles
    wide: Tiles
    rows: Int32
    positions: Int32
    blocks: Int32
    merge_from: Int32
    merge_list: Int32
    partials: int
    tokens_read: int
    tokens_logical: int
    shared_passes: int

    @property
    def reads(self) -> tuple[int, int, int]:
        """KV tokens logically and really read, and shared passes: what one layer counts."""
        return self.tokens_logical, self.tokens_read, self.shared_passes


class _Piece(NamedTuple):
    """Rows `[row_start, row_start + row_count)` of the row list against keys `[start, end)`; all rows see
    the keys before `full`."""

    row_start: int
    row_count: int
    block_base: int
    start: int
    full: int
    end: int
    wide: bool


def split_length(work: Sequence[tuple[int, int]], kv_heads: int, processors: int, block_n: int) -> int:
    """Keys of one split, so that all multiprocessors have work and no split is shorter than it should be.

    Args:
        work: (number of row tiles, keys) of each piece.
        processors: the chip's multiprocessors.
    """
    total = sum(tiles * keys for tiles, keys in work) * kv_heads
    length = max(SHORTEST_SPLIT, -(-total // (WAVES * processors)))
    return -(-length // block_n) * block_n


def tile_plan(
    plan: AttentionPlan,
    *,
    window: int | None,
    group: int,
    kv_heads: int,
    launch: Launch,
    processors: int,
    tall: bool | None = None,
) -> TilePlan:
    """Lay out the tiles of one step (see the module's drawing). `tall`: which wide tile, None: as needed."""
    builder = _TileBuilder(plan, window, group, kv_heads, launch, processors)
    if tall is not None:
        builder.wide_config = launch.tall if tall else launch.wide
    elif builder.most_rows() > launch.wide.block_m:
        builder.wide_config = launch.tall
    return builder.build()


class _TileBuilder:
    def __init__(
        self,
        plan: AttentionPlan,
        window: int | None,
        group: int,
        kv_heads: int,
        launch: Launch,
        processors: int,
    ) -> None:
        self.plan, self.window, self.group, self.kv_heads = plan, window, group, kv_heads
        self.processors, self.launch = processors, launch
        self.wide_config = launch.wide
        self.rows: list[npt.NDArray[np.int64]] = []
        self.row_total = 0
        self.blocks: list[npt.NDArray[np.int64]] = []
        self.block_total = 0
        self.pieces: list[_Piece] = []
        self.read = self.logical = self.shared_passes = 0

    def most_rows(self) -> int:
        """Stacked rows of the largest shared segment or chunk."""
        plan = self.plan
        readers_rows = [sum(plan.query_lens[s] for s in g.readers) for g in plan.shared]
        chunks = [n for n in plan.query_lens if n > 1]
        return max([*readers_rows, *chunks], default=0) * self.group

    def build(self) -> TilePlan:
        plan = self.plan
        for segment in plan.shared:
            self._segment(segment, wide=True)
        for segment in plan.own:
            s = segment.readers[0]
            self.logical += plan.context_lens[s] - self._oldest(plan.first_query(s))
            self._segment(segment, wide=plan.query_lens[s] > 1)
        return self._lay_out()

    def _oldest(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _segment(self, segment: Segment, *, wide: bool) -> None:
        plan, size = self.plan, self.plan.block_size
        first = min(plan.first_query(s) for s in segment.readers)
        start = max(segment.start, self._oldest(first))
        if start >= segment.end:
            return  # behind every reader's window
        self.read += segment.end - start
        shared = len(segment.readers) > 1
        self.shared_passes += shared
        row_start = self.row_total
        for s in segment.readers:
            offset = plan.query_starts[s]
            self.rows.append(np.arange(offset, offset + plan.query_lens[s]))
            self.row_total += plan.query_lens[s]
        first_block, last_block = start // size, (segment.end - 1) // size
        block_base = self.block_total - first_block
        self.blocks.append(plan.tables[segment.readers[0]][first_block : last_block + 1])
        self.block_total += last_block + 1 - first_block
        config = self.wide_config if wide else self.launch.narrow
        step = config.tokens(self.group)
        count = self.row_total - row_start
        for a in range(0, count, step):
            b = min(a + step, count)
            if shared:
                # All rows see all keys, unless a window cuts: then the kernel masks anyway.
                self.pieces.append(
                    _Piece(row_start + a, b - a, block_base, start, segment.end, segment.end, wide)
                )
                continue
            query = plan.first_query(segment.readers[0])
            low = max(segment.start, self._oldest(query + a))
            self.pieces.append(_Piece(row_start + a, b - a, block_base, low, query + a + 1, query + b, wide))

    def _lay_out(self) -> TilePlan:
        """Split the pieces over their keys and number the partial rows."""
        plan = self.plan
        narrow, wide = self.launch.narrow, self.wide_config
        block_n = max(narrow.block_n, wide.block_n)
        length = split_length(
            [(1, p.end - p.start) for p in self.pieces], self.kv_heads, self.processors, block_n
        )
        rows = _concatenate(self.rows)
        table = np.asarray([p[:6] for p in self.pieces], dtype=np.int64).reshape(-1, 6)
        is_wide = np.asarray([p.wide for p in self.pieces], dtype=bool)
        # Even splits: 1.1 lengths become two halves, not a long and a short one.
        splits = np.maximum(1, -(-(table[:, 5] - table[:, 3]) // length))
        even = -(-(table[:, 5] - table[:, 3]) // splits)
        even = -(-even // block_n) * block_n
        splits = np.maximum(1, -(-(table[:, 5] - table[:, 3]) // np.maximum(even, 1)))
        owner = np.repeat(np.arange(len(table)), splits)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(splits) - splits, splits)
        tiles = np.zeros((len(owner), len(TILE_FIELDS)), dtype=np.int64)
        tiles[:, :6] = table[owner]
        tiles[:, 3] = table[owner, 3] + index * even[owner]
        tiles[:, 5] = np.minimum(tiles[:, 3] + even[owner], table[owner, 5])
        keys_per_turn = np.where(is_wide[owner], wide.block_n, narrow.block_n)
        seen_by_all = np.clip(tiles[:, 4], tiles[:, 3], tiles[:, 5]) - tiles[:, 3]
        tiles[:, 4] = tiles[:, 3] + seen_by_all // keys_per_turn * keys_per_turn

        # How many tiles does each token meet? A token of one tile needs no merge.
        token_of = np.repeat(np.arange(len(owner)), tiles[:, 1])
        offset = np.arange(len(token_of)) - np.repeat(np.cumsum(tiles[:, 1]) - tiles[:, 1], tiles[:, 1])
        token = rows[tiles[token_of, 0] + offset] if len(token_of) else np.empty(0, dtype=np.int64)
        meets = np.bincount(token, minlength=plan.rows)
        alone = np.ones(len(owner), dtype=bool)
        np.logical_and.at(alone, token_of, meets[token] == 1)
        partial_count = np.where(alone, 0, tiles[:, 1])
        partial_start = np.cumsum(partial_count) - partial_count
        tiles[:, 6] = np.where(alone, -1, partial_start)

        merged = ~alone[token_of]
        merge_token = token[merged]
        partial_row = partial_start[token_of[merged]] + offset[merged]
        order = np.argsort(merge_token, kind="stable")
        merge_from = np.zeros(plan.rows + 1, dtype=np.int64)
        merge_from[1:] = np.cumsum(np.bincount(merge_token, minlength=plan.rows))
        positions = [
            np.arange(plan.first_query(s), plan.context_lens[s]) for s in range(len(plan.query_lens))
        ]
        owner_wide = is_wide[owner]
        return TilePlan(
            narrow=Tiles(narrow, tiles[~owner_wide].astype(np.int32)),
            wide=Tiles(wide, tiles[owner_wide].astype(np.int32)),
            rows=rows.astype(np.int32),
            positions=_concatenate(positions).astype(np.int32),
            blocks=_concatenate(self.blocks).astype(np.int32),
            merge_from=merge_from.astype(np.int32),
            merge_list=partial_row[order].astype(np.int32),
            partials=int(partial_count.sum()),
            tokens_read=self.read,
            tokens_logical=self.logical,
            shared_passes=self.shared_passes,
        )


def _concatenate(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """Where each array starts in the step's one vector (all starts are multiples of 4 elements)."""

    narrow: int
    narrow_tiles: int
    wide: int
    wide_tiles: int
    rows: int
    positions: int
    merge_from: int
    merge_list: int
    blocks: int
    size: int
    tokens: int
    partials: int


def layout(tiles: TilePlan, capacity: Capacity | None) -> Packed:
    """The vector's layout: as large as needed, or the capacity's, which the step must fit.

    Raises `PlanError` naming the first array that is too large for the capacity.
    """
    tokens = len(tiles.positions)
    need = Capacity(
        tokens=tokens,
        narrow_tiles=len(tiles.narrow.table),
        wide_tiles=len(tiles.wide.table),
        rows=len(tiles.rows),
        blocks=len(tiles.blocks),
        merges=len(tiles.merge_list),
        partials=tiles.partials,
    )
    have = capacity or need
    for name in Capacity.__dataclass_fields__:
        if getattr(need, name) > getattr(have, name):
            raise PlanError(
                f"the step needs {getattr(need, name)} {name}, the captured graph has {getattr(have, name)}"
            )
    sizes = [
        have.narrow_tiles * len(TILE_FIELDS),
        have.wide_tiles * len(TILE_FIELDS),
        have.rows,
        have.tokens,
        have.tokens + 1,
        have.merges,
        have.blocks,
    ]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 4) * 4)
    return Packed(
        narrow=starts[0],
        narrow_tiles=have.narrow_tiles,
        wide=starts[1],
        wide_tiles=have.wide_tiles,
        rows=starts[2],
        positions=starts[3],
        merge_from=starts[4],
        merge_list=starts[5],
        blocks=starts[6],
        size=starts[7],
        tokens=have.tokens,
        partials=have.partials,
    )


def pack(tiles: TilePlan, where: Packed, target: Int32) -> int:
    """Write the arrays into the host vector: unused tiles have no rows, padded tokens nothing to merge.

    Returns how many elements from the start on the kernels may look at.
    """
    used = where.blocks + len(tiles.blocks)
    target[:used] = 0
    for start, array in (
        (where.narrow, tiles.narrow.table.reshape(-1)),
        (where.wide, tiles.wide.table.reshape(-1)),
        (where.rows, tiles.rows),
        (where.positions, tiles.positions),
        (where.blocks, tiles.blocks),
        (where.merge_from, tiles.merge_from),
        (where.merge_list, tiles.merge_list),
    ):
        target[start : start + len(array)] = array
    end = where.merge_from + len(tiles.merge_from)
    target[end : where.merge_from + where.tokens + 1] = tiles.merge_from[-1]
    return used
