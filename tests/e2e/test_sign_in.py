"""People with accounts in a real browser, under the content security policy that is served."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.async_api import Browser

from app.pages.build import build_demo
from app.runtime import Runtime
from app.server import bind, create_app
from app.settings import load_settings
from tests.app.conftest import FakeParts
from tests.app.fakes import FakeEngine
from tests.e2e.conftest import Person, Served
from tests.e2e.test_accessibility import findings

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PASSWORD = "correct horse"
HOSTILE = "<img src=x onerror=window.ran=1> ${window.ran=1}"


@pytest.fixture
def served(tmp_path: Path, two_sample_documents: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("COREAD_SETUP_TOKEN", "the-token")
    engine = FakeEngine()
    settings = load_settings(data_dir=tmp_path / "data", port=0, access="accounts")
    runtime = Runtime(settings, FakeParts(engine))
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


async def test_set_up_ask_sign_out_and_in_again(served: Served, browser: Browser) -> None:
    context = await browser.new_context()
    context.set_default_timeout(60_000)
    page = await context.new_page()
    person = Person(context, page, served.url)
    refused: list[str] = []
    page.on("console", lambda m: refused.append(m.text) if "Content Security Policy" in m.text else None)
    for _ in range(100):  # until the database is open
        await page.goto(served.url)
        if "/set-up" in page.url:
            break
        await asyncio.sleep(0.2)
    assert await findings(page) == []
    await page.fill("input[name=token]", "the-token")
    await page.fill("input[name=name]", "Root")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await page.wait_for_function("document.querySelector('#cr-memory canvas')?.dataset.total", timeout=90_000)
    await person.ask("When was the lighthouse on Gull Rock built?")
    assert "Hello." in await person.answered()
    account = served.runtime.accounts.accounts()[0]
    assert served.engine.requests[0].output_scope.id == account.id
    await page.goto(f"{served.url}/profile")
    await page.fill("form[action='/profile/keys'] input[name=name]", HOSTILE)
    await page.click("form[action='/profile/keys'] button")
    assert re.search(r"coread_[\w-]+", await page.content())
    await page.goto(f"{served.url}/people")
    assert await findings(page) == []
    await page.goto(f"{served.url}/profile?language=zh-Hant")
    assert HOSTILE in await page.inner_text("main")
    await page.get_by_role("button", name="登出").wait_for()
    await page.get_by_role("link", name="English").click()
    assert await findings(page) == []
    assert await page.evaluate("window.ran") is None
    await page.get_by_role("button", name="Sign out").click()
    await page.wait_for_url("**/sign-in")
    assert await findings(page) == []
    await page.goto(served.url)
    await page.wait_for_url("**/sign-in")
    await page.fill("input[name=name]", "root")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await page.wait_for_selector("#cr-ask textarea")
    assert refused == []
    person.assert_unharmed()
    await context.close()
