"""The oracle: attention row by row in float32, plain enough to be checked by eye. Slow on purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.api import AttentionBackend, NewTokens, Options, Reads
from kernels.fp8 import load, store
from kernels.plan import NEVER, AttentionPlan


class ReferenceBackend(AttentionBackend):
    """Gathers each query's visible keys one by one from the page table and applies the definition.

    The oracle itself never takes a shared pass.
    """

    name = "reference"
    cost = NEVER

    def _new_state(self) -> None:
        return None

    def _attend(
        self, query: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, options: Options
    ) -> tuple[Tensor, Reads]:
        group = query.shape[1] // key_pool.shape[0]
        window, soft_cap = options.sliding_window, options.soft_cap
        output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        for sequence, (start, count) in enumerate(zip(plan.query_starts, plan.query_lens, strict=True)):
            table = plan.tables[sequence]
            for i in range(count):
                position = plan.first_query(sequence) + i
                oldest = 0 if window is None else max(0, position - window + 1)
                slots = [
                    int(table[t // plan.block_size]) * plan.block_size + t % plan.block_size
                    for t in range(oldest, position + 1)
                ]
                keys, values = key_pool[:, slots], value_pool[:, slots]  # [kv_heads, n, head_dim]
                if options.scales is not None:
                    keys, values = load(keys, options.scales.key), load(values, options.scales.value)
                keys = keys.float().repeat_interleave(group, dim=0)  # [q_heads, n, head_dim]
                values = values.float().repeat_interleave(group, dim=0)
                row = query[start + i].float()
                scores = torch.einsum("hd,hnd->hn", row, keys) * options.scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if options.sinks is not None:
                    scores = torch.cat([scores, options.sinks.float()[:, None]], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : len(slots)]
                output[start + i] = torch.einsum("hn,hnd->hd", weights, values)
        read = plan.counters.logical_tokens
        return output.to(query.dtype), Reads(read, read, 0)

    def _write(self, new: NewTokens) -> None:
        key, value = new.key, new.value
        if new.scales is not None:
            key, value = store(key, new.scales.key), store(value, new.scales.value)
        for row, slot in enumerate(new.slots.tolist()):
            if slot >= 0:
                new.key_pool[:, slot] = key[row]
                new.value_pool[:, slot] = value[row]
