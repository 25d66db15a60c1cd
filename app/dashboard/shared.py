"""One look at the engine for all viewers: what is the same for everybody, serialised once.

A block is one byte, `25 · state + 5 · min(running readers, 4) + min(open readers, 4)`; the whole map is
deflated and sent in base64. Who has one of the last maps gets only what is different (the two XORed).
"""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from app.dashboard import tables
from app.dashboard.wire import Part, members, part
from app.memory_feed import figures_json, open_readers
from app.sizing import what_if

if TYPE_CHECKING:
    from engine.block_events import BlockEvent
    from engine.ledger import MemorySnapshot
    from engine.service import EngineService

#: At most so many events are flashed at a time, and for so long they are told.
MAX_EVENTS, FLASH_S = 400, 2.5
#: How old an update may be: the page asks once or twice a second.
LOOK_S = 0.5
#: Looking may take at most this share of a core: a pool that is dear to look at is looked at less often.
LOOK_SHARE, MAX_LOOK_S = 0.003, 2.0
HISTORY_S = 5.0
#: Maps that a viewer may still have, to be told only the difference.
KEPT_MAPS = 6


def cells_of(snapshot: MemorySnapshot) -> bytes:
    """The map, one byte a block (see this module's first lines)."""
    state = np.frombuffer(snapshot.state, dtype=np.uint8)
    running = np.minimum(np.frombuffer(snapshot.readers, dtype=np.uint8), 4)
    opened = np.minimum(np.frombuffer(open_readers(snapshot), dtype=np.uint8), 4)
    cells: bytes = (25 * state + 5 * running + opened).astype(np.uint8).tobytes()
    return cells


def packed(data: bytes) -> str:
    """Deflated (zlib), in base64."""
    return base64.b64encode(zlib.compress(data, 6)).decode()


def flashes(events: list[BlockEvent]) -> dict[str, list[list[int]]]:
    """`[event number, block]` by what happened; of a copy, its target. Nobody's name."""
    found: dict[str, list[list[int]]] = {"published": [], "copied": []}
    for event in events:
        if event.kind == "copied":
            found["copied"].append([event.number, event.other])
        elif event.kind == "published":
            found["published"].append([event.number, event.block])
    return found


@dataclass(frozen=True, slots=True)
class Shared:
    """What is made once for all viewers. `number` goes up whenever blocks, page tables or rows have changed,
    so that what is made of them for one viewer can be kept until then."""

    number: int
    snapshot: MemorySnapshot
    figures: Part
    map_key: str
    cells: bytes
    running: tables.Rows
    open: tables.Rows


class Looks:
    """Looks at the engine when somebody asks, for everybody who asks. `born` tells this server's keys apart
    from those of the one before it."""

    def __init__(
        self, engine: Callable[[], EngineService], born: str, clock: Callable[[], float], share: float
    ) -> None:
        self._engine, self._born, self._clock, self._share = engine, born, clock, share
        self._shared: Shared | None = None
        self._looked_at, self._every_s = float("-inf"), LOOK_S
        self._looking = asyncio.Lock()
        self._told = b""
        self._figures_made = self._maps_made = self._histories_made = 0
        #: The last maps with their keys. A tuple: looking replaces it in a thread while others read it.
        self._maps: tuple[tuple[str, bytes], ...] = ()
        self._map_parts: dict[str, Part] = {}
        self._recent: deque[tuple[float, BlockEvent]] = deque(maxlen=MAX_EVENTS)
        self._history: Part | None = None
        self._history_at = float("-inf")

    async def newest(self) -> Shared:
        """The newest look, at most half a second old, longer where looking is dear."""
        if (found := self._fresh()) is not None:
            return found
        async with self._looking:
            if (found := self._fresh()) is not None:  # somebody else has just looked
                return found
            looked, cost = await asyncio.to_thread(self._timed_look, self._shared)
            self._shared, self._looked_at = looked, self._clock()
            self._every_s = min(MAX_LOOK_S, max(LOOK_S, cost / self._share))
            return looked

    def _fresh(self) -> Shared | None:
        return self._shared if self._clock() - self._looked_at < self._every_s else None

    def _timed_look(self, before: Shared | None) -> tuple[Shared, float]:
        began = time.thread_time()
        return self._look(before), time.thread_time() - began

    def _look(self, before: Shared | None) -> Shared:
        engine = self._engine()
        snapshot = engine.memory()
        # Where nothing but the time has changed the snapshot's rows are those of the one before it.
        same = before is not None and before.snapshot.running is snapshot.running
        if before is not None and same:
            number, cells, running, opened = before.number, before.cells, before.running, before.open
        else:
            number = 1 if before is None else before.number + 1
            cells = cells_of(snapshot)
            running = tables.all_rows(snapshot.running, snapshot.running)
            opened = tables.all_rows(snapshot.open, snapshot.running)
        if not self._maps or self._maps[-1][1] != cells:
            self._maps_made += 1
            self._maps = (*self._maps[1 - KEPT_MAPS :], (f"m{self._born}.{self._maps_made}", cells))
            self._map_parts = {}
        figures = self._figures(engine, snapshot, before)
        return Shared(number, snapshot, figures, self._maps[-1][0], cells, running, opened)

    def _figures(self, engine: EngineService, snapshot: MemorySnapshot, before: Shared | None) -> Part:
        told = before.snapshot.event_number if before is not None else snapshot.event_number
        now = self._clock()
        if snapshot.event_number > told:
            after = max(told, snapshot.event_number - MAX_EVENTS)
            self._recent.extend((now, event) for event in engine.events(after))
        while self._recent and now - self._recent[0][0] > FLASH_S:
            self._recent.popleft()
        value: dict[str, Any] = figures_json(snapshot) | {
            "event_number": snapshot.event_number,
            "flash": flashes([event for _, event in self._recent]),
            "what_if": what_if(snapshot),
            "waiting": snapshot.waiting,
        }
        text = members(value)
        if before is not None and text == self._told:
            return before.figures
        self._told = text
        self._figures_made += 1
        # The snapshot's number goes up with every look, so it is no part of what is compared.
        return part(f"f{self._born}.{self._figures_made}", value | {"number": snapshot.number})

    def map_part(self, shared: Shared, have: frozenset[str]) -> Part:
        """The map, whole or as the difference from one that the viewer has.

        `map`: `packed`, and `from` (the key of the map that it is to be XORed with) where it is a difference.
        """
        base = next(((key, cells) for key, cells in reversed(self._maps) if key in have), None)
        if base is not None and len(base[1]) != len(shared.cells):
            base = None
        name = "" if base is None else base[0]
        found = self._map_parts.get(f"{shared.map_key}<{name}")
        if found is None:
            value = {"packed": packed(shared.cells)}
            if base is not None:
                change = np.frombuffer(base[1], np.uint8) ^ np.frombuffer(shared.cells, np.uint8)
                value = {"packed": "" if name == shared.map_key else packed(change.tobytes()), "from": name}
            found = self._map_parts[f"{shared.map_key}<{name}"] = part(shared.map_key, {"map": value})
        return found

    def history_part(self, shared: Shared) -> Part:
        """Savings over time, made anew every few seconds."""
        now = self._clock()
        if self._history is None or now - self._history_at >= HISTORY_S:
            self._histories_made += 1
            value = {"history": tables.history(shared.snapshot)}
            self._history = part(f"h{self._born}.{self._histories_made}", value)
            self._history_at = now
        return self._history
