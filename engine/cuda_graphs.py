"""Decode steps as CUDA graphs: one launch instead of some hundreds.

A graph is captured for each bucket of batch sizes and replayed for every step that fits one. What a step
brings (token ids, positions, slots, the plan's arrays) lies in one vector that stays where it is::

    host, pinned   [ ids positions slots | plan arrays ]
                        │ one copy
    device         [ ids positions slots | plan arrays ] ──replay──▶ logits, broken  (where they always are)

Rows beyond the step's own are padding: token 0 at position 0, slot -1 (written nowhere), read by no tile.
What of CUDA is needed stands behind `GraphDevice`, so that everything else is tested on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.bridge import StepContext
from engine.kv_pool import KVPool
from engine.model import LoadedModel
from kernels.api import AttentionBackend, Heads, StaticPlans
from kernels.plan import AttentionPlan, PlanError

log = logging.getLogger(__name__)

#: int32 elements in front of the plan's arrays: three int64 numbers a row.
_PER_ROW = 6


class GraphDevice(Protocol):
    """What captured steps need of a device. Calls come from one thread, on one stream."""

    def host_vector(self, size: int) -> Tensor:
        """An int32 vector in memory that the device copies from by itself."""
        ...

    def wait_uploaded(self) -> None:
        """Return when the last `upload` no longer reads the host's vector."""
        ...

    def upload(self, host: Tensor, target: Tensor) -> None:
        """Enqueue the copy of `host` to the start of `target`."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once, so that everything is compiled and allocated, then capture; returns the replay.

        A replay reads the memory of what `run` closes over, by address: the caller keeps `run` for as long.
        """
        ...


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: padding costs at most half of a small step, an eighth of a large
    one, and there are few enough graphs to capture at start."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + max(4, (1 << (last.bit_length() - 1)) // 4))
    return tuple(dict.fromkeys(min(size, most) for size in sizes))


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds `rows`; None where none does."""
    return next((size for size in buckets if size >= rows), None)


def fill_rows(
    head: np.ndarray[Any, np.dtype[np.int64]],
    ids: Sequence[int] | np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    slots: np.ndarray[Any, Any],
) -> None:
    """Write a step's rows into `head` `[3, bucket]` (ids, positions, slots); the rest becomes padding."""
    count = len(ids)
    for row, (values, padding) in enumerate(((ids, 0), (positions, 0), (slots, -1))):
        head[row, :count] = values
        head[row, count:] = padding


@dataclass(frozen=True, slots=True)
class _Graph:
    """One bucket: `host` is the vector of the drawing, `replay` runs the captured pass.

    captured   the pass itself, never called again: it owns the tensors whose addresses the graph has taken
               down, the device's vector among them. Without it their memory would go to others.
    """

    rows: int
    plans: StaticPlans
    host: Tensor
    device: Tensor
    captured: Callable[[], None]
    replay: Callable[[], None]


def _head(rows: int) -> int:
    """Elements in front of the plan's arrays; a multiple of 4, so that those start at 16 bytes."""
    return -(-_PER_ROW * rows // 4) * 4


def _rows_of(vector: Tensor, rows: int) -> Tensor:
    """int64 `[3, rows]` view of a vector: ids, positions, slots."""
    return vector[: _PER_ROW * rows].view(torch.int64).view(3, rows)


class DecodeGraphs:
    """All graphs of one model over one pool.

    `unfit` counts decode steps that no captured graph could hold, and ran without one.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        backend: AttentionBackend,
        device: GraphDevice,
        *,
        most_rows: int,
    ) -> None:
        if not backend.captures:
            raise ValueError(f"the backend {backend.name} cannot be captured: it waits for the device")
        self.model, self.pool, self.backend, self.device = model, pool, backend, device
        self.buckets = bucket_sizes(most_rows)
        self.unfit = 0
        largest = self.buckets[-1]
        where = pool.device
        # One place for all buckets: their replays never overlap, and a result is read before the next.
        self._logits = torch.zeros((largest, model.vocab_size), dtype=torch.float32, device=where)
        self._broken = torch.zeros(largest, dtype=torch.float32, device=where)
        self._graphs: dict[int, _Graph] = {}

    def why_not(self, lengths: Sequence[int]) -> str | None:
        """Why a step of rows with so many tokens each cannot be replayed; None: it can."""
        if not lengths or max(lengths) > 1:
            return "the step has rows of more than one token"
        if bucket_for(len(lengths), self.buckets) is None:
            return f"the step has {len(lengths)} rows, the largest graph {self.buckets[-1]}"
        return None

    def capture_all(self) -> None:
        """Capture every bucket, the largest first: the smaller ones then find its memory free to use."""
        for rows in reversed(self.buckets):
            self._captured(rows)

    def run(
        self,
        ids: Sequence[int] | np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        slots: np.ndarray[Any, Any],
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor] | None:
        """`(logits [rows, vocab], broken [rows])` of a step of single tokens, valid until the next step.

        `broken` is 0 for rows whose hidden states are finite. None where the plan does not fit the graph: the
        step then runs without one, and nothing has been touched.
        """
        count = len(ids)
        rows = bucket_for(count, self.buckets)
        if rows is None:
            return None
        graph = self._captured(rows)
        head = _head(rows)
        self.device.wait_uploaded()
        array = graph.host.numpy()
        try:
            used = head + graph.plans.fill(plan, array[head:])
        except PlanError as error:
            self.unfit += 1
            log.debug("a decode step of %d rows runs without its graph: %s", count, error)
            return None
        fill_rows(_rows_of(graph.host, rows).numpy(), ids, positions, slots)
        self.device.upload(graph.host[:used], graph.device)
        graph.replay()
        return self._logits[:count], self._broken[:count]

    def _captured(self, rows: int) -> _Graph:
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows)
        return self._graphs[rows]

    def _capture(self, rows: int) -> _Graph:
        plans = self._plans(rows)
        size = _head(rows) + plans.size
        host = self.device.host_vector(size).zero_()
        device = torch.zeros(size, dtype=torch.int32, device=self.pool.device)
        fill_rows(_rows_of(host, rows).numpy(), [], np.empty(0), np.empty(0))
        self.device.upload(host, device)
        ids, positions, slots = _rows_of(device, rows)
        wanted = torch.arange(rows, device=self.pool.device)
        template = plans.template(device[_head(rows) :])
        logits, broken = self._logits[:rows], self._broken[:rows]

        def run() -> None:
            context = StepContext(self.pool, self.backend, template, slots, self.model.windows)
            output = self.model.decoder(ids, positions, wanted, context)
            logits.copy_(output.logits)
            broken.copy_(broken_tokens(output.hidden))

        return _Graph(rows, plans, host, device, run, self.device.capture(run))

    def _plans(self, rows: int) -> StaticPlans:
        pool, shape = self.pool, self.pool.shape
        heads = Heads(
            self.model.q_heads,
            shape.kv_heads,
            shape.head_dim,
            self.model.dtype.itemsize,
            pool.dtype.itemsize,
        )
        return self.backend.static_plans(
            heads,
            rows=rows,
            layers=self.model.windows,
            block_size=pool.block_size,
            context_blocks=min(pool.num_blocks, -(-shape.max_context // pool.block_size)),
        )


def broken_tokens(hidden: Tensor) -> Tensor:
    """Float32 `[T]`: 0 where the token's hidden states `[T, width]` are finite, NaN where they are not.

    NaN and infinity stay in the residual stream from the layer where they arise, so the last layer tells for
    all of them.
    """
    return (hidden.float() * 0).sum(dim=-1)


class CudaGraphDevice:
    """The real one; see `GraphDevice`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda  # its classes carry no types
        self._uploaded: Any = None
        self._memory: Any = None

    def host_vector(self, size: int) -> Tensor:
        """See `GraphDevice`."""
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def wait_uploaded(self) -> None:
        """See `GraphDevice`. A formality in service: a step ends with its result on the host."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, host: Tensor, target: Tensor) -> None:
        """See `GraphDevice`."""
        target[: host.numel()].copy_(host, non_blocking=True)
        self._uploaded = self._cuda.current_stream(self.device).record_event()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphDevice`. All graphs share one memory pool: their passes never overlap, and what a step
        leaves behind lies outside of it. Other threads (an embedding model) may go on using the device."""
        cuda = self._cuda
        side = cuda.Stream(self.device)
        side.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(side):
            run()
        cuda.current_stream(self.device).wait_stream(side)
        if self._memory is None:
            self._memory = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
