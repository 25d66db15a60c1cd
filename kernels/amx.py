"""The matrix unit of x86 CPUs (Intel AMX): attention passes in bfloat16 (`amx_attention.cpp`) and whole steps
of a decoder (`amx_step.cpp`, called by `kernels.amx_step`).

Compiled once on the machine that uses it (`kernels.amx_build`), where its processor has the unit and a C++
compiler is there; nowhere else is anything different but the speed: `load` then returns None, and the torch
backend stays with torch's fused attention. Single passes run on torch's OpenMP threads (both name
`libgomp.so.1`), so that no second set of threads waits beside torch's; whole steps have threads of their own,
which sleep between steps, and while a step lasts torch's do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import amx_build
from kernels.amx_build import AmxUnavailable

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 256


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
        loaded = _open(amx_build.built())
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
