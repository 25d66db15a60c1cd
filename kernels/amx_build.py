"""Compiling the library for the matrix unit (`kernels.amx`), once on the machine that uses it.

It takes five to ten seconds of one thread, as long as torch, transformers and a model take to load: `begin`
lets both happen at once, and `built` waits for what began. Nothing here needs torch.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

FOLDER = Path(__file__).parent
#: What is compiled, into one library, and what these files include.
SOURCES = ("amx_attention.cpp", "amx_step.cpp")
HEADERS = ("amx_attention.h", "amx_products.h", "amx_team.h")
#: What the processor must have (names of /proc/cpuinfo).
CPU_FLAGS = frozenset(
    {"amx_tile", "amx_bf16", "amx_int8", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi"}
    | {"avx512_bf16"}
)
_OPTIONS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-pthread", "-mfma", "-mavx512f", "-mavx512bw",
    "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8",
)  # fmt: skip
_COMPILE_S = 120
#: For a compiler that was told to end.
_END_S = 2
#: What a process that was killed left behind is removed after this.
_STALE_S = 3600
_lock = threading.Lock()
_begun: Future[Path] | None = None
_running: list[subprocess.Popen[str]] = []
_ending = threading.Event()


class AmxUnavailable(RuntimeError):
    """The matrix unit cannot be used here; the text says why."""


def begin() -> Future[Path]:
    """Compile in a thread of its own, once in a process; returns at once. `built` is to be asked for the
    result."""
    global _begun
    with _lock:
        if _begun is None:
            begun: Future[Path] = Future()
            thread = threading.Thread(target=_fulfil, args=(begun,), name="coread-amx", daemon=True)
            thread.start()
            atexit.register(_end, thread)
            _begun = begun
        return _begun


def built() -> Path:
    """The library, compiled anew where source, options or compiler changed. Raises `AmxUnavailable`."""
    try:
        return begin().result()
    except AmxUnavailable as error:
        raise AmxUnavailable(str(error)) from None  # each caller's own


def _fulfil(future: Future[Path]) -> None:
    try:
        future.set_result(_compile(_compiler()))
    except BaseException as error:
        future.set_exception(error)


def _end(thread: threading.Thread) -> None:
    """When the process ends, so does the compiler, and what it has made so far goes."""
    _ending.set()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in list(_running):
            _signal(process, sign)
        thread.join(_END_S)


def cpu_flags() -> frozenset[str]:
    """What the processor has, by Linux's names; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _compiler() -> str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise AmxUnavailable(f"{platform.system()} on {platform.machine()} is not served")
    missing = CPU_FLAGS - cpu_flags()
    if missing:
        raise AmxUnavailable(f"the processor lacks {', '.join(sorted(missing))}")
    wanted = os.environ.get("CXX") or "g++"
    compiler = shutil.which(wanted)
    if compiler is None:
        raise AmxUnavailable(f"no C++ compiler ({wanted}) is installed")
    return compiler


def _compile(compiler: str) -> Path:
    version = _run([compiler, "--version"])
    try:
        texts = [(FOLDER / name).read_text("utf-8") for name in (*SOURCES, *HEADERS)]
        key = hashlib.sha256("\0".join([*texts, version, *_OPTIONS]).encode()).hexdigest()[:16]
        folder = _folder()
        _tidy(folder)
        built = folder / f"amx-{key}.so"
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix="amx-") as made:
                new = Path(made) / "built.so"
                _run([compiler, *_OPTIONS, *(str(FOLDER / name) for name in SOURCES), "-o", str(new)])
                os.replace(new, built)  # another process may be at it as well: one of two equal files stays
    except OSError as error:
        raise AmxUnavailable(f"there is no place for the compiled library: {error}") from error
    return built


def _tidy(folder: Path) -> None:
    """Remove what a process that was killed while it compiled has left."""
    for left in folder.glob("amx-*"):
        if left.is_dir() and time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _folder() -> Path:
    """Where the library is kept: beside Python's own compiled files, else the person's cache, else for this
    process only. Never a folder that others may write to."""
    for beside_python in (True, False):
        try:
            folder = FOLDER / "__pycache__" if beside_python else _cache()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
        except (OSError, RuntimeError):  # no such folder; nobody's home
            continue
    made = tempfile.mkdtemp(prefix="coread-amx-")
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True))
    return Path(made)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coread"


def _run(command: list[str]) -> str:
    """What a command prints. It has a process group of its own: g++ itself only starts what compiles, and
    that holds the pipes."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise AmxUnavailable(f"{command[0]} did not run: {error}") from error
    _running.append(process)
    try:
        if _ending.is_set():
            _signal(process, signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=_COMPILE_S)
    except subprocess.TimeoutExpired as error:
        _signal(process, signal.SIGKILL)
        process.communicate()
        raise AmxUnavailable(f"{command[0]} did not end: {error}") from error
    finally:
        _running.remove(process)
    if process.returncode:
        raise AmxUnavailable(f"{command[0]} failed: {stderr.strip()[-500:]}")
    return stdout


def _signal(process: subprocess.Popen[str], sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, sign)
