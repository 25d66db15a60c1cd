"""The chat on a phone: nothing is wider than the screen, however long a word is."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser

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
