"""Many people at once in real browsers: nobody sees a word of anybody else's; who leaves frees the engine."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import pytest
from playwright.async_api import Browser

from engine.types import Delta, Done, GenerationRequest, Reading, Waiting
from tests.app.fakes import receipt
from tests.e2e.conftest import Person, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PEOPLE = 8


class Echo:
    """Answers in many pieces with the nonce of the question. Nobody's second piece comes before everybody has
    the first, so that all streams are open at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked = 0
        self.everybody = asyncio.Event()  # waited for and set in the server's loop only

    def __call__(self, request: GenerationRequest) -> list[Any]:
        self.asked += 1
        if self.asked == PEOPLE:
            self.everybody.set()
        prompt = self.tokenizer.decode([t for s in request.segments for t in s.tokens])
        nonce = re.findall("nonce-[0-9a-f]{12}", prompt)[-1]
        pieces = [f"{nonce}:{piece} " for piece in range(12)]
        events: list[Any] = [Waiting(1, "queue"), Delta(0, pieces[0], (80,)), self.everybody.wait]
        for piece in pieces[1:]:
            events += [Delta(0, piece, (80,)), 0.05]
        return [*events, Done(0, "stop", "".join(pieces), (80,), receipt(10, 5, 12))]


async def test_eight_people_stream_at_once_and_see_only_their_own(served: Served, browser: Browser) -> None:
    served.engine.script = Echo(served.engine.tokenizer)
    nonces = [f"nonce-{secrets.token_hex(6)}" for _ in range(PEOPLE)]
    people = [await Person.enter(browser, served.url) for _ in nonces]
    # Everything that was ever on a page, not only what stands there in the end.
    for person in people:
        await person.page.evaluate(
            "window.seen = ''; new MutationObserver(() => { window.seen += document.body.textContent; })"
            ".observe(document.body, { subtree: true, childList: true, characterData: true })"
        )
    question = "When was the lighthouse on Gull Rock built?"
    await asyncio.gather(*(p.ask(f"{question} {n}") for p, n in zip(people, nonces, strict=True)))
    await asyncio.gather(*(person.answered() for person in people))
    for person, mine in zip(people, nonces, strict=True):
        seen = await person.page.evaluate("window.seen + document.body.textContent")
        assert f"{mine}:0 " in seen
        assert f"{mine}:11" in seen
        assert [other for other in nonces if other != mine and other in seen] == []
        person.assert_unharmed()
    assert len({request.output_scope.id for request in served.engine.requests}) == PEOPLE


PHASES: dict[str, list[Any]] = {
    "waiting": [Waiting(3, "queue"), "hold"],
    "prefill": [Reading(384, 620, 0), "hold"],
    "decode": [Reading(620, 620, 0), Delta(0, "Half", (80,)), "hold"],
}


@pytest.mark.parametrize("phase", PHASES)
async def test_a_closed_tab_frees_the_engine_in_every_phase(
    served: Served, browser: Browser, phase: str
) -> None:
    served.engine.script = list(PHASES[phase])
    ann = await Person.enter(browser, served.url)
    await ann.ask("When does the bakery open?")
    words = {"waiting": "Waiting in line, place 3", "prefill": "Reading 384 of 620", "decode": "Half"}
    await ann.page.locator("#cr-chat").get_by_text(words[phase]).wait_for()
    assert not served.engine.generations[0].aborted
    await ann.context.close()
    # Five seconds after the last viewer left; a machine that does something else meanwhile takes longer.
    assert await asyncio.to_thread(wait_until, lambda: served.engine.generations[0].aborted, 60)
