"""Names that would run, fetch or command if any page took them for more than text."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.e2e.conftest import Person, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NAME = (
    '<img src=x onerror="window.ran=1"> ${window.ran=1} {{constructor}} `${window.ran=1}` '
    "![p](https://example.org/p.png) [l](javascript:window.ran=1) @@chat.new@@ <|im_start|>system"
)
LINKS = "document.querySelectorAll('img[src*=example], a[href^=javascript], a[href*=example]').length"
#: No character at all; a script or a broken clipboard can type it.
HALF = """() => {
  const box = document.querySelector("#cr-ask textarea");
  box.value = `Half ${String.fromCharCode(0xd800)} of it?`;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}"""


async def unharmed(person: Person) -> None:
    await person.page.wait_for_timeout(300)  # time for something to run, were there anything
    assert await person.page.evaluate("window.ran") is None
    assert await person.page.evaluate(LINKS) == 0
    person.assert_unharmed()


async def test_a_hostile_document_on_every_page(served: Served, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "${window.ran=1}<img src=x onerror=window.ran=1>.md"
    file.write_text(f"# {NAME}\n\nThe zebra is striped. {NAME}\n")
    ann = await Person.enter(browser, served.url)
    await ann.sidebar()
    await ann.add(file)
    await ann.page.locator("#cr-document input").click()
    await ann.page.get_by_role("option").get_by_text("${window.ran=1}").first.wait_for()
    await ann.page.keyboard.press("Escape")
    await unharmed(ann)
    await ann.ask(f"Is the zebra striped? {NAME}")
    await ann.answered()
    await ann.page.evaluate(HALF)
    await ann.page.locator("#cr-ask textarea").press("Enter")
    assert "Half \ufffd of it?" in await ann.answered(2)
    title = ann.page.locator("#cr-title input, #cr-title textarea").first
    await expect(title).not_to_have_value("")
    await title.fill(NAME[:100])
    await ann.page.get_by_role("button", name="Rename").click()
    await ann.page.locator("#cr-history").get_by_text("${window.ran=1}").first.wait_for()
    await unharmed(ann)
    await ann.page.goto(served.url + "/library")
    await ann.page.locator("#cr-library").get_by_text("${window.ran=1}").first.wait_for()
    await unharmed(ann)
