"""All decoder layers of a step in one call on the processor's matrix unit: the Python side of `amx_step.cpp`.

The plan of a step (`kernels.plan`) becomes *groups* of query rows and *passes* over stored keys::

    shared segment, 16 readers   one group of 16 rows      its keys, cut where that keeps all threads busy
    own tail of a decode         one group of one row      its keys
    own part of a prefill chunk  one group of its rows     its keys, row `i` sees those up to `base + i`

A row's results of all passes are merged exactly by their log-sum-exp. Nothing is kept between steps but the
scratch memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import amx
from kernels.api import KernelError
from kernels.plan import AttentionPlan, IntArray, Segment

#: Keys of one pass where few rows ask: a long stretch is cut so that all threads have a part.
PASS_KEYS = 512
#: An operation of a decode has some 10 to 60 pieces of a few microseconds: more threads would only be in each
#: other's way.
MOST_THREADS = 16
#: Up to so many query rows (heads of a group included) count as few.
FEW_QUERIES = 256


class _Product(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
        ("into", c_int64), ("out", c_int64), ("eight", c_int64),
    ]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", _Product), ("o", _Product), ("gate_up", _Product), ("down", _Product),
        ("norm_attention", c_void_p), ("norm_mlp", c_void_p),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", c_int64), ("width", c_int64), ("q_heads", c_int64), ("kv_heads", c_int64),
        ("head_dim", c_int64), ("inner", c_int64), ("eps", c_float), ("scale", c_float),
        ("layer", POINTER(_Layer)), ("norm", c_void_p), ("head", _Product),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        ("tokens", c_int64), ("hidden", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("slots", c_void_p),
        ("groups", c_int64), ("passes", c_int64), ("group", c_void_p), ("keys", c_void_p),
        ("first", c_void_p), ("in_group", c_void_p), ("as_row", c_void_p), ("wanted", c_void_p),
        ("wanted_count", c_int64), ("last", c_void_p), ("logits", c_void_p),
    ]  # fmt: skip


class _Pool(ctypes.Structure):
    _fields_ = [("key", POINTER(c_void_p)), ("value", POINTER(c_void_p)), ("head_stride", c_int64)]


class MatrixProduct:
    """A linear layer's weight in the unit's layout: int8 with one scale an output, or bfloat16.

    `weight`: `[out, in]`. 8 bits: symmetric, the largest magnitude of an output becomes 127. `memory`: where
    it is kept, at least `size_of` bytes on a cache line; None: memory of its own.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, eight: bool, memory: Tensor | None = None
    ) -> None:
        if not self.serves(weight):
            raise KernelError(
                f"a weight {tuple(weight.shape)} does not fit tiles of 16 outputs and 64 inputs"
            )
        self.out, self.into = weight.shape
        self.eight = eight
        self._scale: Tensor | None = None
        if eight:
            full = weight.float()
            scale = full.abs().amax(dim=1).clamp_(min=1e-12).div_(127.0)
            source = (full / scale[:, None]).round_().to(torch.int8).contiguous()
            self._scale = scale.contiguous()
        else:
            source = weight.to(torch.bfloat16).contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        size = source.numel() * source.element_size()
        self._weight = _aligned(size) if memory is None else memory[:size]
        _functions().pack(
            source.data_ptr(), self.out, self.into, source.element_size(), self._weight.data_ptr()
        )

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether tiles hold a weight of this shape."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % 64 == 0

    @staticmethod
    def size_of(weight: Tensor, *, eight: bool) -> int:
        """Bytes that `weight` takes in tiles."""
        return weight.numel() * (1 if eight else 2)

    def structure(self) -> _Product:
        return _Product(
            self._weight.data_ptr(), _pointer(self._scale), _pointer(self._bias), self.into, self.out,
            int(self.eight),
        )  # fmt: skip


def in_turns(stacked: Tensor) -> Tensor:
    """A gate's outputs stacked over those that it lets through, `[2 * inner, …]`, as 16 of each in turns: the
    step then multiplies them while they are at hand."""
    return stacked.reshape(2, -1, 16, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)


@dataclass(frozen=True, slots=True)
class MatrixLayer:
    """One decoder layer's products and norm weights (float32 `[width]`). `gate_up`: see `in_turns`."""

    qkv: MatrixProduct
    o: MatrixProduct
    gate_up: MatrixProduct
    down: MatrixProduct
    norm_attention: Tensor
    norm_mlp: Tensor


class MatrixModel:
    """Everything of a model that `run` reads; see `engine.matrix_llama` for the meaning.

    `scale`: of the scores; `eps`: of the norms. Used by one thread.
    """

    def __init__(
        self,
        layers: Sequence[MatrixLayer],
        head: MatrixProduct,
        norm: Tensor,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
    ) -> None:
        if head_dim % 32 or not 32 <= head_dim <= amx.MAX_HEAD_DIM:
            raise KernelError(f"heads of {head_dim} are not a multiple of 32 up to {amx.MAX_HEAD_DIM}")
        self._kept = (list(layers), head, norm)
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(
                    *(p.structure() for p in (layer.qkv, layer.o, layer.gate_up, layer.down)),
                    layer.norm_attention.data_ptr(),
                    layer.norm_mlp.data_ptr(),
                )
                for layer in layers
            )
        )
        self.width, self.kv_heads, self.head_dim = norm.shape[0], kv_heads, head_dim
        self.group, self.vocab = q_heads // kv_heads, head.out
        self._model = _Model(
            len(layers), self.width, q_heads, kv_heads, head_dim, layers[0].down.into, eps, scale,
            self._layers, norm.data_ptr(), head.structure(),
        )  # fmt: skip
        self._memory = _aligned(0)

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        wanted: Tensor,
        key_pools: Sequence[Tensor],
        value_pools: Sequence[Tensor],
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor]:
        """Compute all layers; K and V of the step's tokens are written to the pool on the way.

        Args:
            hidden: float32 `[T, width]`, the embeddings; overwritten.
            cos, sin: float32 `[T, head_dim]`.
            slots: int64 `[T]`, where each token's K and V go, -1: nowhere.
            wanted: int64 `[R]`, rows whose logits are asked for.
            key_pools, value_pools: one `[kv_heads, slots, head_dim]` a layer, bfloat16 without gaps.

        Returns the normed states `[T, width]` and the logits `[R, vocab]`, float32. Raises `KernelError` for
        tensors of another form, `MemoryError` where there is no scratch memory.
        """
        tokens, count = hidden.shape[0], wanted.shape[0]
        self._check(hidden, cos, sin, slots, wanted, [*key_pools, *value_pools], plan)
        work = _Work(plan, self.group)
        last = torch.empty((tokens, self.width), dtype=torch.float32)
        logits = torch.empty((count, self.vocab), dtype=torch.float32)
        pool = _Pool(
            (c_void_p * len(key_pools))(*(x.data_ptr() for x in key_pools)),
            (c_void_p * len(value_pools))(*(x.data_ptr() for x in value_pools)),
            key_pools[0].stride(0),
        )
        batch = _Batch(
            tokens, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
            len(work.groups), len(work.keys), work.groups.ctypes.data, work.keys.ctypes.data,
            work.first.ctypes.data, work.in_group.ctypes.data, work.as_row.ctypes.data, wanted.data_ptr(),
            count, last.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        functions, threads = _functions(), min(torch.get_num_threads(), MOST_THREADS)
        needed = functions.bytes(self._model, batch, pool, threads)
        if needed > self._memory.shape[0]:
            self._memory = _aligned(needed)
        if needed < 0 or functions.step(self._model, batch, pool, self._memory.data_ptr(), threads):
            raise MemoryError("no scratch memory for a step on the matrix unit")
        counters = plan.counters
        plan.tally.add(
            (counters.logical_tokens, counters.physical_tokens, counters.shared_nodes),
            2 * self.kv_heads * self.head_dim * 2,
            len(key_pools),
        )
        return last, logits

    def _check(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        wanted: Tensor,
        pools: Sequence[Tensor],
        plan: AttentionPlan,
    ) -> None:
        tokens = plan.padded_rows
        want: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
            ("hidden", hidden, (tokens, self.width), torch.float32),
            ("cos", cos, (tokens, self.head_dim), torch.float32),
            ("sin", sin, (tokens, self.head_dim), torch.float32),
            ("slots", slots, (tokens,), torch.int64),
            ("wanted", wanted, (wanted.shape[0],), torch.int64),
            *(("pool", x, (self.kv_heads, pools[0].shape[1], self.head_dim), torch.bfloat16) for x in pools),
        ]
        for name, x, shape, dtype in want:
            if tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous() or x.device.type != "cpu":
                raise KernelError(f"{name} is {x.dtype} {tuple(x.shape)}, not {dtype} {shape} without gaps")
        if plan.padding or len(pools) != 2 * len(self._layers):
            raise KernelError(f"{plan.padding} padded rows, {len(pools)} pools: not a batch of this model")


#: `Keys` of amx_step.cpp.
_KEYS = np.dtype([("slots", np.int64), ("count", np.int64), ("base", np.int64), ("causal", np.int64)])


class _Work:
    """A plan as `Batch` of amx_step.cpp wants it; holds the arrays for as long as the call lasts."""

    def __init__(self, plan: AttentionPlan, group: int) -> None:
        self._slots: list[IntArray] = []
        groups: list[tuple[int, int, int]] = []
        keys: list[tuple[int, int, int, int]] = []
        rows: list[IntArray] = []
        for segment in (*plan.shared, *plan.own):
            if segment.tokens == 0:
                continue
            mine = np.concatenate([_rows(plan, s) for s in segment.readers])
            own = len(segment.readers) == 1
            causal = own and len(mine) > 1
            base = plan.first_query(segment.readers[0]) - segment.start if causal else 0
            slots = _slots(segment)
            self._slots.append(slots)
            cut = len(slots)
            if not causal and len(mine) * group <= FEW_QUERIES and cut >= 2 * PASS_KEYS:
                cut = PASS_KEYS
            starts = range(0, len(slots), cut)
            groups.append((len(mine), len(keys), len(starts)))
            keys.extend(
                (slots.ctypes.data + 8 * a, min(cut, len(slots) - a), base, int(causal)) for a in starts
            )
            rows.append(mine)
        self.groups = np.asarray(groups, dtype=np.int64)
        self.keys = np.asarray(keys, dtype=_KEYS)
        all_rows = np.concatenate(rows)
        order = np.argsort(all_rows, kind="stable")
        self.in_group = np.repeat(np.arange(len(rows)), [len(x) for x in rows])[order]
        self.as_row = np.concatenate([np.arange(len(x)) for x in rows])[order]
        self.first = np.searchsorted(all_rows[order], np.arange(plan.rows + 1))


def _rows(plan: AttentionPlan, sequence: int) -> IntArray:
    start = plan.query_starts[sequence]
    return np.arange(start, start + plan.query_lens[sequence], dtype=np.int64)


def _slots(segment: Segment) -> IntArray:
    return np.concatenate([np.arange(r.slot, r.slot + r.tokens, dtype=np.int64) for r in segment.runs])


@dataclass(frozen=True, slots=True)
class _Functions:
    pack: Any
    bytes: Any
    step: Any


@functools.cache
def _functions() -> _Functions:
    loaded = amx.library()
    if loaded is None:
        raise KernelError("the processor's matrix unit cannot be used here")
    pack, size, step = loaded.coread_pack_weight, loaded.coread_step_bytes, loaded.coread_step
    pack.argtypes = [c_void_p, c_int64, c_int64, ctypes.c_int, c_void_p]
    pack.restype = None
    common: list[Any] = [POINTER(_Model), POINTER(_Batch), POINTER(_Pool)]
    size.argtypes = [*common, ctypes.c_int]
    size.restype = c_int64
    step.argtypes = [*common, c_void_p, ctypes.c_int]
    step.restype = ctypes.c_int
    return _Functions(pack, size, step)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _aligned(size: int) -> Tensor:
    """`size` bytes that begin on a cache line."""
    memory = torch.empty(size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + size]
