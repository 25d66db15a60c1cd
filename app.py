"""The Space's entry point: `python app.py` serves what `coread serve` serves.

Nothing here is meant to be imported by the package `app` (which has the same name and wins); `demo` is
module-level because Gradio's tools look for it.
"""

from __future__ import annotations

import sys

from app.cache_home import ensure_cache_home

ensure_cache_home()  # before Gradio, which reads the hub's variables as it is imported

from app.errors import AppError  # noqa: E402
from app.pages.build import build_demo  # noqa: E402
from app.runtime import Runtime  # noqa: E402
from app.server import serve  # noqa: E402
from app.settings import load_settings  # noqa: E402
from rag.errors import RagError  # noqa: E402

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
