"""Faults while people are being answered: what each of them is told, that nothing stored is lost, and that
the server goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import gradio as gr
import httpx
import pytest
import uvicorn

from app import lifecycle
from app.errors import TooMany
from app.http_errors import as_refusal
from app.principal import Principal
from app.runtime import Runtime
from app.server import bind, create_app
from app.streams import OpenRequests
from app.updates import Finished, Text
from app.watchdog import MAX_RESTARTS, watch_engine
from engine.errors import EngineError, EngineUnavailable
from rag.database import Database
from tests.app.small_engine import SmallEngine

ANN, BOB = Principal("anonymous", "b-ann"), Principal("anonymous", "b-bob")
QUESTION = "When does the bakery open?"


class Dying(SmallEngine):
    """Its thread dies in the middle of a step as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(blocks=400, threaded=True, pause_s=0.001)
        self.deaths = 0
        step = self.core.step

        def dying() -> int:
            if self.deaths and self.core.scheduler.running and self.written:
                self.deaths -= 1
                raise MemoryError("a bad block")
            return step()

        self.written = False
        #: The conversations whose answer had begun, and whose they are.
        self.taken: dict[str, Principal] = {}
        self.core.step = dying  # type: ignore[method-assign]


@pytest.fixture
def engine() -> Dying:
    return Dying()


async def until(condition: Callable[[], bool]) -> None:
    """What is waited for happens in code that knows no event of ours."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def answer(runtime: Runtime, who: Principal, talk: str, engine: Dying | None = None) -> list[Any]:
    seen = []
    async for update in runtime.chat.ask(who, talk, QUESTION):
        if engine is not None and isinstance(update, Text):
            engine.written = True
            engine.taken[talk] = who
        seen.append(update)
    return seen


@contextlib.asynccontextmanager
async def watched(runtime: Runtime) -> AsyncIterator[None]:
    watching = asyncio.create_task(watch_engine(runtime, 0.02))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


# The engine's thread


async def test_a_dead_engine_comes_back_and_everybody_is_told(runtime: Runtime, engine: Dying) -> None:
    first, second = await runtime.store.create(ANN), await runtime.store.create(BOB)
    before = await runtime.store.create(ANN)
    await answer(runtime, ANN, before.id)
    engine.deaths, engine.written = 1, False
    async with watched(runtime), asyncio.timeout(30):
        results = await asyncio.gather(
            answer(runtime, ANN, first.id, engine), answer(runtime, BOB, second.id, engine),
            return_exceptions=True,
        )  # fmt: skip
        told = [result for result in results if isinstance(result, EngineError)]
        assert told
        for error in told:
            refusal = as_refusal(error)
            assert (refusal.status, refusal.retry_after_s) == (503, 5.0)
        for result in results:  # who comes a moment later may find the engine back already
            assert isinstance(result, EngineError) or isinstance(result[-1], Finished)  # type: ignore[index]
        await until(lambda: runtime.ready)
        assert isinstance((await answer(runtime, BOB, second.id))[-1], Finished)
    kept = await runtime.store.path(ANN, before.id)
    assert [message.status for message in kept] == ["complete", "complete"]
    assert engine.taken
    for talk, who in engine.taken.items():
        interrupted = await runtime.store.path(who, talk)
        assert interrupted[0].text == QUESTION, "a question that was taken is not lost with the engine"
    runtime.engine.check_integrity()


async def test_an_engine_that_keeps_dying_is_left_alone(
    runtime: Runtime, engine: Dying, caplog: pytest.LogCaptureFixture
) -> None:
    talk = await runtime.store.create(ANN)
    engine.deaths, engine.written = 1_000, True
    async with watched(runtime), asyncio.timeout(60):
        for _ in range(MAX_RESTARTS + 1):
            await until(lambda: runtime.ready)
            with pytest.raises(EngineUnavailable):
                await answer(runtime, ANN, talk.id)
        await until(lambda: "left alone" in caplog.text)
    assert not runtime.ready
    assert runtime.engine_failed
    assert "bad block" in runtime.detail
    assert await runtime.store.path(ANN, talk.id), "what is stored can be read without an engine"


async def test_an_engine_that_works_is_not_touched(runtime: Runtime, engine: Dying) -> None:
    thread = engine._thread
    async with watched(runtime):
        await asyncio.sleep(0.1)
    assert engine._thread is thread
    assert not await runtime.revive()


# The disk and the database


@contextlib.contextmanager
def full(database: Database) -> Iterator[None]:
    """The file may not grow by a page: SQLite's own "database or disk is full"."""

    def limit(pages: int) -> None:
        database._submit(
            lambda c: c.execute(f"PRAGMA max_page_count={pages}").fetchone(), transaction=False
        ).result()

    limit(1)  # SQLite takes the present number for less than that
    try:
        yield
    finally:
        limit(2**31)


async def test_a_full_disk_is_told_and_loses_nothing(runtime: Runtime) -> None:
    talk = await runtime.store.create(ANN)
    await answer(runtime, ANN, talk.id)
    assert runtime._database is not None
    big = await runtime.store.create(ANN)
    with full(runtime._database):
        with pytest.raises(sqlite3.OperationalError) as failed:
            await runtime.store.add_message(ANN, big.id, None, "user", "x" * 2_000_000)
        refusal = as_refusal(failed.value)
        assert (refusal.status, refusal.api_code) == (503, "storage_unavailable")
        assert "disk is full" in str(refusal)
        assert "x" * 10 not in str(refusal)
        assert len(await runtime.store.path(ANN, talk.id)) == 2
    assert await runtime.store.path(ANN, big.id) == []
    assert isinstance((await answer(runtime, ANN, big.id))[-1], Finished)
    assert (await runtime.knowledge.check()).ok


async def test_a_strangers_lock_is_waited_for_and_then_told(runtime: Runtime) -> None:
    database = runtime._database
    assert database is not None
    talk = await runtime.store.create(ANN)
    await answer(runtime, ANN, talk.id)
    stranger = sqlite3.connect(database.path, isolation_level=None, check_same_thread=False)
    database._submit(lambda c: c.execute("PRAGMA busy_timeout=300").fetchone(), transaction=False).result()
    try:
        stranger.execute("BEGIN IMMEDIATE")
        # Reading goes on, and the event loop is never held up.
        writing = asyncio.create_task(runtime.store.create(BOB))
        assert len(await runtime.store.path(ANN, talk.id)) == 2
        with pytest.raises(sqlite3.OperationalError) as failed:
            await writing
        assert "Another program holds" in str(as_refusal(failed.value))
        # A lock that is given back in time is not even noticed.
        waiting = asyncio.create_task(runtime.store.create(BOB))
        await asyncio.sleep(0.05)
        stranger.execute("ROLLBACK")
        assert (await waiting).id
    finally:
        stranger.close()
    assert isinstance((await answer(runtime, ANN, talk.id))[-1], Finished)


async def test_a_broken_store_is_a_clean_answer_at_every_door(
    runtime: Runtime, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY

    async def locked(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(runtime.store, "readable", locked)
    body = {"model": "coread", "messages": [{"role": "user", "content": "Hi"}]}
    refused = await client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "storage_unavailable"
    assert int(refused.headers["retry-after"]) >= 1


# Clients that leave, or take their time


@pytest.mark.parametrize("path", ["/library/files", "/gradio_api/queue/join", "/sign-in"])
async def test_who_leaves_while_sending_is_no_fault_of_the_server(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """A cancelled upload is everyday life: no error in the log, and nothing of it is kept."""
    ann, cookie = runtime.signer.issue()
    headers = {"host": "127.0.0.1", "content-type": "application/json"}
    headers |= {"cookie": f"{runtime.signer.name}={cookie}", "content-length": "1000"}
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()], "http_version": "1.1",
        "scheme": "http", "server": ("127.0.0.1", 7860), "client": ("10.0.0.7", 5), "root_path": "",
    }  # fmt: skip
    came: list[dict[str, Any]] = [{"type": "http.request", "body": b"# Half", "more_body": True}]

    async def receive() -> dict[str, Any]:
        return came.pop() if came else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 0) < 500

    await create_app(runtime, gr.Blocks())(scope, receive, send)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
    assert (await runtime.knowledge.stored(ann)).documents == 0


@pytest.fixture
async def port(runtime: Runtime) -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(runtime, gr.Blocks()), http=lifecycle.PatientProtocol, lifespan="off", log_level="error",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    yield listener.getsockname()[1]
    server.should_exit = True
    await running
    listener.close()


async def test_a_body_that_trickles_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "BODY_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: 1000\r\n\r\n")
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            for _ in range(200):  # never silent for long, and yet never done
                writer.write(b"{")
                await writer.drain()
                if reader.at_eof():
                    break
                await asyncio.sleep(0.05)
        assert b"200 OK" not in await reader.read()
    writer.close()


async def test_a_body_that_comes_fast_enough_is_taken(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "BODY_S", 0.4)
    body = b'{"model": "letters", "messages": [{"role": "user", "content": "' + b"x" * 400 + b'"}]}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    monkeypatch.setattr(lifecycle, "BODY_BYTES_A_SECOND", 100)
    async with asyncio.timeout(20):
        for at in range(0, len(body), 100):
            writer.write(body[at : at + 100])
            await asyncio.sleep(0.2)
        assert b"200 OK" in await reader.read()
    writer.close()


async def test_who_reads_nothing_is_cut_off_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STALLED_S", 0.4)
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/quick":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not await _disconnected(receive):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        ended.set()

    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, http=lifecycle.PatientProtocol, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_024)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            async with httpx.AsyncClient(trust_env=False) as other:
                assert (await other.get(f"http://127.0.0.1:{port}/quick")).status_code == 200
            await ended.wait()
        writer.close()
    finally:
        server.should_exit = True
        await running
        listener.close()


async def _disconnected(receive: Any) -> bool:
    """True once the client is gone."""
    try:
        async with asyncio.timeout(0):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


def test_open_requests_are_bounded_for_each_and_for_all() -> None:
    requests = OpenRequests(each=3, total=5)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(requests.one_more("eve"))
        with pytest.raises(TooMany, match="You have 3 requests open"), requests.one_more("eve"):
            pass
        held.enter_context(requests.one_more("ann"))
        held.enter_context(requests.one_more("ann"))
        with pytest.raises(TooMany, match="as it can"), requests.one_more("bob"):
            pass
    assert (requests._all, requests._held) == (0, {})
    with requests.one_more("bob"):
        pass
