"""What keeps a server that runs for months within its bounds: connections, files, half-sent requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.errors import AppError

log = logging.getLogger("coread")
#: A request's headers must be there after so long; without it half-open connections stay for ever.
HEADER_S = 20.0
#: A body may take so long, and longer by what has come of it at so many bytes a second.
BODY_S = 60.0
BODY_BYTES_A_SECOND = 4_096
#: A client that reads nothing of what it is sent for so long is cut off.
STALLED_S = 60.0
#: Files that are not connections: models, the database and its readers, uploads, logs.
KEPT_FILES = 384
#: Gradio's copy of an upload that no handler took (its page was closed) is removed after so long.
FORGOTTEN_S = 15 * 60.0


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits on how long a client may take: for the headers of a request, for
    its body, and for reading what it is sent; and on how many there are."""

    #: Connections beyond are closed at once, so that files are left for the database.
    max_connections = 8_000

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._body_began = 0.0
        self._body_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.close()
            return
        self._arm(HEADER_S)

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        super().data_received(data)
        match self.conn.their_state:
            case h11.IDLE:
                if self._deadline is None:
                    self._arm(HEADER_S)
            case h11.SEND_BODY:
                if before is not h11.SEND_BODY:
                    self._body_began, self._body_bytes = self.loop.time(), 0
                self._body_bytes += len(data)
                self._arm(self._body_left())
            case _:
                self._disarm()  # the request is here

    def pause_writing(self) -> None:
        """The client does not read: what it is sent has filled the buffers."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._calm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._arm(HEADER_S)  # a piece of the next request is here already

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._calm()
        super().connection_lost(exc)

    def _body_left(self) -> float:
        allowed = BODY_S + self._body_bytes / BODY_BYTES_A_SECOND
        return max(0.0, self._body_began + allowed - self.loop.time())

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _calm(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        # Between two requests of a kept connection uvicorn's own timer is at work.
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
        elif self.conn.their_state is h11.SEND_BODY:
            if self.flow.read_paused:  # the server itself does not take more just now
                self._arm(BODY_S)
            else:
                self.transport.close()


def patient_protocol(files: int) -> type[PatientProtocol]:
    """The protocol for a process that may open so many files (0: not known)."""
    wanted = PatientProtocol.max_connections if files <= 0 else max(64, files - KEPT_FILES)
    return type("PatientProtocol", (PatientProtocol,), {"max_connections": wanted})


def raise_file_limit() -> int:
    """Allow as many open files as the system lets this user; the number that is allowed now."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def sweep(folder: Path, older_than_s: float = FORGOTTEN_S) -> int:
    """Remove files that nobody took for so long, and folders that are empty then; how many files."""
    removed, now = 0, time.time()
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                path = Path(root, name)
                if now - path.lstat().st_mtime > older_than_s:
                    path.unlink()
                    removed += 1
        if Path(root) != folder:
            with contextlib.suppress(OSError):
                os.rmdir(root)  # fails, as it should, where something is in it
    return removed


async def sweep_forever(folder: Path, every_s: float = 60.0) -> None:
    """`sweep` again and again until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        try:
            if removed := await asyncio.to_thread(sweep, folder):
                log.info("removed %d uploads that no page asked for", removed)
        except OSError as error:
            log.warning("forgotten uploads could not be removed: %s", error)


async def freeze_when(ready: Awaitable[None]) -> None:
    """Once the models are loaded, take all that is there out of the garbage collector's sight.

    It stays until the process ends, and a full collection walks all of it while every thread waits: half a
    second (torch, transformers and Gradio imported), in the middle of somebody's answer.
    """
    try:
        await ready
    except AppError:
        return  # they cannot be loaded: nothing is served
    gc.collect()
    gc.freeze()
