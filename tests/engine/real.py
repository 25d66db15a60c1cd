"""`EngineCore` over a real runner with a tiny random model, its logits recorded, its slots full of NaN."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.choice import Request
from engine.core import EngineCore
from engine.kv_pool import KVPool
from engine.model import LoadedModel
from engine.runner import Row, Runner
from engine.scheduler import Limits
from engine.types import Delta, Done, Event, Failed, GenerationRequest, SamplingParams, Scope, Segment
from kernels.api import get_backend

A = Scope.account("a")


class Letters:
    """A tokenizer for tests: token 3 is 'd', and so on; nothing is special."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class Recorder(Runner):
    """Keeps the logits of every sampled position, by row key and context length; fails on demand."""

    logits: dict[tuple[int, int], torch.Tensor]
    fail: list[Exception]
    broken: set[int]

    def forward(self, rows: Sequence[Row], wanted: Any) -> Any:
        if self.fail:
            raise self.fail.pop(0)
        output, plan = super().forward(rows, wanted)
        ends = np.cumsum([len(row.tokens) for row in rows])
        for row, end in zip(rows, ends.tolist(), strict=True):
            if row.key in self.broken:
                output.hidden[end - 1] = float("nan")
        sampled = [row for row in rows if row.sample]
        for row, logits in zip(sampled, output.logits, strict=True):
            self.logits[row.key, row.start + len(row.tokens)] = logits.float().clone()
        return output, plan


class RealEngine:
    """Submits, steps, and keeps every event."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        blocks: int = 64,
        block_size: int = 4,
        sharing: bool = True,
        backend: str = "torch_cpu",
        **limits: Any,
    ) -> None:
        self.pool = KVPool(model.shape, blocks, block_size, model.dtype, "cpu", fill_nan=True)
        self.runner = Recorder(model, self.pool, get_backend(backend, "cpu"))
        self.runner.logits, self.runner.fail, self.runner.broken = {}, [], set()
        self.now = 0.0
        self.core = EngineCore(
            self.runner,
            model.tokenizer or Letters(),
            model.shape,
            num_blocks=blocks,
            block_size=block_size,
            limits=Limits(**{"max_batch_tokens": 64, "max_running": 16, **limits}),
            clock=lambda: self.now,
            vocab_size=model.vocab_size,
            sharing=sharing,
        )
        self.events: dict[str, list[Event | None]] = defaultdict(list)
        self.requests: dict[str, Request] = {}

    def submit(
        self,
        segments: Sequence[Segment],
        *,
        max_tokens: int = 4,
        id: str | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        **options: Any,
    ) -> str:
        id = id or f"r{len(self.requests)}"
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        settings: dict[str, Any] = {"principal": "p", "conversation": "c", "output_scope": A, **options}
        request = GenerationRequest(segments=segments, sampling=sampling, **settings)
        self.requests[id] = self.core.submit(id, request, self.events[id].append)
        return id

    def step(self) -> int:
        self.now += 1.0
        tokens = self.core.step()
        self.core.check_integrity()
        return tokens

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.core.busy:
                return
            self.step()
        raise AssertionError("work did not end")

    def run(self, segments: Sequence[Segment], **options: Any) -> str:
        """One request to its end."""
        id = self.submit(segments, **options)
        self.drain()
        return id

    # -- what came out ---------------------------------------------------------------------------------

    def done(self, id: str, choice: int = 0) -> Done:
        [found] = [e for e in self.events[id] if isinstance(e, Done) and e.choice == choice]
        return found

    def error(self, id: str) -> Exception:
        [found] = [e for e in self.events[id] if isinstance(e, Failed)]
        return found.error

    def tokens(self, id: str, choice: int = 0) -> list[int]:
        deltas = [t for e in self.events[id] if isinstance(e, Delta) and e.choice == choice for t in e.tokens]
        assert tuple(deltas) == self.done(id, choice).tokens
        return deltas

    def logits(self, id: str, choice: int = 0) -> dict[int, torch.Tensor]:
        """Logits by context length."""
        key = self.requests[id].choices[choice].sequence.id
        return {end: logits for (k, end), logits in self.runner.logits.items() if k == key}

    def check_order(self) -> None:
        """Every request's events end with one None, right behind its last Done or its Failed."""
        for id, events in self.events.items():
            if self.requests[id].id in self.core.requests:
                continue
            assert events.count(None) == 1, id
            assert events[-1] is None, id
            assert isinstance(events[-2], Done | Failed), id


def gap(warm: dict[int, torch.Tensor], cold: dict[int, torch.Tensor]) -> float:
    """Largest max|Δ| / max|logit| over the positions that both computed; there must be some."""
    both = sorted(set(warm) & set(cold))
    assert both
    return max(float((warm[n] - cold[n]).abs().max() / cold[n].abs().max()) for n in both)
