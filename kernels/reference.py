"""The oracle: attention row by row in float32, plain enough to be checked by eye. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.api import BlockCopy, check_attend, check_copies
from kernels.plan import ALWAYS, AttentionPlan, build_plan


class ReferenceBackend:
    """Gathers each query's visible keys one by one from the page table and applies the definition."""

    name = "reference"

    def plan(
        self,
        *,
        page_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_size: int,
        shared_pass: bool = True,
    ) -> AttentionPlan:
        """See `AttentionBackend.plan`. The oracle itself never takes a shared pass."""
        return build_plan(
            page_tables=page_tables,
            query_lens=query_lens,
            context_lens=context_lens,
            block_size=block_size,
            cost=ALWAYS,
            shared_pass=False,
        )

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
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        for sequence, (start, count) in enumerate(zip(plan.query_starts, plan.query_lens, strict=True)):
            table = plan.tables[sequence]
            for i in range(count):
                position = plan.first_query(sequence) + i
                oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                slots = [
                    int(table[t // plan.block_size]) * plan.block_size + t % plan.block_size
                    for t in range(oldest, position + 1)
                ]
                keys = key_pool[:, slots].float().repeat_interleave(group, dim=0)  # [q_heads, n, head_dim]
                values = value_pool[:, slots].float().repeat_interleave(group, dim=0)
                row = query[start + i].float()
                scores = torch.einsum("hd,hnd->hn", row, keys) * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.float()[:, None]], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : len(slots)]
                output[start + i] = torch.einsum("hn,hnd->hd", weights, values)
        itemsize = 2 * key_pool.shape[0] * key_pool.shape[2] * key_pool.element_size()
        plan.tally.layers += 1
        plan.tally.kv_bytes_logical += plan.counters.logical_tokens * itemsize
        plan.tally.kv_bytes_read += plan.counters.logical_tokens * itemsize
        return output.to(query.dtype)

    def write(self, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor) -> None:
        """See `AttentionBackend.write`."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                key_pool[:, slot] = key[row]
                value_pool[:, slot] = value[row]

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
