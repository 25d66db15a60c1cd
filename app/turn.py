"""One running turn: its state, what the engine's events do to it, and the words for its stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.limits import MeteredGeneration
from app.pages.words import Phrase, phrase
from app.principal import Principal
from app.prompting import Span
from app.repetition import loop_start
from app.store import Conversation, Message, Status
from engine.types import Delta, Done, Reading, SamplingParams, Waiting

T = TypeVar("T")
#: Characters between two looks for a loop.
_CHECK_EVERY = 40
#: Characters of an answer between two looks for the passage that it leans on.
_BEST_EVERY = 120


@dataclass(slots=True)
class Turn:
    """One running turn. `payer` is whose limits it counts against."""

    principal: Principal
    payer: Principal
    conversation: Conversation
    path: Sequence[Message]
    question: str
    sampling: SamplingParams
    readable: frozenset[str]
    parent: str | None
    #: The stored question when an answer is made again; None while it is new.
    asked: str | None = None
    spans: tuple[Span, ...] | None = None
    generation: MeteredGeneration | None = None
    stopped: bool = False
    #: The engine has been asked; from here on a turn is ended by aborting its request.
    submitted: bool = False
    #: The conversation is being deleted: nothing of the turn is kept.
    forgotten: bool = False
    #: The answer is stored, or is being stored.
    saved: bool = False
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    receipt: dict[str, Any] | None = None
    status: Status = "stopped"
    #: How much of `text` has been looked through for a loop, and where one made it end.
    checked: int = 0
    cut: int | None = None
    #: How long `text` was when it was last compared with the passages.
    compared: int = 0

    def stop(self) -> None:
        """End it: with a request in the engine it then ends by itself, with the part that was written and its
        receipt; before that it is aborted as soon as it is submitted."""
        self.stopped = True
        if self.generation is not None:
            self.generation.abort()

    def add(self, piece: Delta) -> bool:
        """Take a piece of the answer; True where it is to be shown, being no part of a loop."""
        shown = bool(piece.text) and self.cut is None
        self.text += piece.text
        self.tokens += piece.tokens
        return shown

    def due(self) -> bool:
        """Whether enough was written since the last time to compare the text with the passages again."""
        due = len(self.text) - self.compared >= _BEST_EVERY
        if due:
            self.compared = len(self.text)
        return due

    def loops(self) -> bool:
        """Whether the text has begun to repeat itself, looked for now and then; the answer ends there."""
        if len(self.text) - self.checked < _CHECK_EVERY:
            return False
        self.checked = len(self.text)
        self.cut = loop_start(self.text)
        return self.cut is not None

    def end(self, done: Done, receipt: dict[str, Any]) -> None:
        """Take the whole answer, up to where it begins to repeat itself."""
        self.text, self.tokens, self.receipt = done.text, list(done.tokens), receipt
        self.status = "stopped" if done.reason == "aborted" else "complete"
        self.cut = loop_start(self.text) if self.cut is None else self.cut
        if self.cut is not None:
            self.text, self.tokens = self.text[: self.cut], []
            self.status = "complete" if not self.stopped else "stopped"
        elif done.reason == "length":
            self.receipt = {**receipt, "length_limit": len(done.tokens)}


async def beats(events: AsyncIterator[T], every_s: float) -> AsyncGenerator[T | None, None]:
    """The events, and None whenever there has been none for `every_s` seconds."""
    pending = asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait({pending}, timeout=every_s)
            if not pending.done():
                yield None
                continue
            try:
                event: T = pending.result()
            except StopAsyncIteration:
                return
            yield event
            pending = asyncio.ensure_future(anext(events))
    finally:
        pending.cancel()


def waiting_words(event: Waiting) -> Phrase:
    """What a turn waits for, in words."""
    if event.reason == "prefill":
        return phrase("stage.prefill")
    return phrase(f"stage.{event.reason}", place=event.position)


def reading_words(event: Reading) -> Phrase:
    """How far its documents have been read, in words."""
    if event.reused:
        return phrase("stage.reading_reused", done=event.done, total=event.total, reused=event.reused)
    return phrase("stage.reading", done=event.done, total=event.total)
