"""Whoever clicks a suggested question the moment the page is ready is answered from the right document."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gradio as gr
import httpx
import pytest

import app.runtime
import data
from app.knowledge import Knowledge
from app.principal import Principal
from app.runtime import Runtime
from app.server import create_app
from app.settings import Settings, load_settings
from data import GoldSpan, Question
from rag.aio import AsyncLibrary
from rag.database import Database
from rag.datadir import DataDir
from rag.embed import Vectors
from rag.errors import EmbedderUnavailable
from rag.library import Library
from tests.app.conftest import FakeParts
from tests.rag.conftest import HashEmbedder

ANN = Principal("anonymous", "b-ann")
ASKED = "When was the lighthouse on Gull Rock built?"


class SlowEmbedder(HashEmbedder):
    """Embeds the lighthouse's document only when it may, and never one of the bakery."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.asked = threading.Event()

    def embed(self, texts: Sequence[str], *, query: bool = False) -> Vectors:
        if not query and any("lighthouse" in text for text in texts):
            self.asked.set()
            self.may.wait(60)
        if not query and any("bakery" in text for text in texts):
            raise RuntimeError("no vector for a bakery")
        return super().embed(texts, query=query)


@dataclass(slots=True)
class SlowParts(FakeParts):
    embedder: SlowEmbedder = field(default_factory=SlowEmbedder)

    def library(
        self, settings: Settings, data_dir: DataDir, database: Database, busy: Callable[[], bool]
    ) -> AsyncLibrary:
        library = Library(data_dir, database, self.embedder)
        wrapped = AsyncLibrary(library)
        self.closing += [self.embedder.may.set, library.close, wrapped.close]
        return wrapped


@pytest.fixture(autouse=True)
def one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    gold = GoldSpan("lighthouse.md", 20, 60)
    monkeypatch.setattr(data, "suggested_questions", lambda: [ASKED])
    monkeypatch.setattr(
        data, "questions", lambda: [Question("q", "dev", "single", ASKED, (), ("1871",), (gold,))]
    )


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[tuple[Runtime, SlowEmbedder]]:
    embedder = SlowEmbedder()
    runtime = Runtime(load_settings(data_dir=tmp_path / "d"), SlowParts(embedder=embedder))
    runtime.open()
    yield runtime, embedder
    await runtime.stop()


async def found(runtime: Runtime) -> list[str]:
    readable = await runtime.store.readable(ANN)
    return [hit.document_id for hit in await runtime.knowledge.search(readable, ASKED, 3)]


async def test_ready_waits_for_the_documents_behind_suggested_questions(
    slow: tuple[Runtime, SlowEmbedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, embedder = slow
    reading = asyncio.Event()
    wait_seeded = Knowledge.wait_seeded

    async def waits(knowledge: Knowledge, document: str) -> None:
        reading.set()
        await wait_seeded(knowledge, document)

    monkeypatch.setattr(Knowledge, "wait_seeded", waits)
    runtime.start()
    await asyncio.to_thread(embedder.asked.wait, 60)
    assert not runtime.ready
    await asyncio.wait_for(reading.wait(), 60)
    assert runtime.detail == ("Warming up: indexing the documents behind the suggested questions (0 of 1).")
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    embedder.may.set()
    await runtime.wait_ready()
    assert await found(runtime) == ["sample-lighthouse"]  # at once, before the others have been read


async def test_a_document_that_fails_holds_nothing_back(
    slow: tuple[Runtime, SlowEmbedder], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, embedder = slow
    embedder.may.set()
    gold = tuple(GoldSpan(name, 20, 60) for name in ("bakery.md", "lighthouse.md"))
    monkeypatch.setattr(
        data, "questions", lambda: [Question("q", "dev", "single", ASKED, (), ("1871",), gold)]
    )
    runtime.start()
    await runtime.wait_ready()
    assert await found(runtime) == ["sample-lighthouse"]
    await runtime.wait_seeded()
    infos = {info.id: info for info in await runtime.knowledge.infos(ANN, frozenset({"sample"}))}
    assert infos["sample-bakery"].status == "failed"
    assert runtime.detail == "Ready."


async def test_a_document_that_never_ends_holds_the_server_back_for_a_while_only(
    slow: tuple[Runtime, SlowEmbedder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, _ = slow
    monkeypatch.setattr(app.runtime, "SUGGESTED_WAIT_S", 0.05)
    runtime.start()
    await runtime.wait_ready()
    assert runtime.ready
    assert "were not read within" in caplog.text


async def test_without_the_sample_nothing_is_waited_for(tmp_path: Path) -> None:
    embedder = SlowEmbedder()  # could never embed the lighthouse
    runtime = Runtime(load_settings(data_dir=tmp_path / "d", sample=False), SlowParts(embedder=embedder))
    runtime.open()
    runtime.start()
    try:
        await runtime.wait_ready()
        assert not embedder.asked.is_set()
        assert await runtime.knowledge.documents(ANN) == []
    finally:
        await runtime.stop()


@pytest.mark.parametrize("missing", [False, True])
async def test_ready_waits_for_the_search_model_and_goes_on_without_one(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, asked = threading.Event(), threading.Event()

    def load(library: Library) -> None:
        asked.set()
        assert loaded.wait(60)
        if missing:
            raise EmbedderUnavailable("The model is not there.")

    monkeypatch.setattr(Library, "warm_up", load)
    runtime = Runtime(load_settings(data_dir=tmp_path / "d", sample=False), SlowParts())
    runtime.open()
    runtime.start()
    try:
        await asyncio.to_thread(asked.wait, 60)
        assert not runtime.ready
        assert runtime.detail == "Warming up: loading the search model."
        loaded.set()
        await runtime.wait_ready()
        assert runtime.ready
        assert ("searches do not work: The model is not there." in caplog.text) is missing
    finally:
        loaded.set()
        await runtime.stop()
