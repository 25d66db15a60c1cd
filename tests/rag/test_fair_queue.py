"""One person's files hold up nobody else's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag.fair_queue import Job, choose
from rag.library import Library
from tests.rag.conftest import HashEmbedder
from tests.rag.test_jobs import ALL, FERRY, Gate


class FakeQueue:
    """The table of jobs, and who was read when."""

    def __init__(self, owners: Sequence[str], threads: int = 2) -> None:
        self.waiting = [Job(n, f"d{n}", 1, "h", "n", 1, float(n), owner) for n, owner in enumerate(owners)]
        self.threads = threads
        self.running: list[Job] = []
        self.turns: dict[str, int] = {}
        self.begun: list[Job] = []

    def oldest(self) -> list[Job]:
        return list({job.owner: job for job in reversed(self.waiting)}.values())

    def claim(self) -> Job | None:
        running = Counter(job.owner for job in self.running)
        job = choose(self.oldest(), running, self.turns)
        if job is None or len(self.running) == self.threads:
            return None
        self.waiting.remove(job)
        self.running.append(job)
        self.begun.append(job)
        self.turns[job.owner] = len(self.begun)
        return job


OWNERS = st.lists(st.sampled_from("ABCD"), min_size=1, max_size=24)


@given(OWNERS, st.data())
def test_fewest_in_work_first_and_each_owners_own_order(owners: list[str], data: st.DataObject) -> None:
    queue = FakeQueue(owners)
    while queue.waiting or queue.running:
        before = Counter(job.owner for job in queue.running)
        could = {job.owner for job in queue.waiting}
        job = queue.claim()
        if job is not None:
            assert before[job.owner] == min(before[owner] for owner in could)
        else:
            queue.running.pop(data.draw(st.integers(0, len(queue.running) - 1)))
    assert len(queue.begun) == len(owners)
    for owner in set(owners):
        numbers = [job.document for job in queue.begun if job.owner == owner]
        assert numbers == sorted(numbers)


@given(OWNERS, st.data())
def test_nobody_waits_longer_than_a_turn_of_everybody_else(owners: list[str], data: st.DataObject) -> None:
    queue = FakeQueue(owners)
    waited: Counter[str] = Counter()
    while queue.waiting or queue.running:
        job = queue.claim()
        if job is None:
            queue.running.pop(data.draw(st.integers(0, len(queue.running) - 1)))
            continue
        waited[job.owner] = 0
        idle = {j.owner for j in queue.waiting} - {j.owner for j in queue.running}
        waited.update(idle)
        # Everybody else once, and whoever begins anew while the two threads change places once more.
        assert max(waited.values(), default=0) <= len(set(owners)) + queue.threads


def test_two_people_with_many_files_do_not_hold_up_a_third() -> None:
    queue = FakeQueue("AB" * 50 + "C")
    queue.claim()
    queue.claim()
    for _ in range(2):
        queue.running.pop(0)
        queue.claim()
    assert "C" in [job.owner for job in queue.begun]


LONG = "\n\n".join(
    f"# Part {n}\n\n" + f"The ferry number {n} carries cars and goats. " * 12 for n in range(30)
)


@pytest.fixture
def gate(embedder: HashEmbedder) -> Gate:
    return Gate(embedder)


def test_whoever_comes_while_one_owner_has_both_threads_is_read_at_once(library: Library, gate: Gate) -> None:
    long = [library.add_document("shared", f"{n}.md", (LONG + f" {n}").encode(), "ann") for n in range(2)]
    for _ in long:
        gate.arrived()
    more = library.add_document("shared", "more.md", (LONG + " more").encode(), "ann")
    short = library.add_document("shared", "ferry.md", FERRY.encode(), "bob")
    assert library.info(short, ALL).status == "queued"
    gate.pass_one()  # one of the two comes to the end of a batch
    gate.arrived()
    assert library.info(short, ALL).status == "embedding"
    assert {library.info(id, ALL).status for id in long} == {"embedding"}, "the one that pauses as well"
    assert library.info(more, ALL).status == "queued"
    gate.open()
    assert [library.wait(id, 60).status for id in (short, *long, more)] == ["ready"] * 4
    assert library.check().ok


def test_a_document_that_pauses_can_be_cancelled(library: Library, gate: Gate) -> None:
    long = [library.add_document("shared", f"{n}.md", (LONG + f" {n}").encode(), "ann") for n in range(2)]
    for _ in long:
        gate.arrived()
    short = library.add_document("shared", "ferry.md", FERRY.encode(), "bob")
    gate.pass_one()
    gate.arrived()
    library.cancel_document(long[0])
    library.cancel_document(long[1])
    gate.open()
    assert library.wait(short, 60).status == "ready"
    assert [library.wait(id, 60).reason for id in long] == ["cancelled"] * 2
    assert library.check().ok
