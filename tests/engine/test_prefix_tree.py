"""Finding, evicting and deleting in the index, by exact (scope, token) pairs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import IntegrityError
from engine.prefix_tree import PrefixTree
from engine.types import Scope, Segment
from tests.engine.simulation import Simulation

PUBLIC, A, B = Scope.public(), Scope.account("a"), Scope.account("b")


def run(sim: Simulation, *segments: Segment, max_tokens: int = 1) -> None:
    """One request, alone, to its end."""
    sequence = sim.submit(list(segments), max_tokens=max_tokens)
    assert sequence is not None
    sim.drain()


def hit(sim: Simulation, *segments: Segment) -> tuple[int, bool]:
    """Tokens that a request with these segments would find, and whether it would take over a tail."""
    match = sim.memory.match(sim.sequence(list(segments)))
    return match.tokens(sim.memory.block_size), match.takeover


def test_matching_is_exact_to_the_token() -> None:
    """[0..3][4..7][8 9]: whole blocks, then the longest common part of the next one."""
    sim = Simulation(16, 4)
    run(sim, Segment(list(range(10)), A))
    assert hit(sim, Segment(list(range(10)), A)) == (10, True)
    assert hit(sim, Segment(list(range(9)), A)) == (9, False)  # a part of the tail: copied, not taken over
    assert hit(sim, Segment([*range(10), 50], A)) == (10, True)
    assert hit(sim, Segment([*range(9), 50, 51], A)) == (9, False)
    assert hit(sim, Segment([0, 1, 2, 3, 4, 5, 50], A)) == (6, False)
    assert hit(sim, Segment([9, *range(10)], A)) == (0, False)


def test_the_best_of_several_continuations_wins_and_a_whole_tail_wins_among_equals() -> None:
    sim = Simulation(32, 4)
    run(sim, Segment([1, 2, 3, 4, 5, 6, 7, 8, 9], A))
    run(sim, Segment([1, 2, 3, 4, 5, 6, 60], A))
    assert hit(sim, Segment([1, 2, 3, 4, 5, 6, 7, 70], A)) == (7, False)
    assert hit(sim, Segment([1, 2, 3, 4, 5, 6, 60, 61], A)) == (7, True)


@pytest.mark.parametrize("other", [B, PUBLIC, Scope.collection("a")])
def test_the_same_tokens_in_another_scope_are_another_text(other: Scope) -> None:
    sim = Simulation(16, 4)
    run(sim, Segment(list(range(10)), A))
    assert hit(sim, Segment(list(range(10)), A))[0] == 10
    assert hit(sim, Segment(list(range(10)), other)) == (0, False)


def test_the_split_of_a_text_into_segments_does_not_matter_and_the_split_into_scopes_does() -> None:
    sim = Simulation(16, 4)
    run(sim, Segment([1, 2, 3, 4], PUBLIC), Segment([5, 6, 7, 8, 9], A))
    assert hit(sim, Segment([1, 2], PUBLIC), Segment([3, 4], PUBLIC), Segment([5, 6, 7, 8, 9], A))[0] == 9
    assert hit(sim, Segment([1, 2, 3, 4, 5], PUBLIC), Segment([6, 7, 8, 9], A))[0] == 4


@pytest.mark.parametrize("size", [1, 2, 16, 32])
def test_a_forced_hash_collision_changes_nothing(size: int) -> None:
    """The index compares tokens; here every key has the hash 0 and answers are still right."""

    class Zero(int):
        def __hash__(self) -> int:
            return 0

    sim = Simulation(300, size)
    sim.memory.scopes.pairs = lambda tokens, scope, old=sim.memory.scopes.pairs: [  # type: ignore[method-assign]
        Zero(p) for p in old(tokens, scope)
    ]
    texts = [[n, *range(40)] for n in range(6)]
    for text in texts:
        run(sim, Segment(text, A))
    for text in texts:
        assert hit(sim, Segment(text, A))[0] == len(text)
        assert hit(sim, Segment([99, *text[1:]], A))[0] == 0


def test_recency_decides_who_goes_and_documents_get_a_bounded_bonus() -> None:
    """A document used up to `document_bonus` uses before a private text is kept longer, an older one not."""
    for uses_between, survivor in ((0, "document"), (12, "private")):
        sim = Simulation(64, 4, document_bonus=8)
        run(sim, Segment([1, 2, 3, 4], Scope.collection("k"), "document", "d"))
        for n in range(uses_between):
            run(sim, Segment([200 + n], Scope.account("z")))
        run(sim, Segment([5, 6, 7, 8], A))
        kinds = []
        while (victim := sim.memory.tree.next_victim()) is not None:
            kinds.append("private" if victim.private else "document")
            sim.evict()
            sim.verify()
        assert kinds[-1] == survivor, (uses_between, kinds)


def test_eviction_takes_leaves_first_so_nothing_is_stranded() -> None:
    sim = Simulation(16, 2)
    run(sim, Segment(list(range(10)), A))
    run(sim, Segment([0, 1, 2, 3, 50, 51], A))
    depths = []
    while (victim := sim.memory.tree.next_victim()) is not None:
        assert victim.is_leaf
        depths.append(sum(1 for _ in victim.chain()))
        sim.evict()
        sim.verify()
    assert sim.memory.pool.free == 16
    assert depths[-1] == 1


def test_a_block_that_was_evicted_is_never_found_again() -> None:
    sim = Simulation(3, 4)
    run(sim, Segment([1, 2, 3, 4, 5, 6, 7, 8], A))
    run(sim, Segment([11, 12, 13, 14, 15, 16, 17, 18], A))  # reuses the blocks
    assert hit(sim, Segment([1, 2, 3, 4, 5, 6, 7, 8], A))[0] <= 4
    indexed = [node.block for node in sim.memory.tree.walk()]
    assert len(indexed) == len(set(indexed))
    sim.verify()


def test_evictable_nodes_that_are_used_again_and_again_do_not_pile_up() -> None:
    sim = Simulation(8, 4)
    for _ in range(300):
        run(sim, Segment([1, 2, 3, 4, 5], A))
    assert len(sim.memory.tree._heap) <= 4 * 8 + 65


def test_the_index_refuses_what_would_corrupt_it() -> None:
    sim = Simulation(8, 2)
    run(sim, Segment([1, 2, 3, 4], A))
    tree: PrefixTree = sim.memory.tree
    top = next(n for n in tree.walk() if n.parent is tree.root)
    with pytest.raises(IntegrityError, match="only a leaf"):
        tree.remove(top)
    with pytest.raises(IntegrityError, match="one chain"):
        tree.insert(tree.root, top.key, 7, True, frozenset())
    with pytest.raises(IntegrityError, match="root"):
        tree.unlink(tree.root)
    top.alive = False
    with pytest.raises(IntegrityError, match="removed"):
        tree.insert(top, (9, 9), 7, True, frozenset())


def test_the_hash_seed_of_the_process_decides_nothing() -> None:
    """Another process, another seed: the same hits, the same blocks, the same victims."""
    program = (
        "from tests.engine.world import RandomDriver\n"
        "driver = RandomDriver(3, 10, 4)\n"
        "driver.run(60)\n"
        "events = driver.sim.memory.events.after(0)\n"
        "print(driver.sim.oracle.reuse, [(e.kind, e.block, e.other, e.slots) for e in events])\n"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    ]
    assert told[0] == told[1]
    assert int(told[0].split()[0]) > 0
