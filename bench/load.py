"""Readers on a real server, through its HTTP doors: `python -m bench.load [--minutes 10] [--out FILE]`.

    warm up ─▶ N readers for M minutes ─▶ 2 N readers (the line is too short for them) ─▶ all leave ─▶ checks

Each reader is a browser's visitor: loads the page, polls the memory panel every second, thinks, asks about
one of the documents or searches all, opens and searches conversations, looks at the memory page, hovers
over blocks, reloads, and now and then stops an answer. The packaged model answers. What must hold: no error
and no refusal at N; refusals, each of them a sentence, at 2 N; p95 of each thing that the page does under
a second while the engine is busy; flat resident memory; accounts that add up; every answer that was seen is
stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.load_figures import summary, verdicts
from bench.load_newcomer import newcomer
from bench.load_page import Measured, attempt
from bench.load_reader import Plan, Reader, failures
from bench.load_server import Sample, ServerProcess


async def _watch(server: ServerProcess, samples: list[Sample]) -> None:
    while True:
        samples.append(await asyncio.to_thread(server.sample))
        await asyncio.sleep(2.0)


@dataclass(frozen=True, slots=True)
class Phase:
    """What was seen from outside, and when it began (`time.monotonic`) and how long it really took."""

    samples: list[Sample]
    began: float
    seconds: float


async def phase(server: ServerProcess, readers: Sequence[Reader], seconds: float, grace_s: float) -> Phase:
    """Let the readers read for `seconds`; whoever is still waiting `grace_s` later leaves, as people do. What
    readers or the watcher themselves fail with is booked in the readers' `Measured.broken`."""
    samples: list[Sample] = []
    measured = readers[0].measured
    watching = asyncio.create_task(_watch(server, samples))
    began = time.monotonic()
    tasks = [asyncio.create_task(reader.run(began + seconds)) for reader in readers]
    late = set(tasks)
    try:
        done, late = await asyncio.wait(tasks, timeout=seconds + grace_s)
        measured.left += len(late)
        measured.broken += failures("a reader", await asyncio.gather(*done, return_exceptions=True), False)
    finally:
        for task in (*tasks, watching):
            task.cancel()
        left = await asyncio.gather(*late, return_exceptions=True)
        measured.broken += failures("a reader who left", left, True)
        measured.broken += failures(
            "the watcher", await asyncio.gather(watching, return_exceptions=True), True
        )
    return Phase(samples, began, time.monotonic() - began)


async def stored_answers(readers: Iterable[Reader]) -> dict[str, Any]:
    """All answers that readers saw to their end, against what is stored."""
    found = Measured()
    seen = stored = conversations = 0
    for reader in readers:
        seen += sum(reader.asked.values())
        conversations += len(reader.asked)

        async def verify(reader: Reader = reader) -> None:
            nonlocal stored
            stored += await reader.verify()

        await attempt(found, "verify", verify)
    return {"seen": seen, "stored": stored, "conversations": conversations, "problems": found.errors}


async def recover(server: ServerProcess, patience_s: float = 120.0) -> dict[str, Any]:
    """Everybody has left: how long until the engine is idle (None: not in time), and how a newcomer fares."""
    began = time.monotonic()
    while True:
        status = await asyncio.to_thread(server.status)
        if status.get("running") == 0 and status.get("queued") == 0:
            break
        if time.monotonic() - began > patience_s:
            return {"idle_s": None, "status": status, "newcomer": {}}
        await asyncio.sleep(0.2)
    idle = time.monotonic() - began
    return {"idle_s": round(idle, 2), "newcomer": await newcomer(server.url)}


async def measure(plan: Plan, data_dir: Path, log: Path) -> dict[str, Any]:
    """Run everything on a server of its own; the result is what `--out` keeps."""
    server = ServerProcess(
        data_dir,
        log,
        max_queued=str(plan.queued),
        max_running=str(plan.at_once),
        kv_pool_bytes=plan.pool,
    )
    await asyncio.to_thread(server.start)
    try:
        status = server.status()
        first, second = Measured(), Measured()
        readers = [Reader(server.url, n, plan, first) for n in range(plan.readers)]
        seen = await phase(server, readers, plan.minutes * 60, 45.0)
        loaded = summary(first, seen.samples, seen.began, seen.seconds)
        after_load = await asyncio.to_thread(server.check)
        hurried = plan.hurried()
        crowd = [Reader(server.url, 1_000 + n, hurried, second) for n in range(2 * plan.readers)]
        seen = await phase(server, crowd, plan.overload_minutes * 60, 1.0)
        overloaded = summary(second, seen.samples, seen.began, seen.seconds)
        recovery = await recover(server)
        stored = await stored_answers((*readers, *crowd))
        for reader in (*readers, *crowd):
            await reader.page.close()
        checked = await asyncio.to_thread(server.check)
    finally:
        exit_status = await asyncio.to_thread(server.stop)
    result: dict[str, Any] = {
        "conditions": {
            "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "memory_bytes": psutil.virtual_memory().total,
            "plan": asdict(plan) | {"at_once": plan.at_once, "queued": plan.queued},
            "engine": {k: status.get(k) for k in ("model", "dtype", "backend", "total_blocks", "pool_bytes")},
        },
        "readers": loaded, "stored": stored, "check_after": after_load,
        "twice": overloaded, "recovery": recovery, "check_at_end": checked,
        "exit_status": exit_status, "ended_well": server.ended_well(exit_status),
        "log_problems": server.log_lines("ERROR", "Traceback", "CRITICAL")[:20],
    }  # fmt: skip
    return result | {"holds": verdicts(result)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readers", type=int, default=Plan().readers)
    parser.add_argument("--minutes", type=float, default=Plan().minutes)
    parser.add_argument("--overload-minutes", type=float, default=None)
    parser.add_argument("--think", type=float, default=Plan().think_s, help="mean seconds between actions")
    parser.add_argument("--data-dir", type=Path, help="keep the data here; it must hold nothing else")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args()
    over = given.overload_minutes if given.overload_minutes is not None else min(2.0, given.minutes / 2)
    if given.readers < 4 or min(given.minutes, over, given.think) <= 0:
        parser.error("--readers must be 4 or more (fewer never fill the line), times more than 0")
    plan = Plan(given.readers, given.minutes, over, given.think)
    folder = Path(tempfile.mkdtemp(prefix="coread-load-"))
    try:
        result = asyncio.run(measure(plan, given.data_dir or folder / "data", folder / "log"))
        text = json.dumps(result, indent=1, ensure_ascii=False)
        if given.out is not None:
            given.out.write_text(text + "\n", encoding="utf-8")
        print(text)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not all(result["holds"].values()):
        raise SystemExit("Not everything held: " + ", ".join(k for k, v in result["holds"].items() if not v))


if __name__ == "__main__":
    main()
