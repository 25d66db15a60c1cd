"""A few people who read while a fault lasts: what they are told, what they saw, and is it still there?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.load_figures import quantile
from bench.load_newcomer import answers_in, newcomer
from bench.load_page import Measured, Page, PageError, attempt
from bench.load_server import ServerProcess

QUESTIONS = ("What is this document about?", "Which numbers does it name?", "Who wrote it, and when?")
#: Whoever was not answered looks again after so long; a server that is down is not asked without a pause.
AGAIN_S = 0.5


class Person:
    """Loads the page, looks at the memory and asks, again and again."""

    def __init__(self, url: str, measured: Measured) -> None:
        self.page = Page(url, measured)
        self._measured = measured
        #: Answers that were seen to their end, by conversation.
        self.seen: dict[str, int] = {}

    async def read(self, until: Callable[[], bool]) -> None:
        """Read until `until` says so; what is running then is read to its end."""
        number = 0
        while not until():
            question = QUESTIONS[number % len(QUESTIONS)]
            well = await attempt(self._measured, "load", self.page.load)
            well = await attempt(self._measured, "memory", self.page.memory) and well
            if await attempt(self._measured, "ask", partial(self._ask, question)):
                self.seen[self.page.conversation] = self.seen.get(self.page.conversation, 0) + 1
            elif not well:
                await asyncio.sleep(AGAIN_S)
            number += 1

    async def _ask(self, question: str) -> None:
        if not self.page.documents:
            raise PageError("the page offers no document to ask about")
        await self.page.ask(question, self.page.documents[0])

    async def lost(self) -> list[str]:
        """Conversations that hold fewer answers than were seen, or are gone, or are not listed."""
        missing = []
        for conversation, seen in self.seen.items():
            self.page.conversation = conversation
            try:
                stored = answers_in(await self.page.export())
            except Exception as error:
                missing.append(f"{conversation} is gone: {error!r}")
                continue
            if stored < seen:
                missing.append(f"{conversation}: {stored} of {seen} answers")
        if self.seen:
            newest = next(reversed(self.seen))
            try:
                await self.page.load()
            except Exception as error:
                missing.append(f"the page does not load any more: {error!r}")
            if newest not in self.page.conversations:
                missing.append(f"{newest} is not listed")
        return missing


class Crowd:
    """A few of them."""

    def __init__(self, url: str, people: int = 4) -> None:
        self.measured = Measured()
        self.people = [Person(url, self.measured) for _ in range(people)]

    async def read(self, until: Callable[[], bool]) -> None:
        """Raises what a person fails with that is not the server's answer."""
        await asyncio.gather(*(person.read(until) for person in self.people))

    async def until_answered(self, seconds: float = 120.0) -> None:
        """Wait for a first answer: before, there is nothing that could be lost. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not self.measured.answers:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def lost(self) -> list[str]:
        """What was seen and is no longer there, of everybody."""
        return [line for person in self.people for line in await person.lost()]

    async def close(self) -> None:
        for person in self.people:
            await person.page.close()

    def report(self) -> dict[str, Any]:
        """What people saw: answers, what the page told them, and what broke in their browsers."""
        loads = self.measured.times.get("page load", [])
        errors = self.measured.errors
        return {
            "answers": self.measured.answers,
            "told": dict(self.measured.refusals),
            "errors": sorted({error[:120] for error in errors})[:8],
            "error_count": len(errors),
            "page_loads": len(loads),
            "page_load_p95_s": round(quantile(loads, 0.95), 3) if loads else None,
        }


async def afterwards(server: ServerProcess, crowd: Crowd) -> tuple[dict[str, Any], dict[str, bool]]:
    """What is there when the fault is over, and what must hold after each of them."""
    found = await newcomer(server.url)
    lost = await crowd.lost()
    seen = sum(sum(person.seen.values()) for person in crowd.people)
    problems = (await asyncio.to_thread(server.check))["problems"]
    return (
        {"answers_seen": seen, "lost": lost, "next_person": found, "problems": problems},
        {
            "answers were seen, and none is lost": seen > 0 and not lost,
            "the next person is answered": bool(found["answered"]),
            "accounts add up": not problems,
        },
    )


def noticed_nothing(seen: dict[str, Any]) -> bool:
    """Whether the fault stayed outside: people were answered, nothing broke and nobody was told anything."""
    return seen["answers"] > 0 and not seen["error_count"] and not seen["told"]


def told_only(seen: dict[str, Any], sentence: str) -> bool:
    """Whether people met the fault and were told so by the page, in the words made for it and no others. The
    engine's own words may follow those that say that it is not running."""
    return bool(seen["told"]) and all(sentence in words for words in seen["told"])
