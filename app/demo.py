"""Scripted readers on the real engine: they arrive, read the sample documents together, branch, and leave.

Nothing is played: each reader is a principal with a conversation of its own that asks through the same
`Chat` as a browser does, so a person can join in by reading one of the same documents.

    reader 1   ├─ ask ───── ask again (branch) ── reads ──┤ leaves
    reader 2      ├─ ask ────────── reads ──────┤
    reader 3         ├─ ask ── ask more ──────── reads ──┤
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import AppError, NotAllowed, NotFoundHere
from app.knowledge import DocumentView, questions_about
from app.principal import Principal

if TYPE_CHECKING:
    from app.runtime import Runtime

log = logging.getLogger("coread")
MIN_READERS, MAX_READERS = 12, 48
#: How the readers spread over the documents: most of them meet in the first one.
_SPREAD = (0, 0, 1, 0, 2, 1, 0, 3, 1, 0, 2, 0)
_PLAIN = (
    "What is this document about?",
    "Which numbers does it name?",
    "What should a newcomer know first?",
)


class DemoRunning(AppError):
    """A demonstration is going on already."""

    code = "demo_running"
    status = 409


class DemoRefused(AppError):
    """The demonstration cannot be run as asked; the message names the value and its limits."""

    code = "demo_refused"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between arrivals, and how long a reader goes on reading after the last answer."""

    between_s: float = 2.0
    reads_s: float = 14.0


@dataclass(frozen=True, slots=True)
class Part:
    """What one reader does. `branch`: asks for the first answer again, beside the one it has."""

    number: int
    document: DocumentView
    questions: tuple[str, ...]
    branch: bool

    @property
    def principal(self) -> Principal:
        """Stable, so that what a killed server left behind is found and deleted at the next start."""
        return Principal("anonymous", f"demo-reader-{self.number}")


@dataclass(slots=True)
class Progress:
    """How far a demonstration has come. Times are of `time.monotonic`."""

    readers: int
    started: float
    arrived: int = 0
    left: int = 0
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    problem: str = ""
    ended: float | None = None


def script(documents: list[DocumentView], readers: int) -> list[Part]:
    """Who reads what and asks what, for `readers` readers over at most four documents, always the same.

    Raises `NotFoundHere` without documents.
    """
    if not documents:
        raise NotFoundHere("There are no sample documents to read; add them first.")
    chosen = documents[: max(_SPREAD) + 1]
    asked = [0] * len(chosen)
    parts = []
    for number in range(1, readers + 1):
        place = _SPREAD[(number - 1) % len(_SPREAD)] % len(chosen)
        questions = [*questions_about(chosen[place].name), *_PLAIN]
        count = 2 if number % 3 == 0 else 1
        first = asked[place]
        asked[place] += count
        picked = tuple(questions[(first + i) % len(questions)] for i in range(count))
        parts.append(Part(number, chosen[place], picked, branch=number % 4 == 1))
    return parts


class Demo:
    """One demonstration at a time on a runtime."""

    def __init__(self, runtime: Runtime, pace: Pace | None = None) -> None:
        self._runtime = runtime
        self._pace = pace if pace is not None else Pace()
        self._task: asyncio.Task[None] | None = None
        self._progress: Progress | None = None
        self._talks: dict[str, Part] = {}
        self._planned: tuple[int, Path | None] | None = None
        self._beginning: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def allowed(self, principal: Principal | None) -> bool:
        """Whoever sits at the machine, or administers it, may start one; visitors may not."""
        if principal is None:
            return False
        return principal.kind == "local" or principal.role == "administrator"

    def start_by(self, principal: Principal | None, readers: int = MIN_READERS) -> None:
        """`start` for somebody; raises `NotAllowed` for those who may not."""
        if not self.allowed(principal):
            raise NotAllowed("Only the administrator of this server can start the demonstration.")
        self.start(readers)

    def start(self, readers: int = MIN_READERS) -> None:
        """Begin in the background. Raises `DemoRunning` or `DemoRefused`."""
        if self.running:
            raise DemoRunning("The demonstration is running already; wait until its readers have left.")
        if not MIN_READERS <= readers <= MAX_READERS:
            raise DemoRefused(f"{readers} readers were asked for; {MIN_READERS} to {MAX_READERS} can come.")
        self._progress = Progress(readers, time.monotonic())
        self._task = asyncio.create_task(self._run(self._progress), name="coread-demo")
        self._task.add_done_callback(_told)

    async def wait(self) -> Progress:
        """Wait for the last reader to leave; raises what the demonstration failed with."""
        if self._task is None or self._progress is None:
            raise DemoRefused("No demonstration has been started.")
        await asyncio.shield(self._task)
        return self._progress

    async def stop(self) -> None:
        """Send everybody home."""
        for task in (self._beginning, self._task):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def plan(self, readers: int, record: Path | None = None) -> None:
        """Begin by itself once the runtime is ready; `record`: keep the feed until the last one has left."""
        if not MIN_READERS <= readers <= MAX_READERS:
            raise DemoRefused(f"{readers} readers were asked for; {MIN_READERS} to {MAX_READERS} can come.")
        self._planned = (readers, record)

    def begin_planned(self) -> None:
        """Called by the runtime when it loads."""
        if self._planned is not None:
            self._beginning = asyncio.create_task(self._begin(*self._planned), name="coread-demo-plan")
            self._beginning.add_done_callback(_told)
            self._planned = None

    async def _begin(self, readers: int, record: Path | None) -> None:
        from app.dashboard.recording import Recorder, save

        await self._runtime.wait_seeded()
        recorder = Recorder(self._runtime.dashboard)
        recording = asyncio.create_task(recorder.run()) if record is not None else None
        try:
            self.start(readers)
            progress = await self.wait()
            log.info("the demonstration has ended after %d answers", progress.answers)
            await asyncio.sleep(self._pace.between_s)  # what is kept for reuse afterwards is part of it
        finally:
            if recording is not None:
                recording.cancel()
                await asyncio.wait({recording})
        if recording is not None and not recording.cancelled():
            recording.result()  # raises what it failed with: half a recording is none
        if record is not None:
            today = datetime.now(UTC).date().isoformat()
            await asyncio.to_thread(save, recorder.recording(today), record)
            log.info("recorded %d updates in %s", len(recorder.frames), record)

    # -- what screens are told ---------------------------------------------------------------------------

    def status(self, principal: Principal | None = None) -> dict[str, Any]:
        """Keys: `running`, `allowed`, and once one was started `readers`, `arrived`, `left`, `answers`,
        `problem` (a sentence, or empty)."""
        out: dict[str, Any] = {"running": self.running, "allowed": self.allowed(principal)}
        if self._progress is not None:
            p = self._progress
            out |= {"readers": p.readers, "arrived": p.arrived, "left": p.left, "answers": p.answers}
            out["problem"] = p.problem
        return out

    def is_scripted(self, conversation: str) -> bool:
        """Whether a conversation is one of the scripted readers'."""
        return conversation in self._talks

    def conversations(self, titles: Mapping[str, str]) -> dict[str, str]:
        """The scripted conversations that are open now, by id, with a label; those whose document is among
        `titles` only. They are nobody's, so everybody may look at them."""
        return {
            id: f"Scripted reader {part.number} · {titles[part.document.id]}"
            for id, part in self._talks.items()
            if part.document.id in titles
        }

    # -- the readers -------------------------------------------------------------------------------------

    async def _run(self, progress: Progress) -> None:
        try:
            parts = script(await self._documents(), progress.readers)
            for part in parts:
                await self._clear(part)
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._reader(part, progress))
        except AppError as error:
            progress.problem = str(error)
            log.warning("the demonstration could not be run: %s", error)
        except Exception:
            progress.problem = "The demonstration has failed; the server's log says why."
            raise
        finally:
            progress.ended = time.monotonic()

    async def _documents(self) -> list[DocumentView]:
        """Sample documents with questions about them, those with most questions first."""
        from rag.sample import COLLECTION

        everybody = Principal("anonymous", "demo")
        views = [
            view
            for view in await self._runtime.knowledge.documents(everybody)
            if view.collection_id == COLLECTION
        ]
        return sorted(views, key=lambda view: (-len(questions_about(view.name)), view.name))

    async def _clear(self, part: Part) -> None:
        for talk in await self._runtime.store.conversations(part.principal):
            await self._runtime.chat.delete(part.principal, talk.id)

    async def _reader(self, part: Part, progress: Progress) -> None:
        await asyncio.sleep((part.number - 1) * self._pace.between_s)
        runtime, who = self._runtime, part.principal
        talk = await runtime.store.create(who, f"Scripted reader {part.number}", part.document.id)
        self._talks[talk.id] = part
        progress.arrived += 1
        try:
            for question in part.questions:
                await self._ask(part, talk.id, question, progress)
            if part.branch:
                await self._branch(part, talk.id, progress)
            await asyncio.sleep(self._pace.reads_s)
        except Exception as error:
            # One reader who is refused (a full line, a small pool) must not end the others' visit.
            log.warning("scripted reader %d gave up: %s", part.number, error)
            progress.failed.append(f"reader {part.number}: {error}")
        finally:
            await asyncio.shield(self._leave(part, talk.id, progress))

    async def _leave(self, part: Part, talk: str, progress: Progress) -> None:
        try:
            await self._runtime.chat.delete(part.principal, talk)
        except Exception as error:  # the others stay; what is left of this one, the next start deletes
            log.warning("the conversation of scripted reader %d could not be deleted: %s", part.number, error)
            progress.failed.append(f"reader {part.number} leaving: {error}")
        finally:
            self._talks.pop(talk, None)
            progress.left += 1

    async def _ask(self, part: Part, talk: str, question: str, progress: Progress) -> None:
        async with aclosing(self._runtime.chat.ask(part.principal, talk, question)) as updates:
            async for _ in updates:
                pass
        progress.answers += 1

    async def _branch(self, part: Part, talk: str, progress: Progress) -> None:
        path = await self._runtime.store.path(part.principal, talk)
        asked = next((message for message in path if message.role == "user"), None)
        if asked is None:
            return
        async with aclosing(self._runtime.chat.regenerate(part.principal, talk, asked.id)) as updates:
            async for _ in updates:
                pass
        progress.answers += 1


def _told(task: asyncio.Task[None]) -> None:
    """Nobody need wait for a demonstration: what it failed with is in the log."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has failed: %s", task.get_name(), error, exc_info=error)
