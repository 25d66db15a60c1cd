"""Attention over pages in plain torch: fast on the CPU, and the path for GPUs that Triton does not serve.

A segment that several sequences read is multiplied once: the queries of all its readers, and all query
heads of a KV head's group, are stacked into one matrix per KV head, and K and V are views of the pool
wherever the blocks are consecutive. Each sequence's own tail follows (decodes gathered into one padded
batch, prefill chunks one by one), and the partial results are merged exactly (Milakov & Gimelshein 2018,
"Online normalizer calculation for softmax"): with row maxima `m`, sums `l` and unnormalised outputs `o`,

    m = max(m1, m2);  l = l1 e^(m1-m) + l2 e^(m2-m);  o = o1 e^(m1-m) + o2 e^(m2-m);  result o / l

all in float32. Products run in the pool's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.api import BlockCopy, KernelError, check_attend, check_copies
from kernels.plan import CPU, AttentionPlan, CostModel, build_plan
from kernels.torch_plan import DecodeBatch, DensePass, Work, build_work

#: Stands for "no key seen yet" in row maxima: finite, so that `exp(-inf - m)` is 0 and never NaN.
NOTHING = -1e30


@dataclass(slots=True)
class _State:
    """Kept in `plan.state`: the work for each sliding window met so far."""

    work: dict[int | None, Work] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Scores:
    """How raw products become scores."""

    scale: float
    window: int | None
    soft_cap: float | None

    def finish(self, scores: Tensor) -> Tensor:
        """Scale and cap, in place; float32."""
        if self.scale != 1.0:
            scores.mul_(self.scale)
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return scores


class _Merge:
    """Running (m, l, o) of every row: `[kv_heads, T, group]`, the same, and `[..., head_dim]`; float32."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, sinks: Tensor | None) -> None:
        kv_heads, rows, group, _ = shape
        self.max = torch.empty((kv_heads, rows, group), dtype=torch.float32, device=device)
        self.sum = torch.empty_like(self.max)
        self.out = torch.empty(shape, dtype=torch.float32, device=device)
        self.fresh = sinks is None
        if sinks is not None:
            # A sink is a key with a logit and no value: it starts the denominator.
            self.max.copy_(sinks.float().view(kv_heads, 1, group).expand_as(self.max))
            self.sum.fill_(1.0)
            self.out.zero_()

    def add(self, rows: slice | Tensor, first: bool, top: Tensor, total: Tensor, out: Tensor) -> None:
        """Merge a partial result of the given rows. `first` rows hold nothing yet."""
        if first and self.fresh:
            if isinstance(rows, slice):
                self.max[:, rows], self.sum[:, rows], self.out[:, rows] = top, total, out
            else:
                self.max.index_copy_(1, rows, top)
                self.sum.index_copy_(1, rows, total)
                self.out.index_copy_(1, rows, out.float())
            return
        if isinstance(rows, slice):
            old_max, old_sum, old_out = self.max[:, rows], self.sum[:, rows], self.out[:, rows]
        else:
            old_max, old_sum = self.max.index_select(1, rows), self.sum.index_select(1, rows)
            old_out = self.out.index_select(1, rows)
        new_max = torch.maximum(old_max, top)
        keep, take = torch.exp(old_max - new_max), torch.exp(top - new_max)
        old_sum.mul_(keep).addcmul_(total, take)
        old_out.mul_(keep.unsqueeze(-1)).addcmul_(out, take.unsqueeze(-1))
        if isinstance(rows, slice):
            self.max[:, rows] = new_max
        else:
            self.max.index_copy_(1, rows, new_max)
            self.sum.index_copy_(1, rows, old_sum)
            self.out.index_copy_(1, rows, old_out)

    def result(self, dtype: torch.dtype) -> Tensor:
        """`[T, kv_heads * group, head_dim]`."""
        kv_heads, rows, group, head_dim = self.out.shape
        normal = self.out.div_(self.sum.unsqueeze(-1)).permute(1, 0, 2, 3)
        # Converted and laid out in one pass.
        result = torch.empty((rows, kv_heads, group, head_dim), dtype=dtype, device=normal.device)
        return result.copy_(normal).view(rows, kv_heads * group, head_dim)


def _partial(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores into `exp(score - max)` in place; returns row maxima and row sums."""
    top = scores.amax(-1).clamp_(min=NOTHING)
    scores.sub_(top.unsqueeze(-1)).exp_()
    return top, scores.sum(-1)


class TorchBackend:
    """See `kernels.api.AttentionBackend`. Plans keep their index tensors on `device`."""

    def __init__(
        self, device: torch.device | str = "cpu", *, name: str = "torch_cpu", cost: CostModel = CPU
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.cost = cost

    def plan(
        self,
        *,
        page_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_size: int,
        shared_pass: bool = True,
    ) -> AttentionPlan:
        """See `AttentionBackend.plan`."""
        plan = build_plan(
            page_tables=page_tables,
            query_lens=query_lens,
            context_lens=context_lens,
            block_size=block_size,
            cost=self.cost,
            shared_pass=shared_pass,
        )
        plan.state = _State()
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
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        group = check_attend(query, key_pool, value_pool, plan, sinks)
        if not isinstance(plan.state, _State):
            raise KernelError(f"the plan was not made by the backend {self.name}")
        work = plan.state.work.get(sliding_window)
        if work is None:
            work = plan.state.work[sliding_window] = build_work(plan, sliding_window, self.device)
        kv_heads, _, head_dim = key_pool.shape
        rows = plan.rows
        stacked = query.view(rows, kv_heads, group, head_dim).permute(1, 0, 2, 3).contiguous()
        # A power of two loses nothing in any dtype and spares a pass over the scores.
        mantissa, _ = math.frexp(scale)
        if mantissa == 0.5:
            stacked, scale = stacked * scale, 1.0
        how = _Scores(scale, sliding_window, soft_cap)
        merge = _Merge((kv_heads, rows, group, head_dim), query.device, sinks)
        for dense in work.dense:
            self._dense(dense, stacked, key_pool, value_pool, how, merge)
        for batch in work.batches:
            self._batch(batch, stacked, key_pool, value_pool, how, merge)
        token_bytes = 2 * kv_heads * head_dim * key_pool.element_size()
        tally = plan.tally
        tally.layers += 1
        tally.kv_bytes_logical += work.tokens_logical * token_bytes
        tally.kv_bytes_read += work.tokens_read * token_bytes
        tally.shared_passes += work.shared_passes
        return merge.result(query.dtype)

    def _dense(
        self, work: DensePass, stacked: Tensor, keys: Tensor, values: Tensor, how: _Scores, merge: _Merge
    ) -> None:
        kv_heads, _, group, head_dim = stacked.shape
        rows = work.rows
        chosen = stacked[:, rows] if isinstance(rows, slice) else stacked.index_select(1, rows)
        chosen = chosen.reshape(kv_heads, work.count * group, head_dim)
        tokens = work.segment.tokens
        if work.gather is not None:
            key_parts = [keys.index_select(1, work.gather)]
            value_parts = [values.index_select(1, work.gather)]
        else:
            key_parts = [keys[:, r.slot : r.slot + r.tokens] for r in work.segment.runs]
            value_parts = [values[:, r.slot : r.slot + r.tokens] for r in work.segment.runs]
        if len(key_parts) == 1:
            scores = torch.bmm(chosen, key_parts[0].mT).float()
        else:
            scores = torch.empty(
                (kv_heads, work.count * group, tokens), dtype=torch.float32, device=keys.device
            )
            at = 0
            for part in key_parts:
                scores[:, :, at : at + part.shape[1]] = torch.bmm(chosen, part.mT)
                at += part.shape[1]
        scores = how.finish(scores)
        if work.positions is not None:
            self._mask(work, scores.view(kv_heads, work.count, group, tokens), how.window)
        top, total = _partial(scores)
        weights = scores.to(keys.dtype)
        out = torch.bmm(weights[:, :, : value_parts[0].shape[1]], value_parts[0])
        at = value_parts[0].shape[1]
        for part in value_parts[1:]:
            # Float32 from here on: many short runs must not add up their rounding.
            out = out.float() + torch.bmm(weights[:, :, at : at + part.shape[1]], part)
            at += part.shape[1]
        by_row = (kv_heads, work.count, group)
        merge.add(rows, work.first, top.view(by_row), total.view(by_row), out.view(*by_row, head_dim))

    @staticmethod
    def _mask(work: DensePass, scores: Tensor, window: int | None) -> None:
        """Hide what a row may not see: keys after it, and keys that its window has left behind."""
        positions = work.positions
        if positions is None:
            return
        start, end = work.segment.start, work.segment.end
        keys = torch.arange(start, end, device=scores.device)
        if window is not None:
            seen = keys > (positions - window).unsqueeze(1)
            if work.causal:
                seen &= keys <= positions.unsqueeze(1)
            scores.masked_fill_(~seen[None, :, None, :], float("-inf"))
            return
        # Without a window only the columns from the first row's position on can be hidden.
        columns = min(end - start, work.count)
        hidden = keys[-columns:] > positions.unsqueeze(1)
        scores[..., -columns:].masked_fill_(hidden[None, :, None, :], float("-inf"))

    @staticmethod
    def _batch(
        work: DecodeBatch, stacked: Tensor, keys: Tensor, values: Tensor, how: _Scores, merge: _Merge
    ) -> None:
        kv_heads, _, group, head_dim = stacked.shape
        rows = work.rows
        chosen = stacked[:, rows] if isinstance(rows, slice) else stacked.index_select(1, rows)
        count, longest = work.slots.shape
        flat = work.slots.view(-1)
        own_keys = keys.index_select(1, flat).view(kv_heads * count, longest, head_dim)
        own_values = values.index_select(1, flat).view(kv_heads * count, longest, head_dim)
        scores = torch.bmm(chosen.reshape(kv_heads * count, group, head_dim), own_keys.mT).float()
        scores = how.finish(scores).view(kv_heads, count, group, longest)
        if work.padding is not None:
            scores.masked_fill_(work.padding[None, :, None, :], float("-inf"))
        top, total = _partial(scores)
        weights = scores.to(keys.dtype).view(kv_heads * count, group, longest)
        out = torch.bmm(weights, own_values).view(kv_heads, count, group, head_dim)
        merge.add(rows, work.first, top, total, out)

    def write(self, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor) -> None:
        """See `AttentionBackend.write`. Rows with slot -1 are dropped on the host where slots live there."""
        if key.shape != value.shape or key.shape[0] != slots.shape[0]:
            raise KernelError(
                f"K {tuple(key.shape)}, V {tuple(value.shape)} and {slots.shape[0]} slots are not one batch"
            )
        kept = slots >= 0
        if not bool(kept.all()):
            rows = kept.nonzero().view(-1)
            key, value, slots = key[rows], value[rows], slots[rows]
        key_pool.index_copy_(1, slots, key.transpose(0, 1))
        value_pool.index_copy_(1, slots, value.transpose(0, 1))

    def copy_blocks(
        self,
        key_pools: list[Tensor],
        value_pools: list[Tensor],
        copies: Sequence[BlockCopy],
        block_size: int,
    ) -> None:
        """See `AttentionBackend.copy_blocks`."""
        check_copies(copies, block_size)
        for pool in (*key_pools, *value_pools):
            for source, target, slots in copies:
                a, b = source * block_size, target * block_size
                pool[:, b : b + slots] = pool[:, a : a + slots]
