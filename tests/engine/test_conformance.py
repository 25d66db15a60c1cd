"""The check at load passes exact backends and refuses subtly wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import conformance
from engine.bridge import IMPLEMENTATION
from engine.errors import ModelRefused
from kernels.api import get_backend
from tests.engine.tiny import FAMILIES, tiny_model


class _Altered:
    """The reference backend with one argument of `attend`, `write` or `plan` changed."""

    def __init__(self, **change: Callable[[Any], Any]) -> None:
        self._backend = get_backend("reference", "cpu")
        self.name = "altered"
        self._change = change

    def _altered(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {k: self._change[k](v) if k in self._change else v for k, v in kwargs.items()}

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._backend.attend(*args, **self._altered(kwargs))

    def plan(self, **kwargs: Any) -> Any:
        return self._backend.plan(**self._altered(kwargs))

    def write(
        self, key: Any, value: Any, key_pool: Any, value_pool: Any, slots: Any, *, scales: Any = None
    ) -> None:
        slots = self._altered({"slots": slots})["slots"]
        self._backend.write(key, value, key_pool, value_pool, slots, scales=scales)


@pytest.mark.parametrize("backend", ["reference", "torch_cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_backends_pass(family: str, backend: str) -> None:
    model = tiny_model(family)
    report = conformance.check(model, get_backend(backend, "cpu"), block_size=16)
    assert report.logits_compared > 100
    assert report.rms_error < 1e-5
    assert report.backend == get_backend(backend, "cpu").name
    assert model.model.config._attn_implementation == IMPLEMENTATION


def test_the_shared_pass_is_part_of_the_check() -> None:
    assert conformance.check(tiny_model(), get_backend("torch_cpu", "cpu")).shared_nodes >= 1


def _off_by_one(tables: Any) -> list[list[int]]:
    return [[*table[1:], table[0]] for table in tables]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"scale": lambda x: x * 1.01}),
        ("llama", {"sliding_window": lambda x: 35}),
        ("llama", {"page_tables": _off_by_one}),
        ("llama", {"slots": lambda x: x.roll(1)}),
        ("gemma2", {"soft_cap": lambda x: None}),
        ("gemma2", {"sliding_window": lambda x: None if x is None else x + 1}),
        ("gpt_oss", {"sinks": lambda x: None}),
        ("mistral", {"sliding_window": lambda x: x - 1}),
    ],
)
def test_wrong_backends_are_refused(family: str, change: dict[str, Any]) -> None:
    model = tiny_model(family)
    with pytest.raises(ModelRefused):
        conformance.check(model, _Altered(**change), block_size=16)  # type: ignore[arg-type]
    assert model.model.config._attn_implementation == IMPLEMENTATION


def test_a_context_that_is_too_short_to_check_is_refused() -> None:
    model = tiny_model(max_position_embeddings=32)
    with pytest.raises(ModelRefused, match="too few"):
        conformance.check(model, get_backend("reference", "cpu"), block_size=16)
    conformance.check(model, get_backend("reference", "cpu"), block_size=4)


def test_bfloat16_is_judged_on_logits() -> None:
    model = tiny_model()
    half = tiny_model()
    half.model.to(torch.bfloat16)
    half.dtype = half.kv_dtype = torch.bfloat16
    half.shape = type(model.shape)(*(model.shape.layers, model.shape.kv_heads, model.shape.head_dim, 2, 256))
    report = conformance.check(half, get_backend("torch_cpu", "cpu"))
    assert 0 < report.rms_error < conformance.TOLERANCES[torch.bfloat16].rms
