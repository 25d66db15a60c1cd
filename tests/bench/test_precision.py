"""The comparison of precisions counts what it says it counts."""

from __future__ import annotations

import pytest

import data
from bench.precision import NEAR_TIE, Reference, compare, parting, questions


@pytest.mark.parametrize(
    ("answer", "reference", "place"),
    [((1, 2), (1, 2), None), ((1, 3), (1, 2), 1), ((1,), (1, 2), 1), ((1, 2, 3), (1, 2), 2), ((), (1,), 0)],
)
def test_where_two_answers_part(
    answer: tuple[int, ...], reference: tuple[int, ...], place: int | None
) -> None:
    assert parting(answer, reference) == place


def test_answers_against_references() -> None:
    asked = [Reference("?", (), (1, 2, 3, 4), (9.0, 8.0, 7.0, 6.0)) for _ in range(3)]
    found = compare("p", "d", (2.02, 2.0), [(1, 2, 3, 4), (1, 5, 3, 4), (1, 2, 3)], asked)
    assert (found.same, found.questions) == (1, 3)
    assert found.same_tokens == pytest.approx((4 + 1 + 3) / 12)
    assert found.margins == (6.0, 8.0)
    assert found.cost == pytest.approx(0.01)
    assert not found.explained


def test_a_near_tie_explains_a_difference_and_nothing_else_does() -> None:
    for margin, explained in ((NEAR_TIE / 2, True), (NEAR_TIE * 2, False)):
        found = compare("p", "d", (2.0, 2.0), [(2,)], [Reference("?", (), (1,), (margin,))])
        assert found.explained is explained


def test_the_questions_are_spread_over_the_sample_and_can_be_answered() -> None:
    asked = questions(24)
    assert len({q.id for q in asked}) == 24
    assert all(q.gold for q in asked)
    assert len({q.gold[0].document for q in asked}) > 8
    assert {q.gold[0].document for q in asked} <= {d.name for d in data.documents()}
