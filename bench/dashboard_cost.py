"""What watching the memory costs: `python -m bench.dashboard_cost` (about three minutes on an idle machine).

A server over a pool of 10,000 blocks, half of them in use by 184 chats. Spans without viewers and spans with
ten of them, who ask for an update a second as the page's script does, take turns; the server's CPU time is
compared. Once with a pool in which nothing changes, once while it changes twice a second. `--frames` draws
100,000 blocks in chromium and counts frames a second while the whole map is drawn anew with each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.dashboard_server import serve

VIEWERS, BLOCKS, CHATS = 10, 10_000, 200
#: Until five seconds of frames have been drawn.
FRAMES_S = 60.0
#: Until the server has said its port, and until its pool is in use.
PORT_S, FILL_S = 120.0, 180.0
#: Until a server that was asked to end is ended.
END_S = 20.0
OUT = Path(__file__).parent / "results" / "dashboard.json"


class CostError(Exception):
    """The server did not come up, or did not tell what it should."""


@dataclass(slots=True)
class Server:
    """A server process and the way to its parent's ear."""

    process: BaseProcess
    url: str
    tell: Connection

    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@dataclass(slots=True)
class Seen:
    """What viewers got: bytes over the wire of each update, 204s among them as 0."""

    bytes: list[int] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)


@contextmanager
def started(blocks: int, chats: int) -> Iterator[Server]:
    """A server whose pool is in use. It ends with the block, and its folder goes with it, whatever happens.

    Raises `CostError` where it does not come up.
    """
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(prefix="coread-cost-", ignore_cleanup_errors=True) as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(blocks, chats, theirs, folder), daemon=True
        )
        process.start()
        theirs.close()  # or the end of the process would not end the pipe
        try:
            url = f"http://127.0.0.1:{_port(ours)}"
            _until_filled(url, chats, process)
            yield Server(process, url, ours)
        finally:
            process.terminate()
            process.join(END_S)
            process.kill()
            process.join()
            ours.close()


def _port(server: Connection) -> int:
    if not server.poll(PORT_S):
        raise CostError(f"The server did not say its port within {PORT_S:g} s.")
    try:
        return int(server.recv())
    except EOFError as error:
        raise CostError("The server ended before it said its port; what it wrote says why.") from error


def _until_filled(url: str, chats: int, process: BaseProcess) -> None:
    end = time.monotonic() + FILL_S
    while time.monotonic() < end:
        if not process.is_alive():
            raise CostError(f"The server ended with {process.exitcode} before its pool was in use.")
        try:
            ready = httpx.get(f"{url}/readyz", trust_env=False)
            if ready.status_code == 200 and not ready.json()["seeding"]:
                open_now = httpx.get(f"{url}/api/memory", trust_env=False).json()["open"]["everybody"]
                if open_now["conversations"] >= chats * 0.9:
                    return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise CostError(f"The server did not fill its pool within {FILL_S:g} s.")


async def view(url: str, number: int, seconds: float, seen: Seen) -> None:
    """One viewer of the page, as `live.js` asks."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        await http.get("/memory", headers={"accept": "text/html"})  # the cookie comes with the page
        have: dict[str, str] = {}
        await asyncio.sleep(number / VIEWERS)
        end, turn = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            began = time.monotonic()
            want = "p" + "h" * (turn % 10 == 0) + "t" * (turn % 2 == 0)
            asked = {"conversation": "", "want": want, "have": "_".join(have.values())}
            answer = await http.get("/api/memory/feed", params=asked)
            answer.raise_for_status()
            keys = answer.json()["keys"] if answer.status_code == 200 else []
            have |= {key[0]: key for key in keys}
            seen.bytes.append(answer.num_bytes_downloaded)
            for key in keys:
                seen.parts[key[0]] = seen.parts.get(key[0], 0) + 1
            turn += 1
            await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


async def watch(server: Server, seconds: float) -> tuple[float, Seen]:
    """The server's CPU share while ten viewers look; their first seconds, with the page, are not counted."""
    seen = Seen()
    tasks = [asyncio.create_task(view(server.url, n, seconds + 4, seen)) for n in range(VIEWERS)]
    await asyncio.sleep(4)
    seen.bytes.clear()
    seen.parts.clear()
    before, began = server.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    share = (server.cpu_s() - before) / (time.monotonic() - began)
    await asyncio.gather(*tasks)
    return share, seen


async def idle(server: Server, seconds: float) -> float:
    """The server's CPU share while nobody looks."""
    await asyncio.sleep(2)
    before, began = server.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (server.cpu_s() - before) / (time.monotonic() - began)


async def compare(server: Server, mode: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Idle and watched spans in turn. Shares are of one core; the noise is that of the idle spans."""
    server.tell.send("work" if mode == "changing" else "still")
    unwatched, watched, seen = [], [], Seen()
    for _ in range(rounds):
        unwatched.append(await idle(server, seconds))
        share, one = await watch(server, seconds)
        watched.append(share)
        seen.bytes += one.bytes
        for letter, count in one.parts.items():
            seen.parts[letter] = seen.parts.get(letter, 0) + count
    differences = [b - a for a, b in zip(unwatched, watched, strict=True)]
    return {
        "cpu_unwatched": [round(x, 4) for x in unwatched],
        "cpu_watched": [round(x, 4) for x in watched],
        "cpu_difference_mean": round(statistics.mean(differences), 4),
        "cpu_difference_worst": round(max(differences), 4),
        "noise_of_unwatched": round(max(unwatched) - min(unwatched), 4),
        "updates": len(seen.bytes),
        "bytes_median": statistics.median(seen.bytes),
        "bytes_mean": round(statistics.mean(seen.bytes)),
        "bytes_most": max(seen.bytes),
        "parts_sent": dict(sorted(seen.parts.items())),
    }


async def frames(url: str) -> float:
    """Frames a second of the page in chromium while the whole map is drawn anew with each of them."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(f"{url}/memory")
        await page.wait_for_function("document.querySelector('[data-cd=map]')?.dataset.total === '100000'")
        await page.get_by_role("button", name="Show the whole pool").click()
        await page.wait_for_function("document.querySelector('[data-cd=map]').dataset.shown === '100000'")
        drawing = page.evaluate(
            """async () => {
              const buttons = [...document.querySelectorAll('[data-view]')];
              let drawn = 0;
              const began = performance.now();
              while (performance.now() < began + 5000) {
                buttons[drawn % 2].click();
                await new Promise(requestAnimationFrame);
                drawn++;
              }
              return (1000 * drawn) / (performance.now() - began);
            }"""
        )
        found: float = await asyncio.wait_for(drawing, FRAMES_S)  # a page that is not drawn has no frames
        await browser.close()
        return found


def _results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def cost(rounds: int, seconds: float) -> dict[str, Any]:
    """Both modes on one server."""
    with started(BLOCKS, CHATS) as server:
        pool = httpx.get(f"{server.url}/api/memory", trust_env=False).json()
        return {
            "blocks": BLOCKS, "blocks_in_use": BLOCKS - pool["pool"]["free"], "viewers": VIEWERS,
            "conversations": pool["open"]["everybody"]["conversations"], "span_s": seconds,
            "load_average": round(os.getloadavg()[0], 2),
            "still": asyncio.run(compare(server, "still", rounds, seconds)),
            "changing": asyncio.run(compare(server, "changing", rounds, seconds)),
        }  # fmt: skip


def main() -> None:
    """Measure, print, and keep in a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--frames", action="store_true", help="draw 100,000 blocks in chromium instead")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    found = _results(arguments.out)
    if arguments.frames:
        with started(100_000, CHATS) as server:
            found["frames_per_second_100000_blocks"] = round(asyncio.run(frames(server.url)), 1)
    else:
        found["cost"] = cost(arguments.rounds, arguments.seconds)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
