"""The memory page as a Gradio component: a constant template, its script, and what the script may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import HTTPException

from app.dashboard.feed import viewer
from app.dashboard.recording import packaged, packed_recording
from app.errors import AppError
from app.pages.desk import say_script
from app.runtime import Runtime
from app.sizing import SizingRefused, Workload, estimate
from engine.errors import EngineError

_HERE = Path(__file__).parent
#: The parts of the script, in order; they share one scope.
SCRIPTS = ("feed.js", "core.js", "map.js", "tree.js", "pages.js", "side.js", "replay.js", "live.js")


def script() -> str:
    """The page's whole script."""
    return say_script() + "\n".join((_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)


def feed_script() -> str:
    """The part that the chat page's panel uses as well."""
    return (_HERE / "feed.js").read_text(encoding="utf-8")


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
        server_functions=server_functions(runtime),
        apply_default_css=False,
        elem_id="cr-dashboard",
    )


def _number(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise SizingRefused(f"{name.replace('_', ' ')} must be a whole number that is not negative.")
    return int(value)


def server_functions(runtime: Runtime) -> list[Callable[..., Awaitable[Any]]]:
    """What the script may call now and then (what it polls is a route, see `routes`); each takes one
    argument, which the browser chooses and nobody believes.

    block       what one block holds, by its number
    size        the calculator
    choices     what the calculator offers, and the names of the packaged recordings
    demo        start the demonstration (administrators)
    recording   a packaged recording, by its name
    """
    feed = runtime.dashboard

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
        return feed.choices() | {"recordings": sorted(packaged())}

    async def demo(_: object, request: gr.Request) -> dict[str, Any]:
        who = viewer(runtime, request.headers)
        try:
            if not runtime.ready:
                return {"error": runtime.detail}
            runtime.demo.start_by(who)
        except AppError as error:
            return {"error": str(error)}
        return runtime.demo.status(who)

    async def recording(name: object) -> dict[str, str]:
        path = packaged().get(name) if isinstance(name, str) else None
        if path is None:
            return {"error": "There is no such recording."}
        try:
            return await asyncio.to_thread(packed_recording, path)
        except AppError as error:
            return {"error": str(error)}

    return [block, size, choices, demo, recording]
