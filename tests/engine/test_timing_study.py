"""The timing study's own arithmetic, and its two sides by counters (its clocks are for a person to judge)."""

from __future__ import annotations

import pytest

from bench.timing_study import DOCUMENT_TOKENS, GUESS_TOKENS, Study, area_under_curve


@pytest.mark.parametrize(
    ("right", "wrong", "area"),
    [
        ([1.0, 2.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [1.0, 2.0], 0.0),
        ([1.0, 1.0], [1.0], 0.5),
        ([1.0, 3.0], [2.0], 0.5),
    ],
)
def test_area_under_the_curve(right: list[float], wrong: list[float], area: float) -> None:
    assert area_under_curve(right, wrong) == area


def test_another_account_learns_nothing_and_the_control_shows_that_it_could_be_seen() -> None:
    study = Study()
    other, control = study.run("guesser", 20), study.run("owner", 20)
    assert (other.auc_tokens, other.reused_right, other.reused_wrong) == (
        0.5,
        DOCUMENT_TOKENS,
        DOCUMENT_TOKENS,
    )
    assert control.auc_tokens == 1.0
    assert control.reused_right == DOCUMENT_TOKENS + GUESS_TOKENS - 1
