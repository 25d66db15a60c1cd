"""The engine as it is served, but for the model: real memory, scheduler, ledger and step loop under a runner
that writes letters. Tests step it themselves, or let the service's own thread do it (`threaded`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.core import EngineCore
from engine.ledger import MemorySnapshot
from engine.runner import Row, StepOutput
from engine.scheduler import Limits
from engine.service import EngineService, EngineStatus
from engine.types import (
    Copy,
    Done,
    EngineConfig,
    Event,
    Failed,
    GenerationRequest,
    ModelShape,
    SamplingParams,
    Scope,
    Segment,
)
from tests.app.fakes import CharTokenizer

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=8, itemsize=4, max_context=4096)
LETTERS = "the reader reads what others read. "


class Letters(CharTokenizer):
    """One id a character, as a detokenizer wants it."""

    added_tokens_decoder: Any = {}  # noqa: RUF012

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(id - 10) if id >= 10 else "" for id in ids)


class LetterRunner:
    """Every row that samples gets the next letter of a text; blocks read by several rows are read once."""

    def __init__(self, block_bytes: int, pause_s: float = 0.0) -> None:
        self.block_bytes, self.pause_s = block_bytes, pause_s
        self._letter = itertools.count()

    def step(self, rows: Sequence[Row], copies: Sequence[Copy] = ()) -> StepOutput:
        if self.pause_s:
            time.sleep(self.pause_s)
        tables = [list(row.page_table) for row in rows]
        return StepOutput(
            tokens=[ord(LETTERS[next(self._letter) % len(LETTERS)]) + 10 if r.sample else None for r in rows],
            finite=[True] * len(rows),
            logprobs=[None] * len(rows),
            kv_bytes_logical=sum(len(table) for table in tables) * self.block_bytes,
            kv_bytes_read=len({block for table in tables for block in table}) * self.block_bytes,
            eligible_nodes=1,
            shared_nodes=1,
        )


class SmallEngine(EngineService):
    """`blocks` blocks of 16 tokens. Ready at once."""

    def __init__(self, blocks: int = 96, *, threaded: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(EngineConfig(model="letters"))
        self.now = 0.0
        self.threaded = threaded
        unit = SHAPE.block_bytes(16)
        self.core = EngineCore(
            LetterRunner(unit, pause_s), Letters(), SHAPE, num_blocks=blocks, block_size=16,
            limits=Limits(max_running=32), clock=time.monotonic if threaded else self.clock,
        )  # fmt: skip
        self.events_of: dict[str, list[Event | None]] = {}
        self._found = EngineStatus(
            "starting", "Letters.", "letters", "cpu", "float32", "letters", SHAPE, 16, blocks
        )
        if not threaded:
            self._core = self.core
            self._set(replace(self._found, state="ready"))

    def _load(self) -> Callable[[], EngineCore]:
        self._status = self._found
        return lambda: self.core

    def clock(self) -> float:
        return self.now

    def start(self) -> None:
        if self.threaded:
            super().start()

    def fresh(self) -> None:
        """The next look makes a snapshot, which then stays for a while."""
        self._snapshot, self._tree = None, None

    def memory(self) -> MemorySnapshot:
        """As served, but the test's clock decides how much time has gone by."""
        if self.threaded:
            return super().memory()
        with self._snapshot_lock:
            if self._snapshot is None:
                self.core.ledger.tick(self.now)
                self._snapshot = self.core.ledger.snapshot()
            return self._snapshot

    # -- work by hand ------------------------------------------------------------------------------------

    def ask(self, conversation: str, *, document: int, question: int, tokens: int, length: int = 100) -> None:
        """Somebody asks about a document of `length` tokens."""
        text = [1000 * (document + 1) + i for i in range(length)]
        id = f"r{len(self.events_of)}"
        self.events_of[id] = []
        request = GenerationRequest(
            segments=[
                Segment([5] * 20, Scope.public(), "instructions"),
                Segment(text, Scope.collection("k"), "document", f"d{document}"),
                Segment([20 + question] * 7, Scope.account(conversation), "question"),
            ],
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
            principal=conversation,
            conversation=conversation,
            output_scope=Scope.account(conversation),
        )
        self.core.submit(id, request, self.events_of[id].append)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.125  # exact in binary, so that sums can be compared
            self.core.step()

    def run_until(self, condition: Callable[[], bool], limit: int = 1_000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.run(1)
        raise AssertionError(f"nothing of the kind within {limit} steps")

    def done(self) -> list[Done]:
        """Ends of all requests so far; a failure is a failure of the test."""
        events = [event for events in self.events_of.values() for event in events]
        assert not [event for event in events if isinstance(event, Failed)]
        return [event for event in events if isinstance(event, Done)]
