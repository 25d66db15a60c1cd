"""How much of a GPU's memory the KV pool may take: what is free, less what a step needs.

free after the weights  =  KV pool  +  largest step (measured)  +  reserve
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.model import LoadedModel
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import SamplingParams
from kernels.api import AttentionBackend

#: What a step took when it was measured, times this: the allocator's fragments, and the graphs' own memory.
STEP_FACTOR = 1.5
#: Share of the whole device that stays free: the driver, libraries, other processes' small change.
RESERVE_SHARE = 0.04


class MemoryMeter(Protocol):
    """What the measurement needs of a device."""

    def reset(self) -> None:
        """Give unused memory back and start a new peak."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes that were allocated at a time since `reset`, above what was allocated then."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Free bytes and all bytes of the device."""
        ...


class CudaMeter:
    """The real one; see `MemoryMeter`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda  # its functions carry no types
        self._before = 0

    def reset(self) -> None:
        """See `MemoryMeter`."""
        self._cuda.synchronize(self.device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self.device)
        self._before = int(self._cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        """See `MemoryMeter`."""
        self._cuda.synchronize(self.device)
        return int(self._cuda.max_memory_allocated(self.device)) - self._before

    def free_and_total(self) -> tuple[int, int]:
        """See `MemoryMeter`."""
        free, total = self._cuda.mem_get_info(self.device)
        return int(free), int(total)


def pool_budget(free: int, total: int, step_bytes: int) -> int:
    """Bytes for the KV pool; 0 where nothing is left."""
    return max(0, free - int(step_bytes * STEP_FACTOR) - int(total * RESERVE_SHARE))


def gpu_pool_bytes(
    meter: MemoryMeter,
    model: LoadedModel,
    backend: AttentionBackend,
    *,
    block_size: int,
    max_batch_tokens: int,
    max_running: int,
) -> int:
    """Measure the largest step that the settings allow; returns the bytes that are left for the pool.

    Its contexts are no longer than its chunks: what longer ones add is left to `STEP_FACTOR`.
    """
    rows = largest_step(model.shape.max_context, block_size, max_batch_tokens, max_running)
    pool = model.new_pool(max(len(row.page_table) for row in rows), block_size)
    runner = Runner(model, pool, backend)
    meter.reset()
    runner.step(rows)
    peak = meter.peak_bytes()
    del runner, pool
    meter.reset()
    free, total = meter.free_and_total()
    return pool_budget(free, total, peak)


def largest_step(max_context: int, block_size: int, max_batch_tokens: int, max_running: int) -> list[Row]:
    """A step with all its tokens, all its rows sampling from ranked candidates. It writes nothing."""
    per_row = max(1, min(max_batch_tokens // max_running, max_context))
    first = min(max_batch_tokens - per_row * (max_running - 1), max_context)
    longest = max(per_row, first)
    table = list(range(-(-longest // block_size)))
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    lengths = [first, *[per_row] * (max_running - 1)]
    return [Row(key, [0] * n, 0, table, n, True, SamplerState(params)) for key, n in enumerate(lengths)]
