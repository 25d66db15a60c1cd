"""A runtime with everything real but the language model and the embedder, and its HTTP application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

import data
from app.runtime import Runtime
from app.server import create_app
from app.settings import Settings, load_settings
from app.store import MIGRATIONS
from rag.aio import AsyncLibrary
from rag.database import Database
from rag.datadir import DataDir
from rag.library import Library
from tests.app.fakes import FakeEngine
from tests.rag.conftest import HashEmbedder

LIGHTHOUSE = "# The lighthouse\n\nThe lighthouse on Gull Rock was built in 1871. Its lamp burns rape oil.\n"
BAKERY = "# The bakery\n\nThe bakery opens at six. A loaf of rye costs four crowns.\n"


@dataclass(slots=True)
class FakeParts:
    """See `app.runtime.Parts`."""

    fake: FakeEngine = field(default_factory=FakeEngine)
    closing: list[Callable[[], None]] = field(default_factory=list)

    def prepare(self, settings: Settings) -> None:
        pass

    def engine(self, settings: Settings) -> Any:
        return self.fake

    def database(self, path: Path) -> Database:
        return Database(path, MIGRATIONS)

    def library(
        self, settings: Settings, data_dir: DataDir, database: Database, busy: Callable[[], bool]
    ) -> AsyncLibrary:
        library = Library(data_dir, database, HashEmbedder())
        wrapped = AsyncLibrary(library)
        self.closing += [library.close, wrapped.close]
        return wrapped

    def close(self) -> None:
        while self.closing:
            self.closing.pop(0)()


@pytest.fixture(autouse=True)
def two_sample_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        data,
        "documents",
        lambda: [
            data.SampleDocument("lighthouse.md", "The lighthouse", LIGHTHOUSE),
            data.SampleDocument("bakery.md", "The bakery", BAKERY),
        ],
    )


@pytest.fixture(autouse=True)
def nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of hashed words do not tell whether a passage answers. Tests of refusals switch them on."""
    monkeypatch.setenv("COREAD_REFUSE_UNANSWERABLE", "false")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", answer_tokens=64)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def runtime(settings: Settings, engine: FakeEngine) -> AsyncIterator[Runtime]:
    made = Runtime(settings, FakeParts(engine))
    made.open()
    made.start()
    await made.wait_seeded()
    yield made
    await made.stop()


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """A program on the same machine."""
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as opened:
        yield opened
