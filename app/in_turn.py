"""What one person may have done only once at a time: the second waits for the first, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InTurn:
    """For each person a line of one. For one event loop."""

    def __init__(self) -> None:
        #: By person: the line, and how many stand in it or are at its head.
        self._lines: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def turn(self, principal: str) -> AsyncIterator[None]:
        """Wait for one's turn and hold it."""
        line, waiting = self._lines.get(principal, (asyncio.Lock(), 0))
        self._lines[principal] = line, waiting + 1
        try:
            async with line:
                yield
        finally:
            waiting = self._lines[principal][1] - 1
            if waiting:
                self._lines[principal] = line, waiting
            else:
                del self._lines[principal]
