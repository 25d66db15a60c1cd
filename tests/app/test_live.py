"""A turn belongs to its conversation: viewers come and go, and nobody's answer runs on for nobody."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import NotFoundHere, ShuttingDown, TurnRunning
from app.live import LiveTurn
from app.pages.conversations import ConversationHandlers
from app.pages.handlers import ChatHandlers
from app.runtime import Runtime
from app.store import Message
from app.updates import Finished, Text, Update
from engine.errors import StepFailed
from engine.types import Delta
from tests.app.fakes import FakeEngine, failing
from tests.app.test_chat import ANN, BOB, QUESTION, ask, run, says
from tests.app.test_conversations import browser

HALF = (Delta(0, "Ha", (82,)), "hold")


async def until_text(updates: AsyncIterator[Update]) -> None:
    while not isinstance(await anext(updates), Text):
        pass


async def settled(runtime: Runtime, talk: str, messages: int) -> list[Message]:
    for _ in range(500):
        path = await runtime.store.path(ANN, talk)
        if len(path) == messages and await runtime.chat.watch(ANN, talk) is None:
            return path
        await asyncio.sleep(0.01)
    raise AssertionError("the turn did not end")


async def test_nobody_watching_ends_the_turn_and_the_part_is_kept(
    runtime: Runtime, engine: FakeEngine
) -> None:
    runtime.chat.grace_s = 0.05
    engine.script = list(HALF)
    talk = await runtime.store.create(ANN)
    updates = runtime.chat.ask(ANN, talk.id, QUESTION)
    await until_text(updates)
    await updates.aclose()
    path = await settled(runtime, talk.id, 2)
    assert engine.generations[0].aborted
    assert [(m.text, m.status) for m in path] == [(QUESTION, "complete"), ("Half", "stopped")]
    assert path[1].receipt is not None
    engine.script = says("Again.")
    await ask(runtime, ANN, "Go on?", talk.id)  # the conversation is free again


async def test_whoever_comes_back_in_time_sees_all_of_the_answer(
    runtime: Runtime, engine: FakeEngine
) -> None:
    runtime.chat.grace_s, came_back = 60.0, asyncio.Event()
    engine.script = [Delta(0, "Hel", (82,)), came_back.wait, Delta(0, "lo.", (118,)), *says("Hello.")[2:]]
    talk = await runtime.store.create(ANN)
    first = runtime.chat.ask(ANN, talk.id, QUESTION)
    await until_text(first)
    await first.aclose()
    live = await runtime.chat.watch(ANN, talk.id)
    assert live is not None
    assert (live.question, live.parent) == (QUESTION, None)
    came_back.set()
    updates = await run(live.view())
    assert "".join(u.delta for u in updates if isinstance(u, Text)) == "Hello."
    assert isinstance(updates[-1], Finished)
    assert updates[-1].message.status == "complete"
    assert not engine.generations[0].aborted
    assert await runtime.chat.watch(ANN, talk.id) is None


async def test_two_viewers_see_the_same_and_one_may_leave(runtime: Runtime, engine: FakeEngine) -> None:
    runtime.chat.grace_s, go_on = 0.0, asyncio.Event()
    engine.script = [Delta(0, "Hel", (82,)), go_on.wait, *says("Hello.")[2:]]
    talk = await runtime.store.create(ANN)
    first = runtime.chat.ask(ANN, talk.id, QUESTION)
    await until_text(first)
    live = await runtime.chat.watch(ANN, talk.id)
    assert live is not None
    second = asyncio.ensure_future(run(live.view()))
    await asyncio.sleep(0.05)
    await first.aclose()
    await asyncio.sleep(0.05)  # time to be ended, were the first the only viewer
    go_on.set()
    assert isinstance((await second)[-1], Finished)
    assert not engine.generations[0].aborted


async def test_a_call_that_is_cancelled_while_waiting_frees_the_engine(
    runtime: Runtime, engine: FakeEngine
) -> None:
    runtime.chat.grace_s = 0.0
    engine.script = ["hold"]
    talk = await runtime.store.create(ANN)
    task = asyncio.ensure_future(run(runtime.chat.ask(ANN, talk.id, QUESTION)))
    await engine.submitted.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(500):
        if engine.generations[0].aborted:
            break
        await asyncio.sleep(0.01)
    assert engine.generations[0].aborted


async def test_leaving_before_the_engine_was_asked_asks_it_nothing(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.chat.grace_s = 0.0

    async def slow(*_: Any, **__: Any) -> None:
        await asyncio.sleep(30)

    monkeypatch.setattr(runtime.knowledge, "search", slow)
    talk = await runtime.store.create(ANN)
    updates = runtime.chat.ask(ANN, talk.id, QUESTION)
    await anext(updates)
    await updates.aclose()
    assert await settled(runtime, talk.id, 0) == []
    assert not engine.requests


async def test_an_error_reaches_every_viewer(runtime: Runtime, engine: FakeEngine) -> None:
    go_on = asyncio.Event()
    engine.script = [go_on.wait, *failing(StepFailed("The step failed."))]
    talk = await runtime.store.create(ANN)
    first = asyncio.ensure_future(run(runtime.chat.ask(ANN, talk.id, QUESTION)))
    await engine.submitted.wait()
    live = await runtime.chat.watch(ANN, talk.id)
    assert live is not None
    second = asyncio.ensure_future(run(live.view()))
    go_on.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StepFailed, StepFailed]


async def test_a_turn_that_is_cancelled_before_its_first_step_has_ended_too() -> None:
    async def never() -> AsyncGenerator[Update, None]:
        raise AssertionError("this was begun")
        yield

    ended: list[str] = []
    live = LiveTurn(
        never(), question=QUESTION, parent=None, grace_s=5.0, abandoned=lambda: None,
        ended=lambda: ended.append("ended"),
    )  # fmt: skip
    live.kill()
    assert await run(live.view()) == []
    await live.wait()
    await asyncio.sleep(0)
    assert ended == ["ended"]


async def test_an_answer_whose_turn_is_killed_while_it_is_stored_is_stored_once(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing, go_on = asyncio.Event(), asyncio.Event()
    attribute = runtime.prompter.attribute

    async def slow(answer: str, built: Any) -> Any:
        storing.set()
        await go_on.wait()
        return await attribute(answer, built)

    monkeypatch.setattr(runtime.prompter, "attribute", slow)
    engine.script = says("It was built in 1871.")
    talk = await runtime.store.create(ANN)
    asking = asyncio.ensure_future(run(runtime.chat.ask(ANN, talk.id, QUESTION)))
    await storing.wait()
    live = await runtime.chat.watch(ANN, talk.id)
    assert live is not None
    await live.cancel()
    go_on.set()
    await runtime.chat.close()
    path = await runtime.store.path(ANN, talk.id)
    assert [(m.text, m.status) for m in path[1:]] == [("It was built in 1871.", "complete")]
    assert path[1].receipt is not None
    assert path[1].references
    assert len(await runtime.store.siblings(ANN, talk.id, path[1].id)) == 1
    await asking


async def test_only_the_owner_watches(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = list(HALF)
    talk = await runtime.store.create(ANN)
    updates = runtime.chat.ask(ANN, talk.id, QUESTION)
    await until_text(updates)
    with pytest.raises(NotFoundHere):
        await runtime.chat.watch(BOB, talk.id)
    with pytest.raises(TurnRunning):
        await run(runtime.chat.ask(ANN, talk.id, "Another?"))
    await runtime.chat.stop(ANN, talk.id)
    assert isinstance((await run(updates))[-1], Finished)


async def test_a_deleted_conversation_keeps_nothing_of_its_running_turn(
    runtime: Runtime, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = list(HALF)
    talk = await runtime.store.create(ANN)
    updates = runtime.chat.ask(ANN, talk.id, QUESTION)
    await until_text(updates)
    await runtime.chat.delete(ANN, talk.id)
    assert engine.generations[0].aborted
    with pytest.raises(NotFoundHere):
        await runtime.store.path(ANN, talk.id)
    await updates.aclose()
    await asyncio.sleep(0.05)
    assert "could not be kept" not in caplog.text


async def test_a_server_that_stops_keeps_the_part(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = list(HALF)
    talk = await runtime.store.create(ANN)
    updates = runtime.chat.ask(ANN, talk.id, QUESTION)
    await until_text(updates)
    await runtime.chat.close()
    assert [m.status for m in await runtime.store.path(ANN, talk.id)] == ["complete", "stopped"]


def event(**sent: str) -> Any:
    return SimpleNamespace(_data=sent)


async def test_a_reloaded_page_finds_the_running_answer_again(runtime: Runtime, engine: FakeEngine) -> None:
    go_on = asyncio.Event()
    engine.script = [Delta(0, "Hel", (82,)), go_on.wait, Delta(0, "lo.", (118,)), *says("Hello.")[2:]]
    handlers = ChatHandlers(runtime, ConversationHandlers(runtime))
    _, request = browser(runtime)
    asking = handlers.ask(QUESTION, None, None, request)
    talk = ""
    async for output in asking:
        talk = output.get("conversation", talk)
        if "Hel" in str(output.get("chat", "")):
            break
    await asking.aclose()  # type: ignore[attr-defined]
    outputs = []
    async for output in handlers.enter(None, request, event(conversation=talk)):
        outputs.append(output)
        if len(outputs) > 2 and "Hel" in str(output.get("chat", "")):
            go_on.set()
    assert outputs[1]["conversation"] == talk
    assert "lighthouse on Gull Rock" in outputs[1]["chat"][0]["content"]
    assert any("Hel" in str(o.get("chat", "")) for o in outputs[2:])
    final = str(outputs[-1]["chat"])
    assert "Hello." in final
    assert "#cr-source-" in final
    assert len(engine.requests) == 1


async def test_a_reload_before_the_question_is_stored_shows_its_title_in_the_end(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()
    build = runtime.prompter.build

    async def slowly(**asked: Any) -> Any:
        await go_on.wait()
        return await build(**asked)

    monkeypatch.setattr(runtime.prompter, "build", slowly)
    handlers = ChatHandlers(runtime, ConversationHandlers(runtime))
    _, request = browser(runtime)
    asking = handlers.ask(QUESTION, None, None, request)
    talk = (await anext(asking))["conversation"]
    for _ in range(2):  # the turn begins with the second
        await anext(asking)
    await asking.aclose()  # type: ignore[attr-defined]
    shown: dict[str, Any] = {}
    async for output in handlers.enter(None, request, event(conversation=talk)):
        shown |= output
        if "title" in output:
            go_on.set()
    assert shown["title"] == QUESTION
    assert shown["opened"]["visible"] is True
    assert shown["search"]["visible"] is True


async def test_a_reload_puts_back_nothing_of_somebody_elses(runtime: Runtime, engine: FakeEngine) -> None:
    talk, _ = await ask(runtime, ANN)
    handlers = ChatHandlers(runtime, ConversationHandlers(runtime))
    _, request = browser(runtime)
    for sent in (event(conversation=talk), event(conversation="x"), event(), SimpleNamespace(_data=None)):
        outputs = [o async for o in handlers.enter(None, request, sent)]
        assert len(outputs) == 1
        assert not {"chat", "title", "opened"} & set(outputs[0])


async def test_a_page_that_shows_something_else_is_not_written_on(
    runtime: Runtime, engine: FakeEngine
) -> None:
    runtime.chat.grace_s = 0.0
    engine.script = list(HALF)
    talks = ConversationHandlers(runtime)
    handlers = ChatHandlers(runtime, talks)
    _, request = browser(runtime)
    request.session_hash = "page1"
    asking = handlers.ask(QUESTION, None, None, request)
    async for output in asking:
        if "Ha" in str(output.get("chat", "")):
            break
    assert (await talks.new(request))["chat"] == []
    assert [o async for o in asking] == [], "the stream ends without touching the page"
    for _ in range(200):
        if engine.generations[0].aborted:
            break
        await asyncio.sleep(0.01)
    assert engine.generations[0].aborted


async def test_a_store_that_fails_twice_leaves_the_page_as_it_was(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = failing(StepFailed("The device is gone."))
    told: list[Exception] = []
    monkeypatch.setattr("app.pages.handlers.tell", lambda error, request: told.append(error))
    _, request = browser(runtime)
    asking = ChatHandlers(runtime, ConversationHandlers(runtime)).ask(QUESTION, None, None, request)
    outputs = []

    async def broken(*_: Any) -> list[Any]:
        raise sqlite3.OperationalError("disk I/O error")

    async for output in asking:
        outputs.append(output)
        if "Hel" in str(output.get("chat", "")):
            monkeypatch.setattr(runtime.store, "path", broken)
    shown = str(outputs[-1]["chat"])
    assert "lighthouse on Gull Rock" in shown
    assert "Hel" in shown
    assert "The device is gone" in shown
    assert outputs[-1]["question"]["submit_btn"] == "Ask"
    assert len(told) == 1


async def test_a_page_of_a_server_that_stops_ends_quietly(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = list(HALF)
    told: list[Exception] = []
    monkeypatch.setattr("app.pages.handlers.tell", lambda error, request: told.append(error))
    _, request = browser(runtime)
    asking = ChatHandlers(runtime, ConversationHandlers(runtime)).ask(QUESTION, None, None, request)
    async for output in asking:
        if "Ha" in str(output.get("chat", "")):
            break
    stopping = asyncio.create_task(runtime.stop())
    late = [o async for o in asking]
    await stopping
    assert not any("question" in output for output in late), "nothing more can be asked here"
    assert told == []
    with pytest.raises(ShuttingDown, match="shutting down"):
        _ = runtime.store
