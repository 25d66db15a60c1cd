"""One request's events on their way from the engine's thread to the event loop of their reader. No torch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from engine.types import Delta, Done, Event, Failed, Reading, Waiting


class Generation:
    """One request's events, as an async iterator for one consumer.

    Unread text runs together, so that a slow or vanished reader costs no more memory than its answer is long.
    Ends after the last choice's `Done`, or after `Failed`. After `abort()` no more text comes, only each
    choice's `Done` with what was written.
    """

    def __init__(self, id: str, bell: Bell, abort: Callable[[str], None]) -> None:
        """To be made in the consumer's loop. `abort` is called with `id`, from any thread."""
        self.id = id
        self.loop = asyncio.get_running_loop()
        self._bell, self._tell_engine = bell, abort
        self._lock = threading.Lock()
        self._buffer: deque[Event] = deque()
        #: Set in the consumer's loop when there is something to look at.
        self.ready = asyncio.Event()
        self._ended = False
        self._aborted = False
        self._signalled = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._lock:
                if self._buffer:
                    return self._buffer.popleft()
                if self._ended:
                    raise StopAsyncIteration
                self.ready.clear()
                self._signalled = False
            await self.ready.wait()

    def abort(self) -> None:
        """Stop, in whatever phase the request is. May be called from any thread, and again."""
        with self._lock:
            if self._ended or self._aborted:
                return
            self._aborted = True
            self._buffer = deque(e for e in self._buffer if isinstance(e, Done | Failed))
        self._tell_engine(self.id)

    def _join(self, event: Delta) -> None:
        """Add text to the unread text of the same choice, if there is any behind the last other event.

        The texts of several choices come in turns: their order among each other means nothing.
        """
        for index in range(len(self._buffer) - 1, -1, -1):
            unread = self._buffer[index]
            if not isinstance(unread, Delta):
                break
            if unread.choice == event.choice:
                self._buffer[index] = Delta(
                    event.choice,
                    unread.text + event.text,
                    unread.tokens + event.tokens,
                    unread.logprobs + event.logprobs,
                )
                return
        self._buffer.append(event)

    def put(self, event: Event | None) -> None:
        """Called by the engine's thread; None is the end. Unread progress is replaced, unread text runs
        together."""
        with self._lock:
            last = self._buffer[-1] if self._buffer else None
            if event is None:
                self._ended = True
            elif self._aborted and not isinstance(event, Done | Failed):
                return
            elif isinstance(event, Delta):
                self._join(event)
            elif isinstance(event, Waiting | Reading) and isinstance(last, Waiting | Reading):
                self._buffer[-1] = event
            else:
                self._buffer.append(event)
            gone = self.loop.is_closed()
            if self._signalled and not gone:
                return
            self._signalled = True
        self._bell.ring(self)


class Bell:
    """Wakes the loops that consumers wait in: once a loop and step for all of them.

    Every wake-up from another thread is a system call, during which the interpreter lock is free: a loop that
    begins to work on the first reader's text keeps the engine from handing out the others' and from its next
    step. So while the engine's thread is in a step, it only notes whom to wake.
    """

    def __init__(self) -> None:
        self._holder: int | None = None
        self._noted: dict[asyncio.AbstractEventLoop, list[Generation]] = {}

    def hold(self) -> None:
        """From now on the calling thread's rings wait for `flush`. Other threads' rings are heard at once."""
        self._holder = threading.get_ident()

    def ring(self, generation: Generation) -> None:
        """Wake the consumer of `generation`."""
        if threading.get_ident() == self._holder:
            self._noted.setdefault(generation.loop, []).append(generation)
        else:
            self._wake(generation.loop, [generation])

    def flush(self) -> None:
        """Wake all that were noted. Called by the holder."""
        noted, self._noted = self._noted, {}
        for loop, generations in noted.items():
            self._wake(loop, generations)

    def release(self) -> None:
        """Flush, and hold no more."""
        self._holder = None
        self.flush()

    @staticmethod
    def _wake(loop: asyncio.AbstractEventLoop, generations: list[Generation]) -> None:
        events = [generation.ready for generation in generations]

        def wake() -> None:
            for event in events:
                event.set()

        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the consumers' loop is closed: nobody waits for this any more
            for generation in generations:
                generation.abort()
