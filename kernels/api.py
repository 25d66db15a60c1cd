"""What a backend promises, and how to get one.

Storage of one layer: K and V each a tensor `[kv_heads, num_blocks * block_size, head_dim]`, so one block
of one head is one contiguous tile and a run of consecutive blocks is a view without a copy.

Attention of query `i` of sequence `s`: it sits at position `p = context_len - query_len + i` and sees
positions `0..p` (with a sliding window `w` only `p - w + 1..p`). With `x = scale * q·k`, capped to
`soft_cap * tanh(x / soft_cap)` where a cap is given, the output is `sum exp(x) v / (sum exp(x) + exp(sink))`,
the sink of a query head being there only where sinks are given.

Slots that hold no token of a sequence may hold anything, NaN included; no backend lets them reach a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.plan import AttentionPlan

#: (source block, target block, number of leading slots to copy)
BlockCopy = tuple[int, int, int]


class BackendUnavailable(RuntimeError):
    """The named backend does not exist or cannot run on the named device."""


class KernelError(ValueError):
    """Arguments that contradict each other: shapes, dtypes, block ids."""


class AttentionBackend(Protocol):
    """Everything that touches the KV pool on behalf of a step."""

    name: str

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
        ...

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
    ) -> Tensor:
        """Attention of one layer; the step's own K and V are already in the pool.

        Args:
            query: `[T, q_heads, head_dim]`, packed in the plan's order; any strides, in the pool's dtype.
            key_pool, value_pool: `[kv_heads, slots, head_dim]`.
            sinks: `[q_heads]`, a logit each head adds to its denominator.

        Returns `[T, q_heads, head_dim]` in the query's dtype.

        Raises `KernelError` for shapes that do not fit.
        """
        ...

    def write(self, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor) -> None:
        """Store new K and V `[T, kv_heads, head_dim]` (any strides) at `slots` (int64 `[T]`; -1: nowhere)."""
        ...

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
        ...


def check_attend(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, sinks: Tensor | None
) -> int:
    """Refuse shapes that do not fit together; returns the GQA group size. Costs no device work."""
    if query.dim() != 3 or key_pool.dim() != 3 or key_pool.shape != value_pool.shape:
        raise KernelError(
            f"query {tuple(query.shape)}, K {tuple(key_pool.shape)}, V {tuple(value_pool.shape)} do not fit: "
            "[T, q_heads, head_dim] and twice [kv_heads, slots, head_dim] are wanted"
        )
    rows, q_heads, head_dim = query.shape
    kv_heads = key_pool.shape[0]
    if rows != plan.rows:
        raise KernelError(f"the query has {rows} rows, the plan {plan.rows}")
    if head_dim != key_pool.shape[2] or q_heads % kv_heads:
        raise KernelError(
            f"{q_heads} query heads of {head_dim} do not fit {kv_heads} KV heads of {key_pool.shape[2]}"
        )
    if query.dtype != key_pool.dtype or key_pool.dtype != value_pool.dtype:
        raise KernelError(f"query {query.dtype}, K {key_pool.dtype} and V {value_pool.dtype} differ in dtype")
    if sinks is not None and tuple(sinks.shape) != (q_heads,):
        raise KernelError(f"sinks have shape {tuple(sinks.shape)}; [{q_heads}] is wanted")
    return q_heads // kv_heads


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
