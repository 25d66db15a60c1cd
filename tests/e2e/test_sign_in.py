"""People with accounts in a real browser, under the content security policy that is served."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Browser, expect

from tests.e2e.conftest import SETUP_TOKEN, Person, Served, set_up
from tests.e2e.test_accessibility import findings

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PASSWORD = "correct horse"
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
