"""The small operations of a decoder layer compiled for the CPU (numba; no compiler on the user's machine).

Each method of `CompiledOps` is one pass over the data where eager torch takes five to fifteen, each with
its own dispatch and its own trip through memory. Values are bfloat16 in memory, seen by numba as uint16,
and float32 in registers::

    bfloat16 -> float32   the bits, shifted left by 16
    float32 -> bfloat16   round to nearest even, as torch does

Reductions may be reordered (vectorised), but NaN and infinity keep their meaning: a broken row has to
stay visible behind 8-bit integers, which it does through its scale.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from engine.small_ops import Rows

Array = npt.NDArray[Any]

#: Reordering and fused multiply-add are allowed; "no NaN" and "no infinity" are not assumed.
_MATH = {"reassoc", "contract", "nsz", "arcp"}
#: Rows that are worth a thread of their own; for fewer, waking it costs more than the work.
MIN_ROWS = 32

#: Bits of infinity; every NaN's magnitude is above.
_INFINITE = np.uint32(0x7F800000)
#: Results kept for writing again; a step uses about eight, and chunk lengths vary.
_KEPT_SHAPES = 32
_NOTHING_F32 = np.zeros(0, dtype=np.float32)
_NOTHING_U16 = np.zeros((0, 0), dtype=np.uint16)
_NOTHING_I8 = np.zeros((0, 0), dtype=np.int8)


@njit(inline="always")
def _wide(bits: Any) -> Any:
    # numba widens the shift to 64 bits; the outer cast brings it back.
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _narrow(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(inline="always")
def _round(value: Any) -> Any:
    """Nearest integer (int32) of a float32 below 2^22 in magnitude: after adding 1.5 * 2^23 the sum's last
    bits are the integer, rounded to even by the addition. Unlike `rint` this is never a call."""
    return np.int32(np.float32(value + np.float32(12582912.0)).view(np.int32) - np.int32(0x4B400000))


@njit(inline="always")
def _exp(x: Any) -> Any:
    """exp in float32 to 2 ulp, without calls, so that loops over it vectorise (Cody & Waite reduction and
    the polynomial of Cephes' expf)."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = _round(x * np.float32(1.44269504))
    n = np.float32(whole)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.uint32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(inline="always")
def _store(row: Any, words: Any, bytes_: Any, scales: Any, t: Any, eight: Any) -> None:
    """Write a row of float32 as bfloat16, or as int8 with its scale (largest magnitude to 127)."""
    width = row.shape[0]
    if not eight:
        for i in range(width):
            words[t, i] = _narrow(row[i])
        return
    # Magnitudes compare like their bits, and as integers NaN and infinity come out on top.
    top = np.uint32(0)
    for i in range(width):
        top = max(top, np.uint32(np.float32(row[i]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    if top >= _INFINITE:
        scales[t] = np.float32(np.nan)
        for i in range(width):
            bytes_[t, i] = np.int8(0)
        return
    largest = max(np.uint32(top).view(np.float32), np.float32(1e-10))
    scales[t] = largest * np.float32(1.0 / 127.0)
    inverse = np.float32(127.0) / largest
    for i in range(width):
        bytes_[t, i] = np.int8(_round(row[i] * inverse))


def _norm(
    first: int,
    last: int,
    hidden: Array,
    delta: Array,
    delta_scale: Array,
    weight: Array,
    eps: Any,
    words: Array,
    bytes_: Array,
    scales: Array,
    eight: bool,
) -> None:
    width = hidden.shape[1]
    for t in range(first, last):
        row = np.empty(width, dtype=np.float32)
        factor = np.float32(1.0)
        if delta_scale.shape[0]:
            factor = delta_scale[t]
        if delta.shape[0]:
            for i in range(width):
                hidden[t, i] += _wide(delta[t, i]) * factor
        square = np.float32(0.0)
        for i in range(width):
            square += hidden[t, i] * hidden[t, i]
        inverse = np.float32(1.0) / np.sqrt(square / np.float32(width) + np.float32(eps))
        for i in range(width):
            row[i] = hidden[t, i] * inverse * weight[i]
        _store(row, words, bytes_, scales, t, eight)


@njit(inline="always")
def _turn(head: Any, factor: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.shape[0] // 2
    for i in range(half):
        left, right = _wide(head[i]) * factor, _wide(head[half + i]) * factor
        out[i] = _narrow(left * cos[i] - right * sin[i])
        out[half + i] = _narrow(right * cos[half + i] + left * sin[half + i])


def _rotate(
    first: int,
    last: int,
    qkv: Array,
    scale: Array,
    cos: Array,
    sin: Array,
    q: Array,
    k: Array,
    v: Array,
) -> None:
    head_dim = cos.shape[1]
    q_heads, kv_heads = q.shape[1], k.shape[1]
    for t in range(first, last):
        factor = np.float32(1.0)
        if scale.shape[0]:
            factor = scale[t]
        for head in range(q_heads):
            _turn(qkv[t, head * head_dim : (head + 1) * head_dim], factor, cos[t], sin[t], q[t, head])
        for head in range(kv_heads):
            at = (q_heads + head) * head_dim
            _turn(qkv[t, at : at + head_dim], factor, cos[t], sin[t], k[t, head])
        for head in range(kv_heads):
            at = (q_heads + kv_heads + head) * head_dim
            for i in range(head_dim):
                v[t, head, i] = _narrow(_wide(qkv[t, at + i]) * factor)


def _gate(
    first: int,
    last: int,
    gate_up: Array,
    scale: Array,
    words: Array,
    bytes_: Array,
    scales: Array,
    eight: bool,
) -> None:
    width = gate_up.shape[1] // 2
    for t in range(first, last):
        row = np.empty(width, dtype=np.float32)
        factor = np.float32(1.0)
        if scale.shape[0]:
            factor = scale[t]
        for i in range(width):
            x = _wide(gate_up[t, i]) * factor
            row[i] = x / (np.float32(1.0) + _exp(-x)) * (_wide(gate_up[t, width + i]) * factor)
        _store(row, words, bytes_, scales, t, eight)


def _cast(first: int, last: int, x: Array, words: Array, bytes_: Array, scales: Array) -> None:
    width = x.shape[1]
    for t in range(first, last):
        row = np.empty(width, dtype=np.float32)
        for i in range(width):
            row[i] = _wide(x[t, i])
        _store(row, words, bytes_, scales, t, True)


def _compile(function: Any) -> Any:
    try:
        return njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep the compiled code: compile at every start
        return njit(nogil=True, fastmath=_MATH, error_model="numpy")(function)


_NORM, _ROTATE, _GATE, _CAST = _compile(_norm), _compile(_rotate), _compile(_gate), _compile(_cast)


class _Threads:
    """Splits rows over as many threads as torch uses. The kernels hold no interpreter lock."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._count = 0

    def run(self, kernel: Any, rows: int, *args: Any) -> None:
        count = min(torch.get_num_threads(), rows // MIN_ROWS)
        if count < 2:
            kernel(0, rows, *args)
            return
        if self._pool is None or self._count < count - 1:
            self._pool, self._count = ThreadPoolExecutor(count - 1, "small-ops"), count - 1
        cuts = [rows * part // count for part in range(count + 1)]
        others = [self._pool.submit(kernel, cuts[i], cuts[i + 1], *args) for i in range(1, count)]
        kernel(0, cuts[1], *args)
        for other in others:
            other.result()


_THREADS = _Threads()


def _bits(x: Tensor) -> Array:
    """A bfloat16 tensor's memory as uint16."""
    array: Array = x.view(torch.uint16).numpy()
    return array


class CompiledOps:
    """See `engine.small_ops.SmallOps`; bfloat16 on the CPU.

    Results of `norm`, `gate` and `cast` are written to the same memory again by the next call of the same
    method with the same shape: a decoder consumes them at once, and allocating and wrapping them anew
    costs as much as filling them. Used by one thread.
    """

    name = "compiled"

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int, bool], _Out] = {}

    def _out(self, method: str, rows: int, width: int, eight: bool) -> _Out:
        key = (method, rows, width, eight)
        out = self._kept.get(key)
        if out is None:
            if len(self._kept) >= _KEPT_SHAPES:
                self._kept.clear()
            out = self._kept[key] = _Out(rows, width, eight)
        return out

    def norm(self, hidden: Tensor, delta: Rows | None, weight: Tensor, eps: float, eight: bool) -> Rows:
        """See `SmallOps.norm`."""
        rows, width = hidden.shape
        out = self._out("norm", rows, width, eight)
        words = _NOTHING_U16 if delta is None else _bits(delta.values)
        factor = _NOTHING_F32 if delta is None or delta.scale is None else delta.scale.numpy()
        _THREADS.run(
            _NORM,
            rows,
            hidden.numpy(),
            words,
            factor,
            weight.numpy(),
            eps,
            out.words,
            out.bytes,
            out.scales,
            eight,
        )
        return out.rows

    def rotate(
        self, qkv: Rows, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SmallOps.rotate`."""
        count, head_dim = cos.shape
        q = torch.empty((count, q_heads, head_dim), dtype=torch.bfloat16)
        kv = torch.empty((2, count, kv_heads, head_dim), dtype=torch.bfloat16)
        pair = _bits(kv)
        factor = _NOTHING_F32 if qkv.scale is None else qkv.scale.numpy()
        _THREADS.run(
            _ROTATE,
            count,
            _bits(qkv.values),
            factor,
            cos.numpy(),
            sin.numpy(),
            _bits(q),
            pair[0],
            pair[1],
        )
        return q, kv[0], kv[1]

    def gate(self, gate_up: Rows, eight: bool) -> Rows:
        """See `SmallOps.gate`."""
        count, width = gate_up.values.shape
        out = self._out("gate", count, width // 2, eight)
        factor = _NOTHING_F32 if gate_up.scale is None else gate_up.scale.numpy()
        _THREADS.run(_GATE, count, _bits(gate_up.values), factor, out.words, out.bytes, out.scales, eight)
        return out.rows

    def cast(self, x: Tensor, eight: bool) -> Rows:
        """See `SmallOps.cast`."""
        if not eight:
            return Rows(x)
        out = self._out("cast", x.shape[0], x.shape[1], True)
        _THREADS.run(_CAST, x.shape[0], _bits(x.contiguous()), out.words, out.bytes, out.scales)
        return out.rows


class _Out:
    """Where a result goes, as the tensor that is returned and as the arrays that are written."""

    __slots__ = ("bytes", "rows", "scales", "words")

    def __init__(self, rows: int, width: int, eight: bool) -> None:
        if eight:
            values, scale = torch.empty((rows, width), dtype=torch.int8), torch.empty(rows)
            self.rows = Rows(values, scale)
            self.words, self.bytes, self.scales = _NOTHING_U16, values.numpy(), scale.numpy()
        else:
            values = torch.empty((rows, width), dtype=torch.bfloat16)
            self.rows = Rows(values)
            self.words, self.bytes, self.scales = _bits(values), _NOTHING_I8, _NOTHING_F32
