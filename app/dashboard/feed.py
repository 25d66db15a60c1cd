"""The feed of the memory page. One look at the engine serves all viewers: what is the same for everybody is
made once a snapshot, and only the viewer's own rows, names and page table are added for each.

A block is one byte, `25 · state + 5 · min(running readers, 4) + min(open readers, 4)`; the whole map is
deflated and sent in base64, so that a pool of 10,000 blocks takes a few kilobytes an update.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from app.dashboard import tables
from app.errors import AppError
from app.memory_feed import memory_json, open_readers
from app.principal import Principal
from app.sizing import known_devices, known_models, what_if

if TYPE_CHECKING:
    from app.runtime import Runtime
    from engine.block_events import BlockEvent
    from engine.ledger import MemorySnapshot
    from engine.tree_picture import TreePicture

#: Events older than this many are not flashed: a page that was hidden shows what is, not what has been.
MAX_EVENTS = 400
#: How old an update may be: the page asks once or twice a second.
LOOK_S = 0.5
TREE_S = 1.0
#: How long a viewer's list of documents and conversations is good for.
NAMES_S = 5.0
MAX_VIEWERS = 1_000


def compact_map(snapshot: MemorySnapshot) -> str:
    """The map in the form of this module's first lines."""
    state = np.frombuffer(snapshot.state, dtype=np.uint8)
    running = np.minimum(np.frombuffer(snapshot.readers, dtype=np.uint8), 4)
    opened = np.minimum(np.frombuffer(open_readers(snapshot), dtype=np.uint8), 4)
    return packed((25 * state + 5 * running + opened).astype(np.uint8).tobytes())


def packed(data: bytes) -> str:
    """Deflated (zlib), in base64."""
    return base64.b64encode(zlib.compress(data, 1)).decode()


def flashes(events: list[BlockEvent]) -> dict[str, list[int]]:
    """Blocks by what just happened to them; of a copy, its target. Nobody's name."""
    found: dict[str, list[int]] = {"published": [], "copied": [], "evicted": [], "shared": []}
    for event in events:
        if event.kind == "copied":
            found["copied"].append(event.other)
        elif event.kind in ("published", "evicted"):
            found[event.kind].append(event.block)
        elif event.kind in ("shared", "merged", "taken_over"):
            found["shared"].append(event.other if event.kind == "merged" else event.block)
    return found


@dataclass(frozen=True, slots=True)
class Shared:
    """What is made once for all viewers of one snapshot."""

    snapshot: MemorySnapshot
    map: str
    running: tables.Rows
    open: tables.Rows
    history: list[list[float]]
    what_if: dict[str, Any] | None
    events: list[BlockEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Names:
    """What one viewer may see by name: own conversations and readable documents, newest first."""

    at: float
    own: dict[str, str]
    titles: dict[str, str]


class DashboardFeed:
    """Answers what the page's script asks. Holds no data of its own but short-lived copies."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._shared: Shared | None = None
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()
        self._names: OrderedDict[str, Names] = OrderedDict()
        self._picture: TreePicture | None = None
        self._picture_number = 0
        self._pictured: list[str] = []
        self._pictured_at = float("-inf")
        self._trees: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def shared(self) -> Shared:
        """The newest snapshot with what all viewers get of it, at most `LOOK_S` old."""
        async with self._looking:
            if self._shared is None or time.monotonic() - self._looked_at >= LOOK_S:
                self._shared = await asyncio.to_thread(self._look, self._shared)
                self._looked_at = time.monotonic()
            return self._shared

    def _look(self, before: Shared | None) -> Shared:
        snapshot = self._runtime.engine.memory()
        if before is not None and before.snapshot is snapshot:
            return before
        history = tables.history(snapshot)
        if before is not None and before.snapshot.running is snapshot.running:
            # Nothing but the time has changed (see `Ledger.snapshot`).
            return replace(before, snapshot=snapshot, history=history)
        return Shared(
            snapshot=snapshot,
            map=compact_map(snapshot),
            running=tables.all_rows(snapshot.running, snapshot.running),
            open=tables.all_rows(snapshot.open, snapshot.running),
            history=history,
            what_if=what_if(snapshot),
            events=self._runtime.engine.events(snapshot.event_number - MAX_EVENTS),
        )

    async def names(self, principal: Principal | None) -> Names:
        """Own conversations and readable documents, at most `NAMES_S` old. Nobody in particular may see the
        scripted readers of a demonstration and what everybody may read."""
        key = principal.id if principal is not None else ""
        found = self._names.get(key)
        if found is None or time.monotonic() - found.at > NAMES_S:
            runtime = self._runtime
            viewer = principal if principal is not None else Principal("anonymous", "nobody")
            own: dict[str, str] = {}
            if principal is not None:
                talks = await runtime.store.conversations(principal)
                own = {talk.id: talk.title or "Untitled" for talk in talks}
            documents = await runtime.knowledge.documents(viewer)
            titles = {view.id: view.title for view in documents}
            found = self._names[key] = Names(time.monotonic(), own, titles)
            while len(self._names) > MAX_VIEWERS:
                self._names.popitem(last=False)
        scripted = self._runtime.demo.conversations(found.titles)
        return replace(found, own=found.own | scripted)

    async def read(self, principal: Principal | None, asked: Mapping[str, Any]) -> dict[str, Any]:
        """One update. `asked`: `conversation` (one of the viewer's own), `after` (the last event number that
        it has seen), `history` and `pages` (whether it wants them), `tree` (there if it wants it: the key of
        the tree that it has). Whatever else the browser sends is left alone.
        """
        runtime = self._runtime
        status = {"engine": runtime.status(), "demo": runtime.demo.status(principal)}
        if not runtime.ready:
            return status
        shared, names = await self.shared(), await self.names(principal)
        snapshot = shared.snapshot
        wanted = asked.get("conversation")
        mine = wanted if isinstance(wanted, str) and wanted in names.own else None
        if mine is None:
            mine = self._chosen([id for id in names.own if id in snapshot.open])
        after = asked.get("after")
        since = after if isinstance(after, int) else snapshot.event_number
        out = status | memory_json(snapshot, mine, {"packed": shared.map})
        out |= {
            "conversation": mine,
            "own": [{"id": id, "title": title} for id, title in names.own.items() if id in snapshot.open],
            "rows": {
                "running": tables.table(shared.running, names.own),
                "open": tables.table(shared.open, names.own),
            },
            "event_number": snapshot.event_number,
            "flash": flashes([e for e in shared.events if e.number > since]),
            "what_if": shared.what_if,
            "waiting": snapshot.waiting,
        }
        if asked.get("history"):
            out["history"] = shared.history
        if "tree" in asked:
            out |= await self._tree(asked["tree"], snapshot, names.titles, mine)
        if asked.get("pages") and mine is not None:
            views = await asyncio.to_thread(runtime.engine.page_tables, mine)
            out["pages"] = tables.page_tables_json(views)
        return out

    def _chosen(self, there: list[str]) -> str | None:
        """The conversation to show where the viewer has chosen none: its last one, else a scripted reader's,
        the second where there is one, since the first one of a document has nothing to share or copy."""
        scripted = self._runtime.demo.is_scripted
        own = [id for id in there if not scripted(id)]
        return next(iter(own or there[1:2] or there), None)

    async def _tree(
        self, known: object, snapshot: MemorySnapshot, titles: Mapping[str, str], mine: str | None
    ) -> dict[str, Any]:
        """`tree` and `tree_key`, unless the viewer has just these; shared by viewers who see the same."""
        picture = self._picture
        if picture is None or time.monotonic() - self._pictured_at >= TREE_S:
            picture = await asyncio.to_thread(self._runtime.engine.tree)
            self._pictured_at = time.monotonic()
        if picture is not self._picture:
            if picture != self._picture:
                self._picture_number += 1
                self._trees.clear()
            self._picture = picture
            self._pictured = sorted(frozenset[str]().union(*(node.documents for node in picture.nodes)))
        ids = frozenset(snapshot.blocks_of(mine)) if mine else frozenset()
        labels = {id: titles[id] for id in self._pictured if id in titles}
        viewer = hashlib.sha256(repr((list(labels.items()), sorted(ids))).encode()).hexdigest()[:16]
        key = f"{self._picture_number}-{viewer}"
        if key == known:
            return {}
        if key not in self._trees:
            self._trees[key] = tables.tree_json(picture, snapshot.block_bytes, labels, ids)
            while len(self._trees) > 64:
                self._trees.popitem(last=False)
        return {"tree": self._trees[key], "tree_key": key}

    async def block(self, principal: Principal | None, block: object) -> dict[str, Any] | None:
        """What the pointer is on: readers as counts, documents by name only to those who may read them."""
        if not isinstance(block, int) or not self._runtime.ready:
            return None
        view = await asyncio.to_thread(self._runtime.engine.block, block)
        if view is None:
            return None
        names = await self.names(principal)
        return {
            "block": view.block,
            "kind": "branch" if view.private else "document" if view.documents else "instructions",
            "readers": view.readers,
            "open_readers": view.open_readers,
            "filled": view.filled,
            "documents": tables.document_label(view.documents, names.titles),
            "first_token": view.first_token,
            "copied_slots": view.copied_slots,
            "copied_from": view.copied_from,
        }

    def choices(self) -> dict[str, Any]:
        """What the calculator offers."""
        return {
            "models": [model.name for model in known_models()],
            "devices": [{"name": name, "bytes": size} for name, size in known_devices().items()],
        }


def viewer(runtime: Runtime, headers: Mapping[str, str]) -> Principal | None:
    """Who looks; None where the request proves nobody."""
    try:
        return runtime.principal(headers)
    except AppError:
        return None
