"""What the answer leans on that is just being written, found beside the turn.

A look at the passages is of use to nobody a second later, costs the reader nothing, and takes the longer the
more there is to read. So no turn waits for one, few run at once in threads of their own, whoever asks
and a turn has at most one in line, which looks at the newest text when its time comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rag.cite import Attribution, Citable, best_source

#: All turns together; each takes part of a core from the engine.
_AT_ONCE = 2


class Looks:
    """Threads for the looks of all turns."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="coread-looks")

    def of(self, passages: Sequence[Citable]) -> Look:
        """The looks of one turn at these passages."""
        return Look(self._threads, passages)


class Look:
    """The looks of one turn, for the event loop; `close` it in the end."""

    def __init__(self, threads: ThreadPoolExecutor, passages: Sequence[Citable]) -> None:
        self._threads, self._passages = threads, passages
        self._running: Future[Attribution | None] | None = None
        self._text = self._looked_at = ""

    def at(self, text: str) -> None:
        """Look at the end of `text`, instead of at what waits to be looked at."""
        self._text = text
        if self._running is None:
            self._running = self._threads.submit(self._find)

    def found(self) -> Attribution | None:
        """What a look has found since the last call, None for nothing yet."""
        if self._running is None or not self._running.done():
            return None
        found, self._running = self._running.result(), None
        if self._text is not self._looked_at:
            self.at(self._text)
        return found

    def close(self) -> None:
        """Drop what has not begun."""
        if self._running is not None:
            self._running.cancel()

    def _find(self) -> Attribution | None:
        self._looked_at = self._text
        return best_source(self._looked_at, self._passages)
