"""Measurements of the attention kernels on a GPU; `scripts/gpu_check.py` runs them and prints the table.

Every time is the median over several runs of device time, with the level-2 cache flushed before each. All
contestants are replayed as CUDA graphs, as serving does, so Python's own time is in none of them.
On the CPU (under Triton's interpreter) the same code runs with a plain clock: that only proves that it runs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.api import AttentionBackend
from kernels.api import Heads as LayerShape
from kernels.fp8 import CAPABILITY, Scales, load, store
from kernels.plan import AttentionPlan
from kernels.reference import ReferenceBackend
from kernels.roofline import Decode, Heads, decode_cost
from kernels.triton_backend import TritonBackend, interpreted, make_triton_backend
from kernels.triton_config import Launch

BLOCK = 16
#: torch.cuda's classes carry no types.
cuda: Any = torch.cuda


@dataclass(slots=True)
class Result:
    """One line of the table. `extra` holds what only some measurements have (all seconds or ratios); `error`
    says why there is no result."""

    what: str
    case: str
    seconds: float | None = None
    passed: bool | None = None
    extra: dict[str, float | str] = field(default_factory=dict)
    error: str | None = None


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


def correctness_case(backend: TritonBackend, seed: int, head_dim: int, longest: int = 130) -> Result:
    """A random tree of sharing against the float32 oracle, with NaN in unwritten slots.

    `longest`: most tokens that a sequence has on its own. Every third case has an 8-bit pool, where the chip
    knows it.
    """
    rng = random.Random(seed)
    # The interpreter cannot multiply bfloat16.
    dtype = torch.float16 if interpreted() else rng.choice([torch.float16, torch.bfloat16])
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
        "sinks": rng.choice([None, torch.randn(kv_heads * group).to(backend.device, dtype)]),
    }
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.full((kv_heads, 256 * BLOCK, head_dim), float("nan")) for _ in range(2))
    for table, context in zip(tables, contexts, strict=True):
        slots = [table[t // BLOCK] * BLOCK + t % BLOCK for t in range(context)]
        for pool in (keys, values):
            pool[:, slots] = torch.randn((kv_heads, context, head_dim), generator=generator)
    shape = (sum(queries), kv_heads * group, head_dim)
    query = torch.randn(shape, generator=generator).to(backend.device, dtype)
    eight_bit = seed % 3 == 2 and (backend.device.type == "cpu" or backend.capability >= CAPABILITY)
    if eight_bit:
        heads = torch.arange(kv_heads, dtype=torch.float32, device=backend.device)
        scales = Scales(torch.exp2(heads - 6), torch.exp2(heads - 5))
        keys, values = (
            store(pool.to(backend.device).transpose(0, 1), scale).transpose(0, 1).contiguous()
            for pool, scale in zip((keys, values), scales, strict=True)
        )
        exact_pools = load(keys, scales.key), load(values, scales.value)
        options["scales"] = scales
    else:
        keys, values = keys.to(backend.device, dtype), values.to(backend.device, dtype)
        exact_pools = keys.float(), values.float()

    def plan_of(maker: AttentionBackend) -> AttentionPlan:
        return maker.plan(page_tables=tables, query_lens=queries, context_lens=contexts, block_size=BLOCK)

    oracle = ReferenceBackend()
    exact = {**options, "scales": None}
    expected = oracle.attend(query.float(), *exact_pools, plan_of(oracle), **exact)
    found = backend.attend(query, keys, values, plan_of(backend), **options)
    difference = float((found.float() - expected).abs().max())
    limit = 5e-2 if dtype == torch.bfloat16 else 6e-3
    kind = ", 8-bit KV" if eight_bit else ""
    return Result(
        "correctness",
        f"tree {seed}: head {head_dim}, group {group}, {str(dtype)[6:]}{kind}",
        passed=difference <= limit,  # False for NaN too
        extra={"largest_difference": difference},
    )


def correctness_in_process(arguments: tuple[str, int, int]) -> Result:
    """`correctness_case` for a pool of processes: kernels are compiled by all cores at once."""
    device, seed, head_dim = arguments
    case = f"tree {seed}: head {head_dim}"
    try:
        return correctness_case(make_triton_backend(torch.device(device)), seed, head_dim)
    except Exception as error:  # one case's failure is a line of the table
        return Result("correctness", case, passed=False, error=f"{type(error).__name__}: {error}"[:300])


def pool_correctness(backend: TritonBackend) -> Result:
    """Writing from a fused projection with a row that goes nowhere, and a copy, in two layers."""
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


class DeeperBackend(TritonBackend):
    """Narrow tiles with more stages than the launcher's choice: a question for the first GPU at hand.

    Block ids are loaded in front of K and V, and Triton shares the stages out between the two levels: three
    or four give one buffer of K and V, five give two, so that the next turn's copies run under this turn's
    products.
    """

    stages = 5

    def launch_config(self, heads: LayerShape, block_size: int) -> Launch:
        """See `TritonBackend.launch_config`."""
        chosen = super().launch_config(heads, block_size)
        return replace(chosen, narrow=replace(chosen.narrow, stages=self.stages))


def decode(
    clock: Clock,
    backend: TritonBackend,
    heads: Heads,
    work: Decode,
    bandwidth: float,
    *,
    peers: Sequence[str] = (),
    eight_bit: bool = False,
    what: str = "decode",
) -> Result:
    """One layer of a decode step: two phases, one phase, and torch over gathered K and V.

    `peers`: "sdpa", torch's fused attention; "flex", FlexAttention.
    """
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
    scales = None
    if eight_bit:
        one_each = torch.full((heads.kv_heads,), 2.0**-6, device=clock.device)
        scales = Scales(one_each, one_each)
        keys, values = (
            store(pool.transpose(0, 1), one_each).transpose(0, 1).contiguous() for pool in (keys, values)
        )
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
        # Uploads the arrays, outside of the graph.
        backend.attend(query, keys, values, plan, scale=scale, scales=scales)

        def attend(plan: AttentionPlan = plan) -> Tensor:
            return backend.attend(query, keys, values, plan, scale=scale, scales=scales)

        times.append(clock.seconds(clock.captured(attend)))
    cost = decode_cost(heads, work, shared_pass=True)
    result = Result(
        what,
        f"{heads.name}: {work.readers} x {work.shared + work.own}, {work.shared} shared",
        seconds=times[0],
        extra={
            "share_of_bandwidth": cost.bytes / (2 if eight_bit else 1) / times[0] / bandwidth,
            "one_phase_s": times[1],
            "faster_than_one_phase": times[1] / times[0],
        },
    )
    if peers:
        # Each reader's tokens in a row: [readers, kv_heads, tokens, head_dim], as torch's attention wants.
        starts = torch.tensor(tables, device=clock.device)[:, :, None] * BLOCK
        slots = (starts + torch.arange(BLOCK, device=clock.device)).flatten(1)[:, : work.shared + work.own]
        key_4d, value_4d = (pool[:, slots].transpose(0, 1).contiguous() for pool in (keys, values))
        one = query.unsqueeze(2)
        if "sdpa" in peers:
            result.extra.update(
                _peer(clock, "sdpa_gathered", lambda: _fused_sdpa(one, key_4d, value_4d, causal=False))
            )
        if "flex" in peers:
            result.extra.update(_flex(clock, one, key_4d, value_4d))
    return result


def _fused_sdpa(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """Torch's attention, on a GPU by a fused kernel or not at all: with grouped heads torch would otherwise
    fall back to plain products without a word, and we would be compared with those."""
    if query.device.type != "cuda":
        return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)


def _peer(clock: Clock, name: str, run: Callable[[], object]) -> dict[str, float | str]:
    """`{name_s: seconds}`, or `{name: why there is none}`: a contestant that fails is not our failure."""
    try:
        return {f"{name}_s": clock.seconds(clock.captured(run))}
    except Exception as error:
        return {name: f"{type(error).__name__}: {str(error)[:120]}"}


def _flex(clock: Clock, query: Tensor, keys: Tensor, values: Tensor) -> dict[str, float | str]:
    """FlexAttention over the same gathered tensors, compiled (its decoding kernel splits over the keys)."""
    if not clock.cuda:
        return {"flex_gathered": "needs a GPU"}
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return _peer(clock, "flex_gathered", lambda: compiled(query, keys, values, enable_gqa=True))


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
    extra = _peer(clock, "sdpa", lambda: _fused_sdpa(head_first, key_4d, value_4d, causal=True))
    theirs = extra.get("sdpa_s")
    if isinstance(theirs, float):
        extra["share_of_sdpa"] = theirs / ours
    return Result("prefill", f"{heads.name}: {chunk} tokens", seconds=ours, extra=extra)
