"""Stopping while people are being answered, and starting again: nothing that was written is lost."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.knowledge import suggested_questions
from app.pages.build import build_demo
from app.principal import Principal
from app.runtime import Runtime
from app.settings import load_settings
from app.updates import Text
from engine.errors import EngineUnavailable
from engine.service import EngineStatus
from engine.types import Delta
from rag.aio import AsyncLibrary
from tests.app.conftest import FakeParts
from tests.app.fakes import FakeEngine

ANN = Principal("anonymous", "b-ann")


async def started(folder: Path, engine: FakeEngine) -> Runtime:
    runtime = Runtime(load_settings(data_dir=folder), FakeParts(engine))
    runtime.open()
    runtime.start()
    await runtime.wait_seeded()
    return runtime


@pytest.mark.parametrize("watched", [True, False], ids=["viewer stays", "viewer was cut off first"])
async def test_a_running_answer_is_kept_and_marked(tmp_path: Path, watched: bool) -> None:
    engine = FakeEngine(script=[Delta(0, "Half", (80,)), "hold"])
    runtime = await started(tmp_path / "d", engine)
    talk = await runtime.store.create(ANN)
    written = asyncio.Event()

    async def watch() -> None:
        async for update in runtime.chat.ask(ANN, talk.id, "When does the bakery open?"):
            if isinstance(update, Text):
                written.set()

    viewer = asyncio.create_task(watch())
    await asyncio.wait_for(written.wait(), 20)
    if not watched:
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)
    await runtime.stop()
    viewer.cancel()
    await asyncio.gather(viewer, return_exceptions=True)
    assert engine.generations[0].aborted
    again = await started(tmp_path / "d", FakeEngine())
    try:
        asked, answered = await again.store.path(ANN, talk.id)
        assert asked.text == "When does the bakery open?"
        assert (answered.text, answered.status) == ("Half", "stopped")
    finally:
        await again.stop()


async def test_what_a_thread_still_loads_is_given_back_too(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(FakeParts):
        def library(self, *arguments: Any) -> AsyncLibrary:
            entered.set()
            assert go_on.wait(60)
            return super().library(*arguments)

    parts = Slow()
    runtime = Runtime(load_settings(data_dir=tmp_path / "d", sample=False), parts)
    runtime.open()
    runtime.start()
    assert await asyncio.to_thread(entered.wait, 60)
    stopping = asyncio.create_task(runtime.stop())
    await asyncio.wait({stopping}, timeout=0.5)  # a stop that does not wait for the thread is over by then
    assert not stopping.done()
    go_on.set()
    await stopping
    assert runtime.state == "stopped"
    assert parts.fake.stopped
    assert parts.closing == [], "the library was made after everything had been given back"
    again = await started(tmp_path / "d", FakeEngine())
    await again.stop()


async def test_a_model_that_is_being_loaded_holds_up_no_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waited: list[float] = []

    class Loading(FakeEngine):
        def status(self) -> EngineStatus:
            return replace(super().status(), state="starting")

        def stop(self, timeout: float = 10.0) -> None:
            waited.append(timeout)
            raise EngineUnavailable("The engine's thread did not end.")

    runtime = await started(tmp_path / "d", Loading())
    await runtime.stop()
    assert runtime.state == "stopped"
    assert waited
    assert max(waited) < 1
    assert "did not end" in caplog.text
    again = await started(tmp_path / "d", FakeEngine())  # all else was given back
    await again.stop()


async def test_keys_accounts_and_sessions_outlive_a_restart(tmp_path: Path) -> None:
    runtime = await started(tmp_path / "d", FakeEngine())
    _, secret = await runtime.keys.create("script")
    person = await runtime.accounts.create("Ann", "correct horse", "reader")
    token = await runtime.accounts.sign_in("Ann", "correct horse", "a", "x")
    cookie = {"cookie": f"{runtime.signer.name}_s={token}"}
    await runtime.stop()
    again = await started(tmp_path / "d", FakeEngine())
    try:
        assert again.keys.principal(secret) is not None
        assert again.accounts.principal(cookie) == person.principal
    finally:
        await again.stop()


async def test_a_library_can_start_without_the_sample(tmp_path: Path) -> None:
    runtime = Runtime(load_settings(data_dir=tmp_path / "d", sample=False), FakeParts(FakeEngine()))
    runtime.open()
    runtime.start()
    await runtime.wait_seeded()
    try:
        assert await runtime.knowledge.documents(ANN) == []
        page = str(build_demo(runtime).get_config_file())
        assert not any(question in page for question in suggested_questions(4))
    finally:
        await runtime.stop()
