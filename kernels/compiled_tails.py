"""Decode attention of own tails compiled for the CPU (numba; no compiler on the user's machine).

The last step of a layer's attention on the CPU: for every row of the query, what the passes before have left
(log-sum-exp and output, float32) is continued over the row's own tail, read from the pool where it lies, and
the finished row is written in the pool's dtype. There is no gathered copy, no padding and no mask, and the
merge is the running softmax itself (Milakov & Gimelshein 2018): a partial result with log-sum-exp `L` and
output `o` is the state "largest score `L`, sum of weights 1, weighted values `o`".

The kernel holds no interpreter lock and runs on threads of Python. Numba's own pool is not used: it would be
a second set of OpenMP threads beside torch's, and two sets that wait by spinning take each other's cores.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.compiled_kernel import FINISH
from kernels.plan import IntArray
from kernels.torch_plan import Tails

Array = npt.NDArray[Any]

#: Dtypes of pools that the kernel reads.
DTYPES = (torch.bfloat16, torch.float32)
#: Tail tokens (counted for each KV head, some 40 ns) that are worth a thread of their own: handing work to
#: another thread of Python costs 30 us and more where cores are busy.
MIN_TOKENS = 4096


class _Threads:
    """Splits the work over at most as many threads as torch uses; the calling thread is one of them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._count = 0

    def run(self, work: IntArray, kv_heads: int, *arguments: Any) -> None:
        rows = len(work) - 1
        units, cost = rows * kv_heads, int(work[-1]) * kv_heads
        count = min(torch.get_num_threads(), cost // MIN_TOKENS)
        if count < 2:
            FINISH(0, units, *arguments)
            return
        if self._pool is None or self._count < count - 1:
            self._pool, self._count = ThreadPoolExecutor(count - 1, "tails"), count - 1
        cuts = [0, *(_cut(work, kv_heads, cost * part // count) for part in range(1, count)), units]
        others = [self._pool.submit(FINISH, cuts[i], cuts[i + 1], *arguments) for i in range(1, count)]
        FINISH(0, cuts[1], *arguments)
        for other in others:
            other.result()


def _cut(work: IntArray, kv_heads: int, cost: int) -> int:
    """The unit (row * kv_heads + KV head) before which about `cost` of the work lies."""
    row = int(np.searchsorted(work, cost // kv_heads, side="right")) - 1
    each = int(work[row + 1] - work[row])
    return row * kv_heads + min(kv_heads, (cost - int(work[row]) * kv_heads) // each)


_THREADS = _Threads()


def can_read(query: Tensor, key_pool: Tensor, value_pool: Tensor) -> bool:
    """Whether the kernel serves these tensors: on the CPU, bfloat16 or float32, pools without gaps."""
    if query.device.type != "cpu" or key_pool.dtype not in DTYPES:
        return False
    return key_pool.is_contiguous() and value_pool.is_contiguous()


def finish(
    tails: Tails,
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    lse: Tensor,
    out: Tensor,
    all_started: bool,
) -> Tensor:
    """Continue every row over its own tail.

    Args:
        query: `[T, q_heads, head_dim]` in the pools' dtype, any strides.
        key_pool, value_pool: `[kv_heads, slots, head_dim]`, see `can_read`.
        lse, out: float32 `[kv_heads, T, group]` and `[kv_heads, T, group, head_dim]`, contiguous: the
            partial results of the rows that are `started` (`all_started`: of all rows, as sinks leave them);
            other rows may hold anything.

    Returns `[T, q_heads, head_dim]` in the pools' dtype. A row that is neither started nor has a tail is NaN.
    """
    query = query.contiguous()
    result = torch.empty_like(query)
    _THREADS.run(
        tails.work,
        key_pool.shape[0],
        _array(query),
        _array(key_pool),
        _array(value_pool),
        tails.first,
        tails.slot,
        tails.tokens,
        np.ones_like(tails.started) if all_started else tails.started,
        np.float32(scale),
        np.float32(soft_cap or 0.0),
        lse.numpy(),
        out.numpy(),
        _array(result),
    )
    return result


def _array(x: Tensor) -> Array:
    """The tensor's memory; bfloat16 as uint16."""
    array: Array = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array
