"""The decoder of `engine.fast_llama` in one call a step, on the processor's matrix unit (`kernels.amx_step`).

Same products, same forms (8 bits or bfloat16, as chosen by their likelihood), and between them no Python at
all: with one reader the glue between some 270 calls took longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.bridge import StepContext
from engine.decoder import DecoderOutput
from engine.errors import ModelRefused
from engine.fast_llama import ROLES, fused_weight, rotary_table
from kernels import amx
from kernels.amx_step import MatrixLayer, MatrixModel, MatrixProduct


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


class MatrixLlama:
    """A `Decoder`. `kinds`: for each role ("head": one) the form of each layer's product, "int8" or another,
    which means bfloat16. Reads all weights at construction."""

    name = "matrix"

    def __init__(self, model: Any, max_context: int, kinds: Mapping[str, list[str]]) -> None:
        config = model.config

        def product(role: str, layer: int) -> MatrixProduct:
            return MatrixProduct(*fused_weight(model, role, layer), eight=kinds[role][layer] == "int8")

        layers = [
            MatrixLayer(
                qkv=product("qkv", index),
                o=product("o", index),
                gate_up=product("gate_up", index),
                down=product("down", index),
                norm_attention=block.input_layernorm.weight.detach().float().contiguous(),
                norm_mlp=block.post_attention_layernorm.weight.detach().float().contiguous(),
            )
            for index, block in enumerate(model.base_model.layers)
        ]
        self._embedding: Tensor = model.base_model.embed_tokens.weight.detach()
        norm = model.base_model.norm.weight.detach().float().contiguous()
        self._cos, self._sin = rotary_table(model, max_context, norm.device)
        self._model = MatrixModel(
            layers,
            product("head", 0),
            norm,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=self._cos.shape[1],
            eps=float(config.rms_norm_eps),
            scale=float(model.base_model.layers[0].self_attn.scaling),
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
