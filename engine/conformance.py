"""Does the engine compute what the model computes? Asked once at load, before anybody is served.

The same tokens run twice: through the model's own eager attention without any cache, and through pages.
The paged side covers what service does to them::

    step 1   A[0:23] and B whole          ragged batch, first chunk size, blocks in shuffled order
    step 2   A[23:40], E[0:17]            a chunk that starts inside a block; E repeats A's tokens
    step 3   E[17:40]                     another chunk size
    step 4   A decodes, D = fork of A     D's partly filled block is a copy
             C = hit on A's two blocks    and a few tokens of its own
             readers of A, writing nothing: a fully cached prompt, many readers of one run of blocks

on a pool full of NaN, so that a slot read without having been written shows.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.bridge import attention_implementation
from engine.errors import ModelRefused
from engine.model import LoadedModel
from engine.runner import Row, Runner
from engine.types import Copy
from kernels.api import AttentionBackend

#: Readers of A in step 4 that write nothing: enough that the shared pass pays on every backend.
_READERS = 12


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits on `paged - eager`, both divided by the root mean square of the eager logits.

    `rms` judges the whole, `peak` the worst single logit.
    """

    rms: float
    peak: float


#: Float32: only the order of summation differs; 7e-7 (worst logit 6e-6) was measured on 30 layers, while
#: a scale that is 2 % off gives 8e-3. Half precisions: eager attention rounds scores and probabilities to
#: 8 (11) bits of mantissa, ours does not in the same places, and the residual stream carries that through
#: all layers: 1.2e-2 (7e-2) in bfloat16. The limits are some four times that; a window or mask that is one
#: block off gives 1.3e-1 (1.1).
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(rms=2e-5, peak=5e-4),
    torch.float16: Tolerance(rms=1e-2, peak=6e-2),
    torch.bfloat16: Tolerance(rms=5e-2, peak=3e-1),
}


#: A pool of 8-bit floats: 2.8e-2 (1.7e-1) was measured on 30 layers in bfloat16, 1.2e-2 of it without them.
#: Random models of a few layers with large weights reach 2.1e-1 (1.8). What it costs on a text is in
#: docs/kernels.md; this catches scales that are not applied or belong to another head.
FP8_TOLERANCE = Tolerance(rms=3e-1, peak=2.5)


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What was compared and how far apart it was (see `Tolerance` for the units)."""

    decoder: str
    backend: str
    logits_compared: int
    max_abs_diff: float
    rms_error: float
    peak_error: float
    shared_nodes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.decoder} on {self.backend}: {self.logits_compared} positions agree with eager attention, "
            f"relative error {self.rms_error:.1e} (worst logit {self.peak_error:.1e}), {self.seconds:.1f} s"
        )


def check(
    model: LoadedModel, backend: AttentionBackend, block_size: int = 16, tolerance: Tolerance | None = None
) -> ConformanceReport:
    """Compare `model.decoder` over pages with the model's own eager attention.

    `tolerance` defaults to that of the model's dtype; a decoder of reduced precision brings its own.
    Raises `ModelRefused` on mismatch. Not to be called while the model is in service.
    """
    started = time.monotonic()
    tolerance = tolerance or TOLERANCES[model.dtype]
    script = _Script(model, backend, block_size)
    paged, positions, shared_nodes = script.run()
    eager = _eager(model, script.texts)
    want = torch.stack([eager[text, position] for text, position in positions])
    if not torch.isfinite(paged).all():
        raise ModelRefused(
            f"{model.name}: paged attention on {backend.name} reads slots that were never written."
        )
    difference = paged - want
    scale = float(want.square().mean().sqrt()) or 1.0
    report = ConformanceReport(
        decoder=model.decoder.name,
        backend=backend.name,
        logits_compared=len(positions),
        max_abs_diff=float(difference.abs().max()),
        rms_error=float(difference.square().mean().sqrt()) / scale,
        peak_error=float(difference.abs().max()) / scale,
        shared_nodes=shared_nodes,
        seconds=time.monotonic() - started,
    )
    if not (report.rms_error <= tolerance.rms and report.peak_error <= tolerance.peak):
        worst = int(difference.abs().amax(dim=1).argmax())
        raise ModelRefused(
            f"{model.name}: logits over pages differ from the model's own by {report.rms_error:.1e} of their "
            f"size (worst logit {report.peak_error:.1e}, at position {positions[worst][1]}); "
            f"{tolerance.rms:.0e} and {tolerance.peak:.0e} are allowed ({report.decoder}, {report.backend})."
        )
    return report


@torch.inference_mode()
def _eager(model: LoadedModel, texts: list[list[int]]) -> Tensor:
    """Logits `[texts, longest, vocab]` in float32. Padding stands at the end, where causality hides it."""
    longest = max(len(text) for text in texts)
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=model.device)
    with attention_implementation(model.model, "eager"):
        logits: Tensor = model.model(input_ids=ids, use_cache=False).logits
    return logits.float()


class _Script:
    """The paged side: which rows run in which step, and which logits they give."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend, block_size: int) -> None:
        size = block_size
        rng = random.Random(0)
        length = 2 * size + size // 2
        if length + 1 > model.shape.max_context:
            raise ModelRefused(
                f"{model.name} reads {model.shape.max_context} tokens, too few for blocks of {size}."
            )

        def some(count: int) -> list[int]:
            return [rng.randrange(model.vocab_size) for _ in range(count)]

        a = some(length + 1)
        # Texts, by number: A, B, C (A's first two blocks, then its own), D (A, then another token).
        self.texts = [a, some(size + 3), a[: 2 * size] + some(5), a[:length] + some(1)]
        self.length, self.size = length, size
        ids = list(range(20))
        rng.shuffle(ids)
        self._free = ids
        pool = model.new_pool(len(ids), size, fill_nan=True)
        self.runner = Runner(model, pool, backend)
        self._logits: list[Tensor] = []
        self._positions: list[tuple[int, int]] = []
        self._shared = 0

    def _blocks(self, tokens: int) -> list[int]:
        count = -(-tokens // self.size)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _step(self, rows: list[tuple[int, int, int, list[int], int]]) -> None:
        """Run rows of (text, start, end, page table, write_from) and keep all their logits."""
        step = [
            Row(index, self.texts[text][start:end], start, table, write_from, False)
            for index, (text, start, end, table, write_from) in enumerate(rows)
        ]
        total = sum(len(row.tokens) for row in step)
        output, plan = self.runner.forward(step, np.arange(total, dtype=np.int64))
        self._logits.append(output.logits)
        self._shared += plan.counters.shared_nodes
        self._positions.extend((text, at) for text, start, end, _, _ in rows for at in range(start, end))

    def run(self) -> tuple[Tensor, list[tuple[int, int]], int]:
        """`(logits [P, vocab], (text, position) of each, nodes that took the shared pass)`."""
        size, length = self.size, self.length
        a, b, e = self._blocks(length + 1), self._blocks(len(self.texts[1])), self._blocks(length)
        cut, other = size + size // 2 - 1, size + 1
        self._step([(0, 0, cut, a, 0), (1, 0, len(self.texts[1]), b, 0)])
        self._step([(0, cut, length, a, 0), (0, 0, other, e, 0)])
        self._step([(0, other, length, e, 0)])
        c = a[:2] + self._blocks(5)
        d = a[:2] + self._blocks(1)
        self.runner.pool.copy([Copy(a[2], d[2], length - 2 * size)])
        again = (0, length - 1, length, a, length)
        self._step(
            [
                (0, length, length + 1, a, 0),
                (2, 2 * size, len(self.texts[2]), c, 0),
                (3, length, length + 1, d, 0),
                *[again] * _READERS,
            ]
        )
        return torch.cat(self._logits), self._positions, self._shared
