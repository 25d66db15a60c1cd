"""The matrix unit of x86 CPUs (Intel AMX): attention passes in bfloat16 (`amx_attention.cpp`) and whole steps
of a decoder (`amx_step.cpp`, called by `kernels.amx_step`).

Compiled once on the machine that uses it, in ten seconds, where its processor has the unit and a C++ compiler
is there; nowhere else is anything different but the speed: `load` then returns None, and the torch backend
stays with torch's fused attention. Single passes run on torch's OpenMP threads (both name `libgomp.so.1`), so
that no second set of threads waits beside torch's; whole steps have threads of their own, which sleep between
steps, and while a step lasts torch's do nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

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
MAX_HEAD_DIM = 256


class AmxUnavailable(RuntimeError):
    """The matrix unit cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class AmxAttention:
    """One pass of attention on the matrix unit (see `amx_attention.cpp`)."""

    function: Any

    def serves(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether a call may be made: all on the CPU, bfloat16, `head_dim` a multiple of 32 up to 256, and
        each KV head's rows without gaps."""
        dim = query.shape[-1]
        return (
            dim % 32 == 0
            and dim <= MAX_HEAD_DIM
            and all(
                x.dtype == torch.bfloat16
                and x.shape[2] == dim
                and x.device.type == "cpu"
                and x.stride(2) == 1
                and x.stride(1) == dim
                for x in (query, key, value)
            )
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal_group: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Log-sum-exp `[kv_heads, rows]` and output `[kv_heads, rows, head_dim]`, float32.

        Args:
            query: `[kv_heads, rows, head_dim]`, rows >= 1.
            key, value: `[kv_heads, tokens, head_dim]`, tokens >= 1.
            causal_group: 0: every row sees every key; `g`: row `r` sees the keys `0..r // g`.

        Raises `MemoryError` where the threads' scratch memory (0.7 MiB each) cannot be had.
        """
        kv_heads, rows, dim = query.shape
        lse = torch.empty((kv_heads, rows), dtype=torch.float32)
        out = torch.empty((kv_heads, rows, dim), dtype=torch.float32)
        failed = self.function(
            query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(),
            value.stride(0), kv_heads, rows, key.shape[1], dim, max(1, causal_group),
            int(causal_group > 0), scale, lse.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for attention on the matrix unit")
        return lse, out


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None where it cannot be used here; the log says why, once."""
    try:
        loaded = _open(_compile(_compiler()))
        _check(AmxAttention(_attend_of(loaded)))
    except AmxUnavailable as reason:
        log.info("The processor's matrix unit is not used: %s.", reason)
        return None
    log.info("The processor's matrix unit is used for bfloat16.")
    return loaded


def load() -> AmxAttention | None:
    """The compiled pass of attention, or None where it cannot be used here."""
    loaded = library()
    return None if loaded is None else AmxAttention(_attend_of(loaded))


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
    """The library, compiled anew where source, options or compiler changed."""
    version = _run([compiler, "--version"])
    texts = [(FOLDER / name).read_text("utf-8") for name in (*SOURCES, *HEADERS)]
    key = hashlib.sha256("\0".join([*texts, version, *_OPTIONS]).encode()).hexdigest()[:16]
    try:
        folder = _folder()
        built = folder / f"amx-{key}.so"
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix="amx-") as made:
                new = Path(made) / "built.so"
                _run([compiler, *_OPTIONS, *(str(FOLDER / name) for name in SOURCES), "-o", str(new)])
                os.replace(new, built)  # another process may be at it as well: one of two equal files stays
    except OSError as error:
        raise AmxUnavailable(f"there is no place for the compiled library: {error}") from error
    return built


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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AmxUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise AmxUnavailable(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _open(built: Path) -> ctypes.CDLL:
    """The library, with the system's leave to use the unit."""
    try:
        loaded = ctypes.CDLL(str(built))
    except OSError as error:
        raise AmxUnavailable(f"the compiled library does not load: {error}") from error
    if loaded.coread_amx_request() != 0:
        raise AmxUnavailable("the system does not grant the use of the matrix unit")
    return loaded


def _attend_of(loaded: ctypes.CDLL) -> Any:
    function = loaded.coread_amx_attend
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [
        pointer, long, pointer, long, pointer, long, long, long, long, integer, integer, integer,
        ctypes.c_float, pointer, pointer, integer,
    ]  # fmt: skip
    function.restype = integer
    return function


def _check(found: AmxAttention) -> None:
    """One small pass against torch: a library that computes something else must not be used."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((2, count, 64), generator=generator).bfloat16() for count in (21, 300, 300)
    )
    key[:, 200] = 4 * query[:, 3]  # for that row it outweighs all that came before
    lse, out = found.attend(query, key, value, 0.125)
    scores = torch.matmul(query.float(), key.float().mT) * 0.125
    right = torch.matmul(scores.softmax(-1), value.float())
    off = max(float((lse - scores.logsumexp(-1)).abs().max()), float((out - right).abs().max()))
    if not off < 0.02:  # bfloat16 weights; also NaN
        raise AmxUnavailable(f"its results are off by {off:g}")
