"""The tree as a picture: against the tree itself, over random texts and any limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.histogram import Histogram
from engine.ledger import Saved, SavedHistory
from engine.tree_picture import TreePicture, picture
from engine.types import Scope, Segment
from tests.engine.simulation import Simulation

A, LIBRARY = Scope.account("a"), Scope.collection("k")


def document(length: int, name: str, first: int) -> Segment:
    return Segment([first + i for i in range(length)], LIBRARY, "document", name)


def agrees(sim: Simulation, drawn: TreePicture) -> None:
    """What every picture promises, whatever its limit."""
    indexed = {node.block for node in sim.memory.tree.walk()}
    shown = [block for node in drawn.nodes for block in node.blocks]
    assert len(shown) == len(set(shown))
    assert set(shown) <= indexed
    assert drawn.blocks == len(indexed)
    assert len(shown) + drawn.left_out + sum(n.left_out for n in drawn.nodes) == len(indexed)
    for index, node in enumerate(drawn.nodes):
        assert node.parent < index
        behind = [n.below for n in drawn.nodes if n.parent == index]
        assert node.below == len(node.blocks) + sum(behind) + node.left_out
        for block in node.blocks:
            assert sim.memory.pool.reader_count[block] == node.readers
            owner = sim.memory.pool.node[block]
            assert owner is not None
            assert owner.documents == node.documents


def test_instructions_documents_and_branches_are_one_node_each() -> None:
    sim = Simulation(64, 4)
    head = Segment([1] * 8, Scope.public(), "instructions")
    for name, first, question in (("d", 100, 1), ("d", 100, 2), ("e", 300, 3)):
        sim.submit([head, document(12, name, first), Segment([900 + question] * 8, A)], max_tokens=5)
        sim.step()
    drawn = picture(sim.memory)
    agrees(sim, drawn)
    top = [n for n in drawn.nodes if n.parent == -1]
    assert [(len(n.blocks), n.readers, n.documents, n.private) for n in top] == [(2, 3, frozenset(), False)]
    documents = {frozenset(n.documents): n for n in drawn.nodes if n.documents}
    assert {k: (len(n.blocks), n.readers) for k, n in documents.items()} == {
        frozenset({"d"}): (3, 2),
        frozenset({"e"}): (3, 1),
    }
    assert sum(n.private for n in drawn.nodes) == 3


def test_a_divergence_shows_its_copy_until_the_block_is_freed() -> None:
    sim = Simulation(64, 4)
    sim.submit([document(10, "d", 100), Segment([901] * 6, A)], max_tokens=3)
    sim.drain()
    other = sim.submit([document(10, "d", 100), Segment([902] * 6, A)], max_tokens=3)
    sim.step()
    assert other is not None
    [(target, (source, _, slots))] = sim.memory.pool.origin.items()
    assert target == other.table[2]
    assert (sim.memory.pool.node[source] is not None, slots) == (True, 2)
    assert sum(n.copied for n in picture(sim.memory).nodes) == 1
    sim.drain()
    while sim.evict():
        pass
    assert sim.memory.pool.origin == {}


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=12),
    limit=st.integers(1, 12),
)
def test_any_limit_accounts_for_every_block(texts: list[list[int]], limit: int) -> None:
    sim = Simulation(128, 2)
    for text in texts:
        sim.submit([Segment(text, LIBRARY, "document", f"d{text[0]}")], max_tokens=2)
        sim.step()
    whole, few = picture(sim.memory, 10_000), picture(sim.memory, limit)
    agrees(sim, whole)
    agrees(sim, few)
    assert len(few.nodes) == min(limit, len(whole.nodes))
    assert whole.left_out == 0


def test_a_picture_needs_a_node() -> None:
    with pytest.raises(ValueError, match="limit=0"):
        picture(Simulation(4, 4).memory, 0)


def test_a_histogram_counts_each_value_once_at_its_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(value)
    found = histogram.value()
    assert (found.counts, found.count, found.total) == ((2, 1, 1), 4, pytest.approx(3.65))
    with pytest.raises(ValueError, match="ascend"):
        Histogram((1.0, 1.0))


def test_a_history_spans_the_whole_time_in_bounded_room() -> None:
    history = SavedHistory(capacity=16, every_s=1.0)
    for second in range(1_000):
        history.add(Saved(float(second), second, 2 * second))
        assert len(history.samples()) <= 16
    at = [sample.at for sample in history.samples()]
    assert at == sorted(at)
    assert at[0] == 0.0
    assert at[-1] > 850.0
