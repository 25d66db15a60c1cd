"""Decoders are timed on steps that the model can read."""

from __future__ import annotations

import pytest

from engine.step_times import STEPS, in_turns, step_times
from kernels.api import get_backend
from tests.engine.tiny import tiny_model


@pytest.mark.parametrize("context", [16, 128, 200, 300, 512])
def test_a_model_that_reads_little_is_timed_on_less(context: int) -> None:
    """128 to 255 tokens were a document of less than none, and the server did not start."""
    model = tiny_model("llama", max_position_embeddings=context)
    decoder = model.decoder
    times = step_times(model, get_backend("reference", "cpu"), 16, (decoder, decoder), budget_s=0.0)
    assert [len(one) for one in times] == [len(STEPS)] * 2
    assert all(value > 0 for one in times for value in one)


def test_the_first_turn_does_not_count() -> None:
    turns: list[tuple[str, int]] = []
    best = in_turns([lambda t: turns.append(("a", t)), lambda t: turns.append(("b", t))], 3, 0.0)
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert all(value < float("inf") for value in best)
