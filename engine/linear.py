"""Linear layers on the CPU: the same product in several forms, to be measured against each other.

    dense    torch's own, weights as they are
    packed   weights laid out once for the machine's matrix kernels (oneDNN), bfloat16
    int8     weights in 8 bits with one scale an output channel, activations in 8 bits with one scale a token
             (dynamic, symmetric); the product is exact in int32
    int4     weights in 4 bits, bfloat16 activations; for a handful of rows, where reading the weights is all
             that takes time

An int8 layer takes rows that are already quantised and leaves their scale to whoever reads its result:
`y = scale[row] * layer(q)`. That operation runs anyway, so the scale costs nothing there.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Linear(Protocol):
    """`[T, in_features]` to `[T, out_features]`."""

    kind: str
    in_features: int
    #: True where the input is int8 and the result still lacks the row's scale.
    quantised: bool

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """`torch.nn.functional.linear`, any dtype."""

    kind = "dense"
    quantised = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.in_features = weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """bfloat16 weights in oneDNN's own layout."""

    kind = "packed"
    quantised = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._bias = bias
        self.in_features = weight.shape[1]
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return out


class Int8Linear:
    """8-bit weights and activations; the result is bfloat16 and lacks the row's scale."""

    kind = "int8"
    quantised = True

    def __init__(self, weight: Tensor) -> None:
        full = weight.float()
        scale = full.abs().amax(dim=1).clamp_(min=1e-12).div_(127.0)
        eight = (full / scale[:, None]).round_().to(torch.int8)
        self._weight: Tensor = torch.ops.onednn.qlinear_prepack(eight.contiguous(), [64, weight.shape[1]])
        self._scale = scale.contiguous()
        self.in_features = weight.shape[1]
        self._zero = torch.zeros(scale.shape, dtype=torch.int32)
        self._run = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(
            x,
            1.0,
            0,
            self._weight,
            self._scale,
            self._zero,
            None,
            1.0,
            0,
            torch.bfloat16,
            "none",
            [],
            "",
        )
        return out


class Int4Linear:
    """4-bit weights in groups of `GROUP` along the input, each with a scale and an offset (asymmetric).

    A group's smallest and largest weight become 0 and 15. Weights that came from a file with the same groups
    (GGUF's Q4_1 is such a format: `w = d * q + m` for 32 weights) are therefore found again as they were, up
    to bfloat16's rounding of `d` and `m`.
    """

    kind = "int4"
    quantised = False
    GROUP = 32

    def __init__(self, weight: Tensor) -> None:
        rows, self.in_features = weight.shape
        groups = weight.float().view(rows, -1, self.GROUP)
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        scale = ((high - low) / 15.0).clamp_(min=1e-8)
        levels = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        self._weight: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            levels.to(torch.int32).view(rows, -1).contiguous(), 2
        )
        # The kernel computes (q - 8) * scale + zero.
        pairs = torch.stack([scale.T, (low + 8.0 * scale).T], dim=-1)
        self._scales = pairs.to(torch.bfloat16).contiguous()
        self._run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @classmethod
    def serves(cls, weight: Tensor) -> bool:
        """Whether the kernel takes a weight of this shape."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % cls.GROUP == 0

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(x, self._weight, self.GROUP, self._scales)
        return out


#: Layers at both ends that stay in full precision where a role is too sensitive as a whole: their inputs
#: have the largest outliers.
_ENDS = 2


def has_inner(layers: int) -> bool:
    """Whether so many layers have some between their ends."""
    return layers > 2 * _ENDS


def forms(kind: str, layers: int, full: str) -> list[str]:
    """The form of each layer's product; "int8-inner" means 8 bits but for the ends, which are in `full`."""
    if kind != "int8-inner":
        return [kind] * layers
    return ["int8" if _ENDS <= layer < layers - _ENDS else full for layer in range(layers)]


def available(kind: str) -> bool:
    """Whether this build of torch and this machine compute the form, and compute it right."""
    torch.manual_seed(0)
    weight, x = torch.randn(16, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    want = x.float() @ weight.float().T
    try:
        if kind == "packed":
            got = PackedLinear(weight)(x).float()
        elif kind == "int8":
            scale = x.float().abs().amax(-1, keepdim=True) / 127
            got = Int8Linear(weight)((x.float() / scale).round().to(torch.int8)).float() * scale
        elif kind == "int4":
            levels = _four_bit_levels(weight)
            want, got = x.float() @ levels.T, Int4Linear(levels)(x).float()
        else:
            return kind == "dense"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log.info("Linear layers of kind %s are not available here: %s", kind, str(error).splitlines()[0])
        return False
    return bool((got - want).abs().max() < 0.05 * want.abs().max())


def _four_bit_levels(weight: Tensor) -> Tensor:
    """Weights like `weight` that 4 bits can hold: 0 to 15 times a sixteenth, less a half."""
    levels = (weight.float() * 4 + 8).round_().clamp_(0, 15)
    levels[:, ::32], levels[:, 1::32] = 0, 15
    return ((levels - 8) / 16).to(torch.bfloat16).float()
