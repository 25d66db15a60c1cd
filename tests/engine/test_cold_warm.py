"""The packaged model: what is read from shared pages gives the logits of a run that shares nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.model import LoadedModel, load_model
from engine.types import EngineConfig, Scope, Segment
from tests.engine.real import RealEngine, gap

pytestmark = [pytest.mark.model, pytest.mark.slow]

A, LIBRARY = Scope.account("a"), Scope.collection("k")
TEXT = (
    "The ferry Kittiwake leaves the north pier at six in the morning and returns before dusk. Its master "
    "keeps the tide table in the wheelhouse, and the deck crew checks every line before casting off. In "
    "heavy swell the crossing is cancelled by the harbour office, and passengers are offered the next "
    "sailing at no charge. "
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(EngineConfig(dtype=request.param, device="cpu"))
    torch.set_num_threads(threads)


def tokens(model: LoadedModel, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def cold(model: LoadedModel, segments: list[Segment], chunk: int, **options: Any) -> dict[int, torch.Tensor]:
    engine = RealEngine(model, blocks=32, block_size=16, sharing=False, max_batch_tokens=chunk)
    return engine.logits(engine.run(segments, **options))


def test_hits_forks_takeover_and_resumption(model: LoadedModel) -> None:
    """float32: within 1e-5 of the largest logit.

    bfloat16 rounds to 8 bits after every operation, so that two cold runs that only cut the prompt into
    other chunks, and add up in another order, differ already. That difference is measured here, on the
    same prompt; a warm run is such another order, too, and may differ three times as much, at most 5 %.
    """
    document = Segment(tokens(model, TEXT), LIBRARY, "document", "d")
    asked = Segment(tokens(model, "When does the Kittiwake leave?"), A, "question")
    other = Segment(tokens(model, "Who keeps the tide table?"), A, "question")
    if model.dtype is torch.float32:
        tolerance = 1e-5
    else:
        noise = gap(cold(model, [document, asked], 512), cold(model, [document, asked], 16))
        tolerance = min(0.05, max(3 * noise, 2**-8))

    engine = RealEngine(model, blocks=48, block_size=16, max_batch_tokens=64)
    first = engine.run([document, asked], max_tokens=3)
    history = [document, asked, Segment(engine.tokens(first), A), other]
    cases: dict[str, list[Segment]] = {
        "whole": [document, asked],
        "partial": [document, other],
        "continued": history,
        "forked": [document, asked, other],
    }
    for name, segments in cases.items():
        n = 2 if name == "forked" else 1
        id = engine.run(segments, max_tokens=2, n=n)
        assert engine.done(id).receipt.reused_tokens >= len(document.tokens), name
        assert gap(engine.logits(id), cold(model, segments, 512, max_tokens=2)) <= tolerance, name
    resumed = engine.submit([document, other], max_tokens=4)
    engine.step()
    engine.step()
    from engine.scheduler import Step

    engine.core.scheduler._preempt(engine.core.scheduler.running[0], Step())
    engine.drain()
    assert engine.done(resumed).receipt.preemptions == 1
    assert gap(engine.logits(resumed), cold(model, [document, other], 512, max_tokens=4)) <= tolerance
    counters = engine.core.memory.counters
    assert min(counters.takeovers, counters.blocks_copied) > 0
    assert engine.core.scheduler.counters.prompt_tokens_skipped > 4 * len(document.tokens)
