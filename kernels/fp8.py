"""KV in 8-bit floats: e4m3 with one scale a layer, K or V, and KV head.

e4m3 has 4 bits of exponent and 3 of mantissa: an error of at most 1/16 of each number, whatever the scale,
as long as the number lies between 2^-6 and 448. So the scale only has to keep numbers inside that range; one
for each head does, because the heads of a layer differ in size by far more than a head's tokens do. It is
fixed at load: a block may be shared, copied and evicted as mere bytes, and nothing is computed for it later.

Scales are powers of two, so that dividing and multiplying by them rounds nothing. They leave the inner loop:

    q · (s_k k) = (q s_k) · k          sum w (s_v v) = s_v sum w v
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KV_FP8 = torch.float8_e4m3fn
#: Largest finite e4m3 number.
MAXIMUM = 448.0
#: What is stored may grow to so many times what calibration has seen before it is cut off.
HEADROOM = 4.0
#: From this compute capability on, GPUs convert e4m3 in hardware, and Triton compiles it.
CAPABILITY = (8, 9)


class Scales(NamedTuple):
    """One layer's factors from stored to real numbers: float32 `[kv_heads]` each."""

    key: Tensor
    value: Tensor


def scale_for(largest: Tensor) -> Tensor:
    """The scale (a power of two) for numbers up to `largest` in calibration, element by element, float32."""
    wanted = largest.float().clamp(min=2.0**-20) * (HEADROOM / MAXIMUM)
    return torch.exp2(torch.ceil(torch.log2(wanted)))


def store(values: Tensor, scale: Tensor) -> Tensor:
    """e4m3 of `values` `[T, kv_heads, head_dim]`; what lies outside of the range is cut off, NaN stays."""
    scaled = values.float() / scale[None, :, None]
    return scaled.clamp_(-MAXIMUM, MAXIMUM).to(KV_FP8)


def load(stored: Tensor, scale: Tensor) -> Tensor:
    """Float32 of `stored` `[kv_heads, slots, head_dim]`."""
    return stored.float() * scale[:, None, None]
