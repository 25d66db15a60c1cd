"""The load test cannot pass by looking away: what fails in it is told; what was not reached has not held."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.load import phase, recover, stored_answers
from bench.load_figures import ENOUGH, slowest_kind, verdicts
from bench.load_newcomer import answers_in, newcomer
from bench.load_page import Measured, Page, PageError
from bench.load_reader import Plan, Reader
from bench.load_server import STOPPED, Sample, ServerProcess
from bench.resident import Resident
from engine.errors import LimitReached


class Watched(ServerProcess):
    """A server that is looked at without being there."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(Path("nowhere"), Path("nowhere"))
        self.url, self.fails, self.idle = "http://test", fails, True

    def sample(self) -> Sample:
        if self.fails:
            raise ProcessLookupError("the server has gone")
        return Sample(time.monotonic(), Resident(0, 0, 0, 0), 0.0, 1, 0)

    def status(self) -> dict[str, Any]:
        return {"running": 0, "queued": 0} if self.idle else {}


class Faulty(Reader):
    async def run(self, until: float) -> None:
        await asyncio.sleep(0)
        raise KeyError("choices")


class Patient(Reader):
    async def run(self, until: float) -> None:
        await asyncio.Event().wait()


async def test_a_reader_that_breaks_is_told_and_one_that_leaves_is_counted() -> None:
    measured = Measured()
    readers = [kind("http://test", n, Plan(), measured) for n, kind in enumerate((Faulty, Patient))]
    seen = await phase(Watched(), readers, 0.01, 0.01)
    assert measured.broken == ["a reader: KeyError: 'choices'"]
    assert measured.left == 1
    assert seen.samples
    assert seen.seconds > 0


async def test_a_watcher_that_breaks_is_told() -> None:
    measured = Measured()
    await phase(Watched(fails=True), [Patient("http://test", 0, Plan(), measured)], 0.05, 0.05)
    assert measured.broken == ["the watcher: ProcessLookupError: the server has gone"]


def message(id: str, role: str, parent: str | None = None, text: str = "x", status: str = "complete") -> Any:
    return {"id": id, "role": role, "parent": parent, "text": text, "status": status, "model": None}


def test_stored_answers_are_those_that_can_be_read_again() -> None:
    messages = [
        message("q", "user"), message("a", "assistant", "q"), message("b", "assistant", "q", "", "stopped"),
        message("c", "assistant", "q", ""), message("d", "assistant", "q", "x", "failed"),
        message("e", "assistant", "gone"),
    ]  # fmt: skip
    assert answers_in({"messages": messages}) == 2


async def test_every_conversation_with_an_answer_is_checked_not_only_the_one_on_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {"early": 1, "late": 2}

    async def export(page: Page) -> dict[str, Any]:
        if page.conversation not in kept:
            raise PageError("the export answered 404")
        answers = [message(f"a{n}", "assistant", "q") for n in range(kept[page.conversation])]
        return {"messages": [message("q", "user"), *answers]}

    monkeypatch.setattr(Page, "export", export)
    reader = Reader("http://test", 0, Plan(), Measured())
    reader.asked, reader.page.conversation = {"early": 1, "late": 2}, "late"
    whole = await stored_answers([reader])
    assert whole == {"seen": 3, "stored": 3, "conversations": 2, "problems": []}
    kept["early"] = 0
    (problem,) = (await stored_answers([reader]))["problems"]
    assert "early: 0 of 1 answers are stored" in problem
    assert "late" not in problem
    del kept["early"]
    assert "early: the export answered 404" in (await stored_answers([reader]))["problems"][0]


async def test_a_newcomer_who_cannot_load_the_page_is_a_finding_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def load(page: Page) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(Page, "load", load)
    found = await newcomer("http://test")
    assert found["answered"] is False
    assert found["page_load_s"] is None
    assert found["errors"] == ["page load: ConnectError: refused"]
    stuck = Watched()
    stuck.idle = False
    assert await recover(stuck, patience_s=0.0) == {"idle_s": None, "status": {}, "newcomer": {}}
    assert (await recover(Watched()))["newcomer"] == found


@pytest.mark.parametrize("readers", [4, 6, 20, 50, 200])
def test_the_line_is_long_enough_for_all_readers_and_too_short_for_twice_as_many(readers: int) -> None:
    plan = Plan(readers=readers)
    places = plan.at_once + plan.queued
    assert readers <= places < 2 * readers
    # Little's law: who would have a question there, at half an answer a second.
    hurried = plan.hurried()
    wanting = 2 * readers - 0.5 * hurried.think_s / hurried.asking
    assert wanting > places
    assert hurried.about_one == 1.0  # the gate refuses none of these questions


def good() -> dict[str, Any]:
    course = {"growth": 0.01}
    figures = {
        "error_count": 0, "refusals": {}, "refused": 0, "page_p95_s": 0.2, "engine_busy_share": 0.9,
        "looks": 300, "looks_without_answer": 0, "measuring_failed": [],
        "memory": {"enough_samples": True, "all": course, "beside_pool": course},
    }  # fmt: skip
    words = f"Too much at once. ({LimitReached('waiting requests', 1_028)})"
    return {
        "readers": figures, "twice": copy.deepcopy(figures) | {"refusals": {words: 7}, "refused": 7},
        "recovery": {"idle_s": 3.0, "newcomer": {"answered": True}},
        "stored": {"seen": 9, "stored": 9, "problems": []},
        "check_after": {"problems": []}, "check_at_end": {"problems": []},
        "ended_well": True, "log_problems": [],
    }  # fmt: skip


def test_all_holds_where_all_is_well() -> None:
    assert set(verdicts(good()).values()) == {True}


@pytest.mark.parametrize(
    ("verdict", "where", "key", "value"),
    [
        ("the measuring itself", "twice", "measuring_failed", ["the watcher: OSError: gone"]),
        ("no errors and no refusals", "readers", "error_count", 1),
        ("p95 under 1 s of each kind of page action", "readers", "page_p95_s", None),
        ("the engine was busy meanwhile", "readers", "engine_busy_share", 0.1),
        ("nothing hangs: the server always said how it is", "twice", "looks_without_answer", 1),
        ("resident memory flat", "readers", "memory", {"enough_samples": False}),
        ("accounts add up", "check_at_end", "problems", ["a block is held twice"]),
        ("twice the load: no errors", "twice", "error_count", 1),
        ("twice the load: refusals were reached", "twice", "refused", 0),
        ("twice the load: each refusal says which limit, and when to come back", "twice", "refusals", {}),
        (
            "twice the load: each refusal says which limit, and when to come back",
            "twice", "refusals", {"Something is full; ask again.": 1},
        ),
        ("every answer that was seen is stored", "stored", "stored", 8),
        ("every answer that was seen is stored", "stored", "problems", ["verify: PageError: 0 of 1"]),
        ("recovers", "recovery", "newcomer", {}),
        ("recovers", "recovery", "idle_s", None),
    ],
)  # fmt: skip
def test_each_verdict_can_fail(verdict: str, where: str, key: str, value: object) -> None:
    result = good()
    result[where][key] = value
    assert [name for name, held in verdicts(result).items() if not held] == [verdict]


def test_a_slow_kind_of_action_is_not_hidden_by_a_frequent_one() -> None:
    times = {"memory feed": [0.01] * 10_000, "page load": [2.0] * ENOUGH, "export": [0.5]}
    assert slowest_kind(times) == ("page load", 2.0)
    times = {"memory feed": [0.01] * 10_000, "page load": [0.1], "export": [3.0], "answer": [60.0]}
    assert slowest_kind(times) == ("rare ones", 3.0)
    assert slowest_kind({"answer": [60.0]}) is None


def test_a_server_that_was_killed_or_logged_an_error_does_not_hold() -> None:
    result = good() | {"ended_well": False, "log_problems": ["ERROR coread: lost"]}
    assert [n for n, held in verdicts(result).items() if not held] == [
        "the server ended in order", "no errors in the log",
    ]  # fmt: skip


def test_only_a_server_that_says_so_has_shut_down_in_order(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, tmp_path / "log")
    log = tmp_path / "log"
    log.write_text(f"Coread listens on a\n{STOPPED}\nCoread listens on a\n")
    assert not server.ended_well(-15)  # the first one did, this one died
    log.write_text(f"Coread listens on a\n{STOPPED}.\n")
    assert server.ended_well(-15)
    assert server.ended_well(0)
    assert not server.ended_well(-9)
    assert not server.ended_well(1)
