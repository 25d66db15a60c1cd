"""What a backend promises, and how to get one.

Storage of one layer: K and V each a tensor `[kv_heads, num_blocks * block_size, head_dim]`, so one block
of one head is one contiguous tile and a run of consecutive blocks is a view without a copy.

Attention of query `i` of sequence `s`: it sits at position `p = context_len - query_len + i` and sees
positions `0..p` (with a sliding window `w` only `p - w + 1..p`). With `x = scale * q·k`, capped to
`soft_cap * tanh(x / soft_cap)` where a cap is given, the output is `sum exp(x) v / (sum exp(x) + exp(sink))`,
the sink of a query head being there only where sinks are given.

Slots that hold no token of a sequence may hold anything, NaN included; no backend lets them reach a result.

A pool may hold 8-bit floats (`kernels.fp8`); K and V are then `scale * stored`, one scale a KV head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.fp8 import KV_FP8, Scales
from kernels.plan import AttentionPlan, CostModel, build_plan

#: (source block, target block, number of leading slots to copy)
BlockCopy = tuple[int, int, int]


class BackendUnavailable(RuntimeError):
    """The named backend does not exist or cannot run on the named device."""


class KernelError(ValueError):
    """Arguments that contradict each other: shapes, dtypes, block ids."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a layer asks of attention beside its tensors; see `AttentionBackend.attend`."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    scales: Scales | None = None


class NewTokens(NamedTuple):
    """New K and V of one layer and where they go; see `AttentionBackend.write`."""

    key: Tensor
    value: Tensor
    key_pool: Tensor
    value_pool: Tensor
    slots: Tensor
    scales: Scales | None


class Reads(NamedTuple):
    """What one layer's attention read, in KV tokens (one K and one V vector of all heads)."""

    tokens_logical: int
    tokens_read: int
    shared_passes: int


class Heads(NamedTuple):
    """A layer's shape, as far as kernels are chosen by it. Sizes are bytes an element: query, pool."""

    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    kv_itemsize: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads


class StaticPlans(Protocol):
    """The plan arrays of a captured graph, see `kernels.triton_static`."""

    @property
    def size(self) -> int:
        """int32 elements of the vector that the graph reads."""
        ...

    def template(self, vector: Tensor) -> AttentionPlan:
        """The plan to capture with: every row is padding, the arrays are the device's `vector`."""
        ...

    def fill(self, plan: AttentionPlan, host: npt.NDArray[np.int32]) -> int:
        """Write a step's arrays, count its reads; returns the elements to be sent. Raises `PlanError`."""
        ...


class AttentionBackend(ABC):
    """Everything that touches the KV pool on behalf of a step.

    cost      when a segment is worth a pass of its own
    captures  the host neither waits for the device nor looks at its data in any call, so that a layer may be
              captured in a CUDA graph
    """

    name: str
    cost: CostModel
    captures = False

    def plan(
        self,
        *,
        page_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_size: int,
        shared_pass: bool = True,
    ) -> AttentionPlan:
        """Plan a step once for all of its layers. `context_lens` include the step's own tokens.

        Raises `kernels.plan.PlanError` for a batch that contradicts itself.
        """
        plan = build_plan(
            page_tables=page_tables,
            query_lens=query_lens,
            context_lens=context_lens,
            block_size=block_size,
            cost=self.cost,
            shared_pass=shared_pass,
        )
        plan.state = self._new_state()
        return plan

    def attend(
        self,
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        scales: Scales | None = None,
    ) -> Tensor:
        """Attention of one layer; the step's own K and V are already in the pool.

        Args:
            query: `[T, q_heads, head_dim]`, packed in the plan's order; any strides, in the pool's dtype (of
                an 8-bit pool: in any).
            key_pool, value_pool: `[kv_heads, slots, head_dim]`.
            sinks: `[q_heads]`, a logit each head adds to its denominator.
            scales: of an 8-bit pool, and only of one.

        Returns `[T, q_heads, head_dim]` in the query's dtype.

        Raises `KernelError` for shapes that do not fit, and for a plan that another backend has made.
        """
        check_attend(query, key_pool, value_pool, plan, sinks, scales)
        options = Options(scale, sliding_window, soft_cap, sinks, scales)
        output, reads = self._attend(query, key_pool, value_pool, plan, options)
        kv_heads, _, head_dim = key_pool.shape
        plan.tally.add(reads, 2 * kv_heads * head_dim * key_pool.element_size())
        return output

    def write(
        self,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        slots: Tensor,
        *,
        scales: Scales | None = None,
    ) -> None:
        """Store new K and V `[T, kv_heads, head_dim]` (any strides) at `slots` (int64 `[T]`; -1: nowhere)."""
        if key.shape != value.shape or key.shape[0] != slots.shape[0]:
            raise KernelError(
                f"K {tuple(key.shape)}, V {tuple(value.shape)} and {slots.shape[0]} slots are not one batch"
            )
        check_scales(key_pool, scales)
        self._write(NewTokens(key, value, key_pool, value_pool, slots, scales))

    def copy_blocks(
        self,
        key_pools: list[Tensor],
        value_pools: list[Tensor],
        copies: Sequence[BlockCopy],
        block_size: int,
    ) -> None:
        """Copy the first slots of blocks to other blocks in all layers; no block is both source and target.

        Raises `KernelError` for a target that is named twice or is a source, or for too many slots.
        """
        check_copies(copies, block_size)
        if copies:
            self._copy([*key_pools, *value_pools], copies, block_size)

    def static_plans(
        self, heads: Heads, *, rows: int, layers: tuple[int | None, ...], block_size: int, context_blocks: int
    ) -> StaticPlans:
        """Plan arrays for graphs of `rows` decodes. `layers`: each layer's sliding window; `context_blocks`:
        blocks of the longest context. Raises `KernelError` where the backend cannot be captured."""
        raise KernelError(f"the backend {self.name} cannot be captured: it waits for the device")

    def warm_up_batches(self, group: int, block_size: int) -> list[tuple[list[int], list[int], list[int]]]:
        """`(page table, query lengths, context lengths)` of tiny batches that meet every kernel there is.

        All sequences of a batch read the one page table.
        """
        return []

    @abstractmethod
    def _new_state(self) -> Any:
        """What the backend keeps beside a plan of its own."""

    @abstractmethod
    def _attend(
        self, query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, options: Options
    ) -> tuple[Tensor, Reads]:
        """As `attend`, with arguments that fit together."""

    @abstractmethod
    def _write(self, new: NewTokens) -> None:
        """As `write`, with arguments that fit together."""

    def _copy(self, pools: list[Tensor], copies: Sequence[BlockCopy], block_size: int) -> None:
        """As `copy_blocks`, of copies in any order."""
        for pool in pools:
            for source, target, slots in copies:
                a, b = source * block_size, target * block_size
                pool[:, b : b + slots] = pool[:, a : a + slots]


def check_attend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    plan: AttentionPlan,
    sinks: Tensor | None,
    scales: Scales | None = None,
) -> None:
    """Refuse shapes that do not fit together. Costs no device work."""
    if query.dim() != 3 or key_pool.dim() != 3 or key_pool.shape != value_pool.shape:
        raise KernelError(
            f"query {tuple(query.shape)}, K {tuple(key_pool.shape)}, V {tuple(value_pool.shape)} do not fit: "
            "[T, q_heads, head_dim] and twice [kv_heads, slots, head_dim] are wanted"
        )
    rows, q_heads, head_dim = query.shape
    kv_heads = key_pool.shape[0]
    if rows != plan.padded_rows:
        raise KernelError(f"the query has {rows} rows, the plan {plan.padded_rows}")
    if head_dim != key_pool.shape[2] or q_heads % kv_heads:
        raise KernelError(
            f"{q_heads} query heads of {head_dim} do not fit {kv_heads} KV heads of {key_pool.shape[2]}"
        )
    check_scales(key_pool, scales)
    if key_pool.dtype != value_pool.dtype or (scales is None and query.dtype != key_pool.dtype):
        raise KernelError(f"query {query.dtype}, K {key_pool.dtype} and V {value_pool.dtype} differ in dtype")
    if sinks is not None and tuple(sinks.shape) != (q_heads,):
        raise KernelError(f"sinks have shape {tuple(sinks.shape)}; [{q_heads}] is wanted")


def check_scales(pool: Tensor, scales: Scales | None) -> None:
    """Refuse an 8-bit pool without its scales, and scales for any other pool."""
    if (pool.dtype == KV_FP8) != (scales is not None):
        raise KernelError(f"a pool of {pool.dtype} goes {'with' if scales is None else 'without'} scales")
    if scales is not None and any(tuple(one.shape) != (pool.shape[0],) for one in scales):
        raise KernelError(
            f"scales of shapes {tuple(scales.key.shape)} and {tuple(scales.value.shape)} do not fit "
            f"{pool.shape[0]} KV heads"
        )


def check_copies(copies: Sequence[BlockCopy], block_size: int) -> None:
    """Refuse copies whose result would depend on their order."""
    sources = {source for source, _, _ in copies}
    targets: set[int] = set()
    for source, target, slots in copies:
        if not 0 <= slots <= block_size or source < 0 or target < 0:
            raise KernelError(
                f"cannot copy {slots} of {block_size} slots from block {source} to block {target}"
            )
        if target in targets or target in sources:
            raise KernelError(f"block {target} is a target twice, or a source as well, in one step's copies")
        targets.add(target)


def get_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """`reference`, `torch_cpu`, `torch`, `triton`, or `auto`: Triton on CUDA from compute capability 8.0 on,
    otherwise torch.

    Raises `BackendUnavailable` where the device cannot run it; nothing falls back silently.
    """
    device = torch.device(device)
    if name == "auto":
        if device.type != "cuda":
            name = "torch_cpu"
        else:
            name = "triton" if torch.cuda.get_device_capability(device) >= (8, 0) else "torch"
    if name == "reference":
        from kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "torch_cpu" and device.type != "cpu":
        raise BackendUnavailable(f"backend torch_cpu runs on the CPU, not on {device}; use torch there")
    if name in ("torch_cpu", "torch"):
        from kernels.torch_cpu import TorchBackend

        return TorchBackend(device, name=name)
    if name == "triton":
        from kernels.triton_backend import make_triton_backend

        return make_triton_backend(device)
    raise BackendUnavailable(
        f"there is no backend {name!r}; known: auto, reference, torch_cpu, torch, triton"
    )
