"""The pages on a phone: nothing is wider than the screen, however long a word is; and what has to be in the
first screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from engine.types import Delta, Done
from tests.app.fakes import receipt
from tests.e2e.conftest import Person, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LONG = "Donaudampfschifffahrtsgesellschaft" * 12


async def test_nothing_is_wider_than_a_phone(served: Served, browser: Browser, tmp_path: Path) -> None:
    context = await browser.new_context(viewport={"width": 390, "height": 844}, locale="zh-TW")
    ann = Person(context, await context.new_page(), served.url)
    await ann.load()
    file = tmp_path / f"{LONG[:200]}.md"
    file.write_text(f"# {LONG}\n\nThe {LONG} is striped.\n")
    answer = f"The {LONG} is striped."
    served.engine.script = [Delta(0, answer, (80,)), Done(0, "stop", answer, (80,), receipt(10, 5, 1))]
    await ann.sidebar()
    await ann.page.get_by_role("button", name="你自己的文件").click()
    await ann.page.locator("#cr-upload input[type=file]").set_input_files(str(file))
    await ann.page.get_by_text("完成，共").first.wait_for()
    await ann.page.locator(".toggle-button").first.click()
    await ann.ask(f"Is the {LONG} striped?")
    await ann.page.get_by_text("收據 ·").wait_for()
    await ann.page.get_by_text("收據 ·").click()
    await ann.page.get_by_text("取自共用記憶").wait_for()
    await ann.page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    wide = await ann.page.evaluate(
        "[...document.querySelectorAll('#cr-chat .message, #cr-chat a')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.textContent.slice(0, 40))"
    )
    assert wide == []
    ann.assert_unharmed()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
async def test_the_first_screen_has_the_box_and_the_suggested_questions(
    served: Served, browser: Browser, width: int, height: int
) -> None:
    context = await browser.new_context(viewport={"width": width, "height": height}, locale="en-GB")
    ann = Person(context, await context.new_page(), served.url)
    await ann.load()
    suggested = ann.page.locator("#cr-suggest button")
    await expect(suggested).to_have_count(4)
    for part in (ann.page.locator("#cr-ask"), *await suggested.all()):
        await expect(part).to_be_in_viewport(ratio=1)
    assert await ann.page.evaluate("scrollY") == 0
    # They are about all documents: while one is read they are not there.
    await ann.page.locator("#cr-document input").click()
    await ann.page.get_by_role("option").get_by_text("The lighthouse").first.click()
    await expect(suggested.first).to_be_hidden()
    await ann.page.locator("#cr-document input").click()
    await ann.page.get_by_role("option").first.click()
    await expect(suggested.first).to_be_visible()
    await ann.page.locator("#cr-document input").blur()
    await ann.page.evaluate("scrollTo(0, 0)")
    text = ann.page.locator("#cr-chat .placeholder")
    await expect(text).to_be_in_viewport(ratio=0.99)  # what the page is about is not cut off to make the room
    await ann.ask("When was the lighthouse on Gull Rock built?")
    await ann.answered()
    await expect(suggested.first).to_be_hidden()
    await ann.page.evaluate("scrollTo(0, 0)")
    await expect(ann.page.locator("#cr-ask")).to_be_in_viewport(ratio=1)
    ann.assert_unharmed()


async def test_no_collection_is_cut_off_on_a_phone(served: Served, browser: Browser) -> None:
    context = await browser.new_context(viewport={"width": 390, "height": 844}, locale="en-GB")
    ann = Person(context, await context.new_page(), served.url)
    await ann.page.goto(served.url + "/library")
    for number in range(2):
        await ann.page.get_by_role("button", name="New collection").click()
        await ann.page.locator("[data-cl=dialog] input").fill(f"Papers of the harbour {number}")
        await ann.page.keyboard.press("Enter")
        await expect(ann.page.locator("[data-cl=title]")).to_have_text(f"Papers of the harbour {number}")
    cards = ann.page.locator("[data-cl=collections] button")
    await expect(cards).to_have_count(3)
    for card in await cards.all():
        await expect(card).to_be_in_viewport(ratio=1)
    ann.assert_unharmed()
