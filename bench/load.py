"""Readers on a real server, through its HTTP doors: `python -m bench.load [--minutes 10] [--out FILE]`.

    warm up ─▶ N readers for M minutes ─▶ 2 N readers (the line is too short for them) ─▶ all leave ─▶ checks

Each reader is a browser's visitor: loads the page, polls the memory panel every second, thinks, asks about
one of the documents or searches all, opens and searches conversations, looks at the memory page, hovers
over blocks, reloads, and now and then stops an answer. The packaged model answers. What must hold: no error
and no refusal at N; refusals that are sentences at 2 N; p95 of what the page does under a second while the
engine is busy; flat resident memory; accounts that add up; every answer that was seen is stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import data
from bench.load_figures import summary, verdicts
from bench.load_page import Measured, Page, attempt
from bench.load_server import Sample, ServerProcess


@dataclass(frozen=True, slots=True)
class Plan:
    """`think_s`: mean of an exponential, `hurried_s` of twice the readers; `running`: answers at once."""

    readers: int = 50
    minutes: float = 10.0
    overload_minutes: float = 2.0
    think_s: float = 30.0
    hurried_s: float = 10.0
    running: int = 24
    pool: str = "512MB"

    @property
    def queued(self) -> int:
        """Places in line: with those that run as many as there are readers, so that none is ever refused,
        and a few more, because an answer that was stopped leaves its place a moment later. Twice the readers
        find too few."""
        return max(1, self.readers - min(self.running, self.readers // 2) + 2)


class Reader:
    """One reader's behaviour; the same seed does the same things, as far as the server lets it."""

    def __init__(self, url: str, number: int, plan: Plan, measured: Measured) -> None:
        self._random = random.Random(number)
        self._plan, self.measured = plan, measured
        self.page = Page(url, measured)
        self._questions = [question.question for question in data.questions("dev")]
        self.asked: dict[str, int] = {}

    async def run(self, until: float) -> None:
        """Read until the moment `until` (`time.monotonic`); an answer that runs then is read to its end."""
        await asyncio.sleep(self._random.uniform(0, min(self._plan.think_s, 20.0)))
        if not await attempt(self.measured, "page load", self.page.load):
            return
        polling = asyncio.create_task(self._poll())
        try:
            while time.monotonic() < until:
                thinking = self._random.expovariate(1 / self._plan.think_s)
                await asyncio.sleep(max(0.0, min(thinking, until - time.monotonic())))
                if time.monotonic() < until:
                    await self._do_something()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def verify(self) -> int:
        """The conversation on screen holds what was answered; the number of stored answers."""
        if not self.page.conversation:
            return 0
        exported = await self.page.export()
        answers = [m for m in exported["messages"] if m["role"] == "assistant"]
        if len(answers) < self.asked.get(self.page.conversation, 0):
            raise ValueError(f"{len(answers)} of {self.asked[self.page.conversation]} answers are stored")
        return len(answers)

    async def _poll(self) -> None:
        while True:
            await attempt(self.measured, "memory feed", self.page.memory)
            await asyncio.sleep(1.0)

    async def _do_something(self) -> None:
        pick, page = self._random.random(), self.page
        if pick < 0.62:
            await self._ask()
        elif pick < 0.70:
            await attempt(self.measured, "search", lambda: page.search(self._random.choice("aeio")))
        elif pick < 0.78 and page.conversations:
            id = self._random.choice(page.conversations)
            await attempt(self.measured, "open", lambda: page.open(id))
        elif pick < 0.84:
            await attempt(self.measured, "new", page.new)
        elif pick < 0.90:
            await attempt(self.measured, "memory page", page.dashboard)
            await attempt(self.measured, "hover", lambda: page.hover(self._random.randrange(100)))
        elif pick < 0.95:
            await attempt(self.measured, "reload", page.load)
        elif page.conversation:
            await attempt(self.measured, "export", page.export)

    async def _ask(self) -> None:
        documents = self.page.documents
        # Popular documents are read by many, as in life.
        place = min(int(self._random.paretovariate(0.7)) - 1, len(documents) - 1)
        document = documents[place] if documents and self._random.random() < 0.7 else ""
        question = self._random.choice(self._questions)
        stop = self._random.uniform(0.5, 6.0) if self._random.random() < 0.1 else None
        if await attempt(self.measured, "ask", lambda: self.page.ask(question, document, stop)):
            id = self.page.conversation
            self.asked[id] = self.asked.get(id, 0) + 1


async def _watch(server: ServerProcess, samples: list[Sample]) -> None:
    while True:
        samples.append(await asyncio.to_thread(server.sample))
        await asyncio.sleep(2.0)


async def _phase(
    server: ServerProcess, readers: Sequence[Reader], seconds: float, grace_s: float
) -> tuple[list[Sample], float]:
    """Let the readers read for `seconds`; whoever is still waiting `grace_s` later leaves, as people do. What
    was seen from outside, and how long it really took."""
    samples: list[Sample] = []
    watching = asyncio.create_task(_watch(server, samples))
    began = time.monotonic()
    tasks = [asyncio.create_task(reader.run(began + seconds)) for reader in readers]
    try:
        _, late = await asyncio.wait(tasks, timeout=seconds + grace_s)
        readers[0].measured.left += len(late)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return samples, time.monotonic() - began


async def _recover(server: ServerProcess) -> dict[str, Any]:
    """Everybody has left: how long until the engine is idle, and a newcomer is answered."""
    began = time.monotonic()
    while True:
        status = await asyncio.to_thread(server.status)
        if status.get("running") == 0 and status.get("queued") == 0:
            break
        if time.monotonic() - began > 120:
            return {"idle_s": None, "status": status}
        await asyncio.sleep(0.2)
    idle = time.monotonic() - began
    measured = Measured()
    newcomer = Page(server.url, measured)
    await attempt(measured, "load", newcomer.load)
    await attempt(measured, "ask", lambda: newcomer.ask("What is this about?", ""))
    await newcomer.close()
    return {
        "idle_s": round(idle, 2), "newcomer_answered": measured.answers == 1,
        "newcomer_errors": measured.errors, "newcomer_page_load_s": round(measured.times["page load"][0], 3),
    }  # fmt: skip


async def measure(plan: Plan, data_dir: Path, log: Path) -> dict[str, Any]:
    """Run everything on a server of its own; the result is what `--out` keeps."""
    server = ServerProcess(
        data_dir,
        log,
        max_queued=str(plan.queued),
        max_running=str(min(plan.running, plan.readers // 2)),
        kv_pool_bytes=plan.pool,
    )
    await asyncio.to_thread(server.start)
    try:
        status = server.status()
        first, second = Measured(), Measured()
        readers = [Reader(server.url, n, plan, first) for n in range(plan.readers)]
        samples, seconds = await _phase(server, readers, plan.minutes * 60, 45.0)
        stored = 0
        for reader in readers:
            if await attempt(first, "verify", reader.verify):
                stored += reader.asked.get(reader.page.conversation, 0)
        loaded = summary(first, samples, seconds)
        after_load = await asyncio.to_thread(server.check)
        hurried = replace(plan, think_s=min(plan.think_s, plan.hurried_s))
        crowd = [Reader(server.url, 1_000 + n, hurried, second) for n in range(2 * plan.readers)]
        over_samples, over_seconds = await _phase(server, crowd, plan.overload_minutes * 60, 1.0)
        overloaded = summary(second, over_samples, over_seconds)
        for reader in (*readers, *crowd):
            await reader.page.close()
        recovery = await _recover(server)
        checked = await asyncio.to_thread(server.check)
    finally:
        status_code = await asyncio.to_thread(server.stop)
    return {
        "conditions": {
            "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "memory_bytes": psutil.virtual_memory().total, "plan": asdict(plan),
            "engine": {k: status.get(k) for k in ("model", "dtype", "backend", "total_blocks", "pool_bytes")},
        },
        "readers": loaded, "stored_answers_checked": stored, "check_after": after_load,
        "twice": overloaded, "recovery": recovery, "check_at_end": checked, "exit_status": status_code,
        "log_problems": server.log_lines("ERROR", "Traceback", "CRITICAL")[:20],
        "holds": verdicts(loaded, overloaded, recovery, after_load, checked),
    }  # fmt: skip


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
