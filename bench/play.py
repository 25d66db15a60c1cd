"""Plays a trace through an engine core: submits, steps, carries answers into the next prompt.

The engine is the one that serves (`engine.core.EngineCore`: pool, prefix tree, scheduler, ledger, step
loop). What differs is the runner behind it: the real one, or `VirtualRunner`, which computes nothing,
knows what the trace's answers are, and lets a step take the time that a cost model says.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bench.meter import Meter
from bench.trace import FIRST_ID, LAST_ID, Chat, Text, Trace
from engine.core import EngineCore
from engine.errors import EngineError
from engine.runner import Row, StepOutput
from engine.types import Copy, Done, Event, Failed, GenerationRequest, SamplingParams, Scope


class Clock(Protocol):
    """Seconds, and how to let them pass."""

    def __call__(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Return when the clock shows `moment`."""
        ...


class VirtualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        """Jump."""
        self.now = max(self.now, moment)


class WallClock:
    """The machine's own monotonic time."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, moment - time.monotonic()))


class VirtualRunner:
    """A runner without a model. A step takes `base_s + token_s * tokens` of virtual time.

    The token that a row samples is a function of the request's seed and of its position, so that an
    answer is the same whichever batches it was computed in.
    """

    def __init__(self, clock: VirtualClock, *, base_s: float = 0.025, token_s: float = 0.0001) -> None:
        self.clock, self.base_s, self.token_s = clock, base_s, token_s

    def step(self, rows: Sequence[Row], copies: Sequence[Copy] = ()) -> StepOutput:
        """Nothing is computed."""
        self.clock.now += self.base_s + self.token_s * sum(len(row.tokens) for row in rows)
        tokens = [self._token(row) if row.sample else None for row in rows]
        return StepOutput(tokens, [True] * len(rows), [None] * len(rows), 0, 0, 0, 0)

    @staticmethod
    def _token(row: Row) -> int:
        seed = row.state.params.seed if row.state is not None else None
        mixed = ((seed or 0) * 2_654_435_761 + (row.start + len(row.tokens)) * 40_503) & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 15) * 2_246_822_519 & 0xFFFFFFFF
        return FIRST_ID + (mixed ^ mixed >> 13) % (LAST_ID - FIRST_ID)


class NoText:
    """A tokenizer all of whose ids are special: nothing is ever shown, ids are all that is played."""

    all_special_ids = range(FIRST_ID, LAST_ID)

    def decode(self, ids: Sequence[int], **options: object) -> str:
        """The empty text."""
        return ""


@dataclass(slots=True)
class Played:
    """What came of a trace. `seconds` is of the core's clock, from the first request to the last answer."""

    completed: int = 0
    output_tokens: int = 0
    chats: int = 0
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    copied_bytes: int = 0
    ttft_s: list[float] = field(default_factory=list)
    #: Generated ids of each answer, by (chat, turn, 0 or 1 for the second answer), where asked for.
    answers: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)


class Player:
    """Plays every chat of `trace`; one of each chat's requests at a time.

    pace      what the recorded arrivals and pauses are multiplied by; 0: everybody is there from the start
              and asks again at once, so that memory, not the crowd, is the limit
    """

    def __init__(
        self, core: EngineCore, meter: Meter, trace: Trace, clock: Clock, *, pace: float = 0.0
    ) -> None:
        self.core, self.meter, self.trace, self.clock, self.pace = core, meter, trace, clock, pace
        meter.core = core
        self.text = Text(trace)
        self.played = Played()
        self.keep_answers = False
        self._start = clock()
        self._due: list[tuple[float, int, int, int]] = []
        self._history: dict[int, list[int]] = {chat.number: [] for chat in trace.chats}
        self._ended: list[tuple[Chat, int, int, tuple[int, ...], Done | Failed]] = []
        for chat in trace.chats:
            heapq.heappush(self._due, (self._start + pace * chat.at, chat.number, 0, 0))

    def run(self, after_step: Callable[[], None] | None = None) -> Played:
        """Play to the end."""
        while self._due or self.core.busy:
            while self._due and self._due[0][0] <= self.clock():
                _, number, turn, attempt = heapq.heappop(self._due)
                self._ask(self.trace.chats[number], turn, attempt)
            began = self.clock()
            if self.core.step():
                self.meter.after_step(self.clock() - began)
                if after_step is not None:
                    after_step()
            elif self._due and not self.core.busy:
                self.clock.wait_until(self._due[0][0])
            self._answer_all()
        self.meter.check()
        self.played.seconds = self.clock() - self._start
        return self.played

    def _ask(self, chat: Chat, turn: int, attempt: int) -> None:
        question = self.text.question(chat, turn)
        asked = chat.turns[turn]
        name = f"chat-{chat.number}"
        request = GenerationRequest(
            segments=self.text.segments(chat, turn, self._history[chat.number], question),
            sampling=SamplingParams(
                max_tokens=asked.again if attempt else asked.answer,
                ignore_eos=True,
                seed=(chat.number * 32 + turn) * 2 + attempt,
            ),
            principal=f"user-{chat.number}",
            conversation=name,
            output_scope=Scope.account(f"user-{chat.number}"),
        )
        sink = partial(self._event, chat, turn, attempt, question)
        try:
            self.core.submit(f"{name}-{turn}-{attempt}", request, sink)
        except EngineError as error:
            # The chat ends here: who is refused goes away.
            self.played.refused[error.code] = self.played.refused.get(error.code, 0) + 1

    def _event(
        self, chat: Chat, turn: int, attempt: int, question: tuple[int, ...], event: Event | None
    ) -> None:
        if isinstance(event, Done | Failed):
            self._ended.append((chat, turn, attempt, question, event))

    def _answer_all(self) -> None:
        ended, self._ended = self._ended, []
        for chat, turn, attempt, question, event in ended:
            if isinstance(event, Failed):
                code = getattr(event.error, "code", type(event.error).__name__)
                self.played.failed[code] = self.played.failed.get(code, 0) + 1
                continue
            self._answered(chat, turn, attempt, question, event)

    def _answered(self, chat: Chat, turn: int, attempt: int, question: tuple[int, ...], done: Done) -> None:
        played, receipt = self.played, done.receipt
        played.completed += 1
        played.output_tokens += receipt.output_tokens
        played.copied_bytes += receipt.bytes_copied
        if receipt.ttft_s is not None:
            played.ttft_s.append(receipt.ttft_s)
        if self.keep_answers:
            played.answers[chat.number, turn, attempt] = done.tokens
        now = self.clock()
        if chat.turns[turn].again and not attempt:
            heapq.heappush(self._due, (now, chat.number, turn, 1))
            return
        self._history[chat.number] += [*question, *done.tokens]
        if turn + 1 < len(chat.turns):
            pause = self.pace * chat.turns[turn + 1].think
            heapq.heappush(self._due, (now + pause, chat.number, turn + 1, 0))
        else:
            played.chats += 1
            self.core.ledger.close(f"chat-{chat.number}")
