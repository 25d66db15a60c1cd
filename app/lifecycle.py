"""What keeps a server that runs for months within its bounds: connections, files, half-sent requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("coread")
#: A request's headers must be there after so long; without it half-open connections stay for ever.
HEADER_S = 20.0
#: Gradio's copy of an upload that no handler took (its page was closed) is removed after so long.
FORGOTTEN_S = 15 * 60.0


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a limit on how long the headers of a request may take."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._disarm()  # the headers are complete
        elif self._deadline is None:
            self._arm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._arm()  # a piece of the next request is here already

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEADER_S, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        # Between two requests of a kept connection uvicorn's own timer is at work.
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


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
