"""Faults of the world around a real server under load: `python -m bench.faults [--only NAME] [--out FILE]`.

    engine thread killed · half-open connections · a full disk · a stranger's lock on the database
    · readers who do not read · kill -9 and a start on the same data

While each lasts, people read (`bench.load_page`); what they are told is written down as they are told it,
and afterwards the server must work, its accounts add up and every answer that was seen be stored. As root the
data lies on a small file system of its own, which is then really full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from app.lifecycle import raise_file_limit
from bench.load_figures import quantile
from bench.load_page import Measured, Page, attempt
from bench.load_server import ServerProcess

QUESTIONS = ("What is this document about?", "Which numbers does it name?", "Who wrote it, and when?")
HALF_OPEN, NOT_READING = 1_000, 16
#: Longer than the database waits for a lock, so that people are told.
LOCKED_S = 40.0
FULL_S = 15.0
DISK_BYTES = 400 * 2**20


class Crowd:
    """A few people who ask, look and load the page for as long as the fault lasts."""

    def __init__(self, url: str, people: int = 4) -> None:
        self.measured = Measured()
        self._pages = [Page(url, self.measured) for _ in range(people)]
        self.asked: dict[str, int] = {}

    async def read(self, until: Callable[[], bool]) -> None:
        await asyncio.gather(*(self._one(page, until) for page in self._pages))

    async def _one(self, page: Page, until: Callable[[], bool]) -> None:
        number = 0
        while not until():
            await attempt(self.measured, "load", page.load)
            await attempt(self.measured, "memory", page.memory)
            question = QUESTIONS[number % len(QUESTIONS)]
            if page.documents and await attempt(
                self.measured,
                "ask",
                lambda q=question: page.ask(q, page.documents[0]),  # type: ignore[misc]
            ):
                self.asked[page.conversation] = self.asked.get(page.conversation, 0) + 1
            number += 1

    async def lost(self) -> list[str]:
        """Conversations that hold fewer answers than were seen."""
        missing = []
        for page in self._pages:
            await attempt(self.measured, "load", page.load)
            for conversation in page.conversations:
                page.conversation = conversation
                stored = [m for m in (await page.export())["messages"] if m["role"] == "assistant"]
                if len(stored) < self.asked.get(conversation, 0):
                    missing.append(f"{conversation}: {len(stored)} of {self.asked[conversation]}")
        known = {id for page in self._pages for id in page.conversations}
        return missing + [f"{id} is gone" for id in self.asked if id not in known]

    async def close(self) -> None:
        for page in self._pages:
            await page.close()

    def report(self) -> dict[str, Any]:
        times = self.measured.times
        loads = times.get("page load", [])
        return {
            "answers": self.measured.answers,
            "told": dict(self.measured.refusals),
            "errors": self.measured.errors[:5],
            "error_count": len(self.measured.errors),
            "page_load_p95_s": round(quantile(loads, 0.95), 3) if loads else None,
        }


async def _during(server: ServerProcess, fault: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Let people read while `fault` lasts, then check everything."""
    crowd, ended = Crowd(server.url), asyncio.Event()
    reading = asyncio.create_task(crowd.read(ended.is_set))
    try:
        await asyncio.sleep(2.0)
        result = await fault()
    finally:
        ended.set()
        await reading
    result |= crowd.report()
    return result | await _afterwards(server, crowd)


async def _afterwards(server: ServerProcess, crowd: Crowd) -> dict[str, Any]:
    after = Measured()
    newcomer = Page(server.url, after)
    await attempt(after, "load", newcomer.load)
    await attempt(after, "ask", lambda: newcomer.ask(QUESTIONS[0], newcomer.documents[0]))
    await newcomer.close()
    lost = await crowd.lost()
    await crowd.close()
    return {
        "lost": lost,
        "next_person_answered": after.answers == 1,
        "problems": (await asyncio.to_thread(server.check))["problems"],
    }


# -- the faults ----------------------------------------------------------------------------------------------


def _address(server: ServerProcess) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


async def half_open(server: ServerProcess) -> dict[str, Any]:
    """Connections whose request never ends: how many opened, and how long until the server closed them."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for _ in range(HALF_OPEN):
        reader, writer = await asyncio.open_connection(*_address(server))
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Never")
        opened.append((reader, writer))
    began = time.monotonic()
    async with asyncio.timeout(120):
        await asyncio.gather(*(reader.read() for reader, _ in opened))
    seconds = time.monotonic() - began
    for _, writer in opened:
        writer.close()
    return {"opened": len(opened), "all_closed_by_the_server_after_s": round(seconds, 1)}


async def not_reading(server: ServerProcess) -> dict[str, Any]:
    """Programs that ask for long answers and never read them."""
    body = json.dumps(
        {"model": "coread", "stream": True, "max_tokens": 192, "logprobs": True, "top_logprobs": 20,
         "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    )  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    before = psutil.Process(server.process.pid).memory_info().rss
    sockets = []
    for _ in range(NOT_READING):
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        plain.connect(_address(server))
        plain.sendall(request)
        sockets.append(plain)
    began = time.monotonic()
    await asyncio.sleep(5.0)
    while True:  # answers go on being computed and end, read or not
        status = await asyncio.to_thread(server.status)
        if status.get("queued") == 0 and status.get("running", 99) <= 4:
            break
        if time.monotonic() - began > 60:
            break
        await asyncio.sleep(0.5)
    grown = psutil.Process(server.process.pid).memory_info().rss - before
    for plain in sockets:
        plain.close()
    return {"programs": NOT_READING, "engine_free_again_after_s": round(time.monotonic() - began, 1),
            "memory_grown_mib": round(grown / 2**20, 1)}  # fmt: skip


async def locked(server: ServerProcess) -> dict[str, Any]:
    """Another program takes the database's write lock and sits on it."""
    path = next(server.data_dir.glob("*.sqlite"))
    stranger = sqlite3.connect(path, isolation_level=None, timeout=30.0)
    stranger.execute("BEGIN IMMEDIATE")
    await asyncio.sleep(LOCKED_S)
    stranger.execute("ROLLBACK")
    stranger.close()
    return {"locked_s": LOCKED_S}


async def _until(
    server: ServerProcess, condition: Callable[[dict[str, Any]], bool], seconds: float = 120.0
) -> None:
    """Ask for the server's status until the condition holds of it. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition(await asyncio.to_thread(server.status)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def engine_killed(server: ServerProcess) -> dict[str, Any]:
    """The engine's thread ends in the middle of answers; how long until questions are answered again."""
    await _until(server, lambda status: bool(status.get("running")))  # in the middle of something
    server.process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    with contextlib.suppress(TimeoutError):  # it may be back before anybody looks
        await _until(server, lambda status: status.get("state") != "ready", 5.0)
    await _until(server, lambda status: status.get("state") == "ready")
    seconds = time.monotonic() - began
    await asyncio.sleep(10.0)  # people ask again
    restarts = len(server.log_lines("was started again with an empty memory"))
    return {"answers_again_after_s": round(seconds, 1), "restarts_in_the_log": restarts}


def fill(folder: Path) -> Path:
    """Write a file until nothing more fits."""
    ballast = folder / "ballast"
    piece = 2**20
    with ballast.open("wb", buffering=0) as file:
        while piece:
            try:
                file.write(b"\0" * piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2
    return ballast


async def disk_full(server: ServerProcess) -> dict[str, Any]:
    """Nothing more fits on the disk for a while. (Where no file system could be mounted, no file of the
    server's may grow instead.)"""
    if server.data_dir.parent.is_mount():
        ballast = await asyncio.to_thread(fill, server.data_dir.parent)
        try:
            await asyncio.sleep(FULL_S)
        finally:
            ballast.unlink()
        return {"seconds": FULL_S, "how": "a file system of its own, filled"}
    process = psutil.Process(server.process.pid)
    old = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (4_096, old[1]))
    try:
        await asyncio.sleep(FULL_S)
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, old)
    return {"seconds": FULL_S, "how": "a limit on the size of the server's files"}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own at `folder`, where this user may mount one; else the folder as it is."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "coread-faults", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


async def killed(server: ServerProcess) -> dict[str, Any]:
    """kill -9 in the middle of answers; then a start on the same data, and the same browsers come back."""
    crowd, ended = Crowd(server.url), asyncio.Event()
    reading = asyncio.create_task(crowd.read(ended.is_set))
    await asyncio.sleep(25.0)
    status = await asyncio.to_thread(server.status)
    port = _address(server)[1]
    ended.set()
    server.kill()
    await reading
    report = crowd.report()
    began = time.monotonic()
    await asyncio.to_thread(server.start, port)
    seconds = time.monotonic() - began
    return (
        {"running_when_killed": status.get("running"), "ready_again_after_s": round(seconds, 1)}
        | {"answers": report["answers"], "error_count": report["error_count"]}
        | {"errors": sorted({error[:60] for error in report["errors"]})}
        | await _afterwards(server, crowd)
    )


FAULTS = {
    "engine": ("engine thread killed", engine_killed),
    "half-open": ("half-open connections", half_open),
    "disk": ("disk full", disk_full),
    "lock": ("database locked by a stranger", locked),
    "slow": ("readers who do not read", not_reading),
}
KILL = "kill"


async def measure(data_dir: Path, log: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """All faults (or some, by `FAULTS`' names and `KILL`) on one server, one after the other."""
    server = ServerProcess(data_dir, log, "bench.faulty_server", kv_pool_bytes="512MB")
    await asyncio.to_thread(server.start)
    results: dict[str, Any] = {}
    try:
        for key, (name, fault) in FAULTS.items():
            if not only or key in only:
                results[name] = await _during(server, lambda f=fault: f(server))  # type: ignore[misc]
                print(name, json.dumps(results[name], indent=1), flush=True)
        if not only or KILL in only:
            results["kill -9 and restart"] = await killed(server)
            print("kill -9", json.dumps(results["kill -9 and restart"], indent=1), flush=True)
    finally:
        results["exit_status"] = await asyncio.to_thread(server.stop)
        results["log"] = server.log_lines("ERROR", "WARNING", "Traceback", "CRITICAL")[-40:]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", action="append", choices=[*FAULTS, KILL], default=[])
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args()
    raise_file_limit()  # a thousand connections are as many files
    folder = Path(tempfile.mkdtemp(prefix="coread-faults-"))
    try:
        with small_disk(folder / "disk") as disk:
            results = asyncio.run(measure(disk / "data", folder / "log", given.only))
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    for line in results["log"]:
        print(line)
    faults = [value for value in results.values() if isinstance(value, dict)]
    if any(f["lost"] or f["problems"] or not f["next_person_answered"] for f in faults):
        raise SystemExit("Something was lost, or the server did not recover; see above.")


if __name__ == "__main__":
    main()
