"""The KV cache's storage: one tensor, cut into blocks by page tables that live elsewhere.

Layout, chosen so that one block of one head is a contiguous tile and a run of blocks is a plain view::

    storage [2, layers, kv_heads, num_blocks * block_size, head_dim]
             K/V

A single allocation lets a block be copied in all layers by one operation and keeps a step's memory flat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import IntegrityError, PoolTooSmall
from engine.types import Copy, ModelShape
from kernels import huge_pages
from kernels.fp8 import KV_FP8, Scales


class KVPool:
    """`num_blocks` blocks of `block_size` token slots, keys and values of all layers.

    Slots that nobody wrote hold whatever the memory held, NaN included (`fill_nan` makes sure of it, for
    tests): the kernels mask K *and* V. On a CPU the pages, huge ones where there are, are only taken from
    the system when first written.

    `scales`: of a pool of 8-bit floats, one for each layer; fixed for its life, so a block is mere bytes.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        fill_nan: bool = False,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise PoolTooSmall(1, max(num_blocks, 0), max(block_size, 1))
        if dtype.itemsize != shape.itemsize:
            raise ValueError(
                f"{dtype} takes {dtype.itemsize} bytes an element; the shape says {shape.itemsize}"
            )
        if (dtype == KV_FP8) != (scales is not None) or (scales is not None and len(scales) != shape.layers):
            raise ValueError(
                f"a pool of {dtype} and {shape.layers} layers got "
                f"{'no' if scales is None else len(scales)} scales; only 8-bit floats have them, one a layer"
            )
        self.shape, self.num_blocks, self.block_size, self.dtype = shape, num_blocks, block_size, dtype
        self.device = torch.device(device)
        self.storage = torch.empty(
            (2, shape.layers, shape.kv_heads, num_blocks * block_size, shape.head_dim),
            dtype=dtype,
            device=self.device,
        )
        huge_pages.advise(self.storage)
        if fill_nan:
            self.storage.fill_(float("nan"))
        #: One view `[kv_heads, slots, head_dim]` for each layer.
        self.key: list[Tensor] = list(self.storage[0].unbind(0))
        self.value: list[Tensor] = list(self.storage[1].unbind(0))
        self.scales: list[Scales | None] = [None] * shape.layers if scales is None else list(scales)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool: `num_blocks * block_bytes`."""
        return self.num_blocks * self.shape.block_bytes(self.block_size)

    @staticmethod
    def blocks_within(budget_bytes: int, shape: ModelShape, block_size: int) -> int:
        """How many whole blocks fit in `budget_bytes`."""
        return max(0, budget_bytes) // shape.block_bytes(block_size)

    def check_copies(self, copies: Sequence[Copy]) -> None:
        """Raise `IntegrityError` for copies that leave the pool or whose result depends on their order."""
        sources = {copy.source for copy in copies}
        targets: set[int] = set()
        for copy in copies:
            inside = 0 <= copy.source < self.num_blocks and 0 <= copy.target < self.num_blocks
            if not inside or not 0 <= copy.slots <= self.block_size:
                raise IntegrityError(
                    f"Cannot copy {copy.slots} slots of block {copy.source} to block {copy.target}: the pool "
                    f"has {self.num_blocks} blocks of {self.block_size} slots."
                )
            if copy.target in targets or copy.target in sources:
                raise IntegrityError(
                    f"Block {copy.target} is the target of two copies of one step, or a source as well."
                )
            targets.add(copy.target)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Carry out the step's copies, in all layers. Raises `IntegrityError` before anything is copied."""
        self.check_copies(copies)
        slots = self.storage
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            slots[:, :, :, target : target + copy.slots] = slots[:, :, :, source : source + copy.slots]
