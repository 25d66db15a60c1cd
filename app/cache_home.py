"""A cache directory that can be written, where the user's own cannot (a Space with a read-only HOME)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path


def ensure_cache_home(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Point `XDG_CACHE_HOME` at a usable directory if the user's cache directory is not; return it then.

    Converted weights, downloads from the hub and compiled kernels go there, so this is called before anything
    that reads those variables is imported. A variable that is set already is the person's word and stays. A
    hub cache that was filled beforehand (an image with preloaded models) goes on being read where it is.
    """
    if environment.get("XDG_CACHE_HOME"):
        return None
    home = environment.get("HOME")
    own = Path(home) / ".cache" if home else None
    if own is not None and _usable(own):
        return None
    data = environment.get("COREAD_DATA_DIR") or environment.get("DATA_DIR")
    chosen = Path(data).expanduser() / "cache" if data else None
    if chosen is None or not _usable(chosen):
        chosen = Path(environment.get("TMPDIR") or tempfile.gettempdir()) / f"coread-cache-{os.getuid()}"
        if not _usable(chosen):
            return None  # nothing can be written anywhere; what needs to will say so
    if own is not None and _holds_something(own / "huggingface" / "hub"):
        environment.setdefault("HF_HOME", str(own / "huggingface"))
    environment["XDG_CACHE_HOME"] = str(chosen)
    environment.setdefault("TRITON_CACHE_DIR", str(chosen / "triton"))
    return chosen


def _usable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".write-test-"):
            return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _holds_something(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False
