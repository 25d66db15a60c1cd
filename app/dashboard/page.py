"""The memory page as a Gradio component: a constant template, its script, and what the script may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import HTTPException

from app.dashboard.feed import DashboardFeed, viewer
from app.dashboard.recording import PACKAGED, packed_recording
from app.errors import AppError
from app.runtime import Runtime
from app.sizing import SizingRefused, Workload, estimate
from engine.errors import EngineError

_HERE = Path(__file__).parent
#: The parts of the script, in order; they share one scope.
SCRIPTS = ("core.js", "map.js", "tree.js", "pages.js", "side.js", "live.js")


def script() -> str:
    """The page's whole script."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)


def template() -> str:
    """The page's constant template; no data ever goes into it."""
    return (_HERE / "page.html").read_text(encoding="utf-8")


def stylesheet() -> str:
    """The page's part of the style sheet."""
    return (_HERE / "page.css").read_text(encoding="utf-8")


def build_dashboard(runtime: Runtime) -> gr.HTML:
    """The component, inside the Blocks that are being built."""
    return gr.HTML(
        "",
        html_template=template(),
        js_on_load=script(),
        server_functions=server_functions(runtime, DashboardFeed(runtime)),
        apply_default_css=False,
        elem_id="cr-dashboard",
    )


def _number(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise SizingRefused(f"{name.replace('_', ' ')} must be a whole number that is not negative.")
    return int(value)


def server_functions(runtime: Runtime, feed: DashboardFeed) -> list[Callable[..., Awaitable[Any]]]:
    """What the script may call; each takes one argument, which the browser chooses and nobody believes.

    look        one update (see `DashboardFeed.read`)
    block       what one block holds, by its number
    size        the calculator
    choices     what the calculator offers, and whether there is a recording
    demo        start the demonstration (administrators)
    recording   the packaged recording
    """

    async def look(asked: object, request: gr.Request) -> dict[str, Any]:
        try:
            return await feed.read(viewer(runtime, request.headers), asked if isinstance(asked, dict) else {})
        except (AppError, EngineError) as error:  # the engine stops or fails in between
            raise HTTPException(getattr(error, "status", 503), str(error)) from None

    async def block(asked: object, request: gr.Request) -> dict[str, Any] | None:
        try:
            return await feed.block(viewer(runtime, request.headers), asked)
        except (AppError, EngineError) as error:
            raise HTTPException(getattr(error, "status", 503), str(error)) from None

    async def size(asked: object) -> dict[str, Any]:
        given = asked if isinstance(asked, dict) else {}
        try:
            work = Workload(_number(given, "document_tokens"), _number(given, "own_tokens"))
            return estimate(str(given.get("model", "")), _number(given, "device_bytes"), work)
        except AppError as error:
            return {"error": str(error)}

    async def choices(_: object) -> dict[str, Any]:
        return feed.choices() | {"recording": PACKAGED.is_file()}

    async def demo(_: object, request: gr.Request) -> dict[str, Any]:
        who = viewer(runtime, request.headers)
        try:
            if not runtime.ready:
                return {"error": runtime.detail}
            runtime.demo.start_by(who)
        except AppError as error:
            return {"error": str(error)}
        return runtime.demo.status(who)

    async def recording(_: object) -> dict[str, str]:
        try:
            return await asyncio.to_thread(packed_recording, PACKAGED)
        except AppError as error:
            return {"error": str(error)}

    return [look, block, size, choices, demo, recording]
