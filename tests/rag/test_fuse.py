from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag.followup import leans, resolve
from rag.fuse import K, fuse

rankings = st.lists(st.integers(0, 30), unique=True, max_size=20)


@given(rankings, rankings)
def test_scores_are_sums_of_reciprocal_ranks(dense: list[int], lexical: list[int]) -> None:
    fused = fuse({"dense": dense, "lexical": lexical})
    assert {f.id for f in fused} == set(dense) | set(lexical)
    for f in fused:
        expected = {
            leg: ids.index(f.id) + 1 for leg, ids in (("dense", dense), ("lexical", lexical)) if f.id in ids
        }
        assert f.ranks == expected
        assert f.score == pytest.approx(sum(1 / (K + r) for r in expected.values()))
    assert [f.score for f in fused] == sorted((f.score for f in fused), reverse=True)


def test_what_both_legs_know_beats_what_one_prefers() -> None:
    assert fuse({"dense": [1, 2], "lexical": [3, 2]})[0].id == 2
    assert [f.id for f in fuse({"dense": [5], "lexical": [4]})] == [4, 5]


def test_only_leaning_questions_take_the_conversation_along() -> None:
    assert leans("And on Sundays?")
    assert leans("How much does it cost?")
    assert not leans("Which buoy went adrift from Skarn Deep in 2020?")
    history = ["Which ferry serves Route 2?", "And how many cars does it carry?"]
    variants = resolve("Who is its master?", history)
    assert variants[0].text == "Who is its master?"
    assert variants[1].text == " ".join([*history, "Who is its master?"])
    assert len(resolve("Which buoy went adrift from Skarn Deep in 2020?", history)) == 1
    assert len(resolve("Who is its master?", [])) == 1
