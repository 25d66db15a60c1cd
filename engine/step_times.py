"""How long a decoder takes for typical steps: what two decoders of one model are chosen by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from engine.decoder import Decoder
from engine.model import LoadedModel
from engine.runner import IntArray, Row, Runner
from kernels.api import AttentionBackend

#: `(readers of one document of 256 tokens, tokens of each)`.
STEPS = ((1, 1), (8, 1), (1, 256))


def step_times(
    model: LoadedModel,
    backend: AttentionBackend,
    block_size: int,
    decoders: Sequence[Decoder],
    budget_s: float = 0.25,
) -> list[list[float]]:
    """Milliseconds of each decoder for each of `STEPS`; they take turns, the smallest value counts."""
    # A model that reads little gets as much of these steps as it can read.
    most = max(1, model.shape.max_context // 2)
    steps = [(count, min(each, most)) for count, each in STEPS]
    readers, tokens = max(n for n, _ in steps), max(n for _, n in steps)
    document = min(256, model.shape.max_context - tokens) // block_size * block_size
    shared, own = list(range(document // block_size)), -(-tokens // block_size)
    pool = model.new_pool(len(shared) + readers * own, block_size)
    pool.storage.zero_()  # slots that nobody wrote may hold anything
    runner = Runner(model, pool, backend)
    result: list[list[float]] = [[] for _ in decoders]
    for count, each in steps:
        rows = [
            Row(reader, [0] * each, document, [*shared, *range(first, first + own)], document, False)
            for reader in range(count)
            for first in (len(shared) + reader * own,)
        ]
        wanted = np.arange(count, dtype=np.int64)
        calls = [partial(_forward, model, runner, decoder, rows, wanted) for decoder in decoders]
        for place, seconds in enumerate(in_turns(calls, 4, budget_s)):
            result[place].append(round(seconds * 1e3, 2))
    return result


def _forward(
    model: LoadedModel, runner: Runner, decoder: Decoder, rows: list[Row], wanted: IntArray, _: int
) -> None:
    model.decoder = decoder
    runner.forward(rows, wanted)


def in_turns(calls: Sequence[Callable[[int], object]], least: int, budget_s: float) -> list[float]:
    """Seconds that each of `calls` takes, which are given the number of the turn. They take turns, at least
    `least` of them and for `budget_s` in all, so that whatever else the machine does meets all of them; the
    smallest value counts, without the first turn, which pays for what is set up once."""
    best, spent, turn = [math.inf] * len(calls), 0.0, 0
    while turn < least or spent < budget_s:
        for place, call in enumerate(calls):
            started = time.perf_counter()
            call(turn)
            passed = time.perf_counter() - started
            if turn:
                best[place] = min(best[place], passed)
            spent += passed
        turn += 1
    return best
