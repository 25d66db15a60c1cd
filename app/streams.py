"""How many requests of one person, and of all people, may be open at a time; which pages are open.

A page keeps event streams open for as long as it is shown, so a number of them is normal; without an end to
that number one visitor could hold every connection that the server can have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.errors import TooMany
from app.render import counted

if TYPE_CHECKING:
    import gradio as gr

log = logging.getLogger("coread")
#: Some sixty tabs of one browser, or forty-eight answers of one program that run or wait, and room beside.
EACH = 200
#: Well below the number of files that a process may open.
TOTAL = 8_000
_RETRY_S = 5.0
#: Gradio keeps the messages of a queue for ever where nobody comes to fetch them; here for so long.
UNFETCHED_S = 60.0


class OpenRequests:
    """Counts requests that have not ended. For one event loop."""

    def __init__(
        self,
        each: int = EACH,
        total: int = TOTAL,
        words: str = "You have {held:,} requests open at a time; close some pages.",
    ) -> None:
        """`words` are said to whoever has `each` of them."""
        self._each, self._total, self._words = each, total, words
        self._held: dict[str, int] = {}
        self._all = 0

    @contextmanager
    def one_more(self, principal: str) -> Iterator[None]:
        """Hold one for as long as the request is open; raises `TooMany`."""
        held = self._held.get(principal, 0)
        if held >= self._each:
            raise TooMany(self._words.format(held=held), _RETRY_S)
        if self._all >= self._total:
            raise TooMany("The server has as many requests open as it can.", _RETRY_S)
        self._held[principal] = held + 1
        self._all += 1
        try:
            yield
        finally:
            self._all -= 1
            self._held[principal] -= 1
            if not self._held[principal]:
                del self._held[principal]


class EventStreams:
    """Which pages' event streams are open, so that what nobody fetches can be thrown away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, int] = {}
        self._shown: dict[str, int] = {}
        self._joined: dict[str, float] = {}

    def joined(self, hash: str) -> None:
        """A page has put an event in line; its stream should be open, or be opened soon."""
        self._joined[hash] = self._clock()

    @contextmanager
    def fetching(self, hash: str) -> Iterator[None]:
        """Hold for as long as a page's stream is open."""
        self._open[hash] = self._open.get(hash, 0) + 1
        try:
            yield
        finally:
            self._open[hash] -= 1
            if not self._open[hash]:
                del self._open[hash]
            if hash in self._joined:
                self._joined[hash] = self._clock()

    @contextmanager
    def shown(self, hash: str) -> Iterator[None]:
        """Hold for as long as a browser says that the page is there."""
        self._shown[hash] = self._shown.get(hash, 0) + 1
        try:
            yield
        finally:
            self._shown[hash] -= 1
            if not self._shown[hash]:
                del self._shown[hash]

    def is_open(self, hash: str) -> bool:
        """True while a page is shown or waits for its events."""
        return hash in self._shown or hash in self._open

    def forgotten(self) -> list[str]:
        """Pages that nobody has fetched anything for since `UNFETCHED_S`; each is named once."""
        before = self._clock() - UNFETCHED_S
        found = [h for h, at in self._joined.items() if at < before and h not in self._open]
        for hash in found:
            del self._joined[hash]
        return found


async def drop_unfetched(demo: gr.Blocks, streams: EventStreams) -> int:
    """End the events of pages that are gone and forget their messages; how many pages there were."""
    queue = demo._queue
    forgotten = streams.forgotten()
    for hash in forgotten:
        await queue.clean_events(session_hash=hash)
        queue.pending_messages_per_session.pop(hash, None)
        queue.pending_event_ids_session.pop(hash, None)
    return len(forgotten)


async def drop_unfetched_forever(demo: gr.Blocks, streams: EventStreams, every_s: float = 20.0) -> None:
    """`drop_unfetched` again and again until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        try:
            if dropped := await drop_unfetched(demo, streams):
                log.info("the events of %s that nobody fetched were dropped", counted(dropped, "page"))
        except Exception as error:
            log.warning("unfetched events could not be dropped: %s", error)
