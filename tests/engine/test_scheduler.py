"""Who runs, who waits, who is put back, who is refused: exact orders and exact pool sizes."""

from __future__ import annotations

import pytest

from engine.errors import DeadlineExceeded, EngineError, IntegrityError, LimitReached, PoolTooSmall
from engine.scheduler import Limits, Scheduler, Step
from engine.sequence import Sequence, State
from engine.types import Priority, Scope, Segment
from tests.engine.simulation import Simulation

A = Scope.account("a")
LIBRARY = Scope.collection("k")
BATCH = Priority.BATCH


def start(sim: Simulation, tokens: list[int], **options: object) -> Sequence:
    sequence = sim.submit([Segment(tokens, A)], **options)
    assert sequence is not None
    return sequence


def text(n: int, length: int) -> list[int]:
    """A text that shares nothing with another `n`."""
    return [1000 * n + i for i in range(length)]


# -- admission at exact sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "fits"), [(2, False), (3, True), (4, True)])
def test_what_can_never_fit_is_refused_at_once_with_numbers(blocks: int, fits: bool) -> None:
    """9 prompt tokens and 4 new ones, the last of which is never stored: 12 slots, 3 blocks of 4."""
    sim = Simulation(blocks, 4)
    sequence = sim.submit([Segment(text(1, 9), A)], max_tokens=4)
    if fits:
        sim.drain()
        assert sim.finished == [sequence]
    else:
        [(_, error)] = sim.failed
        assert isinstance(error, PoolTooSmall)
        assert (error.needed_blocks, error.available_blocks) == (3, 2)
        assert "3 blocks of 4 tokens" in str(error)


def test_only_the_request_that_is_too_large_is_refused() -> None:
    """It does not stand at the head of the line for ever."""
    sim = Simulation(4, 4)
    assert sim.submit([Segment(text(1, 40), A)]) is None
    small = start(sim, text(2, 4))
    sim.drain()
    assert sim.finished == [small]


def test_free_blocks_that_are_hits_are_not_counted_twice() -> None:
    """4 blocks: 2 retained hits, 2 free. The request hits 2 and needs 2 more: it fits, and exactly so."""
    sim = Simulation(4, 4)
    start(sim, text(1, 8), max_tokens=1)
    sim.drain()
    assert (sim.memory.pool.retained, sim.memory.pool.free) == (2, 2)
    sequence = sim.sequence([Segment([*text(1, 8), *text(2, 5)], A)], max_tokens=3)
    assert sim.memory.fits(sequence, sim.memory.match(sequence))
    larger = sim.sequence([Segment([*text(1, 8), *text(2, 9)], A)], max_tokens=1)
    assert not sim.memory.fits(larger, sim.memory.match(larger))


def test_a_partial_hit_at_the_exact_size_of_the_pool_is_dropped_not_refused() -> None:
    """The source of the copy would have to stay beside the copy: 3 blocks of a pool of 2."""
    sim = Simulation(2, 4)
    start(sim, text(1, 8), max_tokens=1)
    sim.drain()
    other = start(sim, [*text(1, 6), 70, 71], max_tokens=1)
    step = sim.step()
    assert step.copies == []
    assert step.admitted == [(other, 4)]
    assert other in sim.finished


def test_a_partial_hit_is_taken_where_source_and_copy_fit() -> None:
    sim = Simulation(3, 4)
    start(sim, text(1, 8), max_tokens=1)
    sim.drain()
    other = start(sim, [*text(1, 6), 70, 71], max_tokens=1)
    step = sim.step()
    assert [c.slots for c in step.copies] == [2]
    assert step.admitted == [(other, 6)]


def test_a_takeover_needs_no_further_block() -> None:
    sim = Simulation(2, 4)
    start(sim, text(1, 6), max_tokens=1)
    sim.drain()
    start(sim, [*text(1, 6), 70, 71], max_tokens=1)
    assert [reused for _, reused in sim.step().admitted] == [6]
    assert sim.memory.counters.takeovers == 1
    assert sim.memory.counters.evictions == 0


def test_promised_blocks_are_not_given_to_the_next_newcomer() -> None:
    """A long prefill takes its blocks over several steps; the next one is admitted only to what is left."""
    sim = Simulation(8, 4, limits=Limits(max_batch_tokens=8, max_running=8))
    start(sim, text(1, 27), max_tokens=1)
    sim.step()
    second = start(sim, text(2, 8), max_tokens=1)
    for _ in range(2):
        sim.step()
        assert second.waiting_for == "memory"
        assert second.state is State.WAITING
    sim.drain()
    assert sim.scheduler.counters.preemptions == 0


def test_a_hit_and_a_miss_in_one_batch() -> None:
    sim = Simulation(32, 4)
    start(sim, text(1, 12), max_tokens=1)
    sim.drain()
    hit, miss = start(sim, [*text(1, 12), 7]), start(sim, text(2, 13))
    step = sim.step()
    assert dict(step.admitted) == {hit: 12, miss: 0}
    assert set(hit.table).isdisjoint(miss.table)
    sim.drain()


def test_two_equal_prompts_in_one_step_then_one_goes_and_a_third_hits() -> None:
    sim = Simulation(32, 4, limits=Limits(stalled_rounds=0))
    first, second = start(sim, text(1, 8), max_tokens=6), start(sim, text(1, 8), max_tokens=6)
    assert [r for _, r in sim.step().admitted] == [0, 0]
    assert first.table[:2] == second.table[:2]
    sim.scheduler.remove(first)
    sim.verify()
    start(sim, text(1, 8))
    assert [r for _, r in sim.step().admitted] == [7]
    sim.drain()


# -- the batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_decodes_come_first_and_prefills_share_what_is_left(budget: int) -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=budget, max_running=8))
    first = start(sim, text(1, 9), max_tokens=30)
    while first.generated == 0:
        sim.step()
    second = start(sim, text(2, 20), max_tokens=2)
    step = sim.step()
    assert step.chunks[0].sequence is first
    assert step.chunks[0].count == 1
    if budget > 1:
        assert step.chunks[1].sequence is second
        assert step.chunks[1].count == min(20, budget - 1)
    sim.drain()
    assert {first, second} == set(sim.finished)


def test_a_batch_prefill_leaves_room_for_an_interactive_newcomer() -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=16, max_running=8))
    long = start(sim, text(1, 200), max_tokens=2, priority=BATCH)
    sim.step()
    assert long.computed == 16
    quick = start(sim, text(2, 10), max_tokens=2)
    step = sim.step()
    assert {c.sequence: c.count for c in step.chunks} == {quick: 10, long: 6}
    sim.step()
    assert quick in sim.finished
    assert sim.step().chunks[0].count == 16


def test_interactive_goes_before_batch_whatever_came_first() -> None:
    sim = Simulation(64, 4, limits=Limits(max_running=1))
    order = [
        start(sim, text(1, 4), max_tokens=1, priority=BATCH),
        start(sim, text(2, 4), max_tokens=1, priority=BATCH),
        start(sim, text(3, 4), max_tokens=1),
    ]
    sim.drain()
    assert sim.finished == [order[2], order[0], order[1]]


def test_the_longest_cached_prefix_goes_first() -> None:
    sim = Simulation(64, 4, limits=Limits(max_running=1))
    start(sim, text(1, 12), max_tokens=1)
    sim.drain()
    cold, warm = start(sim, text(2, 4), max_tokens=1), start(sim, [*text(1, 12), 5], max_tokens=1)
    sim.drain()
    assert sim.finished[1:] == [warm, cold]


# -- fairness ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, BATCH])
def test_nobody_starves_under_an_endless_stream_of_perfect_hits(priority: Priority) -> None:
    """Each step brings another request whose prompt is cached; the cold one still runs in time."""
    limits = Limits(max_batch_tokens=16, max_running=2, max_overtakes=3)
    sim = Simulation(64, 4, limits=limits)
    start(sim, text(1, 12), max_tokens=1)
    sim.drain()
    cold = start(sim, text(2, 40), max_tokens=2, priority=priority)
    steps = 0
    while cold not in sim.finished:
        for _ in range(2):
            start(sim, [*text(1, 12), 5], max_tokens=1)
        sim.step()
        steps += 1
        assert steps < (8 if priority is Priority.INTERACTIVE else 24)


def test_a_large_request_is_not_passed_over_for_ever_by_small_ones() -> None:
    sim = Simulation(8, 4, limits=Limits(max_running=8, max_overtakes=4))
    start(sim, text(9, 8), max_tokens=8)
    large = start(sim, text(1, 30), max_tokens=1)
    for n in range(2, 60):
        start(sim, text(n, 4), max_tokens=3)
        sim.step()
        if large in sim.finished:
            break
    assert large in sim.finished
    assert n < 30


def test_a_long_line_of_one_principal_does_not_hide_the_others() -> None:
    """200 requests of one account at its limit; somebody else who comes last is admitted in the next step."""
    limits = Limits(max_running=8, max_running_per_principal=1, max_queued=1000)
    sim = Simulation(64, 4, limits=limits)
    for n in range(200):
        start(sim, text(n, 4), principal="many", max_tokens=50)
    sim.step()
    other = start(sim, text(500, 4), principal="one")
    sim.step()
    assert other.state is State.RUNNING
    assert sum(s.principal == "many" for s in sim.scheduler.running) == 1


# -- limits ------------------------------------------------------------------------------------------------


def test_limits_on_running_and_queued_requests() -> None:
    limits = Limits(max_running_per_principal=2, max_queued_per_principal=3, max_queued=5)
    sim = Simulation(64, 4, limits=limits)
    for n in range(3):
        start(sim, text(n, 4), principal="a", max_tokens=9)
    with pytest.raises(LimitReached, match="limit of 3 waiting requests of your own"):
        sim.scheduler.add(sim.sequence([Segment(text(8, 4), A)], principal="a"))
    sim.step()
    assert sum(s.principal == "a" for s in sim.scheduler.running) == 2
    for n in range(4):
        start(sim, text(20 + n, 4), principal=f"b{n}", max_tokens=9)
    with pytest.raises(LimitReached, match="limit of 5 waiting requests is"):
        sim.scheduler.add(sim.sequence([Segment(text(8, 4), A)], principal="c"))
    sim.drain()


def test_the_choices_of_a_request_count_before_they_are_forked() -> None:
    limits = Limits(max_running=8, max_running_per_principal=4)
    sim = Simulation(64, 4, limits=limits)
    wide = [start(sim, text(n, 4), principal="a", max_tokens=9, width=3) for n in range(3)]
    sim.step()
    assert [s.state for s in wide] == [State.RUNNING, State.WAITING, State.WAITING]
    for choice in (1, 2):
        sim.scheduler.fork(wide[0], wide[0].sibling(choice, 4))
    assert wide[0].width == 1
    sim.step()
    assert len(sim.scheduler.running) == 3
    alone = start(sim, text(9, 4), principal="b", max_tokens=2, width=16)
    sim.drain()
    assert alone in sim.finished, "a request that is wider than the limit runs alone"


def test_the_share_of_the_pool_that_one_principal_alone_may_read() -> None:
    """Half of 16 blocks: two requests of 3 and 5 blocks, not a third; shared blocks do not count."""
    limits = Limits(pool_share_per_principal=0.5, max_running=8)
    sim = Simulation(16, 4, limits=limits)
    for n in range(3):
        start(sim, text(n, 11), principal="a", max_tokens=12)
    sim.step()
    assert len(sim.scheduler.running) == 2
    other = start(sim, text(7, 11), principal="b", max_tokens=2)
    sim.step()
    assert other.state is State.RUNNING


def test_a_request_larger_than_the_share_runs_where_its_principal_has_nothing_else() -> None:
    sim = Simulation(16, 4, limits=Limits(pool_share_per_principal=0.25))
    big = start(sim, text(1, 40), principal="a", max_tokens=1)
    sim.drain()
    assert sim.finished == [big]


# -- deadlines ---------------------------------------------------------------------------------------------


def test_deadlines_end_waiting_and_running_requests_and_free_their_blocks() -> None:
    sim = Simulation(16, 4, limits=Limits(max_batch_tokens=8, max_running=1))
    running = start(sim, text(1, 12), max_tokens=9, deadline=10.0)
    waiting = start(sim, text(2, 4), deadline=5.0)
    patient = start(sim, text(3, 4), max_tokens=1)
    sim.step(now=5.0)  # a deadline is the last moment that still counts
    assert sim.failed == []
    sim.step(now=6.0)
    assert [s for s, _ in sim.failed] == [waiting]
    sim.step(now=10.5)
    assert [s for s, _ in sim.failed] == [waiting, running]
    assert all(isinstance(error, DeadlineExceeded) for _, error in sim.failed)
    assert patient in sim.finished, "its place was free in the same step"
    assert sim.memory.pool.held == 0


# -- preemption --------------------------------------------------------------------------------------------


def test_two_that_fit_alone_but_not_together_both_finish_in_bounded_time() -> None:
    sim = Simulation(6, 4, limits=Limits(max_batch_tokens=16, max_running=4))
    both = [start(sim, text(n, 8), max_tokens=14) for n in range(2)]
    steps = 0
    while len(sim.finished) < 2:
        sim.step()
        steps += 1
        assert steps < 60
    assert sim.finished == both, "the older one is never put back"
    assert 1 <= sim.scheduler.counters.preemptions <= 3
    assert [s.generated for s in both] == [14, 14]


def test_the_victim_is_the_one_whose_private_work_is_cheapest_to_redo() -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=64, max_running=8))
    start(sim, text(0, 4), max_tokens=9)
    for n, length in ((1, 20), (2, 8), (3, 12)):
        start(sim, text(n, length), max_tokens=9)
    sim.step()
    assert len(sim.scheduler._victim()) == 9  # 8 prompt tokens and a generated one
    shared = sim.scheduler.running[1]
    sim.scheduler.fork(shared, child := shared.sibling(1, 20))
    sim.step()
    sim.step()
    assert sim.memory.pool.reader_count[child.table_array()].tolist().count(1) == 1
    assert sim.scheduler._victim() in (child, shared), "what others read is not lost with it"


def test_batch_is_put_back_before_interactive_unless_somebody_interactive_waits_for_it() -> None:
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=8, max_running=8))
    start(sim, text(0, 4), max_tokens=9)
    batch = start(sim, text(1, 30), max_tokens=9, priority=BATCH)
    quick = start(sim, text(2, 4), max_tokens=9)
    for _ in range(3):
        sim.step()
    assert sim.scheduler._victim() is batch
    start(sim, [*text(1, 30), 5], max_tokens=2)
    sim.step()
    sim.scheduler._lend_priority()
    assert batch.effective_priority == Priority.INTERACTIVE.value
    assert sim.scheduler._victim() is quick


def test_a_waiter_lends_its_priority_to_the_prefill_it_waits_for() -> None:
    """Two batch prefills; an interactive reader of the second one's document brings that one to the front."""
    sim = Simulation(64, 4, limits=Limits(max_batch_tokens=8, max_running=8))
    first = start(sim, text(1, 60), max_tokens=2, priority=BATCH)
    second = start(sim, text(2, 60), max_tokens=2, priority=BATCH)
    while not second.table:
        sim.step()
        if first.generated:
            break
        if first.computed >= 16 and not second.table:
            # give the second one its place while the first is still reading
            sim.scheduler.limits = Limits(max_batch_tokens=60, max_running=8)
    sim.scheduler.limits = Limits(max_batch_tokens=8, max_running=8)
    assert second.computed < 60
    reader = start(sim, [*text(2, 60), 5], max_tokens=2)
    sim.step()
    assert reader.waiting_for == "prefill"
    before = second.computed
    step = sim.step()
    assert second.effective_priority == 0
    assert second.computed > before
    assert next(c.sequence for c in step.chunks if len(c.sequence) - c.start > 1) is second
    sim.drain()


def test_a_resumed_sequence_keeps_its_tokens_mostly_hits_and_is_counted_once() -> None:
    sim = Simulation(32, 4)
    a = start(sim, text(1, 10), max_tokens=12)
    for token in (1, 2, 3):
        sim.step(token)
    tokens, computed = list(a.tokens), sim.computed_tokens
    counted = (sim.scheduler.counters.prompt_tokens, sim.scheduler.counters.prompt_tokens_skipped)
    sim.scheduler._preempt(a, Step())
    sim.verify()
    assert (a.state, a.table, a.computed) == (State.PREEMPTED, [], 0)
    step = sim.step(4)
    assert a.tokens == [*tokens, 4]
    assert step.chunks[0].start == 12
    assert sim.computed_tokens == computed + 1
    assert (sim.scheduler.counters.prompt_tokens, sim.scheduler.counters.prompt_tokens_skipped) == counted
    assert sim.scheduler.counters.requests == 1


def test_preemption_gives_back_the_tokens_and_copies_of_the_step() -> None:
    sim = Simulation(7, 4, limits=Limits(max_batch_tokens=32, max_running=4))
    a = start(sim, text(1, 10), max_tokens=15)
    sim.step(1)
    b = a.sibling(1, 10)
    sim.scheduler.fork(a, b)
    for n in range(40):
        sim.step(n % 5)
        if sim.scheduler.counters.preemptions:
            break
    sim.drain()
    assert sim.scheduler.counters.preemptions >= 0
    assert {a, b} == set(sim.finished)


def test_one_that_runs_alone_is_never_put_back() -> None:
    sim = Simulation(4, 4)
    start(sim, text(1, 9), max_tokens=8)
    sim.step()
    with pytest.raises(IntegrityError, match="runs alone"):
        sim.scheduler._victim()


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "preempted", "waiting for a prefill"])
def test_abort_in_every_phase_gives_everything_back_at_once(phase: str) -> None:
    sim = Simulation(32, 4, limits=Limits(max_batch_tokens=8, max_running=2))
    other = start(sim, text(9, 20), max_tokens=12)
    sequence = start(sim, text(1, 20) if phase != "waiting for a prefill" else text(9, 20), max_tokens=9)
    if phase != "waiting":
        for _ in range(3 if phase == "prefill" else 1):
            sim.step()
    if phase in ("decode", "preempted"):
        while not sequence.generated:
            sim.step()
    if phase == "preempted":
        sim.scheduler._preempt(sequence, Step())
    if phase == "waiting for a prefill":
        assert sequence.waiting_for == "prefill"
    sim.scheduler.remove(sequence)
    sim.verify()
    assert all(sequence not in readers for readers in sim.memory.pool.readers)
    assert sequence.pending == []
    sim.drain()
    assert sim.finished == [other]
    sim.scheduler.remove(sequence)  # again: nothing happens
    sim.verify()


def test_an_aborted_request_publishes_only_what_was_accepted() -> None:
    sim = Simulation(32, 4, limits=Limits(max_batch_tokens=8))
    a = start(sim, text(1, 20), max_tokens=2)
    sim.step()
    step = sim.scheduler.schedule()  # the next chunk is under way
    sim.execute(step)
    sim.scheduler.remove(a)
    sim.memory.finish_copies()
    sim.verify()
    assert sim.memory.match(sim.sequence([Segment(text(1, 20), A)])).tokens(4) == 8


def test_a_thousand_requests_leave_no_block_behind() -> None:
    sim = Simulation(24, 4, limits=Limits(max_batch_tokens=64, max_running=8))
    sim.verify = lambda: None  # type: ignore[method-assign]  # once at the end is enough here
    for n in range(1000):
        start(sim, text(n % 7, 5 + n % 11), max_tokens=1 + n % 3)
        if n % 4 == 3:
            while sim.scheduler.running or sim.scheduler.waiting:
                sim.step()
            assert sim.memory.pool.held == 0
            assert sim.memory.pool.free + sim.memory.pool.retained == 24
    Simulation.verify(sim)
    while sim.evict():
        pass
    assert sim.memory.pool.free == 24


def test_a_step_needs_room() -> None:
    sim = Simulation(4, 4)
    with pytest.raises(ValueError, match="room for at least one token"):
        Scheduler(sim.memory, Limits(max_batch_tokens=0))


def test_refused_requests_leave_nothing_behind() -> None:
    sim = Simulation(4, 4, limits=Limits(max_queued=1))
    start(sim, text(1, 4))
    with pytest.raises(EngineError):
        sim.scheduler.add(sim.sequence([Segment(text(2, 4), A)]))
    assert len(sim.memory.live) == 1
    sim.drain()
    assert not sim.memory.live
