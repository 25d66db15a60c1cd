"""What one person may have done only once at a time: a limit that is looked at before something is added, or
something that costs much. The second waits for the first, and nobody else does."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class OneAtATime:
    """A lock for each person, kept for as long as somebody holds it or waits for it. For one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, person: str) -> asyncio.Lock:
        """The lock of one person; to be entered at once (`async with locks.of(id)`)."""
        return self._locks.setdefault(person, asyncio.Lock())
