"""The plan arrays of a captured CUDA graph: fixed places in one vector, filled anew before each replay.

A graph is captured for a bucket of `rows` decodes. Its kernels read their tiles from a vector that stays
where it is, so a step is: fill the host's copy of the vector, send what is used of it, replay.

    vector   [ window A: tiles, rows, positions, merges, block ids ][ window B: … ]

Rows beyond the step's own are padding: no tile reads them and no slot is written for them.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from kernels.api import Heads, KernelError, Reads
from kernels.plan import AttentionPlan, PlanCounters
from kernels.triton_backend import State, Step, TritonBackend
from kernels.triton_config import Launch
from kernels.triton_plan import WAVES, Capacity, Int32, Packed, layout, pack

#: Most block ids that a window's part of the vector holds: 4 MiB.
MAX_BLOCKS = 1 << 20


def capacity_for(
    rows: int, *, heads: Heads, processors: int, launch: Launch, context_blocks: int
) -> Capacity:
    """Sizes that hold any step of `rows` decodes whose tree of sharing is no deeper than four levels.

    Splitting over the keys adds at most `WAVES * processors / kv_heads` tiles (see `split_length`). A deeper
    tree may need more; such a step does not fit and runs without a graph.
    """
    split = -(-WAVES * processors // heads.kv_heads)
    per_tile = (launch.tall if is_tall(rows, heads, launch) else launch.wide).tokens(heads.group)
    shared = rows > 1
    partials = rows + split + (4 * rows + split * min(rows, per_tile) if shared else 0)
    return Capacity(
        tokens=rows,
        narrow_tiles=rows + split,
        wide_tiles=2 * rows + split if shared else 0,
        rows=5 * rows if shared else rows,
        blocks=min(MAX_BLOCKS, max(rows * context_blocks, 2 * context_blocks)),
        merges=partials,
        partials=partials,
    )


def is_tall(rows: int, heads: Heads, launch: Launch) -> bool:
    """Whether a bucket's shared segments take the tall tile: one document read by all would fill it."""
    return rows * heads.group > launch.wide.block_m


class TritonPlans:
    """The vector of one bucket. `layers`: the sliding window of each of the model's layers."""

    def __init__(
        self,
        backend: TritonBackend,
        heads: Heads,
        *,
        rows: int,
        layers: tuple[int | None, ...],
        block_size: int,
        context_blocks: int,
    ) -> None:
        self.backend, self.heads, self.rows, self.block_size = backend, heads, rows, block_size
        self.layers = Counter(layers)
        launch = backend.launch_config(heads, block_size)
        self.tall = is_tall(rows, heads, launch)
        self.capacity = capacity_for(
            rows, heads=heads, processors=backend.processors, launch=launch, context_blocks=context_blocks
        )
        tiles = backend.tiles(self._empty(), heads, None, self.tall)
        self._configs = tiles.narrow.config, tiles.wide.config
        self.where: Packed = layout(tiles, self.capacity)

    @property
    def size(self) -> int:
        """Elements (int32) of the vector."""
        return len(self.layers) * self.where.size

    def template(self, vector: Tensor) -> AttentionPlan:
        """The plan that the captured pass runs with: all rows padding, all arrays in `vector`."""
        if vector.numel() < self.size:
            raise KernelError(f"the vector has {vector.numel()} elements, the captured graph {self.size}")
        plan = self._empty()
        narrow, wide = self._configs
        for index, window in enumerate(self.layers):
            part = vector[index * self.where.size : (index + 1) * self.where.size]
            plan.state.steps[window, self.heads] = Step(narrow, wide, self.where, part, Reads(0, 0, 0))
        return plan

    def fill(self, plan: AttentionPlan, host: Int32) -> int:
        """Write a step's arrays into the host's vector and count what the replay will read.

        Returns how many elements have to be sent. Raises `kernels.plan.PlanError` where it does not fit.
        """
        token_bytes = 2 * self.heads.kv_heads * self.heads.head_dim * self.heads.kv_itemsize
        used, counted = 0, []
        for index, (window, layers) in enumerate(self.layers.items()):
            tiles = self.backend.tiles(plan, self.heads, window, self.tall)
            layout(tiles, self.capacity)  # refuses what does not fit
            start = index * self.where.size
            used = start + pack(tiles, self.where, host[start : start + self.where.size])
            counted.append((tiles.reads, layers))
        for reads, layers in counted:
            plan.tally.add(reads, token_bytes, layers)
        return used

    def _empty(self) -> AttentionPlan:
        return AttentionPlan(
            block_size=self.block_size,
            query_lens=(),
            context_lens=(),
            query_starts=(),
            tables=(),
            shared=(),
            own=(),
            counters=PlanCounters(0, 0, 0, 0),
            state=State(),
            padding=self.rows,
        )
