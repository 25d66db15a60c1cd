"""Where blocks lie: runs are extended, prefills get one run, and nothing is handed out twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import IntegrityError
from engine.extents import FreeExtents


def test_a_fresh_pool_is_one_extent_and_goes_out_in_address_order() -> None:
    free = FreeExtents(8)
    assert free.extents() == [(0, 8)]
    assert free.take(3) == [0, 1, 2]
    assert free.take(2, after=2) == [3, 4]
    assert free.extents() == [(5, 3)]


def test_the_last_run_is_extended_before_anything_else() -> None:
    """........  ->  AA.B....  ->  A grows over the gap first, then behind B."""
    free = FreeExtents(8)
    free.take(4)
    free.add(2)
    assert free.take(3, after=1) == [2, 4, 5]


def test_a_prefill_goes_where_it_fits_in_one_run() -> None:
    """Free: [1], [3, 4], [6..9]; four blocks go to the third extent, two exactly into the second."""
    free = FreeExtents(10)
    free.take(10)
    for block in (1, 3, 4, 6, 7, 8, 9):
        free.add(block)
    assert free.extents() == [(1, 1), (3, 2), (6, 4)]
    assert free.take(2) == [3, 4]
    assert free.take(4) == [6, 7, 8, 9]


def test_a_first_chunk_lies_where_the_rest_fits_behind_it() -> None:
    free = FreeExtents(10)
    free.take(10)
    for block in (0, 1, 4, 5, 6, 7):
        free.add(block)
    assert free.take(2, room=2) == [4, 5]
    assert free.take(2, after=5) == [6, 7]


def test_what_fits_nowhere_takes_the_largest_pieces_first() -> None:
    free = FreeExtents(8)
    free.take(8)
    for block in (0, 2, 3, 6):
        free.add(block)
    assert free.take(4) == [2, 3, 6, 0]


def test_a_block_freed_twice_is_refused() -> None:
    free = FreeExtents(4)
    free.take(2)
    free.add(1)
    with pytest.raises(IntegrityError, match="block 1 was freed twice"):
        free.add(1)


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_outside_the_pool_is_refused(block: int) -> None:
    free = FreeExtents(4)
    free.take(4)
    with pytest.raises(IntegrityError, match="no block"):
        free.add(block)


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    free = FreeExtents(4)
    with pytest.raises(IntegrityError, match="5 blocks were asked for and 4 are free"):
        free.take(5)
    assert free.count == 4


@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 6))))
def test_extents_are_the_maximal_runs_of_a_plain_set(blocks: int, moves: list[tuple[bool, int, int]]) -> None:
    free, plain = FreeExtents(blocks), set(range(blocks))
    for give, pick, room in moves:
        if give:
            taken = sorted(set(range(blocks)) - plain)
            if taken:
                free.add(taken[pick % len(taken)])
                plain.add(taken[pick % len(taken)])
        else:
            count = pick % (len(plain) + 1)
            got = free.take(count, after=pick % blocks, room=room)
            assert len(set(got)) == count
            assert set(got) <= plain
            plain -= set(got)
        assert free.count == len(plain)
        assert [b for b in range(blocks) if b in free] == sorted(plain)
        runs = free.extents()
        assert {b for s, n in runs for b in range(s, s + n)} == plain
        assert all(s + n < t for (s, n), (t, _) in itertools.pairwise(runs)), "runs are maximal"
