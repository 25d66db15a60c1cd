"""What readers do: how many of them, how patient they are, and each one's behaviour."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import data
from bench.load_newcomer import answers_in
from bench.load_page import Measured, Page, PageError, attempt


@dataclass(frozen=True, slots=True)
class Plan:
    """`think_s`: mean of an exponential, between two actions; `asking`: share of the actions that are
    questions; `running`: answers at once; `hurried_s`, `hurried_asking`: of twice the readers.

    Why the hurried are so hurried. A reader has one question at a time. Of R readers who think Z seconds
    between an answer and the next question, with X answers a second, R - X·Z have a question there at a time
    (Little's law over the whole cycle). Two cores give about 0.5 answers a second. Were twice the readers as
    patient as the rest (30 s, 0.62: Z = 48), 100 - 0.5 · 48 = 76 would come to have one there, but the line
    fills with 76 · (1 - exp(-t/48)) only: after two minutes it is as good as full, and nobody had been
    refused (40 of 52 places taken). With 3 s and 0.9, Z is 3.3 s, and 98 of 100 would have a question there;
    a place is taken before the search begins, so 52 are soon taken.
    They ask about one document, since a question to all of them may be refused by the gate, which gives its
    place back at once. What holds for R holds for every R well above X·Z, so from about four readers on.
    """

    readers: int = 50
    minutes: float = 10.0
    overload_minutes: float = 2.0
    think_s: float = 30.0
    hurried_s: float = 3.0
    running: int = 24
    pool: str = "512MB"
    asking: float = 0.62
    hurried_asking: float = 0.9
    about_one: float = 0.7

    @property
    def at_once(self) -> int:
        """Answers at once: never so many that half the readers have a place without waiting."""
        return min(self.running, max(1, self.readers // 2))

    @property
    def queued(self) -> int:
        """Places in line: with those that run as many as there are readers, so that none is ever refused,
        and two more, because an answer that was stopped leaves its place a moment later. Twice the readers
        find too few."""
        return max(1, self.readers - self.at_once + 2)

    def hurried(self) -> Plan:
        """The plan of those who come on top: they think shortly, and ask about one document each."""
        return replace(
            self,
            think_s=min(self.think_s, self.hurried_s),
            asking=self.hurried_asking,
            about_one=1.0,
        )


class Reader:
    """One reader's behaviour; the same seed does the same things, as far as the server lets it."""

    def __init__(self, url: str, number: int, plan: Plan, measured: Measured) -> None:
        self._random = random.Random(number)
        self._plan, self.measured = plan, measured
        self.page = Page(url, measured)
        self._questions = [question.question for question in data.questions("dev")]
        self.asked: dict[str, int] = {}

    async def run(self, until: float) -> None:
        """Read until the moment `until` (`time.monotonic`); an answer that runs then is read to its end."""
        await asyncio.sleep(self._random.uniform(0, min(self._plan.think_s, 20.0)))
        if not await attempt(self.measured, "page load", self.page.load):
            return
        polling = asyncio.create_task(self._poll())
        try:
            while time.monotonic() < until:
                thinking = self._random.expovariate(1 / self._plan.think_s)
                await asyncio.sleep(max(0.0, min(thinking, until - time.monotonic())))
                if time.monotonic() < until:
                    await self._do_something()
        finally:
            polling.cancel()
            self.measured.broken += failures(
                "polling", await asyncio.gather(polling, return_exceptions=True), True
            )

    async def verify(self) -> int:
        """Every conversation in which this reader was answered holds the answers; how many those are.

        Raises `PageError` that names the conversations that do not.
        """
        stored, missing = 0, []
        for conversation, seen in self.asked.items():
            self.page.conversation = conversation
            try:
                found = answers_in(await self.page.export())
            except PageError as error:
                missing.append(f"{conversation}: {error}")
                continue
            stored += found
            if found < seen:
                missing.append(f"{conversation}: {found} of {seen} answers are stored")
        if missing:
            raise PageError("; ".join(missing))
        return stored

    async def _poll(self) -> None:
        while True:
            await attempt(self.measured, "memory feed", self.page.memory)
            await asyncio.sleep(1.0)

    async def _do_something(self) -> None:
        if self._random.random() < self._plan.asking:
            await self._ask()
            return
        pick, page = self._random.random(), self.page
        if pick < 0.21:
            await attempt(self.measured, "search", lambda: page.search(self._random.choice("aeio")))
        elif pick < 0.42 and page.conversations:
            id = self._random.choice(page.conversations)
            await attempt(self.measured, "open", lambda: page.open(id))
        elif pick < 0.58:
            await attempt(self.measured, "new", page.new)
        elif pick < 0.74:
            await attempt(self.measured, "memory page", page.dashboard)
            await attempt(self.measured, "hover", lambda: page.hover(self._random.randrange(100)))
        elif pick < 0.87:
            await attempt(self.measured, "reload", page.load)
        elif page.conversation:
            await attempt(self.measured, "export", page.export)

    async def _ask(self) -> None:
        documents = self.page.documents
        # Popular documents are read by many, as in life.
        place = min(int(self._random.paretovariate(0.7)) - 1, len(documents) - 1)
        document = documents[place] if documents and self._random.random() < self._plan.about_one else ""
        question = self._random.choice(self._questions)
        stop = self._random.uniform(0.5, 6.0) if self._random.random() < 0.1 else None
        if await attempt(self.measured, "ask", lambda: self.page.ask(question, document, stop)):
            id = self.page.conversation
            self.asked[id] = self.asked.get(id, 0) + 1


def failures(what: str, outcomes: Iterable[BaseException | None], cancelled: bool) -> list[str]:
    """What `gather(…, return_exceptions=True)` gave, as sentences; being cancelled is a failure of those who
    were not."""
    return [
        f"{what}: {type(outcome).__name__}: {outcome}"[:300]
        for outcome in outcomes
        if outcome is not None and not (cancelled and isinstance(outcome, asyncio.CancelledError))
    ]
