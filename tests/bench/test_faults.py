"""A fault that was not put to the server, or that people did not survive, is told; what was taken is given
back."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench import faults_crowd, faults_world
from bench.faults import FAULTS, NOBODY_HANGS, REACHED, Fault, during, not_held, one, told, unnoticed
from bench.faults_crowd import Crowd, Person
from bench.faults_world import Unreached, disk_full, half_open, locked, many_files, not_reading
from bench.load_page import Measured, Page, PageRefused
from bench.load_server import ServerFailed, ServerProcess


class Alive:
    """A process that is there, or is not."""

    def __init__(self, pid: int = 0, status: int | None = None) -> None:
        self.pid, self.status = pid, status

    def poll(self) -> int | None:
        return self.status


class Fake(ServerProcess):
    """A server of which everything is what the test says."""

    def __init__(self, folder: Path, url: str = "http://127.0.0.1:9", **status: Any) -> None:
        super().__init__(folder / "disk" / "data", folder / "log")
        self.data_dir.mkdir(parents=True)
        self.url, self.told, self.alive = url, status, Alive()
        self.starts = 0

    @property
    def process(self) -> Any:
        return self.alive

    def status(self) -> dict[str, Any]:
        return self.told

    def model(self) -> str:
        return "m"

    def check(self) -> dict[str, Any]:
        return {"problems": []}

    def start(self, port: int = 0) -> None:
        self.starts += 1
        raise ServerFailed("The server cannot answer: no memory")


async def test_a_fault_that_could_not_be_put_has_not_held(tmp_path: Path) -> None:
    async def nothing() -> dict[str, Any]:
        raise Unreached("only 7 of 1,000 opened")

    result = await one(Fake(tmp_path), nothing)
    assert result == {"failed": "Unreached: only 7 of 1,000 opened", "held": {REACHED: False}}
    assert not_held({"faults": {"half": result}, "ended_well": True}) == [f"half: {REACHED}"]


async def test_a_server_that_has_gone_is_told_and_the_other_faults_still_come(tmp_path: Path) -> None:
    server = Fake(tmp_path)
    server.alive = Alive(status=-9)

    async def well() -> dict[str, Any]:
        return {"held": {"all": True}}

    result = await one(server, well)
    assert server.starts == 1
    assert result["not_started_again"] == "The server cannot answer: no memory"
    assert not_held({"faults": {"x": result}, "ended_well": False}) == [
        "x: the server goes on", "the server ended in order",
    ]  # fmt: skip


def test_of_no_fault_nothing_holds() -> None:
    assert not_held({"faults": {}, "ended_well": True}) == ["no fault was put"]


@pytest.mark.parametrize(
    ("seen", "noticed", "was_told"),
    [
        ({"answers": 3, "error_count": 0, "told": {}}, True, False),
        ({"answers": 0, "error_count": 0, "told": {}}, False, False),
        ({"answers": 3, "error_count": 1, "told": {}}, False, False),
        ({"answers": 3, "error_count": 0, "told": {"The disk is full; try again.": 2}}, False, True),
        ({"answers": 3, "error_count": 0, "told": {"Something went wrong inside Coread.": 2}}, False, False),
        (
            {"answers": 3, "error_count": 0, "told": {"The disk is full.": 2, "Too much at once.": 1}},
            False,
            False,
        ),
    ],
)
def test_what_people_see_is_judged(seen: dict[str, Any], noticed: bool, was_told: bool) -> None:
    assert list(unnoticed(seen).values()) == [noticed]
    assert next(iter(told("The disk is full")(seen).values())) is was_told


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pages without a server: everybody is answered at once; `answers` is what is stored of each."""
    world: dict[str, Any] = {"answers": 1, "number": 0, "ask": None}

    async def load(page: Page) -> None:
        page.documents = ["d"]

    async def memory(page: Page) -> dict[str, Any]:
        return {}

    async def ask(page: Page, question: str, document: str, stop_after_s: float | None = None) -> None:
        await asyncio.sleep(0.001)
        if world["ask"] is not None:
            await world["ask"]()
        world["number"] += 1
        page.conversation = f"c{world['number']}"
        page.conversations.append(page.conversation)
        page.measured.answers += 1

    async def export(page: Page) -> dict[str, Any]:
        said = {"text": "x", "status": "complete", "model": "m"}
        question = {"id": "q", "parent": None, "role": "user", **said}
        answer = {"id": "a", "parent": "q", "role": "assistant", **said}
        return {"messages": [question, *[answer] * world["answers"]]}

    for name, function in (("load", load), ("memory", memory), ("ask", ask), ("export", export)):
        monkeypatch.setattr(Page, name, function)
    return world


async def _nothing(_server: ServerProcess) -> tuple[dict[str, Any], dict[str, bool]]:
    await asyncio.sleep(0.01)
    return {"figure": 1}, {"its own": True}


async def test_a_fault_with_people_beside_it(tmp_path: Path, readers: dict[str, Any]) -> None:
    result = await during(Fake(tmp_path), Fault("nothing", _nothing, unnoticed))
    assert set(result["held"].values()) == {True}
    assert {"its own", NOBODY_HANGS, "people noticed nothing"} <= set(result["held"])
    readers["answers"] = 0
    result = await during(Fake(tmp_path / "again"), Fault("nothing", _nothing, unnoticed))
    assert result["lost"]
    assert not result["held"]["answers were seen, and none is lost"]
    assert not result["held"]["the next person is answered"]


async def test_people_who_hang_are_told(
    tmp_path: Path, readers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> None:
        if readers["number"] >= 4:
            await asyncio.Event().wait()

    async def newcomer(_url: str) -> dict[str, Any]:
        return {"answered": True}

    readers["ask"] = hang
    monkeypatch.setattr(faults_crowd, "newcomer", newcomer)
    monkeypatch.setattr("bench.faults.PATIENCE_S", 0.05)
    result = await during(Fake(tmp_path), Fault("nothing", _nothing, unnoticed))
    assert result["held"][NOBODY_HANGS] is False


async def test_a_person_without_answers_has_nothing_to_lose_and_that_is_no_proof(
    tmp_path: Path, readers: dict[str, Any]
) -> None:
    crowd = Crowd("http://test", people=1)
    _, held = await faults_crowd.afterwards(Fake(tmp_path), crowd)
    assert not held["answers were seen, and none is lost"]
    with pytest.raises(TimeoutError):
        await crowd.until_answered(0.01)


async def test_people_pause_before_they_ask_a_server_that_is_down_again(
    readers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(page: Page) -> None:
        raise ConnectionError("refused")

    async def refused() -> None:
        raise PageRefused("The engine is down.")

    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(Page, "load", down)
    measured = Measured()
    person = Person("http://test", measured)
    monkeypatch.setattr("bench.faults_crowd.asyncio.sleep", pause)
    await person.read(lambda: len(pauses) > 0)
    assert faults_crowd.AGAIN_S in pauses
    assert measured.errors[0] == "load: ConnectionError: refused"
    assert "offers no document" in measured.errors[1]


async def test_slow_programs_that_never_leave_have_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def take(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        accepted.append(writer)

    own = psutil.Process().pid
    monkeypatch.setattr(faults_world, "FREE_S", 0.6)
    async with await asyncio.start_server(take, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        server = Fake(tmp_path, f"http://127.0.0.1:{port}", running=16, queued=4)
        server.alive = Alive(own)
        figures, held = await not_reading(server)
        assert figures["taken"] == faults_world.NOT_READING
        assert figures["engine_free_again_after_s"] is None
        assert list(held.values()) == [False, True, True]
        server.told = {"running": 3, "queued": 0}
        with pytest.raises(Unreached, match="3 requests at once"):
            await not_reading(server)
        for writer in accepted:
            writer.close()


async def test_slow_programs_that_are_refused_say_what_they_were_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 400 Bad Request\r\nx-a: b\r\n\r\n{"error": "model: not a text"}')

    monkeypatch.setattr(faults_world, "FREE_S", 0.6)
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        server = Fake(tmp_path, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", running=1)
        server.alive = Alive(psutil.Process().pid)
        with pytest.raises(Unreached, match=r'0 were taken; 16 got HTTP/1.1 400 .*: {"error": "model: not'):
            await not_reading(server)


def test_programs_ask_for_the_bare_model_that_the_server_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {"data": [{"id": "coread"}, {"id": "tiny"}]}

    def get(url: str, **_: Any) -> httpx.Response:
        return httpx.Response(200, json=listed, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    server = ServerProcess(tmp_path / "data", tmp_path / "log")
    assert server.model() == "tiny"
    del listed["data"][1]
    with pytest.raises(ServerFailed, match=r"no model beside the search: \['coread'\]"):
        server.model()


async def test_half_open_connections_that_the_server_keeps_have_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = [True]

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if keep[0]:
            await reader.read()
        writer.close()

    monkeypatch.setattr(faults_world, "HALF_OPEN", 5)
    monkeypatch.setattr(faults_world, "HEADER_S", -19.9)  # a tenth of a second in all
    async with await asyncio.start_server(take, "127.0.0.1", 0) as listening:
        server = Fake(tmp_path, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        figures, held = await half_open(server)
        assert figures["closed_by_the_server"] == 0
        assert list(held.values()) == [False]
    with pytest.raises(Unreached, match="only 0 of 5"):
        await half_open(Fake(tmp_path / "gone", "http://127.0.0.1:9"))


async def test_the_lock_is_taken_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Fake(tmp_path)
    with pytest.raises(Unreached, match="holds 0 databases"):
        await locked(server)
    path = server.data_dir / "a.sqlite"
    sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
    task = asyncio.create_task(locked(server))
    await asyncio.sleep(0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        sqlite3.connect(path, timeout=0).execute("INSERT INTO t VALUES (1)")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with sqlite3.connect(path, timeout=0) as after:
        after.execute("INSERT INTO t VALUES (1)")
    monkeypatch.setattr(faults_world, "LOCKED_S", 0.0)
    assert (await locked(server))[0]["locked_s"] == 0.0


def test_the_databases_log_is_emptied_unless_somebody_needs_it(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    writer, reader = sqlite3.connect(path), sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("CREATE TABLE t (x)")
    log = path.with_name("a.sqlite-wal")
    assert log.stat().st_size
    assert faults_world.empty_log(path)
    assert log.stat().st_size == 0
    with writer:
        writer.execute("INSERT INTO t VALUES (1)")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM t").fetchone()
    with writer:
        writer.execute("INSERT INTO t VALUES (2)")
    assert not faults_world.empty_log(path)
    assert log.stat().st_size
    reader.close()
    writer.close()


async def test_the_limit_on_files_is_given_back(tmp_path: Path) -> None:
    """The way of whoever may mount nothing, ended in the middle."""
    server = Fake(tmp_path)
    sqlite3.connect(server.data_dir / "a.sqlite").close()
    with subprocess.Popen(["sleep", "60"]) as other:  # noqa: ASYNC220 - it starts at once
        try:
            process = psutil.Process(other.pid)
            server.alive = Alive(other.pid)
            before = process.rlimit(psutil.RLIMIT_FSIZE)
            task = asyncio.create_task(disk_full(server))
            await asyncio.sleep(0)
            meanwhile = process.rlimit(psutil.RLIMIT_FSIZE)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert meanwhile[0] == faults_world.FILE_BYTES
            assert process.rlimit(psutil.RLIMIT_FSIZE) == before
        finally:
            other.kill()


def test_the_number_of_open_files_is_given_back() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(KeyError), many_files(before[0] + 1 if before[0] < before[1] else before[0]):
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    with pytest.raises(Unreached, match="open files are needed"), many_files(before[1] + 1):
        pass


def test_every_fault_has_a_name_and_says_what_people_see() -> None:
    assert set(FAULTS) == {"engine", "half-open", "disk", "lock", "slow"}
    broken = {"answers": 0, "error_count": 1, "told": {}}
    assert all(not any(fault.seen(broken).values()) for fault in FAULTS.values())
