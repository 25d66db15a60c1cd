"""The fused decoder equals the model's own; reduced precision is chosen, bounded and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine import accelerate as module
from engine import conformance
from engine.accelerate import Acceleration, accelerate, release
from engine.accuracy import TEXT, likelihood, token_ids
from engine.decoder import TransformersDecoder
from engine.errors import ModelRefused
from engine.fast_llama import ROLES, FastLlama, supports
from engine.linear import DenseLinear, Int4Linear, Int8Linear, PackedLinear, available
from engine.model import LoadedModel, adopt
from engine.small_ops import TorchOps
from kernels.api import get_backend
from tests.engine.test_detokenize import byte_level
from tests.engine.tiny import Paged, eager_greedy, some_tokens, tiny_hf, tiny_model

BACKEND = get_backend("torch_cpu", "cpu")
needs_int8 = pytest.mark.skipif(not available("int8"), reason="no 8-bit products on this machine")


needs_int4 = pytest.mark.skipif(not available("int4"), reason="no 4-bit products on this machine")


def _second_is_faster(candidates: object, ops: object, rows: Sequence[int]) -> list[list[float]]:
    return [[2.0] * len(rows), [1.0] * len(rows)]


def _half() -> LoadedModel:
    model = tiny_hf("llama", vocab_size=len(byte_level()), num_hidden_layers=6, initializer_range=0.05)
    return adopt(model, byte_level(), name="tiny", dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_float32_answers_are_those_of_transformers(family: str) -> None:
    model = tiny_model(family)
    chosen = accelerate(model, BACKEND)
    assert chosen is not None
    assert isinstance(model.decoder, FastLlama)
    assert set(chosen.kinds.values()) == {"dense"}
    prompt = some_tokens(37)
    assert Paged(model, "torch_cpu").greedy(prompt, 20, chunk=13) == eager_greedy(family, prompt, 20)
    release(model)
    assert Paged(model, "torch_cpu").greedy(prompt, 20) == eager_greedy(family, prompt, 20)


def test_biases_of_q_k_and_v() -> None:
    model = adopt(tiny_hf("llama", attention_bias=True), None)
    assert accelerate(model, BACKEND) is not None
    assert conformance.check(model, BACKEND).rms_error < 1e-5


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_other_architectures_keep_their_own_code(family: str) -> None:
    model = tiny_model(family)
    assert not supports(model.model)
    assert accelerate(model, BACKEND) is None
    assert isinstance(model.decoder, TransformersDecoder)


def test_an_mlp_with_biases_is_not_taken_for_a_plain_one() -> None:
    assert not supports(tiny_hf("llama", mlp_bias=True))
    assert not supports(tiny_hf("llama", hidden_act="gelu"))


def test_a_fused_decoder_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = TorchOps.rotate

    def reversed_rotation(self: TorchOps, qkv, cos, sin, q_heads, kv_heads):  # type: ignore[no-untyped-def]
        return rotate(self, qkv, cos, -sin, q_heads, kv_heads)

    monkeypatch.setattr(TorchOps, "rotate", reversed_rotation)
    with pytest.raises(ModelRefused):
        accelerate(tiny_model(initializer_range=1.0), BACKEND)


@needs_int8
def test_reduced_precision_is_bounded_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measure", _second_is_faster)
    model = _half()
    text = token_ids(model.tokenizer, 120)
    own = likelihood(model, BACKEND, 16, text)
    chosen = accelerate(model, BACKEND, 16, tmp_path)
    assert chosen is not None
    assert "int8" in set(chosen.kinds.values())
    assert chosen.cost <= module.BUDGET
    assert f"{chosen.cost:+.2%}" in str(chosen)
    fast = likelihood(model, BACKEND, 16, text)
    assert fast == pytest.approx(own, rel=0.03)

    def never(*args: object) -> Acceleration:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "_choose", never)
    again = _half()
    assert accelerate(again, BACKEND, 16, tmp_path) == chosen
    release(again)
    assert likelihood(again, BACKEND, 16, text) == pytest.approx(fast, rel=1e-3)


@needs_int8
def test_nothing_is_reduced_where_the_budget_does_not_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measure", _second_is_faster)
    monkeypatch.setattr(module, "BUDGET", -0.5)
    chosen = accelerate(_half(), BACKEND)
    assert chosen is not None
    assert "int8" not in "".join(chosen.kinds.values())
    assert (chosen.few, chosen.few_rows) == ([], 0)


@needs_int8
def test_nothing_is_reduced_where_it_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measure", lambda candidates, ops, rows: [[2.0] * len(rows)] * 2)
    chosen = accelerate(_half(), BACKEND)
    assert chosen is not None
    assert "int8" not in "".join(chosen.kinds.values())
    assert (chosen.few, chosen.few_rows) == ([], 0)


@needs_int4
def test_steps_of_few_tokens_take_four_bits_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_measure", _second_is_faster)
    monkeypatch.setattr(module, "BUDGET", 0.2)  # random weights are no 4-bit weights
    model = _half()
    chosen = accelerate(model, BACKEND, 16, tmp_path)
    assert chosen is not None
    assert chosen.few == ["down"]  # the only width here that groups of 32 divide
    assert chosen.few_rows == 4
    assert "up to 4 tokens a step down int4" in str(chosen)
    used: list[int] = []
    run = Int4Linear.__call__

    def noted(self: Int4Linear, x: torch.Tensor) -> torch.Tensor:
        used.append(x.shape[0])
        return run(self, x)

    monkeypatch.setattr(Int4Linear, "__call__", noted)
    release(model)
    paged = Paged(model, "torch_cpu", block_size=16)
    tables = [paged.take(32) for _ in range(5)]
    paged.runner.step([paged.row(some_tokens(8), 0, table, sample=False) for table in tables])
    paged.runner.step([paged.row([5], 8, table) for table in tables])
    assert used == []
    paged.runner.step([paged.row([7], 9, table) for table in tables[:4]])
    assert used == [4] * 6  # once a layer
    again = _half()
    assert accelerate(again, BACKEND, 16, tmp_path) == chosen
    assert isinstance(again.decoder, FastLlama)
    assert again.decoder.few_rows == 4


@needs_int4
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_weights_that_were_four_bits_are_found_again(rows: int) -> None:
    """As in a file with groups of 32: `w = d * q + m`, the extremes of each group in use."""
    generator = torch.Generator().manual_seed(rows)
    levels = torch.randint(0, 16, (48, 3, 32), generator=generator).float()
    levels[:, :, 3], levels[:, :, 17] = 0, 15
    step = torch.rand(48, 3, 1, generator=generator) * 0.02 + 0.001
    weight = (levels * step - 7.3 * step).view(48, 96).bfloat16()
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    want = x.float() @ weight.float().T
    error = (Int4Linear(weight)(x).float() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert float(error) < 0.01
    assert Int4Linear.serves(weight)
    assert not Int4Linear.serves(weight[:, :48])
    assert not Int4Linear.serves(weight[:40])


@pytest.mark.parametrize("content", ["", "[]", '{"kinds": {"qkv": "int8"}}', "null"])
def test_a_kept_choice_that_cannot_be_read_is_made_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "choice.json"
    path.write_text(content, "utf-8")
    assert module._read(path, matrix=False) is None
    good = Acceleration(dict.fromkeys(ROLES, "dense"), "torch", 2.0, 2.01, {})
    module._write(path, good)
    assert module._read(path, matrix=False) == good
    module._write(path, Acceleration(dict.fromkeys(ROLES, "dense"), "torch", 2.0, 2.1, {}))
    assert module._read(path, matrix=False) is None  # over the limit
    module._write(path, Acceleration(dict.fromkeys(ROLES, "dense"), "torch", 2.0, 2.0, {}, decoder="matrix"))
    assert module._read(path, matrix=True) is not None
    assert module._read(path, matrix=False) is None  # another machine, or the compiler is gone


def test_a_broken_row_is_reported_through_reduced_precision() -> None:
    model = _half()
    accelerate(model, BACKEND)
    paged = Paged(model, "torch_cpu", block_size=16)
    tables = [paged.take(16), paged.take(16)]
    paged.runner.step([paged.row(some_tokens(8), 0, table, sample=False) for table in tables])
    paged.pool.value[2][:, tables[1][0] * 16 + 3] = float("nan")
    out = paged.runner.step([paged.row([5], 8, table) for table in tables])
    assert out.finite == [True, False]
    assert out.tokens[1] is None


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_products_agree(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    want = x.float() @ weight.float().T
    torch.testing.assert_close(DenseLinear(weight)(x).float(), want, rtol=0.02, atol=0.1)
    if available("packed"):
        bias = torch.randn(24).bfloat16()
        torch.testing.assert_close(PackedLinear(weight)(x).float(), want, rtol=0.02, atol=0.1)
        got = PackedLinear(weight, bias)(x).float()
        torch.testing.assert_close(got, want + bias.float(), rtol=0.02, atol=0.1)
    if available("int8"):
        eight = TorchOps(torch.bfloat16).cast(x, True)
        assert eight.scale is not None
        got = Int8Linear(weight)(eight.values).float() * eight.scale[:, None]
        assert float((got - want).square().mean().sqrt() / want.square().mean().sqrt()) < 0.02
    assert not available("int3")


def test_the_text_is_long_enough_to_judge_by() -> None:
    assert len(TEXT.split()) > 350
