"""What the memory page costs: `python -m tests.app.dashboard_cost` (takes about a minute and a half).

A server over a pool of 10,000 blocks, most of them in use, first without viewers, then with ten who ask for
an update a second, as the page's script does. Printed: the server's CPU time in each span as a share of one
core, and the bytes of an update before and after HTTP compression. Then 100,000 blocks in chromium: frames
a second while blocks flash.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

VIEWERS, SPAN_S = 10, 25.0


def serve(blocks: int, talks: int, say: Connection) -> None:
    """The server's process: fills the pool, then serves."""
    import uvicorn

    from app.pages.build import build_demo
    from app.runtime import Runtime
    from app.server import bind, create_app
    from app.settings import load_settings
    from tests.app.conftest import FakeParts
    from tests.app.small_engine import SmallEngine

    engine = SmallEngine(blocks)
    length = blocks * 16 // talks
    for n in range(talks):
        engine.ask(f"c{n}", document=n // 4, question=n, tokens=4, length=min(length, 3_000))
        engine.run(2)
    engine.run_until(lambda: len(engine.done()) == talks, limit=100_000)
    engine.threaded = True  # from here on the service's own thread idles, as it does in a real server
    engine.core.clock = time.monotonic
    engine.core.ledger._ticked = None
    runtime = Runtime(
        load_settings(data_dir=Path(tempfile.mkdtemp()), port=0),
        FakeParts(engine),  # type: ignore[arg-type]
    )
    listener = bind("127.0.0.1", 0)
    runtime.open()
    say.send(listener.getsockname()[1])
    app = create_app(runtime, build_demo(runtime))
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def component(config: dict[str, Any]) -> int:
    for found in config["components"]:
        if found["props"].get("elem_id") == "cr-dashboard":
            return int(found["id"])
    raise LookupError("the memory page is not in the configuration")


async def view(url: str, number: int, seconds: float, sizes: list[int], packed: list[int]) -> None:
    """One viewer of the page."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        await http.get("/memory", headers={"accept": "text/html"})
        id = component((await http.get("/config")).json())
        session = secrets.token_hex(6)
        tree = ""
        seen, end, turn = None, time.monotonic() + seconds, 0
        await asyncio.sleep(number / VIEWERS)
        while time.monotonic() < end:
            began = time.monotonic()
            asked = {"conversation": "", "after": seen, "pages": True, "history": turn % 5 == 0}
            if turn % 2 == 0:
                asked["tree"] = tree
            answer = await http.post(
                "/gradio_api/component_server",
                json={"data": asked, "component_id": id, "fn_name": "look", "session_hash": session},
            )
            update = answer.raise_for_status().json()
            seen, turn = update["event_number"], turn + 1
            tree = update.get("tree_key", tree)
            sizes.append(len(answer.content))
            packed.append(len(update["map"]["packed"]))
            await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


async def frames(url: str) -> float:
    """Frames a second of the page in chromium while the whole map is drawn anew with each of them."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(f"{url}/memory")
        await page.wait_for_function("document.querySelector('[data-cd=map]')?.dataset.total")
        found: float = await page.evaluate(
            """async () => {
              const buttons = [...document.querySelectorAll('[data-view]')];
              let drawn = 0;
              const end = performance.now() + 5000;
              while (performance.now() < end) {
                buttons[drawn % 2].click();
                await new Promise(requestAnimationFrame);
                drawn++;
              }
              return drawn / 5;
            }"""
        )
        await browser.close()
        return found


def start(blocks: int, talks: int) -> tuple[multiprocessing.Process, str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(blocks, talks, theirs), daemon=True
    )
    process.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    while True:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                return process, url  # type: ignore[return-value]
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


def cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def main() -> None:
    """Measure and print one JSON object."""
    process, url = start(10_000, 200)
    pid = process.pid or 0
    await asyncio.sleep(5)
    before = cpu(pid)
    await asyncio.sleep(SPAN_S)
    idle = (cpu(pid) - before) / SPAN_S
    sizes: list[int] = []
    packed: list[int] = []
    warm: list[int] = []
    await asyncio.gather(*(view(url, n, 3.0, warm, []) for n in range(VIEWERS)))
    before = cpu(pid)
    await asyncio.gather(*(view(url, n, SPAN_S, sizes, packed) for n in range(VIEWERS)))
    busy = (cpu(pid) - before) / SPAN_S
    process.kill()
    large, url = start(100_000, 400)
    rate = await frames(url)
    large.kill()
    json.dump(
        {
            "blocks": 10_000,
            "viewers": VIEWERS,
            "updates": len(sizes),
            "cpu_idle": round(idle, 4),
            "cpu_watched": round(busy, 4),
            "cpu_difference": round(busy - idle, 4),
            "update_bytes_median": statistics.median(sizes),
            "map_bytes_median": statistics.median(packed),
            "frames_per_second_100000_blocks": round(rate, 1),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    asyncio.run(main())
