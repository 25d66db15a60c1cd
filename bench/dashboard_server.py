"""The server whose cost `bench.dashboard_cost` measures: the real application over a pool of the wanted size.

Pool, prefix tree, scheduler, ledger, feed, routes and middleware are those that serve. The chats are the
trace's and nothing is computed for them (`bench.play.VirtualRunner`): a machine without a GPU cannot hold
such a model.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from app.runtime import RealParts, Runtime
from app.settings import Settings, load_settings
from bench.dashboard_recording import LIMITS, SHAPE
from bench.meter import Meter
from bench.play import NoText, Player, VirtualClock, VirtualRunner, WallClock
from bench.policies import BLOCK
from bench.trace import Trace, load
from engine.core import EngineCore
from engine.packaged import default_cache_dir, load_gguf, packaged_gguf
from engine.service import EngineService, EngineStatus
from engine.types import EngineConfig

#: Steps taken at once, so that every chat has its prompt in the pool before anything is measured.
WARM_STEPS = 90
#: Seconds between two steps of a server that works.
BEAT_S = 0.5


class _Stopped(Exception):
    """The service is to end in the middle of the trace."""


@dataclass(slots=True)
class Pace:
    """What the parent process says through its pipe: whether the engine goes on stepping."""

    works: threading.Event = field(default_factory=threading.Event)
    warm: threading.Event = field(default_factory=threading.Event)


class TraceEngine(EngineService):
    """A service whose thread plays a trace: quickly until the pool is in use, then step by step."""

    def __init__(self, blocks: int, trace: Trace, pace: Pace) -> None:
        super().__init__(EngineConfig(model="70B-class"))
        self._blocks, self._trace, self._pace, self._steps = blocks, trace, pace, 0

    def _load(self) -> Callable[[], EngineCore]:
        what = ("70B-class, nothing computed", "no device", "bfloat16", "simulated steps")
        self._status = EngineStatus("starting", "A trace.", *what, SHAPE, BLOCK, self._blocks)
        self._meter = Meter(VirtualRunner(VirtualClock()))
        # The prompt layout wants a chat template; the model that comes with it is not kept.
        _, self._words = load_gguf(packaged_gguf(), torch.bfloat16, default_cache_dir())
        return lambda: EngineCore(
            self._meter, NoText(), SHAPE, num_blocks=self._blocks, block_size=BLOCK, limits=LIMITS,
            clock=WallClock(), sharing=True,
        )  # fmt: skip

    @property
    def tokenizer(self) -> Any:
        """The packaged model's."""
        return self._words

    def _loop(self, core: EngineCore) -> None:
        with contextlib.suppress(_Stopped):
            Player(core, self._meter, self._trace, WallClock()).run(self._beat)
        while not self._stopping:
            self._wake.wait(1.0)

    def _beat(self) -> None:
        self._steps += 1
        if self._steps < WARM_STEPS:
            return
        self._pace.warm.set()
        self._wake.wait(BEAT_S)
        self._wake.clear()
        while not self._stopping and not self._pace.works.wait(0.5):
            pass
        if self._stopping:
            raise _Stopped


@dataclass(slots=True)
class Parts(RealParts):
    """Everything real but the engine."""

    trace_engine: TraceEngine

    def __post_init__(self) -> None:
        RealParts.__init__(self)

    def engine(self, settings: Settings) -> EngineService:
        """The trace's."""
        return self.trace_engine


def serve(blocks: int, chats: int, say: Connection, folder: str) -> None:
    """The server's process, with its data in `folder`: says its port, then takes "work" and "still" from its
    parent, without whom it ends."""
    import uvicorn

    import data
    from app.pages.build import build_demo
    from app.server import bind, create_app

    few = data.documents()[:2]
    data.documents = lambda: few  # reading all of them would take longer than what is measured
    pace = Pace()
    trace = load().sample(chats, documents=32, max_turns=3)
    runtime = Runtime(
        load_settings(data_dir=Path(folder), port=0),
        Parts(TraceEngine(blocks, trace, pace)),
    )
    listener = bind("127.0.0.1", 0)
    runtime.open()
    app = create_app(runtime, build_demo(runtime), alone=True)
    say.send(listener.getsockname()[1])

    def obey() -> None:
        while True:
            try:
                word = say.recv()
            except EOFError:  # the parent is gone
                signal.raise_signal(signal.SIGTERM)
                return
            (pace.works.set if word == "work" else pace.works.clear)()

    threading.Thread(target=obey, daemon=True).start()
    from app.lifecycle import PatientProtocol

    config = uvicorn.Config(
        app, log_level="error", access_log=False, http=PatientProtocol, timeout_graceful_shutdown=5
    )
    uvicorn.Server(config).run(sockets=[listener])
