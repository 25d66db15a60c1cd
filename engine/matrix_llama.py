"""The decoder of `engine.fast_llama` in one call a step, on the processor's matrix unit (`kernels.amx_step`).

Same products, same forms (8 bits or bfloat16, as chosen by their likelihood), and between them no Python at
all: with one reader the glue between some 270 calls took longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.bridge import StepContext
from engine.decoder import DecoderOutput
from engine.errors import ModelRefused
from engine.fast_llama import ROLES, fused_weight, rotary_table
from kernels import amx, huge_pages
from kernels.amx_step import MatrixLayer, MatrixModel, MatrixProduct, in_turns


def serves(model: Any) -> bool:
    """Whether this machine has the unit and `model` (of a family of `engine.fast_llama`) fits its tiles."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        amx.library() is not None
        and head_dim % 32 == 0
        and head_dim <= amx.MAX_HEAD_DIM
        and all(MatrixProduct.serves(fused_weight(model, role, 0)[0]) for role in ROLES)
    )


def products(model: Any, role: str, forms: list[str]) -> list[MatrixProduct]:
    """All products of a role, each layer's in its form, in one piece of memory."""
    shape = fused_weight(model, role, 0)[0]
    sizes = [MatrixProduct.size_of(shape, eight=form == "int8") for form in forms]
    pieces = torch.split(huge_pages.allocate(sum(sizes)), sizes)
    return [
        MatrixProduct(*_weight(model, role, layer), eight=form == "int8", memory=pieces[layer])
        for layer, form in enumerate(forms)
    ]


def _weight(model: Any, role: str, layer: int) -> tuple[Tensor, Tensor | None]:
    weight, bias = fused_weight(model, role, layer)
    if role != "gate_up":
        return weight, bias
    return in_turns(weight), None if bias is None else in_turns(bias)


class MatrixLlama:
    """A `Decoder`. `kinds`: for each role ("head": one) the form of each layer's product, "int8" or another,
    which means bfloat16. Reads the weights at construction."""

    name = "matrix"

    def __init__(self, model: Any, max_context: int, kinds: Mapping[str, list[str]]) -> None:
        self._embedding: Tensor = model.base_model.embed_tokens.weight.detach()
        self._norm = model.base_model.norm.weight.detach().float().contiguous()
        self._norms = [
            (
                block.input_layernorm.weight.detach().float().contiguous(),
                block.post_attention_layernorm.weight.detach().float().contiguous(),
            )
            for block in model.base_model.layers
        ]
        self._cos, self._sin = rotary_table(model, max_context, self._norm.device)
        config = model.config
        self._sizes = {"q_heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        self._eps = float(config.rms_norm_eps)
        self._scale = float(model.base_model.layers[0].self_attn.scaling)
        self.products = {role: products(model, role, kinds[role]) for role in ROLES}
        self._model = self._assemble()

    def set_products(self, role: str, made: list[MatrixProduct]) -> None:
        """Replace the products of a role (one for each layer; for the head, one)."""
        self.products[role] = made
        self._model = self._assemble()

    def _assemble(self) -> MatrixModel:
        by_layer = zip(*(self.products[role] for role in ROLES if role != "head"), self._norms, strict=True)
        return MatrixModel(
            [MatrixLayer(qkv, o, gate_up, down, *norms) for qkv, o, gate_up, down, norms in by_layer],
            self.products["head"][0],
            self._norm,
            **self._sizes,
            head_dim=self._cos.shape[1],
            eps=self._eps,
            scale=self._scale,
        )

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor, context: StepContext) -> DecoderOutput:
        """See `engine.decoder.Decoder`."""
        if any(window is not None for window in context.windows):
            raise ModelRefused("The decoder on the matrix unit knows no sliding window.")
        pool = context.pool
        last, logits = self._model.run(
            self._embedding[ids].float(),
            self._cos[positions],
            self._sin[positions],
            context.slots,
            wanted,
            pool.key,
            pool.value,
            context.plan,
        )
        return DecoderOutput(last, logits)
