"""The decoder of Llama-like models with fewer, larger products and a float32 residual stream.

Same mathematics as transformers' modelling code, in another order of work::

    h ─ norm ─ [q k v] ─ rotate ─ write pages, attend ─ [o] ─ + norm ─ [gate up] ─ silu·mul ─ [down] ─ +

`[…]` is one product each (`engine.linear`), everything between two of them one operation
(`engine.small_ops`). Logits are computed for the wanted rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.bridge import StepContext
from engine.decoder import DecoderOutput
from engine.linear import Linear
from engine.small_ops import Rows, SmallOps

#: The products of a layer, and the head.
ROLES = ("qkv", "o", "gate_up", "down", "head")
#: Architectures whose layers are exactly the above: RMSNorm before each half, RoPE over the whole head,
#: SwiGLU, no norm of q and k, no scaling of embeddings, residuals or logits.
FAMILIES = frozenset({"llama", "mistral", "qwen2"})


def supports(model: Any) -> bool:
    """Whether `model` (transformers) is of a family that `FastLlama` computes, with nothing extra in it."""
    config = model.config
    layer = next(iter(getattr(model.base_model, "layers", [])), None)
    if config.model_type not in FAMILIES or layer is None or getattr(config, "hidden_act", "") != "silu":
        return False
    attention, mlp = layer.self_attn, layer.mlp
    children = {
        "layer": ({name for name, _ in layer.named_children()}, _LAYER),
        "attention": ({name for name, _ in attention.named_children()}, _ATTENTION),
        "mlp": ({name for name, _ in mlp.named_children()} - {"act_fn"}, _MLP),
    }
    return all(have == want for have, want in children.values()) and not _has_bias(mlp)


_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


def _has_bias(module: Any) -> bool:
    return any(name.endswith("bias") for name, _ in module.named_parameters())


@dataclass(slots=True)
class Layer:
    """One layer's products and norm weights (float32)."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm_attention: Tensor
    norm_mlp: Tensor


def fused_weight(model: Any, role: str, layer: int) -> tuple[Tensor, Tensor | None]:
    """`(weight, bias)` of a product, the separate projections stacked along the output."""
    if role == "head":
        return model.lm_head.weight.detach(), None
    block = model.base_model.layers[layer]
    attention, mlp = block.self_attn, block.mlp
    parts = {
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "o": [attention.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down": [mlp.down_proj],
    }[role]
    weight = (
        torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    )
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    return weight, torch.cat(biases) if biases else None


Maker = Callable[[Tensor, Tensor | None], Linear]


class FastLlama:
    """A `Decoder` (see `engine.decoder`) over products made by `make(role)`.

    The embedding and the norms are read from the model at construction; after that the transformers
    model is not needed any more.
    """

    name = "fused"

    def __init__(self, model: Any, max_context: int, ops: SmallOps, make: Callable[[str], Maker]) -> None:
        config = model.config
        self.ops = ops
        self._eps = float(config.rms_norm_eps)
        self._q_heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._embedding: Tensor = model.base_model.embed_tokens.weight.detach()
        self.layers: list[Layer] = []
        for index, block in enumerate(model.base_model.layers):
            products = {
                role: make(role)(*fused_weight(model, role, index)) for role in ROLES if role != "head"
            }
            self.layers.append(
                Layer(
                    **products,
                    norm_attention=block.input_layernorm.weight.detach().float(),
                    norm_mlp=block.post_attention_layernorm.weight.detach().float(),
                )
            )
        self._norm: Tensor = model.base_model.norm.weight.detach().float()
        self._scale = float(model.base_model.layers[0].self_attn.scaling)
        self.head: Linear = make("head")(*fused_weight(model, "head", 0))
        self._cos, self._sin = rotary_table(model, max_context, self._norm.device)
        #: Steps of at most so many tokens take `_few` instead of `layers`.
        self.few_rows = 0
        self._few: list[Layer] = []

    def set_few(self, products: dict[str, list[Linear]], rows: int) -> None:
        """Take other products (role to one for each layer) in steps of at most `rows` tokens; 0: in none.

        With a handful of rows a product costs the time of reading its weights, with many the time of
        multiplying: what is best for one is not for the other.
        """
        self.few_rows = rows if products else 0
        self._few = []
        for index, layer in enumerate(self.layers if products else []):
            other = copy(layer)
            for role, each in products.items():
                setattr(other, role, each[index])
            self._few.append(other)

    def set_products(self, role: str, products: list[Linear]) -> list[Linear]:
        """Replace the products of a role (one for each layer; for the head, one); returns the old ones."""
        if role == "head":
            old, self.head = [self.head], products[0]
            return old
        old = [getattr(layer, role) for layer in self.layers]
        for layer, product in zip(self.layers, products, strict=True):
            setattr(layer, role, product)
        return old

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor, context: StepContext) -> DecoderOutput:
        """See `engine.decoder.Decoder`."""
        ops, eps, pool, backend = self.ops, self._eps, context.pool, context.backend
        tokens = ids.shape[0]
        hidden = self._embedding[ids].float()
        cos, sin = self._cos[positions], self._sin[positions]
        delta: Rows | None = None
        for index, layer in enumerate(self._few if tokens <= self.few_rows else self.layers):
            key_pool, value_pool = pool.key[index], pool.value[index]
            x = ops.norm(hidden, delta, layer.norm_attention, eps, layer.qkv.quantised)
            qkv = Rows(layer.qkv(x.values), x.scale)
            q, k, v = ops.rotate(qkv, cos, sin, self._q_heads, self._kv_heads)
            backend.write(k, v, key_pool, value_pool, context.slots)
            window = context.windows[index] if context.windows else None
            seen = backend.attend(
                q, key_pool, value_pool, context.plan, scale=self._scale, sliding_window=window
            )
            x = ops.cast(seen.reshape(tokens, -1), layer.o.quantised)
            delta = Rows(layer.o(x.values), x.scale)
            x = ops.norm(hidden, delta, layer.norm_mlp, eps, layer.gate_up.quantised)
            x = ops.gate(Rows(layer.gate_up(x.values), x.scale), layer.down.quantised)
            delta = Rows(layer.down(x.values), x.scale)
        last = ops.norm(hidden, delta, self._norm, eps, False).values
        rows = last[wanted]
        if not rows.shape[0]:
            return DecoderOutput(last, torch.empty((0, self._embedding.shape[0]), device=last.device))
        x = ops.cast(rows, self.head.quantised)
        return DecoderOutput(last, Rows(self.head(x.values), x.scale).full())


def rotary_table(model: Any, max_context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, float32 `[max_context, head_dim]`, by the model's own formula."""
    like = torch.empty(0, dtype=torch.float32, device=device)
    with torch.inference_mode():
        cos, sin = model.base_model.rotary_emb(like, torch.arange(max_context, device=device)[None])
    return cos[0].contiguous(), sin[0].contiguous()
