"""What the attention function reads, and what it refuses rather than ignore."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine.bridge import (
    CONTEXT,
    IMPLEMENTATION,
    StepContext,
    attention_implementation,
    no_mask,
    paged_attention,
)
from engine.errors import ModelRefused
from engine.kv_pool import KVPool
from engine.types import ModelShape
from kernels.api import get_backend
from tests.engine.tiny import tiny_model

SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=8, itemsize=4, max_context=64)


class _Attention(nn.Module):
    def __init__(self, layer: Any = 0, **attributes: Any) -> None:
        super().__init__()
        self.layer_idx = layer
        self.is_causal = True
        for name, value in attributes.items():
            setattr(self, name, value)


def _context(windows: tuple[int | None, ...] = ()) -> StepContext:
    pool = KVPool(SHAPE, 4, 4, torch.float32, "cpu", fill_nan=True)
    backend = get_backend("reference", "cpu")
    plan = backend.plan(page_tables=[[2, 0]], query_lens=[5], context_lens=[5], block_size=4)
    return StepContext(pool, backend, plan, torch.tensor([8, 9, 10, 11, 0]), windows)


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)


def _call(module: nn.Module | None = None, mask: Any = None, **kwargs: Any) -> torch.Tensor:
    kwargs.setdefault(CONTEXT, _context())
    out, weights = paged_attention(module or _Attention(), *_tensors(), mask, **kwargs)
    assert weights is None
    return out


def _plain(
    scaling: float | None = None,
    window: int = 99,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention written out for one short sequence: `[1, T, heads, head_dim]`."""
    q, k, v = _tensors()
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    score = (q @ k.transpose(2, 3)) * (8**-0.5 if scaling is None else scaling)
    if cap is not None:
        score = cap * torch.tanh(score / cap)
    at = torch.arange(5)
    visible = (at[None] <= at[:, None]) & (at[None] > at[:, None] - window)
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.view(1, 4, 1, 1).expand(1, 4, 5, 1)], -1)
    return (score.softmax(-1)[..., :5] @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, {}),
        ({"scaling": 0.5}, {"scaling": 0.5}),
        ({"sliding_window": 2}, {"window": 2}),
        ({"softcap": 0.7}, {"cap": 0.7}),
        ({"s_aux": torch.tensor([0.1, 2.0, -1.0, 0.0])}, {"sinks": torch.tensor([0.1, 2.0, -1.0, 0.0])}),
        ({"sinks": torch.ones(4), "scaling": 2.0}, {"sinks": torch.ones(4), "scaling": 2.0}),
        ({"position_ids": torch.arange(5)[None], "is_causal": None, "output_attentions": False}, {}),
    ],
)
def test_reads_what_models_pass(given: dict[str, Any], want: dict[str, Any]) -> None:
    torch.testing.assert_close(_call(**given), _plain(**want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"head_mask": torch.ones(4)},
        {"position_bias": torch.zeros(1)},
        {"block_indices": torch.zeros(1)},
        {"cu_seq_lens_q": torch.tensor([0, 5])},
        {"something_new": 1},
        {"mask": torch.ones(5, 5)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"output_attentions": True},
        {"sliding_window": "wide"},
        {"s_aux": torch.ones(4), "sinks": torch.ones(4)},
        {"s_aux": 1.0},
    ],
)
def test_refuses_what_it_would_have_to_ignore(given: dict[str, Any]) -> None:
    with pytest.raises(ModelRefused):
        _call(**given)


@pytest.mark.parametrize(
    "module",
    [
        _Attention(is_causal=False),
        _Attention(is_cross_attention=True),
        _Attention(layer=None),
        _Attention(layer=2),
    ],
)
def test_refuses_modules_that_pages_cannot_serve(module: nn.Module) -> None:
    with pytest.raises(ModelRefused):
        _call(module)


def test_refuses_a_call_without_context_and_a_layer_that_calls_twice() -> None:
    with pytest.raises(ModelRefused):
        paged_attention(_Attention(), *_tensors(), None)
    context = _context()
    _call(**{CONTEXT: context})
    with pytest.raises(ModelRefused, match="twice"):
        _call(**{CONTEXT: context})


def test_refuses_shapes_that_the_pool_was_not_made_for() -> None:
    q, k, v = _tensors()
    for query, key, value in (
        (q, k[..., :4], v[..., :4]),
        (q, k, v[..., :4]),
        (q[:, :3], k, v),
        (q, k[:, :1], v),
    ):
        with pytest.raises(ModelRefused):
            paged_attention(_Attention(), query, key, value, None, **{CONTEXT: _context()})


@pytest.mark.parametrize(("windows", "given"), [((None, None), 4), ((4, None), None), ((4, 4), 8)])
def test_refuses_a_window_that_is_not_the_configured_one(windows: Any, given: Any) -> None:
    with pytest.raises(ModelRefused, match="window"):
        _call(**{CONTEXT: _context(windows), "sliding_window": given})


def test_masks_are_refused_only_where_the_model_adds_a_rule() -> None:
    assert no_mask(batch_size=1, use_vmap=False) is None  # type: ignore[func-returns-value]
    with pytest.raises(ModelRefused):
        no_mask(use_vmap=True)


def test_the_attention_implementation_is_put_back_whatever_happens() -> None:
    model = tiny_model().model
    assert model.config._attn_implementation == IMPLEMENTATION

    def fail() -> None:
        with attention_implementation(model, "eager"):
            assert model.config._attn_implementation == "eager"
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert model.config._attn_implementation == IMPLEMENTATION
