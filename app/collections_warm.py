"""Warming a collection: its documents are read into the memory before anybody asks about them.

    each section, then each whole document:  wait until nobody's answer runs ─▶ prefill ─▶ published blocks
                                                  ▲                               │ somebody asks
                                                  └────────── give way ◄──────────┘

What is computed is exactly what a question would have the engine read first (instructions and text, up to
where the reader's own words begin), so the next question finds it. Warming yields: it has the engine's batch
priority, begins nothing while an answer runs or waits, and an item in work is given up when somebody comes;
what it had computed stays and is found again. It takes at most half the memory, so that it cannot push out
everything that others read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from app.errors import NotFoundHere, QuotaRefused
from app.pages.words import Phrase, phrase
from app.principal import Principal
from app.prompting import Prompter, Span
from app.settings import Settings
from app.store import Store
from engine.errors import ContextTooLong, EngineError
from engine.types import Done, Event, Failed, GenerationRequest, Priority, SamplingParams, Scope, Segment
from rag.errors import NotFound, PromptTooLong

if TYPE_CHECKING:
    from engine.service import EngineService
    from rag.aio import AsyncLibrary
    from rag.types import DocumentText

log = logging.getLogger("coread")
#: How often the engine is looked at to see whether somebody came.
LOOK_S = 0.2
#: The row on the memory page that the work counts for, and its place among requests. Nobody's tokens a minute
#: are used up: what bounds it is that it gives way, takes half the memory at most, and runs once at a time.
_NAME = "system"
_AGAIN_S = 1.0

State = Literal["reading", "waiting", "done", "full", "stopped", "failed"]


@dataclass(slots=True)
class Warming:
    """How far the warming of one collection has come, in parts of its documents."""

    collection: str
    total: int
    done: int = 0
    #: Parts that were in memory already, and parts that are longer than the model reads.
    found: int = 0
    skipped: int = 0
    tokens: int = 0
    state: State = "reading"
    problem: str = ""

    @property
    def running(self) -> bool:
        return self.state in ("reading", "waiting")


class Warmer:
    """Warms one collection at a time. For the server's event loop."""

    def __init__(
        self,
        settings: Settings,
        library: AsyncLibrary,
        store: Store,
        engine: EngineService,
        prompter: Prompter,
    ) -> None:
        self._settings, self._library, self._store = settings, library, store
        self._engine, self._prompter = engine, prompter
        self._task: asyncio.Task[None] | None = None
        self._now: Warming | None = None
        self.look_s = LOOK_S

    @property
    def now(self) -> Warming | None:
        """The warming that runs or ran last; whoever shows it asks who may read its collection."""
        return self._now

    async def start(self, principal: Principal, collection: str) -> Warming:
        """Begin; the caller has found that the principal may (see `Shelf.keepable`). Raises `QuotaRefused`
        while another one is under way, `NotFoundHere` where there is nothing to read."""
        if self._now is not None and self._now.running:
            raise QuotaRefused(phrase("library.warming_already"))
        now = self._now = Warming(collection, 0)
        try:
            parts = await self._parts(principal, collection)
            if not parts:
                raise NotFoundHere(phrase("library.nothing_to_warm"))
        except BaseException:
            if self._now is now:
                self._now = None
            raise
        now.total = len(parts)
        if not now.running:  # it was stopped while its parts were being listed
            return now
        self._task = asyncio.create_task(self._run(principal, now, parts), name="coread-warm")
        return now

    async def stop(self) -> None:
        """End it; what was computed stays."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._now is not None and self._now.running:
            self._now.state = "stopped"

    async def _parts(self, principal: Principal, collection: str) -> list[Span]:
        """Sections that are short enough to go into a prompt whole, then whole documents."""
        readable = await self._store.readable(principal) & {collection}
        sections: list[Span] = []
        whole: list[Span] = []
        for info in await self._library.documents(readable):
            if info.version == 0:
                continue
            try:
                document = await self._library.document(info.id, readable)
            except NotFound:
                continue  # deleted meanwhile
            sections += _sections(document, self._settings.section_chars)
            whole.append(Span.whole(document))
        return list(dict.fromkeys(sections + whole))

    async def _run(self, principal: Principal, now: Warming, parts: Sequence[Span]) -> None:
        left = self._engine.status().total_blocks // 2
        try:
            for part in parts:
                segments = await self._segments(principal, part)
                if segments is None:
                    now.skipped += 1
                else:
                    try:
                        left = await self._warm(now, part, segments, left)
                    except NotFound:  # deleted or replaced since it was laid out
                        now.skipped += 1
                    if left < 0:
                        now.state = "full"
                        return
                now.done += 1
            now.state = "done"
        except asyncio.CancelledError:
            now.state = "stopped"
            raise
        except (EngineError, NotFoundHere, NotFound) as error:
            log.warning("a collection could not be warmed: %s", error)
            now.state, now.problem = "failed", _told(error)
        except Exception:  # nobody awaits this task: what it fails with is told here or nowhere
            log.exception("a collection could not be warmed")
            now.state, now.problem = "failed", phrase("error.internal_error")

    async def _segments(self, principal: Principal, part: Span) -> list[Segment] | None:
        """The shared beginning of every prompt that reads this part; None where it is too long, was replaced,
        or may no longer be read."""
        readable = await self._store.readable(principal)
        try:
            built = await self._prompter.build(
                readable=readable, path=(), question="?", account=principal.id, spans=(part,),
                answer_tokens=self._settings.answer_tokens,
            )  # fmt: skip
        except (ContextTooLong, PromptTooLong, NotFoundHere):
            return None
        shared = takewhile(lambda segment: not segment.scope.private, built.segments)
        return [segment for segment in shared if segment.tokens]

    async def _warm(self, now: Warming, part: Span, segments: list[Segment], left: int) -> int:
        """Have a part computed unless it is there; how many blocks may still be taken, negative where this
        part would have been too much."""
        total = sum(len(segment.tokens) for segment in segments)
        size = self._engine.status().block_size
        while True:
            await self._idle(now)
            there = await asyncio.to_thread(self._engine.resident_tokens, segments)
            if there >= total - size:  # all whole blocks
                now.found += 1
                return left
            if math.ceil((total - there) / size) > left:
                return -1
            computed = await self._prefill(segments, part)
            if computed is not None:
                now.tokens += computed
                return left - math.ceil(computed / size)

    async def _idle(self, now: Warming) -> None:
        while self._others(0):
            now.state = "waiting"
            await asyncio.sleep(self.look_s)
        now.state = "reading"

    def _others(self, ours: int) -> bool:
        status = self._engine.status()
        return status.running + status.queued > ours

    async def _prefill(self, segments: list[Segment], part: Span) -> int | None:
        """Tokens that were computed; None where it was given up because somebody came. Raises `NotFound`
        where the document was deleted or replaced before the engine had it."""
        request = GenerationRequest(
            segments=segments,
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            principal=_NAME,
            conversation=_NAME,
            output_scope=Scope.account(_NAME),
            priority=Priority.BATCH,
        )
        generation = await self._engine.submit(request)
        computed: int | None = None
        try:
            if await self._library.tell_stale([(part.document_id, part.version)]):
                raise NotFound("The document was deleted or replaced.")
            async with aclosing(_watched(aiter(generation), self.look_s)) as events:
                async for event in events:
                    match event:
                        case None if self._others(1):
                            generation.abort()
                        case Done():
                            given_up = event.reason == "aborted"
                            computed = None if given_up else event.receipt.computed_tokens
                        case Failed():
                            raise event.error
        finally:
            generation.abort()
        return computed


def _sections(document: DocumentText, limit: int) -> list[Span]:
    return [
        Span(document.id, document.version, document.collection_id, section.start, section.end)
        for section in document.sections
        if 0 < section.end - section.start <= limit
    ]


async def _watched(events: AsyncIterator[Event], every_s: float) -> AsyncGenerator[Event | None, None]:
    """The events, and None at least every `every_s` seconds."""
    pending = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({pending}, timeout=every_s)
            yield None
            if not pending.done():
                continue
            event = pending.result()
            if event is None:
                return
            yield event
            pending = asyncio.ensure_future(anext(events, None))
    finally:
        pending.cancel()


def _told(error: Exception) -> str:
    known = error.args[0] if error.args else ""
    return known if isinstance(known, Phrase) else str(error)
