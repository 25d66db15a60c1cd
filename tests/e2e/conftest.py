"""A served page in Debian's chromium. The language model is the tests' own, so that what it writes is known;
everything else, the HTTP server and the browser included, is real."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from app.pages.build import build_demo
from app.runtime import Runtime
from app.server import bind, create_app
from app.settings import load_settings
from tests.app.conftest import FakeParts, two_sample_documents
from tests.app.fakes import FakeEngine

#: As `scripts/find_chromium.sh` finds it.
CHROMIUM = os.environ.get("COREAD_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

SETUP_TOKEN = "the-token"
#: How long a browser may take for anything: a busy machine is slow, and slow is not wrong.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

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


@contextmanager
def serving(runtime: Runtime) -> Iterator[str]:
    """A server over `runtime` on a port of its own; its address. All browser tests are served by it.

    The sample documents have been read by then: pages fill their lists once more when that happens, which
    would come between what a test writes into them and what it does next.
    """
    listener = bind("127.0.0.1", 0)
    runtime.open()
    config = uvicorn.Config(
        create_app(runtime, build_demo(runtime)), log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert wait_until(lambda: runtime.ready and not runtime.status()["seeding"], 120), runtime.detail
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def served(tmp_path: Path, two_sample_documents: None) -> Iterator[Served]:
    """Open to all who come by."""
    engine = FakeEngine()
    runtime = Runtime(load_settings(data_dir=tmp_path / "data", port=0), FakeParts(engine))
    with serving(runtime) as url:
        yield Served(url, runtime, engine)


@pytest.fixture
def with_accounts(
    tmp_path: Path, two_sample_documents: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    """For people with accounts; nobody has one yet (`set_up`)."""
    monkeypatch.setenv("COREAD_SETUP_TOKEN", SETUP_TOKEN)
    engine = FakeEngine()
    settings = load_settings(data_dir=tmp_path / "data", port=0, access="accounts")
    runtime = Runtime(settings, FakeParts(engine))
    with serving(runtime) as url:
        yield Served(url, runtime, engine)


async def set_up(page: Page, served: Served) -> None:
    """Open the page on which the first account is made."""
    await page.goto(served.url)
    await page.wait_for_url("**/set-up")


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
        context.set_default_timeout(PATIENCE_MS)
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
        person = cls(context, await context.new_page(), url)
        await person.load()
        return person

    async def load(self) -> None:
        await self.page.goto(self.url)
        await self.there()

    async def there(self) -> None:
        """The chat page has all its components, and its lists are asked for."""
        for part in (
            "#cr-memory canvas[data-asked=seeded][data-total]",
            "[data-cr=sheet]",
            "#cr-ask textarea",
        ):
            await self.page.locator(part).wait_for(state="attached")

    async def ask(self, question: str) -> None:
        box = self.page.locator("#cr-ask textarea")
        await box.fill(question)
        await box.press("Enter")

    async def sidebar(self) -> None:
        """Open the sidebar; it stays open."""
        await self.page.locator(".toggle-button").first.click()
        await expect(self.page.locator(".sidebar").first).to_have_class(re.compile(r"\bopen\b"))

    async def add(self, file: Path) -> None:
        """Add a document through the open sidebar and wait until it is ready."""
        if not await self.page.locator("#cr-upload").is_visible():  # folded away
            await self.page.get_by_role("button", name="Your own documents").click()
        await self.page.locator("#cr-upload input[type=file]").set_input_files(str(file))
        await self.page.get_by_text(re.compile(r"ready, \d+ passage")).first.wait_for()

    async def answered(self, count: int = 1) -> str:
        await self.page.get_by_text("Receipt ·").nth(count - 1).wait_for()
        # A person looks before they go on; until the answer's stream has ended the page takes no question.
        await self.page.wait_for_timeout(300)
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
