"""Random batches for the attention tests: trees of sharing, ragged lengths, NaN in unwritten slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import AttentionBackend
from kernels.fp8 import Scales, load, store
from kernels.plan import AttentionPlan
from kernels.reference import ReferenceBackend


@dataclass
class Batch:
    """Page tables and lengths of one step."""

    block_size: int
    page_tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    blocks: int

    def plan(self, backend: AttentionBackend, shared_pass: bool = True) -> AttentionPlan:
        return backend.plan(
            page_tables=self.page_tables,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_size=self.block_size,
            shared_pass=shared_pass,
        )

    def slots(self, sequence: int) -> list[int]:
        """Physical slot of every token of a sequence's context."""
        table, size = self.page_tables[sequence], self.block_size
        return [table[t // size] * size + t % size for t in range(self.context_lens[sequence])]


@dataclass(repr=False)
class Case:
    """A batch with tensors and the options of `attend`."""

    batch: Batch
    query: Tensor
    key_pool: Tensor
    value_pool: Tensor
    options: dict[str, Any]

    def __repr__(self) -> str:
        """Without the tensors' contents: hypothesis prints it."""
        return f"Case({self.batch}, query {tuple(self.query.shape)} {self.query.dtype}, {self.options})"

    def run(self, backend: AttentionBackend, *, shared_pass: bool = True) -> tuple[Tensor, AttentionPlan]:
        plan = self.batch.plan(backend, shared_pass)
        return backend.attend(self.query, self.key_pool, self.value_pool, plan, **self.options), plan

    def expected(self) -> Tensor:
        """The oracle's answer in float32 on the same (possibly rounded) inputs."""
        keys, values, options = self.key_pool.float(), self.value_pool.float(), dict(self.options)
        scales = options.pop("scales", None)
        if scales is not None:
            keys, values = load(self.key_pool, scales.key), load(self.value_pool, scales.value)
        return Case(self.batch, self.query.float(), keys, values, options).run(ReferenceBackend())[0]


def case_of(
    batch: Batch,
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    """Fill a pool of NaN with values at exactly the slots that hold a token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (kv_heads, batch.blocks * batch.block_size, head_dim)
    keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    written = sorted({slot for s in range(len(batch.page_tables)) for slot in batch.slots(s)})
    small = (kv_heads, len(written), head_dim)
    keys[:, written] = torch.randn(small, generator=generator)
    values[:, written] = torch.randn(small, generator=generator)
    query = torch.randn((sum(batch.query_lens), kv_heads * group, head_dim), generator=generator) * 2
    options = {
        "scale": 1.3 * head_dim**-0.5,
        "sliding_window": window,
        "soft_cap": soft_cap,
        "sinks": torch.randn(kv_heads * group, generator=generator) if sinks else None,
    }
    return Case(batch, query.to(dtype), keys.to(dtype), values.to(dtype), options)


def in_fp8(case: Case) -> Case:
    """The case over a pool of 8-bit floats, whose heads have scales of their own."""
    heads = case.key_pool.shape[0]
    scales = Scales(2.0 ** -torch.arange(4.0, 4.0 + heads), 2.0 ** torch.arange(-3.0, heads - 3.0))
    keys, values = (
        store(pool.transpose(0, 1), scale).transpose(0, 1).contiguous()
        for pool, scale in zip((case.key_pool, case.value_pool), scales, strict=True)
    )
    return Case(case.batch, case.query, keys, values, {**case.options, "scales": scales})


@st.composite
def batches(
    draw: st.DrawFn,
    block_sizes: tuple[int, ...] = (1, 2, 16, 32),
    max_depth: int = 4,
    max_sequences: int = 6,
    max_query: int = 40,
) -> Batch:
    """A forest of shared block chains; each sequence hangs somewhere in it and goes on alone.

    A sequence's queries may reach into blocks that others share (a fully cached prompt runs its last
    token again), and lengths crowd around block edges.
    """
    size = draw(st.sampled_from(block_sizes))
    order = draw(st.permutations(range(64))) if draw(st.booleans()) else list(range(64))
    free = [base * 16 + i for base in order for i in range(16)]  # physical order comes in runs of 16
    if draw(st.booleans()):
        free = free[1::2] + free[0::2]  # no two neighbours in a row
    free.reverse()

    chains: list[tuple[list[int], int]] = [([], 0)]  # (blocks from the root, depth)
    for _ in range(draw(st.integers(0, 5))):
        parents = [chain for chain in chains if chain[1] < max_depth]
        blocks, depth = parents[draw(st.integers(0, len(parents) - 1))]
        more = [free.pop() for _ in range(draw(st.integers(1, 4)))]
        chains.append((blocks + more, depth + 1))

    edges = sorted({1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1} - {0})
    tables, queries, contexts = [], [], []
    for _ in range(draw(st.integers(1, max_sequences))):
        shared, _ = chains[draw(st.integers(0, len(chains) - 1))]
        fully_cached = bool(shared) and draw(st.integers(0, 4)) == 0
        own = 0 if fully_cached else draw(st.sampled_from(edges) | st.integers(1, 3 * size + 2))
        context = len(shared) * size + own
        reach = draw(st.sampled_from([1, own, context, min(context, size + 1)]) | st.integers(1, context))
        tables.append(shared + [free.pop() for _ in range(-(-own // size))])
        queries.append(max(1, min(reach, context, max_query)))
        contexts.append(context)
    return Batch(size, tables, queries, contexts, blocks=1024)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32,), **limits: Any) -> Case:
    """A batch with random shapes of heads and random options."""
    batch = draw(batches(**limits))
    longest = max(batch.context_lens)
    return case_of(
        batch,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([8, 16, 64])),
        dtype=draw(st.sampled_from(dtypes)),
        window=draw(st.none() | st.integers(1, longest + 1)),
        soft_cap=draw(st.sampled_from([None, None, 4.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )
