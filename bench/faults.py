"""Faults of the world around a real server under load: `python -m bench.faults [NAME …] [--out FILE]`.

    engine     the engine's thread is killed in the middle of answers
    half-open  1,000 connections whose request never ends
    disk       a full disk
    lock       a stranger's lock on the database
    slow       programs that ask and do not read
    kill       kill -9, and a start on the same data

Each can be run alone. While it lasts, people read (`bench.faults_crowd`); what they are told is written down
as they are told it (`told`; `errors`: what broke in their browsers without a word of the page), and
afterwards the server must work, its accounts add up and every answer that was seen be stored. As root the
data lies on a small file system of its own, which is then really full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import faults_world as world
from bench.faults_crowd import Crowd, afterwards, noticed_nothing, told_only
from bench.faults_world import Figures, Held
from bench.load_server import ServerFailed, ServerProcess

REACHED = "the fault was put to it"
NOBODY_HANGS = "nobody hangs"
#: When the fault is over, whoever asked must have been answered or told otherwise after so long.
PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`seen`: what must hold of what people saw meanwhile (`Crowd.report`)."""

    name: str
    put: Callable[[ServerProcess], Awaitable[tuple[Figures, Held]]]
    seen: Callable[[dict[str, Any]], Held]


def unnoticed(seen: dict[str, Any]) -> Held:
    return {"people noticed nothing": noticed_nothing(seen)}


def told(sentence: str) -> Callable[[dict[str, Any]], Held]:
    """`sentence`: what people must be told."""

    def judge(seen: dict[str, Any]) -> Held:
        return {
            "people were told, in the sentence made for it": told_only(seen, sentence),
            "and nothing else broke in their browsers": not seen["error_count"],
        }

    return judge


FAULTS = {
    "engine": Fault(
        "engine thread killed",
        world.engine_killed,
        told("The engine stopped working (SystemExit); please ask again"),
    ),
    "half-open": Fault("half-open connections", world.half_open, unnoticed),
    "disk": Fault(
        "disk full", world.disk_full, told("The server's disk is full, so nothing new can be stored.")
    ),
    "lock": Fault(
        "database locked by a stranger", world.locked, told("Another program holds the server's database, so")
    ),
    "slow": Fault("readers who do not read", world.not_reading, unnoticed),
}
KILL = "kill"
KILL_NAME = "kill -9 and restart"


@contextlib.asynccontextmanager
async def people_reading(server: ServerProcess) -> AsyncIterator[tuple[Crowd, Held]]:
    """People who read while the block runs, once one of them has been answered; afterwards they bring to an
    end what they began, and the `Held` says whether they could."""
    crowd, ended, held = Crowd(server.url), asyncio.Event(), Held()
    reading = asyncio.create_task(crowd.read(ended.is_set))
    try:
        await crowd.until_answered()
        yield crowd, held
    finally:
        ended.set()
        _, hanging = await asyncio.wait({reading}, timeout=PATIENCE_S)
        held[NOBODY_HANGS] = not hanging
        reading.cancel()
        (outcome,) = await asyncio.gather(reading, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome


async def during(server: ServerProcess, fault: Fault) -> dict[str, Any]:
    """Let people read while `fault` lasts, then check everything. Raises `Unreached` or TimeoutError."""
    async with people_reading(server) as (crowd, ended):
        figures, held = await fault.put(server)
    seen = crowd.report()
    after, held_after = await afterwards(server, crowd)
    await crowd.close()
    return figures | {"people": seen} | after | {"held": held | ended | fault.seen(seen) | held_after}


async def killed(server: ServerProcess) -> dict[str, Any]:
    """kill -9 in the middle of answers; then a start on the same data, and the same browsers come back."""
    port = world.address(server)[1]
    async with people_reading(server) as (crowd, ended):
        await world.until(server, world.at_work)
        before = crowd.measured.answers, len(crowd.measured.errors)
        server.kill()
    seen = crowd.report()
    began = time.monotonic()
    await asyncio.to_thread(server.start, port)
    seconds = time.monotonic() - began
    after, held_after = await afterwards(server, crowd)
    await crowd.close()
    figures = {"answers_before": before[0], "ready_again_after_s": round(seconds, 1), "people": seen}
    # The browser says that the connection is gone; no page can tell anything then.
    held = {"people met it in the middle of something": seen["error_count"] > before[1] and not seen["told"]}
    return figures | after | {"held": held | ended | held_after}


async def one(server: ServerProcess, run: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """One fault's result, with all that held (`held`); one that could not be put, or after which the server
    could not be looked at any more, has not. A server that has gone is started again for the next fault."""
    try:
        result = await run()
        result["held"] = {REACHED: True} | result["held"]
    except Exception as error:  # whatever it is, it is told, and the other faults are still to come
        result = {"failed": f"{type(error).__name__}: {error}", "held": {REACHED: False}}
    if server.process.poll() is not None:
        result["held"]["the server goes on"] = False
        try:
            await asyncio.to_thread(server.start)
        except ServerFailed as error:
            result["not_started_again"] = str(error)
    return result


async def measure(data_dir: Path, log: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """All faults (or some, by `FAULTS`' names and `KILL`) on one server, one after the other."""
    server = ServerProcess(data_dir, log, "bench.faulty_server", kv_pool_bytes="512MB")
    await asyncio.to_thread(server.start)
    runs = {key: (fault.name, partial(during, server, fault)) for key, fault in FAULTS.items()}
    runs[KILL] = (KILL_NAME, partial(killed, server))
    faults: dict[str, Any] = {}
    try:
        for key, (name, run) in runs.items():
            if not only or key in only:
                faults[name] = await one(server, run)
                print(name, json.dumps(faults[name], indent=1, ensure_ascii=False), flush=True)
    finally:
        exit_status = await asyncio.to_thread(server.stop)
    return {
        "faults": faults,
        "exit_status": exit_status,
        "ended_well": server.ended_well(exit_status),
        "log": server.log_lines("ERROR", "WARNING", "Traceback", "CRITICAL")[-40:],
    }


def not_held(results: dict[str, Any]) -> list[str]:
    """What did not hold, in words; of no fault at all nothing holds."""
    missing = [
        f"{name}: {what}"
        for name, result in results["faults"].items()
        for what, held in result["held"].items()
        if not held
    ]
    if not results["faults"]:
        missing.append("no fault was put")
    return missing if results["ended_well"] else [*missing, "the server ended in order"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0]
    )
    names = [*FAULTS, KILL]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; all otherwise")
    parser.add_argument("--only", action="append", choices=names, default=[], help="the same, one at a time")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(names)):
        parser.error(f"{', '.join(unknown)}: no such fault; there are {', '.join(names)}")
    only = [*given.names, *given.only]
    folder = Path(tempfile.mkdtemp(prefix="coread-faults-"))
    try:
        with world.small_disk(folder / "disk") as disk:
            results = asyncio.run(measure(disk / "data", folder / "log", only))
            if given.out is not None:
                text = json.dumps(results, indent=1, ensure_ascii=False)
                given.out.write_text(text + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in results["log"]:
        print(line)
    if missing := not_held(results):
        raise SystemExit("Not everything held:\n  " + "\n  ".join(missing))


if __name__ == "__main__":
    main()
