"""A document that goes between being read for a prompt and the prompt reaching the engine: nothing of it
stays in memory, and nobody is answered from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from app.errors import NotFoundHere
from app.principal import Principal
from app.runtime import Runtime
from app.server import create_app
from app.settings import Settings, load_settings
from tests.app.small_engine import SmallEngine

ANN = Principal("local", "owner", "administrator")
MILL = b"# Zanzibar diary\n\nThe mill at Tarn grinds barley since 1802 and never on Sundays.\n"
QUESTION = "Since when does the mill at Tarn grind barley?"


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine(blocks=400, threaded=True)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", answer_tokens=16)


@pytest.fixture
async def mill(runtime: Runtime) -> str:
    id = await runtime.shelf.add(ANN, None, "mill.md", MILL)
    assert (await runtime.knowledge._library.wait(id)).status == "ready"
    return id


def before_the_engine(
    engine: SmallEngine, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[Any]]
) -> None:
    """Have something happen once, when a prompt has been made and the engine does not know it yet."""
    submit, done = engine.submit, False

    async def submitted(request: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            await happens()
        return await submit(request)

    monkeypatch.setattr(engine, "submit", submitted)


async def idle(engine: SmallEngine) -> None:
    async with asyncio.timeout(20):
        while engine.core.busy:  # noqa: ASYNC110 (what is waited for happens in the engine's thread)
            await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.check_integrity)


async def ask(runtime: Runtime, talk: str) -> None:
    async for _ in runtime.chat.ask(ANN, talk, QUESTION):
        pass


@pytest.mark.parametrize("whole", [True, False])
async def test_a_question_ends_and_leaves_nothing_of_the_document(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch, mill: str, whole: bool
) -> None:
    talk = await runtime.store.create(ANN, document_id=mill if whole else None)
    before_the_engine(engine, monkeypatch, lambda: runtime.shelf.delete(ANN, mill))
    with pytest.raises(NotFoundHere, match="was deleted"):
        await ask(runtime, talk.id)
    await idle(engine)
    assert mill not in engine.documents(fresh=True)
    assert await runtime.store.path(ANN, talk.id) == []


async def test_a_turn_that_is_cancelled_meanwhile_leaves_nothing_either(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch, mill: str
) -> None:
    talk = await runtime.store.create(ANN, document_id=mill)
    before_the_engine(engine, monkeypatch, lambda: runtime.shelf.delete(ANN, mill))
    told, look = asyncio.Event(), runtime.knowledge.forget_stale

    async def looked(read: Any) -> bool:
        told.set()
        return await look(read)

    monkeypatch.setattr(runtime.knowledge, "forget_stale", looked)
    turn = asyncio.ensure_future(ask(runtime, talk.id))
    await told.wait()
    await runtime.chat.delete(ANN, talk.id)
    await asyncio.gather(turn, return_exceptions=True)
    await asyncio.to_thread(runtime.knowledge._library._others.submit(lambda: None).result)
    await idle(engine)
    assert mill not in engine.documents(fresh=True)


async def test_a_new_version_that_is_kept_in_memory_stays_so(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch, mill: str
) -> None:
    await runtime.shelf.pin(ANN, mill, True)
    talk = await runtime.store.create(ANN, document_id=mill)

    async def replaced() -> None:
        await runtime.shelf.replace(ANN, mill, "mill.md", MILL.replace(b"1802", b"1902"))
        await runtime.knowledge._library.wait(mill)

    before_the_engine(engine, monkeypatch, replaced)
    with pytest.raises(NotFoundHere, match="replaced"):
        await ask(runtime, talk.id)
    await idle(engine)
    assert mill not in engine.documents(fresh=True) or engine.documents(fresh=True)[mill].behind == 0
    await ask(runtime, talk.id)
    assert engine.documents(fresh=True)[mill].pinned > 0


async def test_a_programs_question_ends_with_it(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch, mill: str
) -> None:
    who = Principal("api_key", ANN.id)
    _, secret = await runtime.keys.create("script", who.id)
    monkeypatch.setattr(runtime.accounts, "role_of", lambda _: "reader")
    monkeypatch.setattr(runtime.keys, "_role_of", lambda _: "reader")
    before_the_engine(engine, monkeypatch, lambda: runtime.shelf.delete(ANN, mill))
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
        response = await client.post(
            "/v1/chat/completions",
            json={"model": "coread", "messages": [{"role": "user", "content": QUESTION}]},
            headers={"authorization": f"Bearer {secret}"},
        )
    assert response.status_code == 404
    assert "was deleted" in response.json()["error"]["message"]
    await idle(engine)
    assert mill not in engine.documents(fresh=True)


async def test_warming_keeps_nothing_of_it(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch, mill: str
) -> None:
    home = (await runtime.knowledge.readable_info(ANN, mill)).collection_id
    before_the_engine(engine, monkeypatch, lambda: runtime.shelf.delete(ANN, mill))
    runtime.warmer.look_s = 0.01
    now = await runtime.warmer.start(ANN, home)
    async with asyncio.timeout(20):
        while now.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (now.state, now.skipped) == ("done", now.total)
    await idle(engine)
    assert mill not in engine.documents(fresh=True)
