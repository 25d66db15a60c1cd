"""Attention over pages with Triton: serves GPUs of compute capability 8.0 and above.

A layer is at most three launches: the own work of decodes (narrow tiles), shared segments with prefill
chunks (wide tiles), and the merge where any token met more than one tile. The host never waits for the
device; a step's integer arrays travel in one copy from pinned memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.api import (
    AttentionBackend,
    BackendUnavailable,
    BlockCopy,
    Heads,
    KernelError,
    NewTokens,
    Options,
    Reads,
    StaticPlans,
)
from kernels.fp8 import KV_FP8
from kernels.plan import GPU, AttentionPlan, CostModel
from kernels.triton_attention import attention_kernel, merge_kernel
from kernels.triton_config import Launch, TileConfig, choose, head_parts
from kernels.triton_plan import Packed, TilePlan, layout, pack, tile_plan
from kernels.triton_pool import copy_kernel, write_kernel
from kernels.triton_upload import Upload

LOG2E = 1.4426950408889634
DTYPES = (torch.float16, torch.bfloat16, torch.float32, KV_FP8)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
    """The one place that starts a kernel; an empty grid starts nothing."""
    if all(grid):
        kernel[grid](*arguments, **meta)


def interpreted() -> bool:
    """True where Triton runs its kernels in Python on the CPU (`TRITON_INTERPRET=1`, for tests)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def make_triton_backend(device: torch.device) -> TritonBackend:
    """Raises `BackendUnavailable` where the device is no GPU of compute capability 8.0 or above."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise BackendUnavailable(
                f"{torch.cuda.get_device_name(device)} has compute capability "
                f"{capability[0]}.{capability[1]}; the Triton kernels need 8.0, use the backend torch"
            )
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonBackend(device, capability=capability, processors=processors)
    if device.type == "cpu" and interpreted():
        return TritonBackend(device, capability=(8, 0), processors=4)
    raise BackendUnavailable(f"the Triton kernels need an NVIDIA GPU, not {device}")


@dataclass(slots=True)
class Step:
    """A step's arrays on the device, for one sliding window and one shape of heads."""

    narrow: TileConfig
    wide: TileConfig
    where: Packed
    arrays: Tensor
    reads: Reads


@dataclass(slots=True)
class State:
    """Kept in `plan.state`: the arrays for each sliding window and shape of heads met so far."""

    steps: dict[tuple[int | None, Heads], Step] = field(default_factory=dict)


class TritonBackend(AttentionBackend):
    """Everything is enqueued; the host never looks at the device's data."""

    name = "triton"
    captures = True

    def __init__(
        self,
        device: torch.device,
        *,
        capability: tuple[int, int],
        processors: int,
        cost: CostModel = GPU,
    ) -> None:
        self.device, self.capability, self.processors, self.cost = device, capability, processors, cost
        self.upload = Upload(device)
        self._launches: dict[tuple[Heads, int], Launch] = {}
        self._pools: dict[tuple[int, ...], Tensor] = {}

    def _new_state(self) -> State:
        return State()

    def launch_config(self, heads: Heads, block_size: int) -> Launch:
        """The tile sizes this backend uses for a model, see `kernels.triton_config.choose`."""
        key = (heads, block_size)
        if key not in self._launches:
            self._launches[key] = choose(
                head_dim=heads.head_dim,
                group=heads.group,
                block_size=block_size,
                itemsize=heads.itemsize,
                kv_itemsize=heads.kv_itemsize,
                capability=self.capability,
            )
        return self._launches[key]

    def tiles(
        self, plan: AttentionPlan, heads: Heads, window: int | None, tall: bool | None = None
    ) -> TilePlan:
        """The step's tiles (see `kernels.triton_plan.tile_plan`)."""
        return tile_plan(
            plan,
            window=window,
            group=heads.group,
            kv_heads=heads.kv_heads,
            launch=self.launch_config(heads, plan.block_size),
            processors=self.processors,
            tall=tall,
        )

    def prepare(self, plan: AttentionPlan, heads: Heads, window: int | None) -> Step:
        """Lay out the step's tiles and send them to the device, once for all layers with this window."""
        tiles = self.tiles(plan, heads, window)
        where = layout(tiles, None)
        host = self.upload.begin(where.size)
        pack(tiles, where, host.numpy())
        return Step(
            tiles.narrow.config, tiles.wide.config, where, self.upload.send(host), Reads(*tiles.reads)
        )

    def _attend(
        self, query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, options: Options
    ) -> tuple[Tensor, Reads]:
        if not isinstance(plan.state, State):
            raise KernelError(f"the plan was not made by the backend {self.name}")
        self._check_pools([key_pool, value_pool])
        kv_heads, _, head_dim = key_pool.shape
        heads = Heads(query.shape[1], kv_heads, head_dim, query.element_size(), key_pool.element_size())
        key = (options.sliding_window, heads)
        step = plan.state.steps.get(key)
        if step is None:
            if plan.padding:
                raise KernelError(f"the captured graph has no arrays for {key}")
            step = self.prepare(plan, heads, options.sliding_window)
            plan.state.steps[key] = step
        return self._run(query, key_pool, value_pool, plan, step, options), step.reads

    def _run(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        plan: AttentionPlan,
        step: Step,
        options: Options,
    ) -> Tensor:
        kv_heads, slots, head_dim = key_pool.shape
        q_heads = query.shape[1]
        if query.stride(2) != 1 or query.stride(0) % 8 or query.stride(1) % 8 or query.data_ptr() % 16:
            query = query.contiguous()  # so that every batch meets the one compiled kernel
        where, device = step.where, query.device
        output = torch.empty(query.shape, dtype=query.dtype, device=device)
        partial_out = torch.empty(
            (max(1, where.partials), q_heads, head_dim), dtype=torch.float32, device=device
        )
        partial_lse = torch.empty((max(1, where.partials), q_heads), dtype=torch.float32, device=device)
        first, second = head_parts(head_dim)
        # See attention_kernel: which of the two carries log2(e).
        scale, soft_cap, sinks = options.scale, options.soft_cap, options.sinks
        multiplier, cap = (scale * LOG2E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2E)
        key_scale, value_scale = options.scales or (None, None)

        def attention(config: TileConfig, tiles_at: int, tiles: int) -> None:
            launch(
                attention_kernel,
                (tiles, kv_heads),
                query,
                key_pool,
                value_pool,
                output,
                partial_out,
                partial_lse,
                sinks,
                key_scale,
                value_scale,
                step.arrays,
                tiles_at,
                where.rows,
                where.positions,
                where.blocks,
                slots,
                query.stride(0) // 8,
                query.stride(1) // 8,
                multiplier,
                cap,
                KV_HEADS=kv_heads,
                GROUP=q_heads // kv_heads,
                HEAD_A=first,
                HEAD_B=second,
                BLOCK_SIZE=plan.block_size,
                WINDOW=options.sliding_window or 0,
                HAS_CAP=soft_cap is not None,
                HAS_SINKS=sinks is not None,
                HAS_SCALES=key_scale is not None,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
                num_warps=config.warps,
                num_stages=config.stages,
            )

        attention(step.wide, where.wide, where.wide_tiles)
        attention(step.narrow, where.narrow, where.narrow_tiles)
        if where.partials:
            launch(
                merge_kernel,
                (query.shape[0], q_heads),
                output,
                partial_out,
                partial_lse,
                sinks,
                step.arrays,
                where.merge_from,
                where.merge_list,
                Q_HEADS=q_heads,
                HEAD_A=first,
                HEAD_B=second,
                HAS_SINKS=sinks is not None,
                num_warps=1 if head_dim <= 128 else 2,
            )
        return output

    def warm_up_batches(self, group: int, block_size: int) -> list[tuple[list[int], list[int], list[int]]]:
        """See `AttentionBackend.warm_up_batches`: two readers of a shared prefix (wide, narrow, merge) and a
        long chunk (tall). Nothing else about a batch takes part in a kernel's specialisation."""
        shared = -(-self.cost.overhead_tokens // block_size) + 1
        chunk = 1 + 64 // group
        table = list(range(max(shared + 1, -(-chunk // block_size))))
        return [(table, [1, 1], [shared * block_size + 1] * 2), (table, [chunk], [chunk])]

    def static_plans(
        self, heads: Heads, *, rows: int, layers: tuple[int | None, ...], block_size: int, context_blocks: int
    ) -> StaticPlans:
        """See `AttentionBackend.static_plans`."""
        from kernels.triton_static import TritonPlans

        return TritonPlans(
            self, heads, rows=rows, layers=layers, block_size=block_size, context_blocks=context_blocks
        )

    def _write(self, new: NewTokens) -> None:
        """The slots must be on the device: the host does not look at them."""
        key, value, key_pool, value_pool, slots, scales = new
        self._check_pools([key_pool, value_pool])
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        kv_heads, pool_slots, head_dim = key_pool.shape
        key_scale, value_scale = scales or (None, None)
        launch(
            write_kernel,
            (key.shape[0], kv_heads),
            key,
            value,
            key_pool,
            value_pool,
            key_scale,
            value_scale,
            slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            pool_slots,
            HEAD_DIM=head_dim,
            LANES=_power_of_two(head_dim),
            HAS_SCALES=scales is not None,
            num_warps=1,
        )

    def _copy(self, pools: list[Tensor], copies: Sequence[BlockCopy], block_size: int) -> None:
        """One launch for all layers."""
        self._check_pools(pools)
        addresses = tuple(pool.data_ptr() for pool in pools)
        table = self._pools.get(addresses)
        if table is None:  # once in a pool's life
            table = torch.tensor(addresses, dtype=torch.int64, device=self.device)
            self._pools = {addresses: table}
        host = self.upload.begin(3 * len(copies))
        host.numpy()[:] = np.asarray(copies, dtype=np.int32).reshape(-1)
        kv_heads, slots, head_dim = pools[0].shape
        lanes = _power_of_two(block_size * head_dim)
        example = pools[0] if pools[0].dtype != KV_FP8 else pools[0].view(torch.uint8)
        launch(
            copy_kernel,
            (len(copies), len(pools), kv_heads),
            table,
            example,
            self.upload.send(host),
            slots,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            LANES=lanes,
            num_warps=4 if lanes >= 1024 else 1,
        )

    @staticmethod
    def _check_pools(pools: list[Tensor]) -> None:
        first = pools[0]
        for pool in pools:
            if pool.dtype not in DTYPES:
                raise KernelError(f"the Triton kernels know no {pool.dtype}; they know {DTYPES}")
            if pool.shape != first.shape or pool.dtype != first.dtype or not pool.is_contiguous():
                raise KernelError(f"a pool of {tuple(pool.shape)} does not match one of {tuple(first.shape)}")
            if pool.data_ptr() % 16:
                raise KernelError("a KV pool does not start at a multiple of 16 bytes")
            if pool.stride(0) >= 1 << 31:
                raise KernelError(f"one head of a KV pool has {pool.stride(0)} elements; at most 2^31 - 1")


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
