"""What stands between a decoder layer's products: norms, rotation, gating, and casting to the next input.

Two forms with one interface: `TorchOps` in eager torch (any dtype, any device) and, for bfloat16 on the
CPU, `engine.compiled_ops.CompiledOps`, where each method is one pass over the data instead of ten.

The residual stream is float32. A product's result may still lack its rows' scale (int8, see
`engine.linear`): `Rows` carries both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """`[T, n]` values; where `scale` (float32 `[T]`) is given, the value meant is `values * scale`."""

    values: Tensor
    scale: Tensor | None = None

    def full(self) -> Tensor:
        """The values meant, in float32."""
        full = self.values.float()
        return full if self.scale is None else full * self.scale[:, None]


class SmallOps(Protocol):
    """All results are for the next product: of `dtype`, or int8 with a scale where `eight` is set. They
    are valid until the same method is called again."""

    name: str

    def norm(self, hidden: Tensor, delta: Rows | None, weight: Tensor, eps: float, eight: bool) -> Rows:
        """Add `delta` to `hidden` (float32 `[T, width]`, in place), then RMSNorm (Zhang & Sennrich 2019)."""
        ...

    def rotate(
        self, qkv: Rows, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `[T, (q_heads + 2 kv_heads) * head_dim]` and rotate q and k (RoPE, Su et al. 2021).

        `cos` and `sin` are float32 `[T, head_dim]`. Returns q `[T, q_heads, head_dim]`, k and v
        `[T, kv_heads, head_dim]`.
        """
        ...

    def gate(self, gate_up: Rows, eight: bool) -> Rows:
        """SwiGLU (Shazeer 2020): `silu(left half) * right half`."""
        ...

    def cast(self, x: Tensor, eight: bool) -> Rows:
        """`[T, n]` of the model's dtype, made ready for the next product."""
        ...


class TorchOps:
    """The plain form; also the oracle of the compiled one."""

    name = "torch"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def norm(self, hidden: Tensor, delta: Rows | None, weight: Tensor, eps: float, eight: bool) -> Rows:
        """See `SmallOps.norm`."""
        if delta is not None:
            hidden.add_(delta.values if delta.scale is None else delta.full())
        return self._ready(torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, eps), eight)

    def rotate(
        self, qkv: Rows, cos: Tensor, sin: Tensor, q_heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SmallOps.rotate`."""
        head_dim = cos.shape[-1]
        full = qkv.full().view(-1, q_heads + 2 * kv_heads, head_dim)
        turned, half = full[:, : q_heads + kv_heads], head_dim // 2
        other = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        turned = (turned * cos[:, None] + other * sin[:, None]).to(self._dtype)
        return turned[:, :q_heads], turned[:, q_heads:], full[:, q_heads + kv_heads :].to(self._dtype)

    def gate(self, gate_up: Rows, eight: bool) -> Rows:
        """See `SmallOps.gate`."""
        left, right = gate_up.full().chunk(2, dim=-1)
        return self._ready(torch.nn.functional.silu(left) * right, eight)

    def cast(self, x: Tensor, eight: bool) -> Rows:
        """See `SmallOps.cast`."""
        return self._ready(x.float(), eight) if eight else Rows(x)

    def _ready(self, full: Tensor, eight: bool) -> Rows:
        if not eight:
            return Rows(full.to(self._dtype))
        # One scale a row: a row's result never depends on its neighbours. A NaN makes the whole scale NaN,
        # so a broken row stays visible behind the integers.
        scale = torch.linalg.vector_norm(full, float("inf"), dim=-1, keepdim=True).div_(127.0)
        scale = torch.where(scale < 1e-12, 1e-12, scale)
        scale = torch.where(scale.isinf(), float("nan"), scale)
        return Rows((full / scale).nan_to_num_(0.0, 0.0, 0.0).round_().to(torch.int8), scale[:, 0])
