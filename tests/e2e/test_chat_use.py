"""Using the chat: by keyboard, on a phone, in another language; copying, stages, the best sentence."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from playwright.async_api import Browser, expect

from engine.types import Delta, Done, Reading, Waiting
from tests.app.fakes import receipt
from tests.e2e.conftest import Person, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def test_stages_are_told_and_the_best_sentence_stands_there_at_once(
    served: Served, browser: Browser
) -> None:
    seen = threading.Event()

    async def until_seen() -> None:
        await asyncio.to_thread(seen.wait, 60)

    served.engine.script = [Waiting(3, "queue"), until_seen, Reading(384, 620, 512), "hold"]
    ann = await Person.enter(browser, served.url)
    await ann.ask("When was the lighthouse on Gull Rock built?")
    chat = ann.page.locator("#cr-chat")
    await chat.get_by_text("Waiting in line, place 3").wait_for()
    seen.set()
    await chat.get_by_text("Reading 384 of 620 tokens, 512 of them already in memory").wait_for()
    await expect(chat.locator("blockquote")).to_contain_text("built in 1871")
    assert not served.engine.generations[0].ended, "nothing was written yet"
    await ann.page.get_by_role("button", name="Stop").click()
    await ann.answered()
    ann.assert_unharmed()


async def test_an_answer_is_copied_as_it_was_written(served: Served, browser: Browser) -> None:
    answer = "Built in 1871 (*not* 1872); see `lamp.md` & <b>keepers</b> [1]."
    served.engine.script = [Delta(0, answer, (80,)), Done(0, "stop", answer, (80,), receipt(10, 5, 1))]
    ann = await Person.enter(browser, served.url)
    await ann.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
    await ann.ask("When was the lighthouse on Gull Rock built?")
    await ann.answered()
    # "Copied" is said for two seconds only: it is noted when it comes, not looked for while it is there.
    await ann.page.evaluate(
        "window.said = ''; const said = document.querySelector('[data-cr=said]');"
        "new MutationObserver(() => { window.said += said.textContent; }).observe(said, { childList: true })"
    )
    await ann.page.get_by_role("button", name="Copy").click()
    await ann.page.wait_for_function("window.said === 'Copied'")
    assert await ann.page.evaluate("navigator.clipboard.readText()") == answer
    ann.assert_unharmed()


async def test_all_of_a_turn_by_keyboard(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    page, keys = ann.page, ann.page.keyboard
    await page.locator("#cr-ask textarea").focus()
    await keys.type("When was the lighthouse on Gull Rock built?")
    await keys.press("Enter")
    await ann.answered()
    source = page.locator("#cr-chat a[href^='#cr-source-']").first
    for _ in range(60):
        if await source.evaluate("link => link === document.activeElement"):
            break
        await keys.press("Shift+Tab")
    await expect(source).to_be_focused()
    await keys.press("Enter")
    await page.locator("[data-cr=sheet] mark").wait_for()
    await expect(page.locator("[data-cr=sheet] :focus, [data-cr=sheet]:focus")).to_have_count(1)
    await keys.press("Escape")
    await page.locator("[data-cr=sheet] mark").wait_for(state="hidden")
    await expect(source).to_be_focused()
    assert await page.locator("#cr-chat a[href^='#cr-']:not([role=button])").count() == 0
    edit = page.locator("#cr-chat").get_by_role("button", name="Edit")
    await edit.focus()
    await keys.press("Space")
    await expect(page.locator("[data-cr=form-text]")).to_have_value(
        "When was the lighthouse on Gull Rock built?"
    )
    await keys.press("Escape")
    await expect(edit).to_be_focused()
    folded = page.locator("#cr-chat .title[role=button]").last
    await expect(folded).to_have_attribute("aria-expanded", "false")
    await folded.focus()
    await keys.press("Enter")
    await page.get_by_text("Reused from shared memory").wait_for()
    await expect(folded).to_have_attribute("aria-expanded", "true")
    ann.assert_unharmed()


async def test_the_language_follows_the_browser_and_the_switch(served: Served, browser: Browser) -> None:
    context = await browser.new_context(locale="zh-TW")
    ann = Person(context, await context.new_page(), served.url)
    await ann.load()
    await expect(ann.page.get_by_role("button", name="提問")).to_be_visible()
    await expect(ann.page.locator("html")).to_have_attribute("lang", re.compile("^zh-(Hant|TW)$"))
    await ann.ask("   ")
    await ann.page.get_by_text("問題是空的").wait_for()
    await ann.page.get_by_role("link", name="English").click()
    await expect(ann.page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    await ann.there()
    await ann.ask("When does the bakery open?")
    await ann.answered()
    await ann.page.reload()
    await ann.there()
    await expect(ann.page.get_by_role("link", name="繁體中文")).to_be_visible()
    assert await ann.page.evaluate("document.body.innerText.match(/@@[a-z_.]+@@/)") is None
    ann.assert_unharmed()
