"""The library page: a constant template, its script, and what the script may ask (`library_calls`)."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from app.pages.desk import say_script
from app.pages.library_calls import functions
from app.runtime import Runtime

_HERE = Path(__file__).parent
#: The parts of the script, in order; they share one scope.
SCRIPTS = ("core", "dialog", "upload", "list", "document", "live")


def script() -> str:
    """The page's whole script."""
    parts = [(_HERE / f"library_{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return "\n".join([say_script(), *parts])


def stylesheet() -> str:
    """The page's part of the style sheet."""
    return (_HERE / "library.css").read_text(encoding="utf-8")


def build_library(runtime: Runtime) -> gr.HTML:
    """The component, inside the Blocks that are being built."""
    return gr.HTML(
        "",
        html_template=(_HERE / "library.html").read_text(encoding="utf-8"),
        js_on_load=script(),
        server_functions=functions(runtime),
        apply_default_css=False,
        elem_id="cr-library",
    )
