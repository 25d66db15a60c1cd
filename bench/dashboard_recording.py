"""The memory page's recording of a large pool: `python -m bench.dashboard_recording` writes it anew.

Two hundred chats of the trace over 32 documents arrive within twenty seconds, read, ask, branch and leave, in
a pool of 12,288 blocks of a 70B-class model. Pool, tree, scheduler and ledger are the serving ones; the
runner computes nothing and lets each step take the time of a cost model (see `bench.play`). What is kept is
what the page is told by the feed that serves it, once a virtual second.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from app.dashboard.feed import DashboardFeed
from app.dashboard.recording import Recorder, packaged_path, save
from app.knowledge import DocumentView
from app.runtime import Runtime, engine_json
from bench.meter import Meter
from bench.play import NoText, Player, VirtualClock, VirtualRunner
from bench.policies import BLOCK
from bench.trace import COLLECTION, Trace, load
from engine.core import EngineCore
from engine.ledger import MemorySnapshot
from engine.scheduler import Limits
from engine.service import EngineService, EngineStatus
from engine.tree_picture import TreePicture, picture
from engine.types import EngineConfig, ModelShape

BLOCKS, CHATS, DOCUMENTS, TURNS = 12_288, 200, 32, 3
#: What the recorded arrivals and pauses are multiplied by.
PACE = 0.4
#: 80 layers, 8 KV heads of 128, bfloat16: 5 MiB a block of 16 tokens. Accounting only.
SHAPE = ModelShape(layers=80, kv_heads=8, head_dim=128, itemsize=2, max_context=8_192)
LIMITS = Limits(
    max_batch_tokens=2_048, max_running=512, max_queued=512, max_running_per_principal=8,
    max_queued_per_principal=8,
)  # fmt: skip
#: So many chats stand for scripted readers, so that a page table can be opened: those that stay longest.
SHOWN = 5


class VirtualEngine(EngineService):
    """A service over a core that somebody else steps, in that core's own time: nothing is cached."""

    def __init__(self, core: EngineCore, clock: VirtualClock) -> None:
        super().__init__(EngineConfig(model="70B-class"))
        self._core, self._clock = core, clock
        what = ("70B-class, nothing computed", "no device", "bfloat16", "simulated steps")
        self._set(EngineStatus("ready", "A simulation.", *what, SHAPE, BLOCK, BLOCKS))

    def memory(self) -> MemorySnapshot:
        """The state now."""
        core = self._ready_core()
        core.ledger.tick(self._clock())
        return core.ledger.snapshot()

    def tree(self) -> TreePicture:
        """The tree now."""
        return picture(self._ready_core().memory, limit=120)


class Visitors:
    """What the feed asks of a demonstration: the chats shown are nobody's, so everybody may look at them."""

    running = False

    def __init__(self, trace: Trace) -> None:
        stays = sorted(trace.chats, key=lambda chat: -sum(turn.think for turn in chat.turns))
        self._names = {
            f"chat-{chat.number}": f"Simulated reader {chat.number + 1} · Report {chat.document + 1}"
            for chat in sorted(stays[:SHOWN], key=lambda chat: chat.number)
        }

    def status(self, _: object) -> dict[str, Any]:
        """As if none had been started."""
        return {"running": False, "allowed": False}

    def allowed(self, _: object) -> bool:
        """Nobody can start one in a recording."""
        return False

    def is_scripted(self, conversation: str) -> bool:
        """Whether the chat is one of those shown."""
        return conversation in self._names

    def conversations(self, _: Mapping[str, str]) -> dict[str, str]:
        """Their names."""
        return dict(self._names)


class Documents:
    """What the feed asks of the knowledge base: the trace's documents, which everybody may read."""

    async def documents(self, _: object) -> list[DocumentView]:
        """One view for each, named by popularity."""
        return [
            DocumentView(f"document-{n}", f"Report {n + 1}", f"report-{n + 1}.md", COLLECTION, 1, own=False)
            for n in range(DOCUMENTS)
        ]


def stage(engine: VirtualEngine, trace: Trace) -> Runtime:
    """As much of a runtime as the feed looks at."""

    def status() -> dict[str, Any]:
        found = engine.status()
        return {
            "state": "ready", "detail": "Ready.", "seeding": False,
            **engine_json(found), "running": found.running, "queued": found.queued,
        }  # fmt: skip

    parts = SimpleNamespace(
        engine=engine, ready=True, status=status, demo=Visitors(trace), knowledge=Documents()
    )
    return cast(Runtime, parts)


def record(trace: Trace, seconds: int) -> Recorder:
    """Play the trace and keep a frame each virtual second, for at most `seconds` of them."""
    clock = VirtualClock()
    meter = Meter(VirtualRunner(clock))
    core = EngineCore(
        meter, NoText(), SHAPE, num_blocks=BLOCKS, block_size=BLOCK, limits=LIMITS, clock=clock, sharing=True
    )
    engine = VirtualEngine(core, clock)
    recorder = Recorder(
        DashboardFeed(stage(engine, trace), clock, share=1.0), kind="simulation", tree_every=3
    )
    loop = asyncio.new_event_loop()

    def look() -> None:
        while len(recorder.frames) < min(seconds, clock()):
            loop.run_until_complete(recorder.take())

    look()
    Player(core, meter, trace, clock, pace=PACE).run(look)
    for _ in range(4):  # everybody has left; what is kept for reuse stays
        clock.now += 1.0
        loop.run_until_complete(recorder.take())
    loop.close()
    core.check_integrity()
    return recorder


def main() -> None:
    """Record, write the file and say how large it is."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=packaged_path("simulation"))
    arguments = parser.parse_args()
    began = time.monotonic()
    recorder = record(load().sample(CHATS, documents=DOCUMENTS, max_turns=TURNS), arguments.seconds)
    save(recorder.recording(datetime.now(UTC).date().isoformat()), arguments.out)
    print(
        f"{len(recorder.frames)} frames of {BLOCKS:,} blocks, {arguments.out.stat().st_size:,} bytes, "
        f"in {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
