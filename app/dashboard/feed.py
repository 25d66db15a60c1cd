"""The feed of the memory page, of the chat page's panel and of `/api/memory`: one producer for all.

One look at the engine serves all viewers (`shared`). What is a viewer's own (rows by name, its page table,
documents by title) is made once for as long as nothing changes and shared by viewers who see the same. An
update is a list of parts, and a part that the viewer has already is not sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.dashboard import tables
from app.dashboard.block import block_json
from app.dashboard.names import Names, Viewers
from app.dashboard.shared import LOOK_SHARE, Looks, Shared
from app.dashboard.wire import Part, gzipped, merged, part
from app.errors import AppError
from app.memory_feed import encode_map, mine_json
from app.principal import Principal
from app.sizing import known_devices, known_models

if TYPE_CHECKING:
    from app.runtime import Runtime
    from engine.tree_picture import TreePicture

TREE_S = 1.0
#: A large tree is drawn anew less often, so that walking it takes half as much of a core as looking does.
MAX_TREE_S = 10.0
#: What is kept of viewers' own parts, until the pool changes.
MAX_KEPT = 256
#: Updates that are kept as bytes, for others who ask for the same.
MAX_BODIES = 32
#: How old the status of engine and demonstration may be.
STATUS_S = 0.5


@dataclass(frozen=True, slots=True)
class Asked:
    """What a viewer wants. Nothing of it is believed: whatever is not the viewer's own is left out.

    conversation    one of the viewer's own, or ""
    choose          where it is none, show the viewer's last one or a scripted reader's
    have            keys of the parts that the viewer has
    history, tree, pages    whether these are wanted
    """

    conversation: str = ""
    choose: bool = True
    have: frozenset[str] = frozenset()
    history: bool = False
    tree: bool = False
    pages: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Asked:
        """From a query: `conversation`, `have` (keys, joined by _), and `want`, letters of `history`, `tree`,
        `pages`, and of `given` (no other conversation than the given one)."""
        want = query.get("want", "")[:16]
        have = frozenset(query.get("have", "")[:1_000].split("_"))
        wanted = {name: name[0] in want for name in ("history", "tree", "pages")}
        return cls(query.get("conversation", "")[:100], "g" not in want, have, **wanted)

    @classmethod
    def everything(cls, conversation: str = "") -> Asked:
        """All parts, of this conversation or of a chosen one."""
        return cls(conversation, history=True, tree=True, pages=True)


class DashboardFeed:
    """Answers what the pages' scripts ask. Holds no data of its own but short-lived copies."""

    def __init__(
        self, runtime: Runtime, clock: Callable[[], float] = time.monotonic, share: float = LOOK_SHARE
    ) -> None:
        """`clock` and `share` (of a core, for looking) are others only where a simulation is recorded."""
        self._runtime, self._clock, self._share = runtime, clock, share
        self._born = secrets.token_hex(3)
        self._looks = Looks(lambda: runtime.engine, self._born, clock, share)
        self._viewers = Viewers(runtime)
        self._statuses: dict[bool, Part] = {}
        self._status_at: dict[bool, float] = {}
        self._bodies: dict[tuple[str, ...], bytes] = {}
        self._picture: TreePicture | None = None
        self._picture_number = self._pictured_number = 0
        self._pictured: list[str] = []
        self._pictured_at, self._tree_every_s = float("-inf"), TREE_S
        self._trees: OrderedDict[str, Part] = OrderedDict()
        self._kept: dict[Any, Part] = {}
        self._kept_of = 0

    async def shared(self) -> Shared:
        """The newest look at the engine. Raises where it is not ready."""
        return await self._looks.newest()

    async def answer(self, principal: Principal | None, asked: Asked) -> list[Part]:
        """One update, without the parts that the viewer has. Before the engine is ready, its status alone."""
        runtime = self._runtime
        parts = [self._status(principal)]
        if runtime.ready:
            shared = await self.shared()
            names = await self._viewers.names(principal, asked.conversation)
            mine = asked.conversation if asked.conversation in names.own else None
            if mine is None and asked.choose:
                mine = self._chosen([id for id in names.own if id in shared.snapshot.open])
            parts += [shared.figures, self._looks.map_part(shared, asked.have)]
            parts.append(self._viewer_part(shared, names, mine))
            if asked.history:
                parts.append(self._looks.history_part(shared))
            if asked.tree:
                parts.append(await self._tree(shared, names.titles, mine))
            if asked.pages:
                parts.append(await self._pages(shared, mine))
        return [part for part in parts if part.key not in asked.have]

    async def read(self, principal: Principal | None, asked: Asked) -> dict[str, Any]:
        """The same as one object (see `wire.merged`)."""
        return merged(await self.answer(principal, asked))

    async def everything(self, principal: Principal | None, asked: Asked) -> dict[str, Any]:
        """`/api/memory`: an update in full, with the map in plain bytes and the viewer's row beside
        everybody's in each view."""
        out = await self.read(principal, asked)
        if "map" in out:
            out["map"] = encode_map((await self.shared()).snapshot)
            mine = out.pop("mine")
            for view in ("running", "open"):
                out[view] = {"mine": mine[view], **out[view]}
        return out

    def gzipped(self, parts: list[Part]) -> bytes:
        """The parts as one gzip stream, put together once for all who get the same ones."""
        bases = (each.value["map"].get("from", "") for each in parts if "map" in each.value)
        key = (*(each.key for each in parts), *bases)
        found = self._bodies.get(key)
        if found is None:
            if len(self._bodies) >= MAX_BODIES:
                self._bodies.clear()
            found = self._bodies[key] = gzipped(parts)
        return found

    # -- parts -------------------------------------------------------------------------------------------

    def _status(self, principal: Principal | None) -> Part:
        allowed = self._runtime.demo.allowed(principal)
        found, now = self._statuses.get(allowed), self._clock()
        if found is not None and now - self._status_at[allowed] < STATUS_S:
            return found
        self._status_at[allowed] = now
        value = {"engine": self._runtime.status(), "demo": self._runtime.demo.status(principal)}
        if found is None or found.value != value:
            digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
            found = self._statuses[allowed] = part(f"s{self._born}.{digest}", value)
        return found

    def _once(self, shared: Shared, key: Any, make: Callable[[], dict[str, Any]], letter: str) -> Part:
        """A part that is good until the pool changes, made once for all viewers with the same `key`."""
        if self._kept_of != shared.number or len(self._kept) > MAX_KEPT:
            self._kept, self._kept_of = {}, shared.number
        found = self._kept.get((letter, key))
        if found is None:
            digest = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
            found = part(f"{letter}{self._born}.{shared.number}.{digest}", make())
            self._kept[letter, key] = found
        return found

    def _viewer_part(self, shared: Shared, names: Names, mine: str | None) -> Part:
        snapshot = shared.snapshot
        there = {id: title for id, title in names.own.items() if id in snapshot.open}

        def make() -> dict[str, Any]:
            return {
                "conversation": mine,
                "own": [{"id": id, "title": title} for id, title in there.items()],
                "rows": {
                    "running": tables.table(shared.running, there),
                    "open": tables.table(shared.open, there),
                },
                **mine_json(snapshot, mine),
            }

        return self._once(shared, (tuple(there.items()), mine), make, "v")

    def _chosen(self, there: list[str]) -> str | None:
        """The conversation to show where the viewer has chosen none: its last one, else a scripted reader's,
        the second where there is one, since the first one of a document has nothing to share or copy."""
        scripted = self._runtime.demo.is_scripted
        own = [id for id in there if not scripted(id)]
        return next(iter(own or there[1:2] or there), None)

    async def _pages(self, shared: Shared, mine: str | None) -> Part:
        found = self._kept.get(("p", mine)) if self._kept_of == shared.number else None
        if found is None:
            engine = self._runtime.engine
            views = await asyncio.to_thread(engine.page_tables, mine) if mine is not None else []
            value = {"pages": tables.page_tables_json(views)}
            found = self._once(shared, mine, lambda: value, "p")
        return found

    async def _tree(self, shared: Shared, titles: Mapping[str, str], mine: str | None) -> Part:
        """The tree with the titles that the viewer may know; shared by viewers who see the same."""
        picture = self._picture
        stale = self._pictured_number != shared.number
        if picture is None or (stale and self._clock() - self._pictured_at >= self._tree_every_s):
            made, cost = await asyncio.to_thread(self._timed_tree)
            picture = made
            self._pictured_at = self._clock()
            self._tree_every_s = min(MAX_TREE_S, max(TREE_S, 2 * cost / self._share))
        if picture is not self._picture:
            self._pictured_number = shared.number
            if picture != self._picture:
                self._picture_number += 1
                self._trees.clear()
            self._picture = picture
            self._pictured = sorted(frozenset[str]().union(*(node.documents for node in picture.nodes)))
        ids = frozenset(shared.snapshot.blocks_of(mine)) if mine else frozenset()
        labels = {id: titles[id] for id in self._pictured if id in titles}
        viewer = hashlib.sha256(repr((list(labels.items()), sorted(ids))).encode()).hexdigest()[:16]
        key = f"t{self._born}.{self._picture_number}.{viewer}"
        found = self._trees.get(key)
        if found is None:
            value = tables.tree_json(picture, shared.snapshot.block_bytes, labels, ids)
            found = self._trees[key] = part(key, {"tree": value})
            while len(self._trees) > 64:
                self._trees.popitem(last=False)
        return found

    def _timed_tree(self) -> tuple[TreePicture, float]:
        began = time.thread_time()
        return self._runtime.engine.tree(), time.thread_time() - began

    # -- what is asked now and then ------------------------------------------------------------------------

    async def block(self, principal: Principal | None, block: object) -> dict[str, Any] | None:
        """What the pointer is on (see `block.block_json`); None where there is no such block."""
        if not isinstance(block, int) or isinstance(block, bool) or not self._runtime.ready:
            return None
        view = await asyncio.to_thread(self._runtime.engine.block, block)
        if view is None:
            return None
        names = await self._viewers.names(principal)
        shared = await self.shared()
        own = any(block in shared.snapshot.blocks_of(id) for id in names.own)
        return await block_json(self._runtime, principal, view, names.titles, own)

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
