"""What one person may use up: computed tokens a minute, uploads an hour, storage. (How many answers run and
wait at a time, and the share of the pool, is the engine's scheduler's to keep; the places of those that it
does not know yet, because their passages are still being searched for, are kept here.)

Tokens that are found in shared memory cost nothing and count for nothing: a person pays for what the engine
computes. An estimate is taken when a request is submitted and what was not needed is given back at its end.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.errors import TooMany, UploadRefused
from app.rates import Rate
from app.render import counted
from app.settings import Settings
from engine.errors import LimitReached
from engine.types import Delta, Done, Event, Failed, GenerationRequest, Reading, Segment

if TYPE_CHECKING:
    from engine.service import EngineStatus, Generation

#: Never fill the disk: the database and its log need room to end a transaction.
KEPT_FREE_BYTES = 256 * 2**20


class Submits(Protocol):
    """The part of the engine service that is needed here."""

    async def submit(self, request: GenerationRequest) -> Generation: ...
    def status(self) -> EngineStatus: ...
    def resident_tokens(self, segments: Sequence[Segment]) -> int: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """What a person keeps, and all people together. `failed`: documents among them that could not be read."""

    documents: int
    bytes: int
    total_bytes: int
    failed: int = 0


class Place:
    """A place in line from before the search until the engine has the request; a context manager."""

    def __init__(self, preparing: Counter[str], principal: str) -> None:
        self._preparing, self._principal = preparing, principal
        self._taken = True
        preparing[principal] += 1

    def leave(self) -> None:
        """Give it up. Calling it again does nothing."""
        if self._taken:
            self._taken = False
            self._preparing[self._principal] -= 1
            if not self._preparing[self._principal]:
                del self._preparing[self._principal]

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class MeteredGeneration:
    """A generation that counts what it computes; reads like the engine's own."""

    def __init__(self, generation: Generation, reserved: float, settle: Callable[[float], None]) -> None:
        self._generation, self._reserved, self._settle = generation, reserved, settle
        self._prompt: float | None = None
        self._written = 0
        self._settled = False

    @property
    def id(self) -> str:
        return self._generation.id

    def __aiter__(self) -> MeteredGeneration:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._generation)
        except BaseException as error:
            if isinstance(error, StopAsyncIteration):
                self._finish()
            raise
        self._count(event)
        return event

    def abort(self) -> None:
        """As the engine's; what was computed until now stays counted."""
        self._generation.abort()
        self._finish()

    def _count(self, event: Event) -> None:
        match event:
            case Reading():
                self._prompt = max(self._prompt or 0.0, float(event.done - event.reused))
            case Delta():
                self._written += len(event.tokens)
            case Done():
                # Exact now; the prompt is computed once for all choices.
                self._prompt = float(event.receipt.computed_tokens)
            case Failed():
                self._finish()

    def _finish(self) -> None:
        if not self._settled:
            self._settled = True
            self._settle(max(0.0, self._reserved - (self._prompt or 0.0) - self._written))


class Limits:
    """All limits of one server; for its event loop."""

    def __init__(self, settings: Settings, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._folder = settings, folder
        tokens, uploads = settings.max_tokens_per_minute, settings.max_uploads_per_hour
        self._tokens = Rate(tokens, 60.0, clock) if tokens else None
        self._uploads = Rate(uploads, 3600.0, clock) if uploads else None
        #: Requests that are being prepared, by principal.
        self._preparing: Counter[str] = Counter()

    # -- answers -----------------------------------------------------------------------------------------

    def place(self, engine: Submits, principal: str) -> Place:
        """Take a place for a request whose prompt is still to be made; raises `LimitReached` where as many
        are on their way as may run and wait.

        Without this a crowd is searched for one after the other and refused at the end of it: the work of
        those who find no place is what keeps everybody else waiting. Of one person only what is being
        prepared is counted here; how many of theirs run and wait, the engine counts when it gets the request.
        """
        settings, status = self._settings, engine.status()
        own = settings.max_running_per_person + settings.max_queued_per_person
        if self._preparing[principal] >= own:
            raise LimitReached("requests of your own at a time", own)
        room = settings.max_queued + max(0, settings.max_running - status.running)
        if self._preparing.total() + status.queued >= room:
            raise LimitReached("waiting requests", settings.max_queued)
        return Place(self._preparing, principal)

    async def submit(self, engine: Submits, request: GenerationRequest) -> MeteredGeneration:
        """Submit within the principal's tokens a minute; raises `TooMany` and what the engine raises."""
        reserved = await self._reserve(engine, request)

        def settle(unused: float) -> None:
            if self._tokens is not None:
                self._tokens.give_back(request.principal, unused)

        try:
            generation = await engine.submit(request)
        except BaseException:
            settle(reserved)
            raise
        return MeteredGeneration(generation, reserved, settle)

    async def _reserve(self, engine: Submits, request: GenerationRequest) -> float:
        if self._tokens is None:
            return 0.0
        prompt = sum(len(segment.tokens) for segment in request.segments)
        answer = request.n * request.sampling.max_tokens
        amount = float(prompt + answer)
        wait = self._tokens.take(request.principal, amount)
        if wait:
            # Perhaps most of it is in memory already. Asked only when it matters: this may wait for a step.
            resident = await asyncio.to_thread(engine.resident_tokens, request.segments)
            amount -= min(resident, prompt)
            wait = self._tokens.take(request.principal, amount)
        if wait:
            limit = self._settings.max_tokens_per_minute
            raise TooMany(
                f"One person may have {limit:,} tokens a minute computed; this takes {amount:,.0f} more.",
                wait,
            )
        return amount

    def token_headers(self, principal: str) -> dict[str, str]:
        """The rate-limit headers that OpenAI clients know; empty without a limit."""
        if self._tokens is None:
            return {}
        left = self._tokens.left(principal)
        reset = (self._tokens.capacity - left) * 60.0 / self._tokens.capacity
        return {
            "x-ratelimit-limit-tokens": f"{self._tokens.capacity:.0f}",
            "x-ratelimit-remaining-tokens": f"{math.floor(left)}",
            "x-ratelimit-reset-tokens": f"{reset:.1f}s",
        }

    # -- documents ---------------------------------------------------------------------------------------

    def check_upload(self, principal: str, size: int, stored: Stored) -> None:
        """Count one upload; raises `UploadRefused` over a limit on storage, `TooMany` over the hourly one."""
        settings = self._settings
        if size > settings.max_upload_bytes:
            raise UploadRefused(
                f"The file has {size:,} bytes; at most {settings.max_upload_bytes:,} are taken."
            )
        if stored.documents >= settings.max_documents_per_person:
            kept = counted(stored.documents, "document")
            raise UploadRefused(f"You already keep {kept}, which is the limit; delete one first.")
        if stored.bytes + size > settings.max_storage_per_person:
            raise UploadRefused(
                f"You would keep {stored.bytes + size:,} bytes; at most {settings.max_storage_per_person:,} "
                "are kept for one person. Delete a document first."
            )
        if stored.total_bytes + size > settings.max_storage:
            raise UploadRefused("The server's storage for documents is full; ask whoever runs it.")
        if shutil.disk_usage(self._folder).free < size + KEPT_FREE_BYTES:
            raise UploadRefused("The server's disk is nearly full, so nothing can be added now.")
        wait = self._uploads.take(principal) if self._uploads is not None else 0.0
        if wait:
            raise TooMany(
                f"At most {counted(settings.max_uploads_per_hour, 'file is', 'files are')} taken at once; "
                "the room for them comes back within an hour.",
                wait,
            )

    # -- what a person sees ------------------------------------------------------------------------------

    def usage(self, principal: str, stored: Stored) -> dict[str, Any]:
        """What a person has used and may use; a limit of None is none."""
        settings = self._settings
        tokens, uploads = self._tokens, self._uploads
        return {
            "documents": stored.documents,
            "failed": stored.failed,
            "max_documents": settings.max_documents_per_person,
            "bytes": stored.bytes,
            "max_bytes": settings.max_storage_per_person,
            "tokens_left": math.floor(tokens.left(principal)) if tokens else None,
            "max_tokens_per_minute": settings.max_tokens_per_minute or None,
            "uploads_left": math.floor(uploads.left(principal)) if uploads else None,
            "max_uploads_per_hour": settings.max_uploads_per_hour or None,
            "max_running": settings.max_running_per_person,
            "max_queued": settings.max_queued_per_person,
        }
