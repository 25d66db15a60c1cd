"""Measurements of the attention kernels on a GPU; `scripts/gpu_check.py` runs them and prints the table.

Every time is the median over several runs of device time, with the level-2 cache flushed before each. The
kernels of one layer are replayed as a CUDA graph, as serving does, so Python's own time is not in it.
On the CPU (under Triton's interpreter) the same code runs with a plain clock: that only proves that it runs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.plan import AttentionPlan
from kernels.reference import ReferenceBackend
from kernels.roofline import Decode, Heads, decode_cost
from kernels.triton_backend import TritonBackend, interpreted

BLOCK = 16
#: torch.cuda's classes carry no types.
cuda: Any = torch.cuda


@dataclass(slots=True)
class Result:
    """One line of the table. `extra` holds what only some measurements have (all seconds or ratios)."""

    what: str
    case: str
    seconds: float | None = None
    passed: bool | None = None
    extra: dict[str, float | str] = field(default_factory=dict)


class Clock:
    """Seconds of device time of a function."""

    def __init__(self, device: torch.device, repeats: int = 7) -> None:
        self.device, self.repeats = device, repeats
        self.cuda = device.type == "cuda"
        # Larger than any level-2 cache of the GPUs we know (at most 126 MB).
        self.flush = torch.empty(192 << 20 if self.cuda else 1, dtype=torch.int8, device=device)

    def captured(self, function: Callable[[], object]) -> Callable[[], object]:
        """The function as a replayed CUDA graph; unchanged on the CPU."""
        if not self.cuda:
            return function
        side = cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def seconds(self, function: Callable[[], object]) -> float:
        """Median over `repeats` runs after one that does not count."""
        times: list[float] = []
        for turn in range(self.repeats + 1):
            self.flush.zero_()
            if self.cuda:
                start, end = (cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                function()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end) / 1e3
            else:
                begun = time.perf_counter()
                function()
                took = time.perf_counter() - begun
            if turn:
                times.append(took)
        return statistics.median(times)


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Bytes per second (read + written) of a device-to-device copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))


def correctness(
    backend: TritonBackend, *, rounds: int, head_dims: tuple[int, ...], longest: int = 130
) -> list[Result]:
    """Random trees of sharing against the float32 oracle, NaN in unwritten slots; write and copy too.

    `longest`: most tokens that a sequence has on its own.
    """
    # The interpreter cannot multiply bfloat16.
    dtypes = [torch.float16] if interpreted() else [torch.float16, torch.bfloat16]
    results: list[Result] = []
    for seed in range(rounds):
        rng = random.Random(seed)
        head_dim = head_dims[seed % len(head_dims)]
        dtype = rng.choice(dtypes)
        group, kv_heads = rng.choice([1, 2, 3, 4, 7, 8, 16]), rng.choice([1, 2])
        blocks = list(range(1, 256))
        rng.shuffle(blocks)
        common = [blocks.pop() for _ in range(rng.choice([0, 2, 9]))]
        nested = common + [blocks.pop() for _ in range(rng.choice([0, 3]))]
        tables: list[list[int]] = []
        contexts: list[int] = []
        queries: list[int] = []
        for _ in range(rng.choice([1, 3, 9])):
            prefix = rng.choice([common, nested, []])
            own = min(longest, rng.choice([1, 15, 16, 17, 63, 64, 65, 130]))
            tables.append(prefix + [blocks.pop() for _ in range(-(-own // BLOCK))])
            contexts.append(len(prefix) * BLOCK + own)
            queries.append(rng.choice([1, 1, own, min(own, 5)]))
        options: dict[str, Any] = {
            "scale": head_dim**-0.5,
            "sliding_window": rng.choice([None, None, 33]),
            "soft_cap": rng.choice([None, None, 5.0]),
            "sinks": rng.choice([None, torch.randn(kv_heads * group, device=backend.device, dtype=dtype)]),
        }
        generator = torch.Generator().manual_seed(seed)
        keys, values = (torch.full((kv_heads, 256 * BLOCK, head_dim), float("nan")) for _ in range(2))
        for table, context in zip(tables, contexts, strict=True):
            slots = [table[t // BLOCK] * BLOCK + t % BLOCK for t in range(context)]
            for pool in (keys, values):
                pool[:, slots] = torch.randn((kv_heads, context, head_dim), generator=generator)
        keys, values = keys.to(backend.device, dtype), values.to(backend.device, dtype)
        shape = (sum(queries), kv_heads * group, head_dim)
        query = torch.randn(shape, generator=generator).to(backend.device, dtype)

        def plan_of(
            maker: TritonBackend | ReferenceBackend,
            tables: list[list[int]] = tables,
            queries: list[int] = queries,
            contexts: list[int] = contexts,
        ) -> AttentionPlan:
            return maker.plan(page_tables=tables, query_lens=queries, context_lens=contexts, block_size=BLOCK)

        oracle = ReferenceBackend()
        exact = (query.float(), keys.float(), values.float(), plan_of(oracle))
        expected = oracle.attend(*exact, **options)
        found = backend.attend(query, keys, values, plan_of(backend), **options)
        difference = float((found.float() - expected).abs().max())
        limit = 5e-2 if dtype == torch.bfloat16 else 6e-3
        results.append(
            Result(
                "correctness",
                f"tree {seed}: head {head_dim}, group {group}, {str(dtype)[6:]}",
                passed=difference <= limit,
                extra={"largest_difference": difference},
            )
        )
    results.append(_pool_correctness(backend))
    return results


def _pool_correctness(backend: TritonBackend) -> Result:
    pools = [torch.zeros((2, 16 * BLOCK, 64), dtype=torch.float16, device=backend.device) for _ in range(4)]
    fused = torch.randn((3, 8, 64), device=backend.device).half()
    slots = torch.tensor([17, -1, 200], device=backend.device)
    for layer in (0, 1):
        backend.write(fused[:, 2:4], fused[:, 6:8], pools[layer], pools[2 + layer], slots)
    backend.copy_blocks(pools[:2], pools[2:], [(1, 3, 5)], BLOCK)
    good = all(
        torch.equal(pool[:, slot], fused[row, at : at + 2])
        for at, layers in ((2, pools[:2]), (6, pools[2:]))
        for pool in layers
        for row, slot in ((0, 17), (2, 200), (0, 3 * BLOCK + 1))
    )
    return Result("correctness", "write and copy", passed=good)


def decode(
    clock: Clock, backend: TritonBackend, heads: Heads, work: Decode, bandwidth: float, *, peers: bool
) -> Result:
    """One layer of a decode step: two phases, one phase, and torch over gathered K and V."""
    shared_blocks, own_blocks = work.shared // BLOCK, -(-work.own // BLOCK)
    total = shared_blocks + work.readers * own_blocks
    shape = (heads.kv_heads, total * BLOCK, heads.head_dim)
    keys, values = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    shape = (work.readers, heads.q_heads, heads.head_dim)
    query = torch.randn(shape, device=clock.device, dtype=torch.bfloat16)
    tables = [
        [*range(shared_blocks), *range(shared_blocks + s * own_blocks, shared_blocks + (s + 1) * own_blocks)]
        for s in range(work.readers)
    ]
    times: list[float] = []
    scale = heads.head_dim**-0.5
    for shared_pass in (True, False):
        plan = backend.plan(
            page_tables=tables,
            query_lens=[1] * work.readers,
            context_lens=[work.shared + work.own] * work.readers,
            block_size=BLOCK,
            shared_pass=shared_pass,
        )
        backend.attend(query, keys, values, plan, scale=scale)  # uploads the arrays, outside of the graph

        def attend(plan: AttentionPlan = plan) -> Tensor:
            return backend.attend(query, keys, values, plan, scale=scale)

        times.append(clock.seconds(clock.captured(attend)))
    cost = decode_cost(heads, work, shared_pass=True)
    result = Result(
        "decode",
        f"{heads.name}: {work.readers} x {work.shared + work.own}, {work.shared} shared",
        seconds=times[0],
        extra={
            "share_of_bandwidth": cost.bytes / times[0] / bandwidth,
            "one_phase_s": times[1],
            "faster_than_one_phase": times[1] / times[0],
        },
    )
    if peers:
        gathered = [
            torch.stack([pool[:, torch.tensor(t, device=pool.device)] for t in _slot_lists(tables, work)])
            for pool in (keys, values)
        ]
        one = query.unsqueeze(2)
        result.extra["sdpa_gathered_s"] = clock.seconds(
            lambda: F.scaled_dot_product_attention(one, gathered[0], gathered[1], enable_gqa=True)
        )
        result.extra.update(_flex(clock, one, gathered[0], gathered[1]))
    return result


def _slot_lists(tables: list[list[int]], work: Decode) -> list[list[int]]:
    length = work.shared + work.own
    return [[t[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)] for t in tables]


def _flex(clock: Clock, query: Tensor, keys: Tensor, values: Tensor) -> dict[str, float | str]:
    """FlexAttention over the same gathered tensors; its compiler may be missing, which is then said."""
    if not clock.cuda:
        return {"flex_gathered": "needs a GPU"}
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    try:
        return {
            "flex_gathered_s": clock.seconds(lambda: compiled(query, keys, values, enable_gqa=True)),
        }
    except (RuntimeError, ImportError, OSError) as error:
        return {"flex_gathered": f"{type(error).__name__}: {str(error)[:120]}"}


def prefill(clock: Clock, backend: TritonBackend, heads: Heads, chunk: int) -> Result:
    """One sequence's prompt in one chunk against torch's own attention (contiguous K and V)."""
    blocks = -(-chunk // BLOCK)
    shape = (heads.kv_heads, blocks * BLOCK, heads.head_dim)
    keys, values = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn((chunk, heads.q_heads, heads.head_dim), device=clock.device, dtype=torch.bfloat16)
    scale = heads.head_dim**-0.5
    plan = backend.plan(
        page_tables=[list(range(blocks))], query_lens=[chunk], context_lens=[chunk], block_size=BLOCK
    )
    backend.attend(query, keys, values, plan, scale=scale)
    ours = clock.seconds(clock.captured(lambda: backend.attend(query, keys, values, plan, scale=scale)))
    head_first = query.transpose(0, 1)[None]
    key_4d, value_4d = keys[None, :, :chunk], values[None, :, :chunk]
    theirs = clock.seconds(
        lambda: F.scaled_dot_product_attention(head_first, key_4d, value_4d, is_causal=True, enable_gqa=True)
    )
    return Result(
        "prefill",
        f"{heads.name}: {chunk} tokens",
        seconds=ours,
        extra={"sdpa_s": theirs, "share_of_sdpa": theirs / ours},
    )


def step(
    clock: Clock,
    backend: TritonBackend,
    heads: Heads,
    *,
    layers: int,
    hidden: int,
    readers: int,
    shared: int = 128,
) -> list[Result]:
    """A decode step's linear layers, KV writes and attention, random weights, with and without a graph.

    `shared`: blocks of the document that all readers have in common.
    """
    device, dtype = clock.device, torch.bfloat16
    width = (heads.q_heads + 2 * heads.kv_heads) * heads.head_dim
    inner = hidden * 7 // 2

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), device=device, dtype=dtype).mul_(columns**-0.5)

    weights = [
        (
            weight(width, hidden),
            weight(hidden, heads.q_heads * heads.head_dim),
            weight(2 * inner, hidden),
            weight(hidden, inner),
        )
        for _ in range(layers)
    ]
    blocks = shared + 2 * readers
    shape = (heads.kv_heads, blocks * BLOCK, heads.head_dim)
    pools = [tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(layers)]
    tables = [[*range(shared), shared + 2 * s, shared + 2 * s + 1] for s in range(readers)]
    context = (shared + 1) * BLOCK + 3
    plan = backend.plan(
        page_tables=tables, query_lens=[1] * readers, context_lens=[context] * readers, block_size=BLOCK
    )
    slots = torch.tensor([t[-1] * BLOCK + 2 for t in tables], device=device)
    start = torch.randn((readers, hidden), device=device, dtype=dtype)

    def run() -> Tensor:
        x = start
        for (qkv, out, up, down), (keys, values) in zip(weights, pools, strict=True):
            fused = F.linear(F.rms_norm(x, (hidden,)), qkv).view(readers, -1, heads.head_dim)
            q, k, v = torch.split(fused, [heads.q_heads, heads.kv_heads, heads.kv_heads], dim=1)
            backend.write(k, v, keys, values, slots)
            attended = backend.attend(q, keys, values, plan, scale=heads.head_dim**-0.5)
            x = x + F.linear(attended.reshape(readers, -1), out)
            gate, value = F.linear(F.rms_norm(x, (hidden,)), up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        return x

    run()
    case = f"{layers} layers of {heads.name}, {readers} readers of one document"
    plain = clock.seconds(run)
    graph = clock.seconds(clock.captured(run))
    return [
        Result("step, no graph", case, seconds=plain),
        Result("step, CUDA graph", case, seconds=graph, extra={"faster": plain / graph}),
    ]
