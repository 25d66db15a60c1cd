"""A served page in Debian's chromium. The language model is the tests' own, so that what it writes is known;
everything else, the HTTP server and the browser included, is real."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from app.pages.build import build_demo
from app.runtime import Runtime
from app.server import bind, create_app
from app.settings import load_settings
from tests.app.conftest import FakeParts, two_sample_documents
from tests.app.fakes import FakeEngine

CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

__all__ = ["two_sample_documents"]


@dataclass(slots=True)
class Served:
    url: str
    runtime: Runtime
    engine: FakeEngine


@pytest.fixture(autouse=True)
def nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of hashed words do not tell whether a passage answers."""
    monkeypatch.setenv("COREAD_REFUSE_UNANSWERABLE", "false")


@pytest.fixture
def served(tmp_path: Path, two_sample_documents: None) -> Iterator[Served]:
    engine = FakeEngine()
    runtime = Runtime(load_settings(data_dir=tmp_path / "data", port=0), FakeParts(engine))
    listener = bind("127.0.0.1", 0)
    runtime.open()
    config = uvicorn.Config(
        create_app(runtime, build_demo(runtime)), log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", runtime, engine)
    server.should_exit = True
    thread.join(20)
    listener.close()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield opened
        await opened.close()


class Person:
    """One browser context: a person with a cookie jar of their own, whose page must stay harmless."""

    def __init__(self, context: BrowserContext, page: Page, url: str) -> None:
        self.context, self.page, self.url = context, page, url
        self.dialogs: list[str] = []
        self.remote: list[str] = []
        self.errors: list[str] = []
        page.on("dialog", lambda dialog: self.dialogs.append(dialog.message))
        page.on("request", lambda request: self._seen(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _seen(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:", "about:")):
            self.remote.append(url)

    @classmethod
    async def enter(cls, browser: Browser, url: str) -> Person:
        context = await browser.new_context(viewport={"width": 1400, "height": 900})
        context.set_default_timeout(60_000)
        person = cls(context, await context.new_page(), url)
        await person.load()
        return person

    async def load(self) -> None:
        await self.page.goto(self.url)
        await self.page.wait_for_function(
            "document.querySelector('#cr-memory canvas')?.dataset.total", timeout=90_000
        )

    async def ask(self, question: str) -> None:
        box = self.page.locator("#cr-ask textarea")
        await box.fill(question)
        await box.press("Enter")

    async def sidebar(self) -> None:
        """Open the sidebar; it stays open."""
        await self.page.locator(".toggle-button").first.click()

    async def add(self, file: Path) -> None:
        """Add a document through the open sidebar and wait until it is ready."""
        if not await self.page.locator("#cr-upload").is_visible():
            await self.page.get_by_role("button", name="Your own documents").click()
        await self.page.locator("#cr-upload input[type=file]").set_input_files(str(file))
        await self.page.get_by_text(re.compile(r"ready, \d+ passage")).first.wait_for()

    async def answered(self, count: int = 1) -> str:
        await self.page.get_by_text("Receipt ·").nth(count - 1).wait_for()
        return await self.page.locator("#cr-chat").inner_text()

    def assert_unharmed(self) -> None:
        assert self.dialogs == []
        assert self.remote == [], "the page asked for something elsewhere"
        assert self.errors == []


def wait_until(condition: object, seconds: float) -> bool:
    """Poll a condition of the server's thread; False where it did not come true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False
