"""What happens to blocks, as a bounded stream for the dashboard and the tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

BlockEventKind = Literal["published", "shared", "copied", "taken_over", "merged", "evicted", "unlinked"]


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """`number` counts from 1 without gaps. `other` is the target of a copy or the block merged into."""

    number: int
    kind: BlockEventKind
    block: int
    conversation: str
    other: int = -1
    slots: int = 0


class BlockEvents:
    """The last `capacity` events; older ones are dropped, their numbers stay counted."""

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[BlockEvent] = deque(maxlen=capacity)
        self.number = 0
        self.counts: dict[str, int] = {}

    def add(
        self, kind: BlockEventKind, block: int, conversation: str, other: int = -1, slots: int = 0
    ) -> None:
        """Append one event."""
        self.number += 1
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._events.append(BlockEvent(self.number, kind, block, conversation, other, slots))

    def after(self, number: int) -> list[BlockEvent]:
        """Events with a number above `number`, oldest first, as far as they are still kept."""
        missing = self.number - number
        if missing <= 0:
            return []
        events = list(self._events)
        return events[-missing:] if missing < len(events) else events
