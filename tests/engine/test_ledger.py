"""What sharing saves: exact shares in two views, idle conversations, sums since start, snapshots."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from engine.ledger import FREE, HELD_PRIVATE, HELD_PUBLISHED, RETAINED, RETAINED_PINNED, RETAINED_TAIL
from engine.sequence import Sequence
from engine.types import Scope, Segment
from tests.engine.simulation import SHAPE, Simulation

A, LIBRARY = Scope.account("a"), Scope.collection("k")


def document(tokens: int) -> Segment:
    return Segment(list(range(100, 100 + tokens)), LIBRARY, "document", "d")


def start(sim: Simulation, conversation: str, *segments: Segment, max_tokens: int = 9) -> Sequence:
    sequence = sim.submit(list(segments), conversation=conversation, max_tokens=max_tokens)
    assert sequence is not None
    return sequence


def question(n: int, length: int = 3) -> Segment:
    return Segment([n] * length, A, "question")


def test_block_bytes_are_those_of_the_design() -> None:
    sim = Simulation(4, 16)
    assert SHAPE.block_bytes(16) == 2 * 2 * 1 * 3 * 16 * 2 == sim.ledger.block_bytes


def test_two_readers_of_one_document_pay_half_of_it_each() -> None:
    """8 document tokens in 2 blocks of 4, then a question block of each: 2 of 3 entries are shared."""
    sim = Simulation(32, 4)
    for n in range(2):
        start(sim, f"c{n}", document(8), question(n))
        sim.step()
    sim.step()
    unit = sim.ledger.block_bytes
    snapshot = sim.ledger.snapshot()
    for n in range(2):
        row = snapshot.running[f"c{n}"]
        own = row.blocks - 2
        assert row.fair_share == (Fraction(2, 2) + own) * unit
        assert row.unshared_bytes == row.blocks * unit
        assert row.saved == unit
        assert row.shared_blocks == 2
        assert row.reserved_bytes == 64 // 4 * unit
    totals = snapshot.totals_running
    assert totals.saved_bytes == 2 * unit
    assert totals.physical_bytes == sim.memory.pool.held * unit


def test_a_fork_shares_its_tail_until_one_of_them_writes() -> None:
    sim = Simulation(32, 4)
    a = start(sim, "c", question(1, 6))
    sim.step()
    sim.scheduler.fork(a, a.sibling(1, 6))
    row = sim.ledger.snapshot().running["c"]
    assert (row.sequences, row.blocks, row.saved) == (2, 4, 2 * sim.ledger.block_bytes)
    sim.step(1)
    sim.step(2)
    assert sim.ledger.snapshot().running["c"].saved == sim.ledger.block_bytes


def test_an_idle_conversation_is_open_for_a_while_and_prevents_nothing() -> None:
    sim = Simulation(8, 4)
    start(sim, "c", document(8), question(1), max_tokens=1)
    sim.drain()
    snapshot = sim.ledger.snapshot()
    assert snapshot.running == {}
    assert snapshot.open["c"].blocks == 3
    assert snapshot.totals_open.physical_bytes == 3 * sim.ledger.block_bytes
    assert snapshot.blocks_of("c") == [0, 1, 2]
    while sim.evict():
        sim.verify()
    assert sim.memory.pool.free == 8
    assert "c" not in sim.ledger.snapshot().open


def test_open_ends_after_the_idle_time_and_a_look_prolongs_it() -> None:
    sim = Simulation(16, 4)
    for name in ("c", "d"):
        start(sim, name, question(1), max_tokens=1)
        sim.drain()
    sim.now += 60.0
    sim.ledger.tick(sim.now)
    sim.ledger.touch("c")
    sim.now += 60.0
    sim.verify()
    assert set(sim.ledger.snapshot().open) == {"c"}
    sim.now += 101.0
    sim.verify()
    assert sim.ledger.snapshot().open == {}
    assert sim.memory.pool.soft_entries == 0


def test_a_conversation_closed_while_it_runs_does_not_stay_open() -> None:
    sim = Simulation(16, 4)
    start(sim, "c", question(1, 4), max_tokens=5)
    sim.step()
    sim.close("c")
    assert "c" in sim.ledger.snapshot().running
    sim.drain()
    assert sim.ledger.snapshot().open == {}
    start(sim, "c", question(1, 4), max_tokens=1)  # opened again
    sim.drain()
    assert set(sim.ledger.snapshot().open) == {"c"}


def test_the_next_turn_replaces_the_stored_table() -> None:
    sim = Simulation(16, 4)
    start(sim, "c", question(1, 5), max_tokens=1)
    sim.drain()
    start(sim, "c", question(1, 5), question(2, 4), max_tokens=1)
    sim.drain()
    row = sim.ledger.snapshot().open["c"]
    assert (row.sequences, row.blocks) == (1, 3)
    assert row.saved == 0, "one's own earlier turn is nobody to share with"


def test_a_block_that_was_freed_and_given_to_others_is_no_longer_the_conversations() -> None:
    sim = Simulation(3, 4)
    start(sim, "c", question(1, 8), max_tokens=1)
    sim.drain()
    start(sim, "other", question(2, 10), max_tokens=1)
    sim.drain()
    assert "c" not in sim.ledger.snapshot().open
    assert sim.ledger.snapshot().blocks_of("c") == []


def test_the_engines_own_work_is_a_row_and_never_stays_open() -> None:
    sim = Simulation(8, 4)
    start(sim, "system", question(1), max_tokens=3)
    sim.step()
    assert sim.ledger.snapshot().running["system"].blocks == 1
    sim.drain()
    assert sim.ledger.snapshot().open == {}


def test_open_conversations_are_bounded() -> None:
    sim = Simulation(64, 4)
    sim.ledger.max_open = 3
    for n in range(5):
        start(sim, f"c{n}", question(n), max_tokens=1)
        sim.drain()
    assert set(sim.ledger.snapshot().open) == {"c2", "c3", "c4"}


def test_byte_seconds_and_peak_follow_what_was_saved() -> None:
    sim = Simulation(32, 4)
    ledger, unit = sim.ledger, sim.ledger.block_bytes
    a = start(sim, "c", question(1, 8))
    sim.step()
    before, peak = ledger.since_start().saved_byte_seconds, ledger.since_start().peak_saved_bytes
    assert (before, peak) == (0.0, 0)
    sim.scheduler.fork(a, a.sibling(1, 8))
    ledger.tick(sim.now)
    ledger.tick(sim.now + 2.5)
    assert ledger.since_start().saved_byte_seconds == 2.5 * 2 * unit
    assert ledger.since_start().peak_saved_bytes == 2 * unit
    ledger.tick(sim.now)  # a clock that goes back adds nothing
    assert ledger.since_start().saved_byte_seconds == 2.5 * 2 * unit


def test_a_snapshot_is_immutable_and_tells_the_state_of_every_block() -> None:
    sim = Simulation(12, 4)
    start(sim, "old", document(8), question(1, 2), max_tokens=1)
    sim.drain()
    sim.memory.pin_document("d")
    start(sim, "plain", question(7, 5), max_tokens=1)
    sim.drain()
    start(sim, "now", question(5, 6))
    sim.step()
    snapshot = sim.ledger.snapshot()
    assert list(snapshot.state) == [
        RETAINED_PINNED,
        RETAINED_PINNED,
        RETAINED_TAIL,
        RETAINED,
        RETAINED_TAIL,
        HELD_PUBLISHED,
        HELD_PRIVATE,
        *[FREE] * 5,
    ]
    assert list(snapshot.readers) == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert list(snapshot.soft_readers[:5]) == [1, 1, 1, 1, 1]
    assert snapshot.utilisation == 6 / 8
    assert snapshot.pinned == 2
    sim.drain()
    assert list(snapshot.readers)[5] == 1
    assert sim.ledger.snapshot().number > snapshot.number


def test_readers_saturate_in_the_snapshot_and_not_in_the_shares() -> None:
    from engine.scheduler import Limits

    sim = Simulation(8, 4, limits=Limits(max_batch_tokens=1000, max_running=400))
    a = start(sim, "c", question(1, 4), max_tokens=3)
    sim.step()
    for n in range(299):
        sim.memory.fork(a, child := a.sibling(n + 1, 4))
        sim.scheduler.running.append(child)
    snapshot = sim.ledger.snapshot()
    assert snapshot.readers[a.table[0]] == 255
    assert snapshot.running["c"].fair_share == sim.ledger.block_bytes


def test_an_unchanged_memory_shares_its_last_snapshot_and_a_changed_one_does_not() -> None:
    sim = Simulation(32, 4)
    start(sim, "c", document(8), question(1), max_tokens=2)
    sim.drain()
    ledger = sim.ledger
    first = ledger.snapshot()
    ledger.tick(sim.now + 5.0)
    second = ledger.snapshot()
    assert second.number == first.number + 1
    assert second.running is first.running
    assert second.at == sim.now + 5.0
    changes: list[Callable[[], object]] = [
        lambda: start(sim, "d", question(2)),
        sim.step,
        sim.drain,
        lambda: sim.memory.pin_document("d"),
        lambda: sim.unpin("d"),
        lambda: sim.close("d"),
        lambda: sim.unlink("d"),
        sim.evict,
    ]
    for number, change in enumerate(changes):
        before = ledger.snapshot()
        change()
        now = ledger.snapshot()
        assert now.running is not before.running, number
        fresh = ledger._snapshot()
        assert (now.state, now.open, now.totals_open, now.pinned) == (
            fresh.state,
            fresh.open,
            fresh.totals_open,
            fresh.pinned,
        )
