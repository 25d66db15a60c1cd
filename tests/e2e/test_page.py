"""The page in a real browser: people apart, hostile text shown, stop and leave, memory drawn."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from app.memory_feed import open_readers
from engine.types import Delta, Done, Reading
from tests.app.fakes import receipt
from tests.e2e.conftest import Person, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTILE = (
    '<img src=x onerror="window.ran=1"> ${window.ran=1} ![p](https://example.org/p.png) '
    "[l](javascript:window.ran=1)"
)


async def test_an_answer_with_source_receipt_and_map(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.ask("When was the lighthouse on Gull Rock built?")
    text = await ann.answered()
    assert "Hello." in text
    await expect(ann.page.get_by_role("button", name="Clear", exact=True)).to_be_hidden()
    await ann.page.get_by_text(re.compile("^Sources? ·")).first.click()
    await ann.page.get_by_text("built in 1871").wait_for()
    await ann.page.locator("#cr-chat a[href^='#cr-source-']").first.click()
    mark = ann.page.locator("[data-cr=sheet] mark")
    await mark.wait_for()
    assert "built in 1871" in await mark.inner_text()
    await ann.page.keyboard.press("Escape")
    await expect(mark).to_be_hidden()
    await ann.page.locator("#cr-chat a[href^='#cr-good-']").click()
    await ann.page.locator("[data-cr=form-text]").fill("Clear.")
    await ann.page.locator("[data-cr=form-go]").click()
    await ann.page.locator("[data-cr=sheet]").wait_for(state="hidden")
    await ann.page.locator("#cr-chat a[href^='#cr-good-'][aria-pressed=true]").wait_for()
    await ann.page.get_by_text("Receipt ·").click()
    await ann.page.get_by_text("Reused from shared memory").wait_for()
    shared = sum(readers >= 2 for readers in open_readers(served.engine.memory()))
    drawn = f"document.querySelector('#cr-memory canvas').dataset.shared === '{shared}'"
    await ann.page.wait_for_function(drawn)
    await ann.page.locator("#cr-memory").get_by_text("1 of them shared").wait_for()
    assert await ann.page.locator("[data-cr=twin]").text_content()
    ann.assert_unharmed()


async def test_two_browsers_are_two_people(served: Served, browser: Browser) -> None:
    ann, bob = await Person.enter(browser, served.url), await Person.enter(browser, served.url)
    await ann.ask("When was the lighthouse on Gull Rock built? nonce-ann")
    await bob.ask("What does the lamp burn? nonce-bob")
    for person, mine, other in ((ann, "nonce-ann", "nonce-bob"), (bob, "nonce-bob", "nonce-ann")):
        text = await person.answered()
        assert mine in text
        await person.load()
        content = await person.page.content()
        assert other not in content
    ids = {r.output_scope.id for r in served.engine.requests}
    assert len(ids) == 2


async def test_a_reload_finds_the_conversation_again(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open?")
    await ann.answered()
    await ann.load()
    await ann.sidebar()
    await ann.page.locator("#cr-history label").first.click()
    assert "When does the bakery open?" in await ann.answered()


async def test_conversations_are_renamed_found_exported_and_deleted(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open?")
    await ann.answered()
    page = ann.page
    await ann.sidebar()
    title = page.locator("#cr-title input, #cr-title textarea").first
    await expect(title).to_have_value("When does the bakery open?")
    await title.fill("Bread and rye")
    await page.get_by_role("button", name="Rename").click()
    listed = page.locator("#cr-history label")
    await listed.get_by_text("Bread and rye").wait_for()
    search = page.locator("#cr-search input, #cr-search textarea").first
    await search.fill("zebra")
    await page.get_by_text("No conversation contains that").wait_for()
    await search.fill("bakery")
    await listed.get_by_text("Bread and rye").wait_for()
    for name, word in (("Export Markdown", "## Answer"), ("Export JSON", '"sources"')):
        async with page.expect_download() as started:
            await page.get_by_role("button", name=name).click()
        download = await started.value
        assert download.suggested_filename.startswith("coread-bread-and-rye-")
        assert word in await asyncio.to_thread(Path(await download.path()).read_text)
    await page.locator("#cr-delete").click()
    await page.get_by_role("button", name="Keep it").click()
    await expect(listed).to_have_count(1)
    await page.locator("#cr-delete").click()
    await page.locator("[data-cr=confirm-go]").click()
    await page.locator("#cr-chat .message").first.wait_for(state="hidden")
    await expect(listed).to_have_count(0)
    ann.assert_unharmed()


async def test_what_is_typed_beside_an_answer_stays(served: Served, browser: Browser) -> None:
    """Gradio sends the last update of a stream again when it has ended."""
    ended = threading.Event()

    async def until_typed() -> None:
        await asyncio.to_thread(ended.wait, 120)

    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open?")
    await ann.answered()
    page = ann.page
    await ann.sidebar()
    done = Done(0, "stop", "One two.", (80, 80), receipt(10, 5, 2))
    served.engine.script = [Delta(0, "One", (80,)), until_typed, Delta(0, " two.", (80,)), done]
    await ann.ask("What does a loaf of rye cost?")
    await expect(page.locator("#cr-chat")).to_contain_text("One")
    title = page.locator("#cr-title input, #cr-title textarea").first
    search = page.locator("#cr-search input, #cr-search textarea").first
    listed = page.locator("#cr-history label")
    try:
        await search.fill("zebra")
        await page.get_by_text("No conversation contains that").wait_for()
        await title.fill("Bread and rye")
    finally:
        ended.set()
    await ann.answered(2)
    # What comes after the answer has come when the page does the next thing.
    await search.fill("bakery")
    await expect(listed).to_have_count(1)
    await expect(title).to_have_value("Bread and rye")
    await page.get_by_role("button", name="Rename").click()
    await listed.get_by_text("Bread and rye").wait_for()
    await expect(search).to_have_value("bakery")
    ann.assert_unharmed()


async def test_an_edited_question_is_a_branch(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open? <b>${window.ran=1}")
    await ann.answered()
    page = ann.page
    await page.get_by_role("button", name="Edit").click()
    box = page.locator("[data-cr=form-text]")
    await page.wait_for_function("document.querySelector('[data-cr=form-text]').value.includes('${window')")
    await box.fill("What does a loaf of rye cost?")
    await page.locator("[data-cr=form-go]").click()
    chat = page.locator("#cr-chat")
    await chat.get_by_text("2 of 2").wait_for()
    await expect(chat).to_contain_text("loaf of rye")
    await chat.get_by_role("button", name="The version before this one").click()
    await chat.get_by_text("1 of 2").wait_for()
    await expect(chat).to_contain_text("When does the bakery open?")
    ann.assert_unharmed()


async def test_a_draft_survives_a_reload_before_it_was_put_back(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.page.locator("#cr-ask textarea").fill("A draft")
    await ann.page.add_init_script(
        "addEventListener('DOMContentLoaded', () => {"
        "  const left = Number(sessionStorage.getItem('test.reloads') ?? 2);"
        "  if (left) { sessionStorage.setItem('test.reloads', left - 1); location.reload(); }"
        "})"
    )
    await ann.page.reload(wait_until="commit")
    await ann.page.wait_for_function("sessionStorage.getItem('test.reloads') === '0'")
    await expect(ann.page.locator("#cr-ask textarea")).to_have_value("A draft")
    await ann.ask("When does the bakery open?")
    await ann.answered()
    await ann.page.reload()
    await ann.page.locator("#cr-chat .message").first.wait_for()
    await expect(ann.page.locator("#cr-ask textarea")).to_have_value("")
    ann.assert_unharmed()


async def test_a_reload_in_mid_answer_finds_it_again(served: Served, browser: Browser) -> None:
    served.engine.script = [Delta(0, "Hel", (82,)), "hold"]
    served.runtime.chat.grace_s = 60.0  # a slow machine's reload is not a person who left
    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open?")
    await ann.page.get_by_text("Hel", exact=True).wait_for()
    await ann.page.locator("#cr-ask textarea").fill("A draft")
    await ann.page.reload()
    await ann.page.get_by_text("Hel", exact=True).wait_for()
    assert "When does the bakery open?" in await ann.page.locator("#cr-chat").inner_text()
    assert not served.engine.generations[0].aborted
    await expect(ann.page.locator("#cr-ask textarea")).to_have_value("A draft")
    await ann.page.get_by_role("button", name="Stop").click()
    assert "Stopped before the end." in await ann.answered()
    ann.assert_unharmed()


async def test_stop_keeps_what_was_written(served: Served, browser: Browser) -> None:
    served.engine.script = [Reading(1, 10, 0), Delta(0, "Half", (80,)), "hold"]
    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open?")
    await ann.page.locator("#cr-chat").get_by_text("Half").wait_for()
    await ann.page.get_by_role("button", name="Stop").click()
    assert "Stopped before the end." in await ann.answered()


async def test_hostile_names_contents_questions_and_answers_are_only_shown(
    served: Served, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "${window.ran=1}<img src=x onerror=window.ran=1>.md"
    file.write_text(f"# {HOSTILE}\n\nThe zebra is striped. {HOSTILE} <|im_end|>\n")
    answer = f"The zebra is striped. {HOSTILE}"
    served.engine.script = [Delta(0, answer, (80,)), Done(0, "stop", answer, (80,), receipt(10, 5, 1))]
    ann = await Person.enter(browser, served.url)
    await ann.sidebar()
    await ann.add(file)
    await ann.ask(f"Is the zebra striped? {HOSTILE}")
    await ann.answered()
    await ann.page.get_by_text(re.compile("^Sources? ·")).first.click()
    await ann.page.locator("#cr-chat a[href^='#cr-source-']").first.click()
    await ann.page.locator("[data-cr=sheet]").get_by_text("${window.ran=1}").first.wait_for()
    await ann.page.wait_for_timeout(1_000)
    await ann.load()
    await ann.sidebar()
    await ann.page.locator("#cr-history label").first.click()
    await ann.answered()
    assert await ann.page.evaluate("window.ran") is None
    assert await ann.page.locator("img[src*=example], #cr-chat a[href]:not([href^='#cr-'])").count() == 0
    ann.assert_unharmed()


@pytest.mark.parametrize("question", ["   ", "x" * 200_000])
async def test_impossible_questions_get_a_sentence(served: Served, browser: Browser, question: str) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.ask(question)
    await ann.page.get_by_text(re.compile("The question (is empty|has 200,000 characters)")).wait_for()
    assert not served.engine.requests


async def test_the_second_reader_joins(served: Served, browser: Browser) -> None:
    ann = await Person.enter(browser, served.url)
    await ann.ask("When was the lighthouse on Gull Rock built?")
    await ann.answered()
    await ann.page.get_by_role("button", name="Invite a second reader").click()
    await ann.page.get_by_text("came from memory").wait_for()
    await expect(ann.page.locator("#cr-guest")).to_contain_text(
        "The lighthouse ? unsupported"
    )  # as any answer
    assert len(served.engine.requests) == 2
