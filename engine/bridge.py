"""transformers' attention interface, answered from pages.

A model whose attention implementation is `"coread"` calls `paged_attention` once in each layer. What the
step needs beside q, k and v (pool, plan, slots) travels as one extra keyword of the model's `forward`,
so paging is a property of the call and nothing is kept between calls.

Everything that modelling code may ask of an attention function is either computed here or refused by
name: an argument that is silently dropped gives fluent nonsense (attention sinks are the known case).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.errors import ModelRefused
from engine.kv_pool import KVPool
from kernels.api import AttentionBackend
from kernels.plan import AttentionPlan

#: Name of the attention implementation.
IMPLEMENTATION = "coread"
#: Keyword of `forward` that carries the `StepContext`.
CONTEXT = "paged_ctx"

#: Keywords that say nothing about the result of attention in a packed, cache-free, inference-only call.
#: Positions are already inside q and k (rotary embedding); the plan knows them for the mask.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
#: Of those, the ones that ask for something we do not produce when they are true.
_ASKS_FOR_MORE = frozenset({"output_attentions", "use_cache"})


@dataclass(slots=True)
class StepContext:
    """What one forward pass needs to read and write pages.

    slots       int64 `[T]`: where each token's K and V go, -1 for nowhere
    windows     the sliding window that each layer must ask for by the model's configuration (None: none);
                an empty tuple where the configuration says nothing
    layers_seen layers that have called so far; a layer that bypasses the interface would be missing
    """

    pool: KVPool
    backend: AttentionBackend
    plan: AttentionPlan
    slots: Tensor
    windows: tuple[int | None, ...] = ()
    layers_seen: set[int] = field(default_factory=set)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the pages.

    Args:
        module: the attention module; `layer_idx` names the pool's layer.
        query: `[1, q_heads, T, head_dim]`; key, value: `[1, kv_heads, T, head_dim]`.
        scaling: factor of q·k; `head_dim ** -0.5` where the model gives none.
        kwargs: `paged_ctx` and whatever else the modelling code passes.

    Returns `([1, T, q_heads, head_dim], None)`. Raises `ModelRefused` for anything it would have to ignore.
    """
    context = kwargs.pop(CONTEXT, None)
    if not isinstance(context, StepContext):
        raise ModelRefused(f"{_name(module)} was called without a step context; use engine.runner.")
    window = kwargs.pop("sliding_window", None)
    soft_cap = kwargs.pop("softcap", None)
    sinks = _sinks(module, kwargs)
    layer = _layer(module, context)
    _refuse_unknown(module, attention_mask, dropout, kwargs)
    _check_shapes(module, query, key, value, context)
    window = _checked_window(module, layer, window, context)

    pool = context.pool
    scales = pool.scales[layer]
    context.layers_seen.add(layer)
    context.backend.write(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        pool.key[layer],
        pool.value[layer],
        context.slots,
        scales=scales,
    )
    out = context.backend.attend(
        query[0].transpose(0, 1),
        pool.key[layer],
        pool.value[layer],
        context.plan,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=sinks,
        scales=scales,
    )
    return out[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask tensor is built: the plan knows who sees what.

    Raises `ModelRefused` where the model overlays a rule of its own on the causal mask (transformers
    builds those with `use_vmap`), such as bidirectional image tokens.
    """
    if kwargs.get("use_vmap"):
        raise ModelRefused(
            "The model adds a rule of its own to the causal mask; the paged attention has none."
        )


def register() -> None:
    """Make `"coread"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, no_mask)


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Run a block with another attention implementation and put the old one back, whatever happens.

    Not for use while another thread runs the model: the setting belongs to the model, not to the call.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _name(module: nn.Module) -> str:
    return f"{type(module).__name__}"


def _layer(module: nn.Module, context: StepContext) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(context.pool.key):
        raise ModelRefused(
            f"{_name(module)} calls itself layer {layer!r}; the KV pool has {len(context.pool.key)} layers."
        )
    if layer in context.layers_seen:
        raise ModelRefused(f"{_name(module)} asks for attention of layer {layer} twice in one pass.")
    return layer


def _sinks(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """Attention sinks come as `s_aux` or as `sinks`; both at once would be two different things."""
    found = [value for name in ("s_aux", "sinks") if (value := kwargs.pop(name, None)) is not None]
    if len(found) > 1 or (found and not isinstance(found[0], Tensor)):
        raise ModelRefused(f"{_name(module)} passes attention sinks in a form that is not understood.")
    return found[0].reshape(-1) if found else None


def _refuse_unknown(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    if attention_mask is not None:
        raise ModelRefused(f"{_name(module)} passes an attention mask; paged attention builds its own.")
    if dropout:
        raise ModelRefused(f"{_name(module)} asks for dropout {dropout}; the engine only runs inference.")
    causal = kwargs.pop("is_causal", None)
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if not causal or getattr(module, "is_cross_attention", False):
        raise ModelRefused(
            f"{_name(module)} is not causal self-attention, the only kind that pages can serve."
        )
    for name, value in kwargs.items():
        if value is None or (name in _HARMLESS and not (name in _ASKS_FOR_MORE and value)):
            continue
        raise ModelRefused(
            f"{_name(module)} passes {name!r} to its attention, which the paged attention does not compute."
        )


def _check_shapes(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, context: StepContext) -> None:
    shape = context.pool.shape
    rows = context.plan.padded_rows
    want = (1, shape.kv_heads, rows, shape.head_dim)
    if tuple(key.shape) != want or tuple(value.shape) != want:
        raise ModelRefused(
            f"{_name(module)} makes K {tuple(key.shape)} and V {tuple(value.shape)}; the pool stores {want}."
        )
    if (
        query.dim() != 4
        or query.shape[0] != 1
        or query.shape[2:] != key.shape[2:]
        or query.shape[1] % shape.kv_heads
    ):
        raise ModelRefused(f"{_name(module)} makes queries {tuple(query.shape)}, which do not fit K {want}.")


def _checked_window(module: nn.Module, layer: int, window: Any, context: StepContext) -> int | None:
    """The layer's window, which has to be the one that the configuration promises: some modelling code
    keeps its window in the mask alone, and the mask is what we do not build."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ModelRefused(f"{_name(module)} asks for a sliding window of {window!r} tokens.")
    if context.windows and context.windows[layer] != window:
        raise ModelRefused(
            f"Layer {layer} asks for a sliding window of {window} tokens; the configuration says "
            f"{context.windows[layer]}."
        )
    return window


register()
