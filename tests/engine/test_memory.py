"""Sharing, copy-on-write, takeover, dedup, pins and deletion: what is copied, and what is not."""

from __future__ import annotations

import pytest

from engine.errors import IntegrityError, LimitReached
from engine.scheduler import Limits
from engine.sequence import Sequence, State
from engine.types import Scope, Segment
from tests.engine.simulation import Simulation

PUBLIC, A, B = Scope.public(), Scope.account("a"), Scope.account("b")
LIBRARY = Scope.collection("k")


def start(sim: Simulation, segments: list[Segment], **options: object) -> Sequence:
    sequence = sim.submit(segments, **options)
    assert sequence is not None
    return sequence


def document(tokens: int, name: str = "d") -> Segment:
    return Segment(list(range(100, 100 + tokens)), LIBRARY, "document", name)


def kinds(sim: Simulation) -> dict[str, int]:
    return dict(sim.memory.events.counts)


# -- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("tokens", [16, 21])
def test_a_fork_copies_nothing_where_it_is_aligned_and_one_block_otherwise(size: int, tokens: int) -> None:
    """
    A ─▶ [ 0..15 ] [16..20 ·····]      fork: B reads both blocks
    B ─▶ [ 0..15 ]──┘                  A writes token 21: one copy; B writes later: none, it is alone
    """
    sim = Simulation(64, size)
    a = start(sim, [Segment(list(range(tokens)), A)], max_tokens=8)
    sim.step(1)
    b = a.sibling(1, tokens)
    sim.scheduler.fork(a, b)
    assert b.table == a.table[: len(b.table)]
    assert sim.memory.counters.blocks_copied == 0
    first = sim.step(2)  # A writes token 21; B runs its last token again, only for the logits
    assert len(first.copies) == (tokens % size != 0)
    second = sim.step(3)  # now B writes, too: it is the last reader of the old block
    assert second.copies == []
    assert sim.memory.counters.blocks_copied == (tokens % size != 0)
    assert sim.memory.counters.slots_copied == tokens % size
    shared = sum(x == y for x, y in zip(a.table, b.table, strict=False))
    assert shared == tokens // size


def test_eight_forks_of_one_tail_make_seven_copies() -> None:
    sim = Simulation(64, 16)
    a = start(sim, [Segment(list(range(21)), A)], max_tokens=6)
    sim.step()
    for choice in range(1, 8):
        sim.scheduler.fork(a, a.sibling(choice, 21))
    for token in (1, 2):
        sim.step(token)
    assert sim.memory.counters.blocks_copied == 7
    assert sim.memory.pool.held == 1 + 8


def test_forks_at_several_points_of_one_conversation() -> None:
    """Aligned at 8 and 16 nothing is copied; at 11 and 13 one block each; the original copies nothing."""
    sim = Simulation(64, 4)
    a = start(sim, [Segment(list(range(18)), A)], max_tokens=9)
    sim.step(1)
    for at in (8, 11, 13, 16):
        child = a.sibling(at, at)
        child.max_tokens = 4
        sim.scheduler.fork(a, child)
    sim.step(2)
    sim.step(3)
    assert sorted(e.slots for e in sim.memory.events.after(0) if e.kind == "copied") == [1, 3]
    sim.drain()
    assert len(sim.finished) == 5


def test_the_last_reader_of_a_tail_writes_in_place() -> None:
    sim = Simulation(16, 16)
    a = start(sim, [Segment(list(range(5)), A)], max_tokens=8)
    sim.step()
    b = a.sibling(1, 5)
    sim.scheduler.fork(a, b)
    sim.scheduler.remove(a)
    sim.step()
    sim.step()
    assert b.computed > 5
    assert sim.memory.counters.blocks_copied == 0


def test_a_fork_inside_a_published_block_at_the_exact_size_of_the_pool_still_ends() -> None:
    """There is no room for a copy, but nobody else reads the block: it leaves the index and is continued."""
    sim = Simulation(1, 4)
    a = start(sim, [Segment([1, 2, 3, 4], A)], max_tokens=1)
    step = sim.scheduler.schedule()
    sim.execute(step)
    sim.memory.finish_copies()
    sim.scheduler.accept(step.chunks[0])
    sim.oracle.accept(a, 4)
    child = a.sibling(1, 2)
    child.max_tokens, sim._asked = 3, 4
    sim.scheduler.fork(a, child)
    sim.scheduler.remove(a)
    sim.verify()
    assert child.table == [0]
    sim.drain()
    assert sim.finished == [child]
    assert sim.memory.counters.blocks_copied == 0
    assert sim.memory.counters.evictions == 1


def test_nothing_is_shared_without_sharing() -> None:
    sim = Simulation(32, 4, sharing=False)
    for _ in range(2):
        start(sim, [document(12), Segment([1], A)], max_tokens=2)
        sim.drain()
    assert sim.oracle.reuse == 0
    assert kinds(sim) == {}
    assert sim.memory.pool.free == 32


# -- hits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 32])
def test_a_prompt_that_is_cached_to_its_last_token_computes_only_that_one(size: int) -> None:
    """Also where its length is a multiple of the block size, and again and again."""
    sim = Simulation(64, size)
    prompt = [Segment(list(range(32)), A)]
    start(sim, prompt, max_tokens=1)
    sim.drain()
    for _ in range(3):
        before = sim.computed_tokens
        again = start(sim, prompt, max_tokens=1)
        step = sim.step()
        [chunk] = step.chunks
        assert (chunk.start, chunk.count, chunk.write_from, chunk.sample) == (31, 1, 32, True)
        assert sim.computed_tokens == before  # nothing was written
        assert sim.finished[-1] is again


def test_a_partial_hit_costs_one_block_and_one_copy_of_the_matching_slots() -> None:
    sim = Simulation(16, 8)
    start(sim, [Segment(list(range(16)), A)], max_tokens=1)
    sim.drain()
    other = start(sim, [Segment([*range(13), 70, 71], A)], max_tokens=1)
    step = sim.step()
    assert [(c.source, c.slots) for c in step.copies] == [(1, 5)]
    assert step.chunks[0].start == 13
    assert sim.scheduler.counters.prompt_tokens_skipped == 13
    assert other in sim.finished


def test_a_tail_is_taken_over_once_and_the_loser_of_the_race_copies() -> None:
    """Two requests continue one open tail in the same step: one gets it, the other full blocks."""
    sim = Simulation(32, 8)
    start(sim, [Segment(list(range(13)), A)], max_tokens=1)
    sim.drain()
    first = start(sim, [Segment([*range(13), 60], A)], max_tokens=2)
    second = start(sim, [Segment([*range(13), 61], A)], max_tokens=2)
    step = sim.step()
    assert [reused for _, reused in step.admitted] == [13, 8]
    assert sim.memory.counters.takeovers == 1
    assert first.table[0] == second.table[0]
    assert first.table[1] != second.table[1]
    assert step.copies == []


def test_a_tail_from_which_a_copy_is_in_flight_is_not_taken_over() -> None:
    sim = Simulation(32, 8)
    start(sim, [Segment(list(range(13)), A)], max_tokens=1)
    sim.drain()
    start(sim, [Segment([*range(12), 60], A)], max_tokens=2)
    step = sim.scheduler.schedule()
    assert [c.slots for c in step.copies] == [4]
    late = sim.sequence([Segment([*range(13), 61], A)])
    match = sim.memory.match(late)
    assert (match.slots, match.takeover) == (5, False)
    sim.execute(step)
    sim.memory.finish_copies()
    assert sim.memory.match(late).takeover


def test_the_tail_of_a_conversation_is_continued_turn_after_turn_without_a_copy() -> None:
    sim = Simulation(64, 16)
    history = [Segment(list(range(10)), A)]
    for turn in range(6):
        sequence = start(sim, history, max_tokens=5)
        sim.drain()
        answer = sequence.tokens[sequence.prompt_len :]
        history = [*history, Segment(answer, A), Segment([80 + turn, 81], A)]
    assert sim.memory.counters.takeovers == 5
    assert sim.memory.counters.blocks_copied == 0
    done = sim.scheduler.counters
    assert done.prompt_tokens - done.prompt_tokens_skipped == 10 + 5 * 3  # the last token's KV, two new ones


def test_an_open_tail_that_a_longer_one_contains_is_not_kept_beside_it() -> None:
    sim = Simulation(16, 8)
    for length in (3, 5, 4):
        start(sim, [Segment(list(range(length)), A)], max_tokens=1)
        sim.drain()
    assert [len(node.key) for node in sim.memory.tree.walk()] == [5]


# -- dedup -------------------------------------------------------------------------------------------------


def test_equal_blocks_filled_at_one_time_end_on_one() -> None:
    """Nobody waits (stalled at once): three compute the same two blocks; all end as readers of one copy."""
    limits = Limits(max_batch_tokens=64, max_running=8, stalled_rounds=0)
    sim = Simulation(32, 4, limits=limits)
    three = [start(sim, [document(8), Segment([n], A)], max_tokens=3) for n in range(3)]
    sim.step()
    assert sim.memory.counters.merges == 4
    assert len({tuple(s.table[:2]) for s in three}) == 1
    assert sim.memory.pool.readers[three[0].table[0]] == set(three)
    sim.drain()


def test_a_reader_that_is_no_writer_moves_with_the_loser() -> None:
    """A fork that only reads the losing block is moved as well."""
    sim = Simulation(32, 4, limits=Limits(max_batch_tokens=64, max_running=8, stalled_rounds=0))
    a = start(sim, [Segment([1, 2], A)], max_tokens=8)
    b = start(sim, [Segment([1, 2, 3], A)], max_tokens=8)
    for token in (3, 4, 5, 6):
        sim.step(token)
    assert sim.memory.counters.merges >= 1 or a.table[0] != b.table[0]
    sim.drain()


# -- pending -----------------------------------------------------------------------------------------------


def test_eight_readers_who_open_one_document_together_cost_one_prefill() -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=16, max_running=8))
    eight = [
        start(sim, [document(40), Segment([n], A)], max_tokens=2, conversation=f"c{n}") for n in range(8)
    ]
    sim.step()
    assert [s.waiting_for for s in eight[1:]] == ["prefill"] * 7
    assert all(not s.table for s in eight[1:]), "who waits holds no blocks"
    sim.drain()
    assert sim.computed_tokens == 40 + 8 + 8  # the document once, a question and an answer token each


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_when_the_producer_leaves_the_first_waiter_takes_over(how: str) -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=8, max_running=8))
    producer, first, second = [start(sim, [document(32), Segment([n], A)], max_tokens=2) for n in range(3)]
    sim.step()
    assert first.wait_on is producer
    if how == "abort":
        sim.scheduler.remove(producer)
    elif how == "preempt":
        from engine.scheduler import Step

        sim.scheduler._preempt(producer, Step())
    else:
        sim.step(fail={producer})
    sim.step()
    runs = [s for s in (producer, first, second) if s.state is State.RUNNING]
    assert len(runs) == 1
    assert runs[0].computed >= 16, "what was accepted is hit, not computed again"
    sim.drain()
    assert sim.computed_tokens <= 32 + 8 + 3 + 3, "the document was computed once, a lost step apart"


def test_nobody_waits_for_a_stalled_prefill_and_the_next_one_succeeds_to_it() -> None:
    """The producer makes no progress for `stalled_rounds`: one waiter computes, the rest waits for it."""
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=8, max_running=8, stalled_rounds=2))
    producer, first, second = [start(sim, [document(32), Segment([n], A)], max_tokens=2) for n in range(3)]
    sim.step()
    sim.scheduler._continue_running = lambda step: 8  # type: ignore[method-assign]  # nobody gets on
    for _ in range(3):
        sim.scheduler.schedule()
    assert first.state is State.RUNNING
    assert second.waiting_for == "prefill"
    assert second.wait_on is first
    assert all(node.producer is first for node in first.pending)
    assert producer.pending == []


def test_a_block_that_is_being_computed_is_no_hit() -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=64, stalled_rounds=0))
    for n in range(2):
        start(sim, [document(8), Segment([n], A)])
    step = sim.step()
    assert [reused for _, reused in step.admitted] == [0, 0]


# -- deletion ----------------------------------------------------------------------------------------------


def test_deletion_stops_new_hits_at_once_and_the_blocks_go_with_their_last_reader() -> None:
    sim = Simulation(32, 4)
    instructions = Segment([1, 2, 3, 4], PUBLIC)
    reader = start(sim, [instructions, document(8), Segment([5], A)], max_tokens=4)
    sim.step()
    held = sim.memory.pool.held
    assert sim.unlink("d") == 2
    assert sim.memory.pool.held == held
    late = sim.sequence([instructions, document(8), Segment([5], A)])
    assert sim.memory.match(late).tokens(4) == 4  # the instructions are still shared
    sim.drain()
    assert sim.finished == [reader]
    assert sim.memory.match(late).tokens(4) == 4, "what the reader computed on is not indexed either"
    assert sim.memory.pool.free == 31


def test_deletion_reaches_pending_blocks_and_all_that_was_computed_behind_the_document() -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=4))
    start(sim, [document(8), document(8, "e"), Segment([9] * 4, A)], max_tokens=2)
    waiter = start(sim, [document(8), document(8, "e"), Segment([8] * 4, A)], max_tokens=2)
    sim.step()
    assert sim.unlink("d") == 1
    assert not list(sim.memory.tree.walk())
    assert not sim.memory.tree.root.pending
    assert sim.memory.tree.by_document == {}
    sim.drain()
    assert waiter in sim.finished
    assert sim.scheduler.counters.prompt_tokens_skipped == 0


def test_equal_text_of_two_documents_is_one_copy_and_deleting_either_ends_it() -> None:
    sim = Simulation(32, 4)
    start(sim, [document(8, "d"), Segment([1], A)], max_tokens=1)
    sim.drain()
    start(sim, [document(8, "twin"), Segment([2], A)], max_tokens=1)
    sim.drain()
    assert sim.scheduler.counters.prompt_tokens_skipped == 8
    assert sim.memory.unlink_document("twin") >= 2
    assert sim.memory.match(sim.sequence([document(8, "d")])).tokens(4) == 0


def test_a_document_that_comes_back_after_its_deletion_is_shared_again() -> None:
    sim = Simulation(32, 4)
    for _ in range(2):
        start(sim, [document(8), Segment([1], A)], max_tokens=1)
        sim.drain()
        assert sim.memory.match(sim.sequence([document(8)])).tokens(4) == 8
        sim.unlink("d")
        assert sim.memory.match(sim.sequence([document(8)])).tokens(4) == 0


# -- pins --------------------------------------------------------------------------------------------------


def test_a_pin_keeps_the_whole_chain_and_counts_common_ancestors_once() -> None:
    sim = Simulation(16, 4)
    top = Segment([1, 2, 3, 4], PUBLIC)
    for name, at in (("d", 100), ("e", 200)):
        tokens = list(range(at, at + 8))
        start(sim, [top, Segment(tokens, LIBRARY, "document", name), Segment([5], A)], max_tokens=1)
        sim.drain()
    assert sim.memory.pin_document("d") == 3
    assert sim.memory.pin_document("e") == 3
    assert len(sim.memory.tree.pinned) == 5
    while sim.evict():
        sim.verify()
    assert sim.memory.pool.retained == 5
    sim.unpin("d")
    while sim.evict():
        sim.verify()
    assert sim.memory.pool.retained == 3
    sim.unpin("e")
    while sim.evict():
        pass
    assert sim.memory.pool.free == 16


def test_at_most_half_the_pool_can_be_pinned() -> None:
    sim = Simulation(8, 4)
    start(sim, [document(20), Segment([5], A)], max_tokens=1)
    sim.drain()
    with pytest.raises(LimitReached, match="limit of 4 pinned blocks"):
        sim.memory.pin_document("d")
    assert not sim.memory.tree.pinned
    assert not sim.memory.pinned_documents


def test_a_pinned_document_is_pinned_as_it_is_computed_up_to_the_cap() -> None:
    sim = Simulation(8, 4)
    assert sim.memory.pin_document("d") == 0
    start(sim, [document(20), Segment([5], A)], max_tokens=1)
    sim.drain()
    assert len(sim.memory.tree.pinned) == 4


def test_a_pin_is_refused_where_an_accepted_request_would_no_longer_fit() -> None:
    sim = Simulation(8, 4)
    start(sim, [document(8), Segment([5], A)], max_tokens=1)
    sim.drain()
    start(sim, [Segment(list(range(27)), B)], max_tokens=4)
    with pytest.raises(LimitReached):
        sim.memory.pin_document("d")
    sim.drain()


def test_deletion_ends_a_pin() -> None:
    sim = Simulation(16, 4)
    start(sim, [document(8), Segment([5], A)], max_tokens=1)
    sim.drain()
    sim.memory.pin_document("d")
    sim.unlink("d")
    assert not sim.memory.tree.pinned
    assert sim.memory.pool.free == 16


def test_private_text_behind_a_document_is_not_pinned_with_it() -> None:
    sim = Simulation(16, 4)
    start(sim, [document(6), Segment([5] * 6, A)], max_tokens=1)
    sim.drain()
    assert sim.memory.pin_document("d") == 1  # the second block of the document is private already


# -- refusals ----------------------------------------------------------------------------------------------


def test_what_must_not_happen_is_refused() -> None:
    sim = Simulation(8, 4)
    a = start(sim, [Segment(list(range(6)), A)], max_tokens=3)
    sim.step()
    with pytest.raises(IntegrityError, match="still holds"):
        sim.memory.forget(a)
    with pytest.raises(IntegrityError, match="admitted twice"):
        sim.memory.admit(a, sim.memory.match(a))
    with pytest.raises(IntegrityError, match="cannot go from"):
        sim.memory.commit(a, a.computed - 1)
    with pytest.raises(IntegrityError, match="cannot go from"):
        sim.memory.commit(a, 100)
    with pytest.raises(IntegrityError, match="no fork"):
        sim.memory.fork(a, sim.sequence([Segment([9, 9], A)]))


# -- events ------------------------------------------------------------------------------------------------


def test_block_events_tell_the_life_of_blocks_and_keep_a_bounded_past() -> None:
    sim = Simulation(8, 4)
    start(sim, [document(8), Segment([5], A)], max_tokens=1)
    sim.drain()
    reader = start(sim, [document(6), Segment([6, 7], A)], max_tokens=1)
    sim.drain()
    sim.unlink("d")
    seen = kinds(sim)
    assert seen["published"] >= 3
    assert seen["copied"] == 1
    assert seen["unlinked"] >= 2
    events = sim.memory.events.after(0)
    assert [e.number for e in events] == list(range(1, sim.memory.events.number + 1))
    assert sim.memory.events.after(events[-1].number) == []
    assert [e.number for e in sim.memory.events.after(events[-3].number)] == [e.number for e in events[-2:]]
    for _ in range(5000):
        sim.memory.events.add("published", 0, reader.conversation)
    assert len(sim.memory.events.after(0)) == 4096
