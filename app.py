"""The Space's entry point: `python app.py` serves what `coread serve` serves.

Nothing here is meant to be imported by the package `app` (which has the same name and wins); `demo` is
module-level because Gradio's tools look for it.
"""

from __future__ import annotations

import sys

from app.errors import AppError
from app.pages.build import build_demo
from app.runtime import Runtime
from app.server import serve
from app.settings import load_settings
from rag.errors import RagError

try:
    runtime = Runtime(load_settings())
except AppError as error:
    sys.exit(f"coread: {error}")
demo = build_demo(runtime)

if __name__ == "__main__":
    try:
        serve(runtime, demo)
    except (AppError, RagError) as error:
        sys.exit(f"coread: {error}")
