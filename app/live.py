"""One running turn, whoever watches it.

    Chat._run ─▶ updates ─▶ log ─┬▶ viewer (the page that asked)
                                 ├▶ viewer (the same page after a reload: the log from its beginning)
                                 └▶ nobody for `grace_s` ─▶ abandoned

A turn belongs to its conversation and not to the request that began it: a page that is reloaded finds it
again. Nobody's answer runs on for nobody: after `grace_s` seconds without a viewer it is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from app.pages.words import phrase
from app.updates import Stage, Text, Update

#: Longest silence towards a viewer; a page that was closed is noticed at the next sign of life.
HEARTBEAT_S = 0.4


class LiveTurn:
    """Runs `updates` in a task of its own and shows them to any number of viewers, each from the beginning.

    `abandoned` is called, once, when nobody has watched for `grace_s` seconds; `ended` when the turn is over.
    Needs a running event loop. An error of the turn is raised in every viewer.
    """

    def __init__(
        self,
        updates: AsyncGenerator[Update, None],
        *,
        question: str,
        parent: str | None,
        grace_s: float,
        abandoned: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        #: The question that is answered, and the message that it stands under.
        self.question, self.parent = question, parent
        self._grace_s, self._abandoned, self._ended = grace_s, abandoned, ended
        self._log: list[Update] = []
        self._stage: Stage | None = None
        self._error: Exception | None = None
        self._viewers = 0
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(updates))
        # A task that is cancelled before its first step never gets to its `finally`.
        self._task.add_done_callback(lambda _: self._end())

    @property
    def done(self) -> bool:
        return self._task.done()

    async def view(self) -> AsyncGenerator[Update, None]:
        """Every update of the turn, what was missed first, with a sign of life at least every
        `HEARTBEAT_S` seconds. Closing this generator takes the viewer away."""
        self._viewers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seen = 0
        try:
            while True:
                changed, over = self._changed, self._task.done()
                while seen < len(self._log):
                    seen += 1
                    yield self._log[seen - 1]
                if over:
                    break
                if changed.is_set():
                    continue
                try:
                    async with asyncio.timeout(HEARTBEAT_S):  # `wait_for` may swallow a cancellation
                        await changed.wait()
                except TimeoutError:
                    if self._stage is not None:
                        yield self._stage
            if self._error is not None:
                raise self._error
        finally:
            self._viewers -= 1
            if not self._viewers and not self._task.done():
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._grace_s, self._abandon)

    async def cancel(self) -> None:
        """End the turn at once and wait until it has ended."""
        self._task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Wait until the turn has ended, however it does."""
        await asyncio.gather(self._task, return_exceptions=True)

    def unless_done_within(self, seconds: float) -> None:
        """End the turn in `seconds` unless it has ended by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.kill)

    def kill(self) -> None:
        """End the turn at once, without waiting."""
        self._task.cancel()

    def _abandon(self) -> None:
        if not self._viewers and not self._task.done():
            self._abandoned()

    async def _run(self, updates: AsyncGenerator[Update, None]) -> None:
        try:
            async with aclosing(updates):
                async for update in updates:
                    if isinstance(update, Stage):
                        if update == self._stage:
                            continue  # viewers have their own signs of life
                        self._stage = update
                    elif isinstance(update, Text):
                        self._stage = Stage("writing", phrase("stage.writing"))
                    self._log.append(update)
                    self._wake()
        except Exception as error:
            self._error = error
        finally:
            self._end()  # before the task is done: whoever saw the end may begin the next turn at once

    def _end(self) -> None:
        """The turn is over. Called again once its task is done, which is what viewers look at."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._over:
            self._over = True
            self._ended()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
