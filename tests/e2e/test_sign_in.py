"""People with accounts in a real browser, under the content security policy that is served."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Browser, Page, expect

from tests.e2e.conftest import SETUP_TOKEN, Person, Served, set_up
from tests.e2e.test_accessibility import findings

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PASSWORD = "correct horse"
QUESTION = "What is a page that is left open told?"
HOSTILE = "<img src=x onerror=window.ran=1> ${window.ran=1}"


async def test_set_up_ask_sign_out_and_in_again(with_accounts: Served, browser: Browser) -> None:
    served, context = with_accounts, await browser.new_context()
    page = await context.new_page()
    person = Person(context, page, served.url)
    refused: list[str] = []
    page.on("console", lambda m: refused.append(m.text) if "Content Security Policy" in m.text else None)
    await set_up(page, served)
    assert await findings(page) == []
    await page.fill("input[name=token]", SETUP_TOKEN)
    await page.fill("input[name=name]", "Root")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await person.there()
    await person.ask("When was the lighthouse on Gull Rock built?")
    assert "Hello." in await person.answered()
    account = served.runtime.accounts.accounts()[0]
    assert served.engine.requests[0].output_scope.id == account.id
    await page.goto(f"{served.url}/profile")
    await page.fill("form[action='/profile/keys'] input[name=name]", HOSTILE)
    await page.click("form[action='/profile/keys'] button")
    await expect(page.locator("main")).to_contain_text(re.compile(r"coread_[\w-]+"))
    await page.goto(f"{served.url}/people")
    assert await findings(page) == []
    await page.goto(f"{served.url}/profile?language=zh-Hant")
    await expect(page.locator("main")).to_contain_text(HOSTILE)
    await page.get_by_role("button", name="登出").wait_for()
    await page.get_by_role("link", name="English").click()
    await page.get_by_role("button", name="Sign out").wait_for()
    assert await findings(page) == []
    assert await page.evaluate("window.ran") is None
    left = await context.new_page()
    left_open = Person(context, left, served.url)
    await left_open.load()
    await left.fill("#cr-ask textarea", QUESTION)
    await page.get_by_role("button", name="Sign out").click()
    await page.wait_for_url("**/sign-in")
    assert await findings(page) == []
    await signs_in_where_it_was_left_open(left)
    assert refused == []
    person.assert_unharmed()
    await context.close()


async def signs_in_where_it_was_left_open(page: Page) -> None:
    """The session has been ended in another tab: a question is not lost, and nothing says that the server is
    gone or has failed."""
    box = page.locator("#cr-ask textarea")
    async with page.expect_response(lambda answer: "/queue/join" in answer.url and answer.status == 401):
        # By script: where the panel has asked first, the box is behind the dialog already.
        await box.dispatch_event("keypress", {"key": "Enter", "bubbles": True})
    told = page.get_by_role("dialog", name="You are signed out")
    await expect(told).to_be_visible()
    await expect(page.locator("#cr-chat .error")).to_have_count(0)
    await expect(page.locator('#cr-memory [data-cr="offline"]')).to_be_hidden()
    assert await findings(page) == []
    await told.get_by_role("link", name="Sign in").click()
    await page.wait_for_url("**/sign-in")
    await page.fill("input[name=name]", "root")
    await page.fill("input[name=password]", PASSWORD)
    await page.click("button")
    await expect(box).to_have_value(QUESTION)
