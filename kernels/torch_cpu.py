"""Attention over pages in plain torch: fast on the CPU, and the path for GPUs that Triton does not serve.

A segment that several sequences read is multiplied once: the queries of all its readers, and all query
heads of a KV head's group, are stacked into one matrix per KV head, and K and V are views of the pool
wherever the blocks are consecutive. Each sequence's own tail follows (decodes gathered into one padded
batch, prefill chunks one by one), and the partial results are merged exactly by their log-sum-exp
(Dao et al. 2022, "FlashAttention", and FlashInfer's cascade): for outputs `o1`, `o2` with `L1`, `L2`,

    L = log(e^L1 + e^L2);   o = o1 + (o2 - o1) * sigmoid(L2 - L1)

in float32. On the CPU a pass is one call of torch's fused attention, which reads K and V through their
strides and returns `L`; elsewhere, and where scores are capped, products and softmax are spelled out.

On the CPU, in bfloat16 and float32, `kernels.compiled_tails` takes the tails of decodes, the last merge and
the conversion of the result in one pass over the data; other dtypes, and machines without numba, stay with
the gathered batches. In bfloat16, passes without a mask run on the processor's matrix unit where it has one
(`kernels.amx`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import amx
from kernels.amx import AmxAttention
from kernels.api import AttentionBackend, KernelError, NewTokens, Options, Reads
from kernels.fp8 import store
from kernels.plan import CPU, AttentionPlan, CostModel
from kernels.torch_merge import NOTHING, Merge
from kernels.torch_plan import DecodeBatch, DensePass, Work, build_work

log = logging.getLogger(__name__)

#: Scores (elements) that the spelled-out path holds at a time.
MAX_SCORES = 1 << 24


@dataclass(slots=True)
class _State:
    """Kept in `plan.state`: the work for each sliding window met so far, with and without the kernel."""

    work: dict[tuple[int | None, bool], Work] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How products become scores; `fused`: torch's fused attention computes them; `unit`: the matrix unit
    does where it serves (it knows no cap and no mask)."""

    scale: float
    soft_cap: float | None
    fused: bool
    unit: AmxAttention | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-sum-exp `[b, h, m]` and output `[b, h, m, head_dim]` of `query` over `[b, h, n, head_dim]`.

        `mask` is added to the scores; it broadcasts to `[b, h, m, n]`.
        """
        if self.fused:
            return fused_attention(query, key, value, mask, self.scale, causal=False)
        m, n = query.shape[2], key.shape[2]
        step = max(1, MAX_SCORES // (query.shape[0] * query.shape[1] * n))
        if step < m:  # fewer rows at a time
            pieces = [
                self.attend(
                    query[:, :, a : a + step],
                    key,
                    value,
                    mask if mask is None or mask.shape[2] == 1 else mask[:, :, a : a + step],
                )
                for a in range(0, m, step)
            ]
            return torch.cat([p[0] for p in pieces], dim=2), torch.cat([p[1] for p in pieces], dim=2)
        scores = torch.matmul(query, key.mT).float().mul_(self.scale)
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if mask is not None:
            scores.add_(mask)
        # The clamp only moves rows that see no key: their weights become 0, not NaN.
        top = scores.amax(-1, keepdim=True).clamp_(min=NOTHING)
        scores.sub_(top).exp_()
        total = scores.sum(-1, keepdim=True).clamp_(min=1e-38)
        out = torch.matmul(scores.div_(total).to(value.dtype), value)
        return (top + total.log()).squeeze(-1), out


def can_fuse(device: torch.device, soft_cap: float | None) -> bool:
    """Whether `fused_attention` serves: it knows no cap and only the CPU."""
    return device.type == "cpu" and soft_cap is None


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Torch's fused attention for the CPU: log-sum-exp and output. Rows that see no key get log-sum-exp 0."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return lse, out


class TorchBackend(AttentionBackend):
    """Plans keep their index tensors on `device`.

    `compiled`: use the compiled kernel where it serves. None: yes for `torch_cpu`, where numba is installed.
    `matrix_unit`: use the processor's matrix unit where there is one. None: yes for `torch_cpu`.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        name: str = "torch_cpu",
        cost: CostModel = CPU,
        compiled: bool | None = None,
        matrix_unit: bool | None = None,
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.cost = cost
        self.compiled = name == "torch_cpu" and _has_compiler() if compiled is None else compiled
        wanted = name == "torch_cpu" if matrix_unit is None else matrix_unit
        self._unit = amx.load() if wanted else None

    def _new_state(self) -> _State:
        return _State()

    def _attend(
        self, query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, options: Options
    ) -> tuple[Tensor, Reads]:
        if not isinstance(plan.state, _State) or plan.padding:
            raise KernelError(f"the plan was not made by the backend {self.name}, or has padded rows")
        compiled = self.compiled and _kernel_serves(query, key_pool, value_pool)
        window = options.sliding_window
        work = plan.state.work.get((window, compiled))
        if work is None:
            work = build_work(plan, window, self.device, compiled=compiled)
            plan.state.work[window, compiled] = work
        kv_heads, _, head_dim = key_pool.shape
        group = query.shape[1] // kv_heads
        stacked = query.view(plan.rows, kv_heads, group, head_dim).permute(1, 0, 2, 3)
        scales = options.scales
        if scales is not None:  # powers of two: the product is exact
            stacked = stacked * scales.key[:, None, None, None].to(query.dtype)
        if work.passes:
            stacked = stacked.contiguous()
        merge = Merge((kv_heads, plan.rows, group, head_dim), query.device, options.sinks, work.mixed)
        fused = can_fuse(query.device, options.soft_cap)
        how = _Scores(options.scale, options.soft_cap, fused, self._unit if fused else None)
        for item in work.passes:
            rows = item.rows
            chosen = stacked[:, rows] if isinstance(rows, slice) else stacked.index_select(1, rows)
            if isinstance(item, DecodeBatch):
                merge.add(rows, item.first, *_batch(item, chosen, key_pool, value_pool, how))
                continue
            first = item.first
            for key, value in _parts(item, key_pool, value_pool):
                lse, out = _dense(item, chosen, key.to(query.dtype), value.to(query.dtype), how)
                merge.add(rows, first, lse, out)
                first = False
        reads = Reads(work.tokens_logical, work.tokens_read, work.shared_passes)
        if work.tails is None:
            if scales is not None:  # a sink has no value: all of the output is a sum of values
                merge.out.mul_(scales.value[:, None, None, None])
            return merge.result(query.dtype), reads
        from kernels.compiled_tails import finish

        output = finish(
            work.tails,
            query,
            key_pool,
            value_pool,
            scale=options.scale,
            soft_cap=options.soft_cap,
            lse=merge.lse,
            out=merge.out,
            all_started=not merge.empty,
        )
        return output, reads

    def _write(self, new: NewTokens) -> None:
        key, value, key_pool, value_pool, slots, scales = new
        kept = slots >= 0
        if not bool(kept.all()):
            rows = kept.nonzero().view(-1)
            key, value, slots = key[rows], value[rows], slots[rows]
        if scales is not None:  # as bytes: torch moves no 8-bit floats by index
            key, value = (
                store(x, scale).view(torch.uint8) for x, scale in zip((key, value), scales, strict=True)
            )
            key_pool, value_pool = key_pool.view(torch.uint8), value_pool.view(torch.uint8)
        key_pool.index_copy_(1, slots, key.transpose(0, 1))
        value_pool.index_copy_(1, slots, value.transpose(0, 1))


def _has_compiler() -> bool:
    """Whether the compiled kernel can be imported; said aloud where not."""
    try:
        import kernels.compiled_tails  # noqa: F401
    except ImportError as error:
        log.warning("Decode attention runs in torch, which is slower: %s", error)
        return False
    return True


def _kernel_serves(query: Tensor, key_pool: Tensor, value_pool: Tensor) -> bool:
    from kernels.compiled_tails import can_read

    return can_read(query, key_pool, value_pool)


def _parts(work: DensePass, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K and V of a pass, `[kv_heads, tokens, head_dim]` each: views of the runs, or one gathered copy."""
    if work.gather is not None:
        return [(keys.index_select(1, work.gather), values.index_select(1, work.gather))]
    spans = [slice(r.slot, r.slot + r.tokens) for r in work.runs]
    return [(keys[:, span], values[:, span]) for span in spans]


def _dense(
    work: DensePass, chosen: Tensor, key: Tensor, value: Tensor, how: _Scores
) -> tuple[Tensor, Tensor]:
    """`chosen`: `[kv_heads, rows, group, head_dim]`, K and V `[kv_heads, tokens, head_dim]`."""
    kv_heads, count, group, head_dim = chosen.shape
    stack = chosen.flatten(1, 2)
    if how.unit is not None and work.hidden is None and how.unit.serves(stack, key, value):
        lse, out = how.unit.attend(stack, key, value, how.scale, group if work.causal else 0)
        return lse.view(kv_heads, count, group), out.view(kv_heads, count, group, head_dim)
    if work.causal and how.fused:
        # One "batch" a KV head, one "head" a query head of its group; K and V are expanded without a copy.
        shape = (kv_heads, group, work.tokens, head_dim)
        key, value = key.unsqueeze(1).expand(shape), value.unsqueeze(1).expand(shape)
        lse, out = fused_attention(chosen.transpose(1, 2), key, value, None, how.scale, causal=True)
        return lse.transpose(1, 2), out.transpose(1, 2)
    hidden = work.hidden
    if work.causal and work.additive is None:
        ones = torch.ones((count, work.tokens), dtype=torch.bool, device=key.device)
        hidden = ones.triu_(1)
    if hidden is not None and work.additive is None:
        # The heads of a group see the same keys: each row's mask is repeated for them.
        work.additive = _additive(hidden).repeat_interleave(group, dim=0)[None, None]
    lse, out = how.attend(stack[None], key[None], value[None], work.additive)
    lse, out = lse.view(kv_heads, count, group), out.reshape(kv_heads, count, group, head_dim)
    if work.blind is not None:
        lse = lse.masked_fill(work.blind[None, :, None], NOTHING)
    return lse, out


def _batch(
    work: DecodeBatch, chosen: Tensor, keys: Tensor, values: Tensor, how: _Scores
) -> tuple[Tensor, Tensor]:
    """One query `[group, head_dim]` a sequence and KV head against its own gathered tail."""
    shape = (keys.shape[0], work.count, work.longest, keys.shape[2])
    key = keys.index_select(1, work.slots).view(shape).to(chosen.dtype)
    value = values.index_select(1, work.slots).view(shape).to(chosen.dtype)
    if work.padding is not None and work.additive is None:
        work.additive = _additive(work.padding)[None, :, None, :]
    return how.attend(chosen, key, value, work.additive)


def _additive(hidden: Tensor) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))
