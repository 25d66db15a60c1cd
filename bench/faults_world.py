"""The faults themselves. Each returns figures, and what must hold of them; `Unreached` is raised where the
fault could not be put to the server at all, since everything would hold then. Whatever a fault takes (locks,
disk space, limits, connections) it gives back, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from app.lifecycle import HEADER_S
from bench.load_server import ServerProcess
from bench.resident import resident as resident_memory

HALF_OPEN, NOT_READING = 1_000, 16
#: Open files of this process: the connections, and those of the people.
FILES = HALF_OPEN + 500
#: Longer than the database waits for a lock, so that people are told.
LOCKED_S = 40.0
FULL_S = 15.0
DISK_BYTES = 400 * 2**20
#: Room in which the database's log can be brought into the database, before it is taken too.
LAST_BYTES = 16 * 2**20
#: Programs that do not read must have left the engine after so long.
FREE_S = 90.0
#: What 16 unread answers may cost beside the KV pool at any time; they have some 300 KB each, as text.
GROWN_MIB = 32.0
#: Longer than any answer is.
ANSWER_BYTES = 2**24
#: So much of an answer is looked at: the head, and of a refusal the sentence.
BEGINNING_BYTES = 2_048
#: A file of the server's may grow to this where no file system of its own could be mounted.
FILE_BYTES = 4_096

Figures = dict[str, Any]
Held = dict[str, bool]


class Unreached(Exception):
    """The fault was not put to the server; the message says why."""


def address(server: ServerProcess) -> tuple[str, int]:
    """Host and port."""
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


async def until(
    server: ServerProcess, condition: Callable[[dict[str, Any]], bool], seconds: float = 120.0
) -> None:
    """Ask for the server's status until the condition holds of it. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition(await asyncio.to_thread(server.status)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def database(server: ServerProcess) -> Path:
    """The file in which everything is. Raises `Unreached` where there is none, or more than one."""
    paths = sorted(server.data_dir.glob("*.sqlite"))
    if len(paths) != 1:
        raise Unreached(f"{server.data_dir} holds {len(paths)} databases, expected one")
    return paths[0]


def at_work(status: dict[str, Any]) -> bool:
    """Whether answers are being computed."""
    return bool(status.get("running"))


async def half_open(server: ServerProcess) -> tuple[Figures, Held]:
    """Connections whose request never ends: how many opened, and how long until the server closed them."""
    with many_files(FILES):
        return await _half_open(server)


async def _half_open(server: ServerProcess) -> tuple[Figures, Held]:
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    allowed = HEADER_S + 20.0
    try:
        for _ in range(HALF_OPEN):
            try:
                reader, writer = await asyncio.open_connection(*address(server))
            except OSError as error:
                raise Unreached(
                    f"only {len(opened):,} of {HALF_OPEN:,} connections opened: {error}"
                ) from error
            opened.append((reader, writer))
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Never")
        began = time.monotonic()
        closing = [asyncio.create_task(_closed(reader)) for reader, _ in opened]
        done, late = await asyncio.wait(closing, timeout=2 * allowed)
        seconds = time.monotonic() - began
        for task in late:
            task.cancel()
        answered = sum(task.result() > 0 for task in done)
    finally:
        for _, writer in opened:
            writer.close()
    return (
        {"opened": len(opened), "closed_by_the_server": len(done), "after_s": round(seconds, 1),
         "got_an_answer": answered},
        {f"all were closed by the server within {allowed:g} s": not late and seconds <= allowed},
    )  # fmt: skip


async def _closed(reader: asyncio.StreamReader) -> int:
    """Bytes that came until the server closed the connection."""
    try:
        return len(await reader.read())
    except ConnectionError:
        return 0


async def not_reading(server: ServerProcess) -> tuple[Figures, Held]:
    """Programs that ask the model itself (a search might refuse) for long answers and never read them.

    As many that read go before, so that what they cost as well, the first time, is not taken for a cost of
    not reading.
    """
    model = await asyncio.to_thread(server.model)
    body = json.dumps(
        {"model": model, "stream": True, "max_tokens": 192, "logprobs": True, "top_logprobs": 20,
         "messages": [{"role": "user", "content": "Write a long story about an island."}]}
    )  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    pid = server.process.pid
    idle = resident_memory(pid, server.pool_bytes).beside_pool
    await asyncio.gather(*(_read(server, request) for _ in range(NOT_READING)))
    before = resident_memory(pid, server.pool_bytes).beside_pool
    sockets: list[socket.socket] = []
    said: dict[socket.socket, bytes] = {}
    most = grown = 0
    free: float | None = None
    try:
        for _ in range(NOT_READING):
            plain = socket.socket()
            sockets.append(plain)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            plain.connect(address(server))
            plain.sendall(request)
        began = time.monotonic()
        while time.monotonic() - began < FREE_S:  # answers go on being computed and end, read or not
            status = await asyncio.to_thread(server.status)
            at_once = status.get("running", 0) + status.get("queued", 0)
            most = max(most, at_once)
            grown = max(grown, resident_memory(pid, server.pool_bytes).beside_pool - before)
            for plain in sockets:  # before the server cuts them off, which leaves nothing to look at
                said |= _beginning(plain)
            # The people who read meanwhile are four.
            if most >= NOT_READING and "running" in status and at_once <= 4:
                free = time.monotonic() - began
                break
            await asyncio.sleep(0.25)
    finally:
        for plain in sockets:
            plain.close()
    taken = sum(beginning.startswith(b"HTTP/1.1 200") for beginning in said.values())
    if most < NOT_READING or taken < NOT_READING:
        raise Unreached(
            f"{most} requests at once at most; of {NOT_READING} programs {taken} were taken{_refusals(said)}"
        )
    return (
        {"programs": NOT_READING, "taken": taken, "at_once": most,
         "engine_free_again_after_s": None if free is None else round(free, 1),
         "memory_grown_while_read_mib": round((before - idle) / 2**20, 1),
         "memory_grown_beside_the_pool_mib": round(grown / 2**20, 1)},
        {f"the engine is free again within {FREE_S:g} s, nothing having been read": free is not None,
         f"memory beside the pool grew by less than {GROWN_MIB:g} MiB": grown < GROWN_MIB * 2**20,
         f"and by less than {3 * GROWN_MIB:g} MiB with what it grew by while answers were read":
             before - idle + grown < 3 * GROWN_MIB * 2**20},
    )  # fmt: skip


async def _read(server: ServerProcess, request: bytes) -> None:
    """Ask, and read the answer to its end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FREE_S):
            with contextlib.suppress(OSError, EOFError):  # refused: those that do not read will say so
                reader, writer = await asyncio.open_connection(*address(server), limit=ANSWER_BYTES)
                with contextlib.closing(writer):
                    writer.write(request)
                    await reader.readuntil(b"data: [DONE]")


def _refusals(said: dict[socket.socket, bytes]) -> str:
    """What the programs that were not taken were told: status line and body, each once, with how many."""
    told: Counter[str] = Counter()
    for beginning in said.values():
        head, _, body = beginning.decode("utf-8", "replace").partition("\r\n\r\n")
        status = head.partition("\r\n")[0]
        if not status.startswith("HTTP/1.1 200"):
            told[f"{status}: {' '.join(body.split())}"] += 1
    return "".join(f"; {count} got {what}" for what, count in told.items())


def _beginning(plain: socket.socket) -> dict[socket.socket, bytes]:
    """How its answer begins, without taking it out of the connection; nothing where nothing has come."""
    try:
        return {plain: plain.recv(BEGINNING_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)}
    except OSError:
        return {}


async def locked(server: ServerProcess) -> tuple[Figures, Held]:
    """Another program takes the database's write lock and sits on it."""
    stranger = sqlite3.connect(database(server), isolation_level=None, timeout=30.0)
    try:
        stranger.execute("BEGIN IMMEDIATE")  # raises where it is not to be had
        began = time.monotonic()
        await asyncio.sleep(LOCKED_S)
        held = time.monotonic() - began
        stranger.execute("ROLLBACK")
    finally:
        stranger.close()  # and with it the lock
    return {"locked_s": round(held, 1)}, {}


async def engine_killed(server: ServerProcess) -> tuple[Figures, Held]:
    """The engine's thread ends in the middle of answers; how long until questions are answered again."""
    mark = "was started again with an empty memory"
    before = len(server.log_lines(mark))
    await until(server, at_work)
    server.process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    seconds: float | None = None
    try:
        async with asyncio.timeout(120.0):  # its log says so, even where it is back before anybody looks
            while len(server.log_lines(mark)) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await until(server, lambda status: status.get("state") == "ready")
        seconds = time.monotonic() - began
    except TimeoutError:
        return {"ready_again_after_s": None}, {"the engine is started again": False}
    await asyncio.sleep(10.0)  # people ask again
    restarts = len(server.log_lines(mark)) - before
    return (
        {"ready_again_after_s": round(seconds, 1), "restarts": restarts},
        {"the engine is started again": True, "and once only": restarts == 1},
    )


def fill(folder: Path, leave: int = 0) -> None:
    """Write at the end of a file until nothing more fits, or only `leave` bytes are free."""
    piece = 2**20
    with (folder / "ballast").open("ab", buffering=0) as file:
        while piece and shutil.disk_usage(folder).free >= leave:
            try:
                file.write(b"\0" * piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2


def empty_log(path: Path) -> bool:
    """Give back what SQLite keeps to write its next changes into (its write-ahead log); False where it could
    not be, as when there is no room to bring the last ones into the database."""
    stranger = sqlite3.connect(path, isolation_level=None, timeout=2.0)
    try:
        busy, _, _ = stranger.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:
        return False
    finally:
        stranger.close()
    return not busy


async def disk_full(server: ServerProcess) -> tuple[Figures, Held]:
    """Nothing more fits on the disk for a while. (Where no file system could be mounted, no file of the
    server's may grow instead.) A full disk alone is met by nobody for a long time: the database goes on
    writing over the log that it has. So the log is emptied just before the last room is taken."""
    disk, path = server.data_dir.parent, database(server)
    if disk.is_mount():
        try:
            await asyncio.to_thread(fill, disk, LAST_BYTES)
            for _ in range(20):
                if await asyncio.to_thread(empty_log, path):
                    break
            else:
                raise Unreached(f"the write-ahead log of {path} could not be emptied")
            began = time.monotonic()
            least = LAST_BYTES
            while time.monotonic() - began < FULL_S:  # what the server gives back meanwhile is taken as well
                await asyncio.to_thread(fill, disk)
                least = min(least, shutil.disk_usage(disk).free)
                await asyncio.sleep(0.5)
            if least:
                raise Unreached(f"{least:,} bytes were still free on {disk}")
        finally:
            (disk / "ballast").unlink(missing_ok=True)
        return {"seconds": FULL_S, "how": "a file system of its own, filled"}, {}
    process = psutil.Process(server.process.pid)
    old = process.rlimit(psutil.RLIMIT_FSIZE)
    try:
        process.rlimit(psutil.RLIMIT_FSIZE, (FILE_BYTES, old[1]))
        await asyncio.sleep(FULL_S)
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, old)
    return {"seconds": FULL_S, "how": "a limit on the size of the server's files"}, {}


@contextlib.contextmanager
def many_files(wanted: int) -> Iterator[None]:
    """Allow this process so many open files (a thousand connections are as many), as long as it lasts. Raises
    `Unreached` where the system does not let this user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= wanted
    if not enough and hard != resource.RLIM_INFINITY and hard < wanted:
        raise Unreached(f"{wanted:,} open files are needed; this user may have {hard:,}")
    try:
        if not enough:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own at `folder`, where this user may mount one; else the folder as it is. Raises
    OSError where it cannot be given back."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "coread-faults", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            given_back = subprocess.run(["umount", str(folder)], check=False, capture_output=True, text=True)
            if given_back.returncode:
                raise OSError(f"{folder} is still mounted: {given_back.stderr.strip()}")
