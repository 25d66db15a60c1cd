"""Parse a stranger's file in a child process, so that a bomb or an endless loop costs one failed job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import rag
from rag.errors import ParseFailed
from rag.parse.types import Limits, Parsed

_ROOT = str(Path(rag.__file__).resolve().parents[1])
#: Starting Python on a busy machine takes a while that is not the document's fault.
_GRACE_S = 10.0


def parse_file(
    path: Path, name: str, limits: Limits | None = None, cancelled: Callable[[], bool] = lambda: False
) -> Parsed:
    """Parse `path`; `name` is the original name (only its ending matters) and never used as a path.

    Blocks until the child has answered or its time is over. `cancelled` is asked several times a second.
    Raises `ParseFailed` with one of the reasons: "no text", "encoding", "not text", "not supported",
    "damaged", "encrypted", "too long", "too many pages", "time", "memory", "cancelled".
    """
    limits = limits or Limits()
    job = json.dumps({"path": str(path), "name": name, "limits": asdict(limits)}).encode("ascii")
    with tempfile.TemporaryDirectory(prefix="coread-parse-") as folder:
        # -P and an empty folder of its own: nothing that lies about can be imported by accident.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rag.parse.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        timer = threading.Timer(limits.seconds + _GRACE_S, _kill, (child,))
        watcher = _Watcher(child, cancelled)
        timer.start()
        watcher.start()
        try:
            output, _ = child.communicate(job)
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
            watcher.stop()
            _kill(child)
            child.wait()
    if watcher.fired:
        raise ParseFailed("cancelled", "The upload was cancelled.")
    return _answer(output, child.returncode, timed_out, limits)


def _answer(output: bytes, code: int, timed_out: bool, limits: Limits) -> Parsed:
    try:
        result = json.loads(output)
    except ValueError:
        result = None
    if isinstance(result, dict) and "parsed" in result:
        return Parsed.from_json(result["parsed"])
    if isinstance(result, dict) and "failed" in result:
        raise ParseFailed(result["failed"], result["message"])
    if timed_out or code in (-getattr(signal, "SIGXCPU", 24), -getattr(signal, "SIGKILL", 9)):
        raise ParseFailed(
            "time", f"Reading the document takes longer than the {limits.seconds:g} s it may take."
        )
    raise ParseFailed("damaged", f"The reader of this format gave up on the file (exit status {code}).")


class _Watcher(threading.Thread):
    """Ends the child when the job is cancelled."""

    def __init__(self, child: subprocess.Popen[bytes], cancelled: Callable[[], bool]) -> None:
        super().__init__(name="rag-parse-watcher", daemon=True)
        self._child, self._cancelled = child, cancelled
        self._ended = threading.Event()
        self.fired = False

    def run(self) -> None:
        while not self._ended.wait(0.2):
            if self._cancelled():
                self.fired = True
                _kill(self._child)
                return

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        child.kill()


def _environment(folder: str) -> dict[str, str]:
    """What Python needs to start, and nothing that a server's environment may hold (keys, tokens)."""
    kept = {
        key: os.environ[key] for key in ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "LANG") if key in os.environ
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([_ROOT, *(p for p in sys.path if p.endswith("site-packages"))]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "HOME": folder,
        "TMPDIR": folder,
        # One thread each for libraries that would reserve address space for many.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
