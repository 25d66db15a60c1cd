"""axe-core over every page: nothing that it calls serious or critical.

What Gradio's own components bring along and no option or style of ours can change is listed in `GRADIO`, by
rule and by the part of the page that it is about.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from tests.e2e.conftest import Person, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
GRADIO: frozenset[tuple[str, str]] = frozenset()


async def findings(page: Page) -> list[str]:
    """One line for each serious or critical finding on the page as it stands, once nothing moves: half faded
    in, every text has too little contrast."""
    await page.wait_for_function(
        "document.getAnimations().every(a => a.playState !== 'running'"
        " || a.effect.getComputedTiming().endTime === Infinity)"
    )
    results = (await Axe().run(page)).response
    assert results["passes"], "axe looked at nothing"
    return [
        f"{violation['id']}: {node['html'][:160]} ({node['failureSummary'].splitlines()[-1].strip()[:160]})"
        for violation in results["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
        if not any(violation["id"] == rule and part in node["html"] for rule, part in GRADIO)
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page(served: Served, browser: Browser, scheme: str) -> None:
    context = await browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    ann = Person(context, await context.new_page(), served.url)
    await ann.load()
    found = {"empty": await findings(ann.page)}
    await ann.ask("When was the lighthouse on Gull Rock built?")
    await ann.answered()
    await ann.page.get_by_text("Receipt ·").click()
    await ann.page.get_by_text(re.compile("^Sources? ·")).first.click()
    await ann.page.get_by_text("Reused from shared memory").wait_for()
    await ann.sidebar()
    await ann.page.locator("#cr-history label").first.wait_for()
    await ann.page.get_by_role("button", name="Your own documents").click()
    await ann.page.locator("#cr-delete").wait_for()
    found["answer and sidebar"] = await findings(ann.page)
    await ann.page.locator("#cr-delete").click()
    await ann.page.locator("[data-cr=confirm-go]").wait_for()
    found["question before deleting"] = await findings(ann.page)
    for path in ("/memory", "/library", "/profile"):
        await ann.page.goto(served.url + path)
        await ann.page.locator("h1").first.wait_for()
        await ann.page.wait_for_load_state("networkidle" if path == "/profile" else "load")
        found[path] = await findings(ann.page)
    assert {state: lines for state, lines in found.items() if lines} == {}


async def tab_stops(page: Page) -> list[tuple[str, float, float]]:
    """Name, left and right edge (CSS px) of everything that Tab reaches from the question box, once round."""
    stops: list[tuple[str, float, float]] = []
    await page.locator("#cr-ask textarea").focus()
    for _ in range(80):
        await page.keyboard.press("Tab")
        stop = await page.evaluate(
            "(() => { const e = document.activeElement, r = e.getBoundingClientRect();"
            " return [e.getAttribute('aria-label') || e.innerText || e.id || e.tagName, r.left, r.right,"
            " e.matches('#cr-ask textarea')]; })()"
        )
        stops.append((str(stop[0]), float(stop[1]), float(stop[2])))
        if stop[3]:
            return stops
    raise AssertionError(f"Tab does not come round to the question box: {stops}")


async def test_the_keyboard_stays_on_the_screen_and_opens_the_sidebar(
    served: Served, browser: Browser
) -> None:
    context = await browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    ann = Person(context, await context.new_page(), served.url)
    await ann.load()
    await ann.ask("When was the lighthouse on Gull Rock built?")
    await ann.answered()
    page = ann.page
    new, toggle = (page.get_by_role("button", name=name) for name in ("New conversation", "Toggle Sidebar"))
    await expect(page.locator("#cr-history input")).to_have_count(1)  # the sidebar has all that it can have
    for width in (1280, 390):
        await page.set_viewport_size({"width": width, "height": 844})
        stops = await tab_stops(page)
        assert [stop for stop in stops if stop[1] < 0 or stop[2] > width] == []
        assert "Toggle Sidebar" in {name for name, *_ in stops}
        await toggle.focus()
        await page.keyboard.press("Enter")
        await expect(new).to_be_in_viewport(ratio=1)
        await expect(toggle).to_have_attribute("aria-expanded", "true")
        await page.keyboard.press("Tab")
        await expect(new).to_be_focused()
        await toggle.click()  # other tests open it so
        await expect(new).to_be_hidden()
        await expect(toggle).to_have_attribute("aria-expanded", "false")
    ann.assert_unharmed()


async def test_the_check_sees_a_fault(browser: Browser, tmp_path: Path) -> None:
    page = await (await browser.new_context()).new_page()
    await page.set_content(
        "<html lang=en><title>x</title><main><h1>x</h1><input><img src=data:,></main></html>"
    )
    assert {line.split(":")[0] for line in await findings(page)} >= {"label", "image-alt"}
