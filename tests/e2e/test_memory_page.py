"""The memory page in a real browser, over the real memory core: it draws, tells, replays, stays harmless."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from app.dashboard.recording import packaged
from app.demo import Demo, Pace
from app.runtime import Runtime
from app.settings import load_settings
from tests.app.conftest import FakeParts
from tests.app.small_engine import SmallEngine
from tests.e2e.conftest import Person, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
HOSTILE = (
    "# Zebra ${window.ran=1}<img src=x onerror=window.ran=1>`${window.ran=1}`\n\nThe zebra is striped.\n"
)


@pytest.fixture
def server(tmp_path: Path, two_sample_documents: None, request: pytest.FixtureRequest) -> Iterator[str]:
    blocks = getattr(request, "param", 600)
    parts = FakeParts(SmallEngine(blocks, threaded=True, pause_s=0.002))  # type: ignore[arg-type]
    runtime = Runtime(load_settings(data_dir=tmp_path / "data", port=0, answer_tokens=48), parts)
    runtime.demo = Demo(runtime, Pace(between_s=0.2, reads_s=3.0))
    with serving(runtime) as url:
        yield url


async def drawn(page: Page, url: str) -> None:
    await page.goto(f"{url}/memory")
    await page.wait_for_function("document.querySelector('[data-cd=map]')?.dataset.total")


#: What a person's going back to live leaves behind: no recording starts by itself.
LIVE = "sessionStorage.setItem('coread.live', '1')"


async def enter(browser: Browser, url: str, *, live: bool = True) -> Person:
    context = await browser.new_context(viewport={"width": 1400, "height": 900})
    if live:
        await context.add_init_script(LIVE)
    person = Person(context, await context.new_page(), url)
    await drawn(person.page, url)
    return person


def part(page: Page, name: str) -> Locator:
    return page.locator(f"[data-cd={name}]")


async def test_the_demonstration_fills_shares_copies_and_drains(server: str, browser: Browser) -> None:
    ann = await enter(browser, server)
    page = ann.page
    queued: list[str] = []
    page.on("request", lambda request: queued.append(request.url) if "/queue/" in request.url else None)
    await expect(part(page, "twin")).to_contain_text("600 blocks")
    await page.get_by_role("button", name="Start the demonstration").click()
    await page.wait_for_function("Number(document.querySelector('[data-cd=map]').dataset.shared) > 5")
    await page.wait_for_function("document.querySelector('[data-cd=pages]').dataset.tables > 0")
    await expect(part(page, "rows")).to_contain_text("Scripted reader")
    await expect(part(page, "tree-twin")).to_contain_text(re.compile("lighthouse|bakery"))
    await part(page, "map").hover(position={"x": 4, "y": 4})
    await expect(part(page, "hover")).to_contain_text("tokens 0 to")
    await expect(part(page, "hover")).to_contain_text("instructions")
    await page.get_by_role("button", name="Running now").click()
    await expect(part(page, "twin")).to_contain_text("Running now")
    await page.get_by_role("button", name="Start the demonstration").wait_for()
    await expect(part(page, "twin")).to_contain_text(", 0 held")
    assert queued == [], "watching is no event of Gradio's queue"
    ann.assert_unharmed()


async def test_a_hostile_title_is_only_shown(server: str, browser: Browser, tmp_path: Path) -> None:
    ann = await enter(browser, server)
    file = tmp_path / "zebra.md"
    file.write_text(HOSTILE)
    await ann.load()
    await ann.sidebar()
    await ann.add(file)
    await ann.ask("Is the zebra striped? ${window.ran=1}<img src=x onerror=window.ran=1>")
    await ann.answered()
    await drawn(ann.page, server)
    await expect(part(ann.page, "tree-twin")).to_contain_text("${window.ran=1}")
    await expect(part(ann.page, "rows")).to_contain_text("<img")
    assert await ann.page.evaluate("window.ran") is None
    ann.assert_unharmed()


async def replayed(page: Page) -> None:
    await page.get_by_text("Recording, not live").wait_for()
    await page.wait_for_function("Number(document.querySelector('[data-cd=map]').dataset.shared) > 20")


@pytest.mark.parametrize("kind", sorted(packaged()))
async def test_a_recording_is_labelled_as_one(server: str, browser: Browser, kind: str) -> None:
    ann = await enter(browser, server)
    await ann.page.locator(f"[data-cd=replay-{kind}]").click()
    await replayed(ann.page)
    await ann.page.get_by_role("button", name="Back to live").click()
    await expect(part(ann.page, "map")).to_have_attribute("data-total", "600")
    await expect(ann.page.get_by_text("Recording, not live")).to_be_hidden()
    ann.assert_unharmed()


async def test_a_recording_plays_only_while_nobody_reads(server: str, browser: Browser) -> None:
    ann = await enter(browser, server, live=False)
    await replayed(ann.page)
    await expect(part(ann.page, "map")).not_to_have_attribute("data-total", "600")
    await ann.page.get_by_text("because nobody is reading").wait_for()
    bob = await enter(browser, server)
    await bob.page.get_by_role("button", name="Start the demonstration").click()
    await expect(part(ann.page, "map")).to_have_attribute("data-total", "600")
    await expect(ann.page.get_by_text("Recording, not live")).to_be_hidden()
    ann.assert_unharmed()


@pytest.mark.parametrize("server", [500, 100_000], indirect=True)
@pytest.mark.parametrize("width", [390, 1400])
async def test_small_and_large_pools_fit_phones_and_screens(
    server: str, browser: Browser, width: int, request: pytest.FixtureRequest
) -> None:
    context = await browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme="dark", reduced_motion="reduce"
    )
    await context.add_init_script(LIVE)
    person = Person(context, await context.new_page(), server)
    await drawn(person.page, server)
    blocks = request.node.callspec.params["server"]
    await expect(part(person.page, "map")).to_have_attribute("data-total", str(blocks))
    fits = "document.documentElement.scrollWidth <= innerWidth"
    if blocks > 512:  # most of it is free, so the part in use is enlarged and a strip shows the rest
        await expect(part(person.page, "strip")).to_be_visible()
        await person.page.wait_for_function(fits)
        await person.page.get_by_role("button", name="Show the whole pool").click()
    await expect(part(person.page, "map")).to_have_attribute("data-shown", str(blocks))
    await person.page.wait_for_function(fits)
    cells = await person.page.evaluate(
        "(c => [c.width, c.height, c.clientWidth <= c.parentElement.clientWidth])"
        "(document.querySelector('[data-cd=map]'))"
    )
    assert cells[0] * cells[1] >= blocks
    assert cells[2]
    person.assert_unharmed()


async def test_nothing_is_asked_while_the_page_is_hidden(server: str, browser: Browser) -> None:
    ann = await enter(browser, server)
    await ann.page.evaluate(
        "Object.defineProperty(document, 'hidden', { get: () => true }); window.asked = 0;"
        "const old = window.fetch; window.fetch = (...a) => { window.asked++; return old(...a); };"
    )
    await ann.page.wait_for_timeout(1_500)  # one that was under way may still end
    await ann.page.evaluate("window.asked = 0")
    await ann.page.wait_for_timeout(3_000)
    assert await ann.page.evaluate("window.asked") == 0
