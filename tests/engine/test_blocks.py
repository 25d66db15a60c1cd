"""The pool's accounts, one call at a time, and the exact order in which blocks become free."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool
from engine.errors import IntegrityError
from engine.sequence import ScopeTable, Sequence, token_of
from engine.types import Scope, Segment
from tests.engine.simulation import Simulation


def reader() -> Sequence:
    return Sequence(
        [Segment([1], Scope.public())],
        ScopeTable(),
        output_scope=Scope.account("a"),
        principal="p",
        conversation="c",
    )


def test_counts_follow_the_readers() -> None:
    pool, a, b = BlockPool(4, 16), reader(), reader()
    blocks = pool.take(a, 2)
    pool.set_filled(blocks[0], 16)
    pool.add_reader(blocks[0], b)
    assert (pool.free, pool.held, pool.retained, pool.entries, pool.held_filled) == (2, 2, 0, 3, 16)
    pool.drop_reader(blocks[0], a)
    assert (pool.held, pool.entries) == (2, 2)
    pool.drop_reader(blocks[0], b)
    assert pool.free_if_unused(blocks[0])
    assert (pool.free, pool.held, pool.entries, pool.held_filled) == (3, 1, 1, 0)


def test_a_block_given_back_twice_is_refused() -> None:
    pool, a = BlockPool(2, 16), reader()
    [block] = pool.take(a, 1)
    pool.drop_reader(block, a)
    with pytest.raises(IntegrityError, match="which it does not read"):
        pool.drop_reader(block, a)
    pool.free_if_unused(block)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free_if_unused(block)


def test_a_block_is_named_once_by_a_reader_and_never_while_free() -> None:
    pool, a = BlockPool(2, 16), reader()
    [block] = pool.take(a, 1)
    with pytest.raises(IntegrityError, match="twice"):
        pool.add_reader(block, a)
    with pytest.raises(IntegrityError, match="free"):
        pool.add_reader(1 - block, a)
    with pytest.raises(IntegrityError, match="free"):
        pool.lock(1 - block)


def test_a_locked_block_outlives_its_readers() -> None:
    pool, a = BlockPool(2, 16), reader()
    [block] = pool.take(a, 1)
    pool.lock(block)
    pool.drop_reader(block, a)
    assert not pool.free_if_unused(block)
    assert (pool.retained, pool.locked_retained, pool.allocatable) == (1, 1, 1)
    pool.unlock(block)
    assert pool.free_if_unused(block)
    assert pool.allocatable == 2
    with pytest.raises(IntegrityError, match="not locked"):
        pool.unlock(block)


def test_soft_readers_prevent_nothing_and_end_with_the_block() -> None:
    pool, a = BlockPool(2, 16), reader()
    [block] = pool.take(a, 1)
    pool.add_soft(block)
    assert (pool.soft_entries, pool.open_blocks) == (1, 1)
    pool.drop_reader(block, a)
    assert pool.open_blocks == 1
    before = int(pool.generation[block])
    assert pool.free_if_unused(block)
    assert (pool.soft_entries, pool.open_blocks, int(pool.generation[block])) == (0, 0, before + 1)
    with pytest.raises(IntegrityError, match="-1 soft readers"):
        pool.add_soft(block, -1)


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="needs blocks and slots"):
        BlockPool(blocks, size)


def test_the_exact_order_of_blocks_over_two_lives() -> None:
    """A: 3 blocks and a tail, then B with other text: the tail goes first, then A's chain from its end."""
    sim = Simulation(5, 4)
    a = sim.submit([Segment(list(range(13)), Scope.account("a"))], max_tokens=1)
    assert a is not None
    sim.step()
    assert sim.finished == [a]
    assert [e.block for e in sim.memory.events.after(0) if e.kind == "published"] == [0, 1, 2]
    assert sim.memory.pool.extents.extents() == [(4, 1)]
    sim.submit([Segment(list(range(50, 65)), Scope.account("b"))], max_tokens=2)
    sim.step()
    evicted = [e.block for e in sim.memory.events.after(0) if e.kind == "evicted"]
    # Tail and chain were used at one time: the leaf below goes before what it hangs on.
    assert evicted == [3, 2, 1]
    assert sim.scheduler.running[0].table == [1, 2, 3, 4]


def test_pairs_keep_scope_and_token_apart() -> None:
    scopes = ScopeTable()
    public, account = Scope.public(), Scope.account("a")
    first, second = scopes.pairs([7], public)[0], scopes.pairs([7], account)[0]
    assert first != second
    assert (token_of(first), token_of(second)) == (7, 7)
    assert (scopes.scope_of(first), scopes.scope_of(second)) == (public, account)


@pytest.mark.parametrize("token", [-1, 1 << 32, (1 << 32) + 5, 1 << 40])
def test_a_token_that_would_reach_into_the_scope_is_refused(token: int) -> None:
    from engine.errors import InvalidRequest

    scopes = ScopeTable()
    for n in range(4):
        with pytest.raises(InvalidRequest, match="token id"):
            scopes.pairs([token], Scope.account(str(n)))


def test_scope_names_cannot_be_confused() -> None:
    """Whatever the ids contain, kind and id are compared apart: nothing is glued to a string."""
    scopes = ScopeTable()
    account = Scope.account
    kinds = [Scope.collection("a"), account("a"), account("a|b"), account("a b"), Scope.public()]
    assert len({scopes.number(s) for s in kinds}) == len(kinds)
    with pytest.raises(ValueError, match="needs an id"):
        Scope("account")
    with pytest.raises(ValueError, match="has no id"):
        Scope("public", "x")
    with pytest.raises(ValueError, match="unknown scope kind"):
        Scope("everybody", "x")  # type: ignore[arg-type]
