"""The kernel behind `kernels.compiled_tails`, compiled by numba: rows of the query over runs of the pool.

A key and a value are widened to float32 once for all query heads of their KV head's group. All that is
compiled into the kernel stands in this file: numba's cache on disk only notices changes of the file itself.

The parts are functions of their own, with rows of a tile as the last dimension but one, because that is the
form in which LLVM vectorises them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import overload

Array = npt.NDArray[Any]

#: Reordering and fused multiply-add are allowed; "no NaN" and "no infinity" are not assumed.
_MATH = {"reassoc", "contract", "nsz", "arcp"}
#: For the parts of the kernel, which are compiled into it.
_part = njit(nogil=True, fastmath=_MATH, error_model="numpy")
#: Keys of one round of the running softmax: their float32 copies stay in the first cache.
_TILE = 32


def _widen(x: Any) -> Any:
    """float32 of a stored value: itself, or a bfloat16's bits shifted left by 16."""
    raise NotImplementedError  # numba takes the overload below


@overload(_widen, inline="always")
def _widen_typed(x: Any) -> Any:
    if isinstance(x, types.Integer):

        def shifted(x: Any) -> Any:
            # numba widens the shift to 64 bits; the outer cast brings it back.
            return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

        return shifted

    def same(x: Any) -> Any:
        return x

    return same


def _narrow(value: Any, like: Any) -> Any:
    """`value` as stored in an array with elements such as `like`; bfloat16 rounds to nearest even."""
    raise NotImplementedError  # numba takes the overload below


@overload(_narrow, inline="always")
def _narrow_typed(value: Any, like: Any) -> Any:
    if isinstance(like, types.Integer):

        def rounded(value: Any, like: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return rounded

    def same(value: Any, like: Any) -> Any:
        return value

    return same


@njit(inline="always")
def _exp(x: Any) -> Any:
    """exp in float32 to 2 ulp, without calls, so that loops over it vectorise (Cody & Waite reduction and
    the polynomial of Cephes' expf). NaN and infinity come out as NaN: the clamp alone would hide them."""
    safe = min(max(x, np.float32(-87.0)), np.float32(88.0))
    # Adding 1.5 * 2^23 leaves the nearest integer in the sum's last bits.
    shifted = np.float32(safe * np.float32(1.44269504) + np.float32(12582912.0)).view(np.int32)
    whole = np.int32(shifted - np.int32(0x4B400000))
    n = np.float32(whole)
    r = safe - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.uint32((whole + np.int32(127)) << np.int32(23)).view(np.float32) + (x - x)


@_part
def _load(source: Array, base: int, count: int, target: Array) -> int:
    """Widen `count` rows of one KV head. Returns the count rounded up to rounds of four; what that adds is
    zeroed, so that it weighs nothing and is no NaN."""
    width = target.shape[1]
    for j in range(count):
        for d in range(width):
            target[j, d] = _widen(source[base + j, d])
    padded = (count + 3) // 4 * 4
    for j in range(count, padded):
        for d in range(width):
            target[j, d] = np.float32(0.0)
    return padded


@_part
def _products(query: Array, key: Array, padded: int, score: Array) -> None:
    """Three heads and four keys at a time: twelve products for seven loads."""
    group, width = query.shape[0], key.shape[1]
    threes = group // 3 * 3
    for g in range(0, threes, 3):
        for j in range(0, padded, 4):
            a0 = a1 = a2 = a3 = np.float32(0.0)
            b0 = b1 = b2 = b3 = np.float32(0.0)
            c0 = c1 = c2 = c3 = np.float32(0.0)
            for d in range(width):
                x, y, z = query[g, d], query[g + 1, d], query[g + 2, d]
                k0, k1, k2, k3 = key[j, d], key[j + 1, d], key[j + 2, d], key[j + 3, d]
                a0 += x * k0
                a1 += x * k1
                a2 += x * k2
                a3 += x * k3
                b0 += y * k0
                b1 += y * k1
                b2 += y * k2
                b3 += y * k3
                c0 += z * k0
                c1 += z * k1
                c2 += z * k2
                c3 += z * k3
            score[g, j], score[g, j + 1], score[g, j + 2], score[g, j + 3] = a0, a1, a2, a3
            score[g + 1, j], score[g + 1, j + 1], score[g + 1, j + 2], score[g + 1, j + 3] = b0, b1, b2, b3
            score[g + 2, j], score[g + 2, j + 1], score[g + 2, j + 2], score[g + 2, j + 3] = c0, c1, c2, c3
    for g in range(threes, group):
        for j in range(0, padded, 4):
            a0 = a1 = a2 = a3 = np.float32(0.0)
            for d in range(width):
                x = query[g, d]
                a0 += x * key[j, d]
                a1 += x * key[j + 1, d]
                a2 += x * key[j + 2, d]
                a3 += x * key[j + 3, d]
            score[g, j], score[g, j + 1], score[g, j + 2], score[g, j + 3] = a0, a1, a2, a3


@_part
def _cap(score: Array, count: int, cap: Any) -> None:
    for g in range(score.shape[0]):
        for j in range(count):
            # tanh x = 1 - 2 / (1 + e^2x)
            double = _exp(score[g, j] * (np.float32(2.0) / cap))
            score[g, j] = cap * (np.float32(1.0) - np.float32(2.0) / (np.float32(1.0) + double))


@_part
def _weights(score: Array, count: int, padded: int, top: Array, total: Array, mixed: Array) -> None:
    """Scores become weights; what the running softmax held so far fades where the largest score grows."""
    for g in range(score.shape[0]):
        peak = top[g]
        for j in range(count):
            peak = max(peak, score[g, j])
        added = np.float32(0.0)
        for j in range(count):
            score[g, j] = _exp(score[g, j] - peak)
            added += score[g, j]
        for j in range(count, padded):
            score[g, j] = np.float32(0.0)
        fade = _exp(top[g] - peak)
        total[g] = total[g] * fade + added
        top[g] = peak
        for d in range(mixed.shape[1]):
            mixed[g, d] *= fade


@_part
def _mix(score: Array, value: Array, padded: int, mixed: Array) -> None:
    group, width = mixed.shape
    threes = group // 3 * 3
    for g in range(0, threes, 3):
        for j in range(0, padded, 4):
            a0, a1, a2, a3 = score[g, j], score[g, j + 1], score[g, j + 2], score[g, j + 3]
            b0, b1, b2, b3 = score[g + 1, j], score[g + 1, j + 1], score[g + 1, j + 2], score[g + 1, j + 3]
            c0, c1, c2, c3 = score[g + 2, j], score[g + 2, j + 1], score[g + 2, j + 2], score[g + 2, j + 3]
            for d in range(width):
                v0, v1, v2, v3 = value[j, d], value[j + 1, d], value[j + 2, d], value[j + 3, d]
                mixed[g, d] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
                mixed[g + 1, d] += (b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)
                mixed[g + 2, d] += (c0 * v0 + c1 * v1) + (c2 * v2 + c3 * v3)
    for g in range(threes, group):
        for j in range(0, padded, 4):
            a0, a1, a2, a3 = score[g, j], score[g, j + 1], score[g, j + 2], score[g, j + 3]
            for d in range(width):
                mixed[g, d] += (a0 * value[j, d] + a1 * value[j + 1, d]) + (
                    a2 * value[j + 2, d] + a3 * value[j + 3, d]
                )


def _finish(
    begin: int,
    end: int,
    query: Array,
    keys: Array,
    values: Array,
    first: Array,
    slot: Array,
    tokens: Array,
    started: Array,
    scale: Any,
    cap: Any,
    lse: Array,
    out: Array,
    result: Array,
) -> None:
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    group = query.shape[1] // kv_heads
    tile = np.empty((_TILE, head_dim), dtype=np.float32)
    asked = np.empty((group, head_dim), dtype=np.float32)
    mixed = np.empty((group, head_dim), dtype=np.float32)
    score = np.empty((group, _TILE), dtype=np.float32)
    top = np.empty(group, dtype=np.float32)
    total = np.empty(group, dtype=np.float32)
    for unit in range(begin, end):
        row, kv = unit // kv_heads, unit % kv_heads
        for g in range(group):
            for d in range(head_dim):
                asked[g, d] = _widen(query[row, kv * group + g, d]) * scale
            if started[row]:
                top[g], total[g] = lse[kv, row, g], np.float32(1.0)
                for d in range(head_dim):
                    mixed[g, d] = out[kv, row, g, d]
            else:
                top[g], total[g] = np.float32(-1e30), np.float32(0.0)
                for d in range(head_dim):
                    mixed[g, d] = np.float32(0.0)
        for run in range(first[row], first[row + 1]):
            for at in range(0, tokens[run], _TILE):
                count = min(_TILE, tokens[run] - at)
                padded = _load(keys[kv], slot[run] + at, count, tile)
                _products(asked, tile, padded, score)
                if cap > np.float32(0.0):
                    _cap(score, count, cap)
                _weights(score, count, padded, top, total, mixed)
                _load(values[kv], slot[run] + at, count, tile)
                _mix(score, tile, padded, mixed)
        for g in range(group):
            inverse, head = np.float32(1.0) / total[g], kv * group + g
            for d in range(head_dim):
                result[row, head, d] = _narrow(mixed[g, d] * inverse, result[row, head, d])


def _compile(function: Any) -> Any:
    try:
        return njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep the compiled code: compile at every start
        return njit(nogil=True, fastmath=_MATH, error_model="numpy")(function)


#: The compiled `_finish`.
FINISH = _compile(_finish)
