"""What happens beside an answer, and how much of a long conversation travels while one is written."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from engine.types import Delta, Done
from tests.app.fakes import receipt
from tests.e2e.conftest import Person, Served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TURNS, PIECES = 100, 20


async def test_an_upload_leaves_a_running_answer_alone(
    served: Served, browser: Browser, tmp_path: Path
) -> None:
    added = threading.Event()

    async def until_added() -> None:
        await asyncio.to_thread(added.wait, 120)

    done = Done(0, "stop", "One two.", (80, 80), receipt(10, 5, 2))
    served.engine.script = [Delta(0, "One", (80,)), until_added, Delta(0, " two.", (80,)), done]
    file = tmp_path / "mill.md"
    file.write_text("# The mill\n\nThe mill at Tarn grinds barley.\n")
    ann = await Person.enter(browser, served.url)
    chat = ann.page.locator("#cr-chat")
    await ann.ask("When does the bakery open?")
    await expect(chat).to_contain_text("One")
    await ann.sidebar()
    await ann.add(file)
    await expect(chat).to_contain_text("One")
    await expect(ann.page.get_by_role("button", name="Stop")).to_be_visible()
    assert not served.engine.generations[0].aborted
    added.set()
    assert "One two." in await ann.answered()
    await ann.page.locator("#cr-document input").click()
    await ann.page.get_by_role("option").filter(has_text="The mill").first.wait_for()
    ann.assert_unharmed()


async def test_a_long_conversation_does_not_travel_with_every_piece_of_an_answer(
    served: Served, browser: Browser
) -> None:
    ann = await Person.enter(browser, served.url)
    runtime, cookies = served.runtime, await ann.context.cookies()
    who = runtime.principal({"cookie": "; ".join(f"{c.get('name')}={c.get('value')}" for c in cookies)})
    talk = await runtime.store.create(who, "A long talk")
    parent: str | None = None
    for turn in range(TURNS):
        for role in ("user", "assistant"):
            text = f"{role} {turn}: " + "The lamp burns rape oil. " * 12
            parent = (await runtime.store.add_message(who, talk.id, parent, role, text)).id  # type: ignore[arg-type]
    await ann.load()
    await ann.sidebar()
    await ann.page.locator("#cr-history label").first.click()
    chat = ann.page.locator("#cr-chat")
    await expect(chat).to_contain_text("user 0:")
    await expect(chat).to_contain_text(f"assistant {TURNS - 1}:")
    whole = len(await chat.inner_text())
    cdp = await ann.context.new_cdp_session(ann.page)
    await cdp.send("Network.enable")
    came: list[int] = []
    cdp.on("Network.dataReceived", lambda event: came.append(event["dataLength"]))
    answer = [f"piece-{n} " for n in range(PIECES)]
    served.engine.script = [
        *(event for piece in answer for event in (Delta(0, piece, (80,)), 0.15)),
        Done(0, "stop", "".join(answer), (80,) * PIECES, receipt(10, 5, PIECES)),
    ]
    await ann.ask("What does the lamp burn?")
    await ann.page.get_by_text("Receipt ·").wait_for()
    await expect(chat).to_contain_text(f"piece-{PIECES - 1}")
    # It all comes when an answer begins and when it is stored, as JSON and twice over; not with each piece.
    assert sum(came) < PIECES / 2 * whole, f"{sum(came):,} characters came for a conversation of {whole:,}"
    ann.assert_unharmed()
