"""Whole steps on the matrix unit: the logits of the model itself, for every mix of rows; what it refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import matrix_choice
from engine.accelerate import accelerate, release
from engine.errors import ModelRefused
from engine.fast_llama import ROLES, FastLlama
from engine.matrix_llama import MatrixLlama, serves
from engine.model import LoadedModel, adopt
from engine.runner import Row, Runner
from kernels import amx
from kernels.amx_step import MatrixProduct
from kernels.api import KernelError
from kernels.plan import ALWAYS
from kernels.torch_cpu import TorchBackend
from tests.engine.test_detokenize import byte_level
from tests.engine.tiny import Paged, some_tokens, tiny_hf

pytestmark = pytest.mark.skipif(amx.library() is None, reason="no matrix unit or no C++ compiler here")

LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 336, "hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "initializer_range": 0.06,
}  # fmt: skip


def _kinds(kind: str) -> dict[str, list[str]]:
    return {role: [kind] * (1 if role == "head" else LAYERS) for role in ROLES}


def _model(kind: str = "packed", **changes: Any) -> tuple[LoadedModel, torch.nn.Module]:
    """The model in bfloat16 over pages, and the same weights (as 8 bits keep them) in float32."""
    plain = tiny_hf("llama", **{**SHAPE, **changes}).bfloat16()
    exact = copy.deepcopy(plain).float()
    exact.set_attn_implementation("eager")
    if kind == "int8":
        linear = [part for part in exact.modules() if isinstance(part, torch.nn.Linear)]
        with torch.no_grad():
            for part in linear:
                scale = part.weight.abs().amax(dim=1, keepdim=True) / 127
                part.weight = torch.nn.Parameter((part.weight / scale).round() * scale)
    loaded = adopt(plain, None, dtype=torch.bfloat16)
    loaded.decoder = MatrixLlama(loaded.model, loaded.shape.max_context, _kinds(kind))
    return loaded, exact


MODELS = {kind: _model(kind) for kind in ("packed", "int8")} if amx.library() is not None else {}


@torch.inference_mode()
def _right(exact: torch.nn.Module, text: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = exact(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


def _close(got: torch.Tensor, want: torch.Tensor, kind: str) -> None:
    assert bool(torch.isfinite(got).all())
    size = float(want.square().mean().sqrt())
    error = float((got - want).square().mean().sqrt()) / size
    worst = float((got - want).abs().max()) / size
    # A scale that is off by 2 %, a key too many or too few give ten times as much.
    assert error < (0.02 if kind == "packed" else 0.04), error
    assert worst < (0.15 if kind == "packed" else 0.3), worst


@given(
    kind=st.sampled_from(["packed", "int8"]),
    block=st.sampled_from([1, 4, 16]),
    document=st.sampled_from([0, 1, 15, 16, 33, 64, 130, 300]),
    own=st.lists(st.integers(1, 40), min_size=1, max_size=18),
    decodes=st.integers(0, 2),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=20, deadline=None)
def test_any_mix_of_rows_gives_the_models_own_logits(
    kind: str, block: int, document: int, own: list[int], decodes: int, threads: int, seed: int
) -> None:
    """A document in chunks, then readers with chunks of their own beside each other, then decodes."""
    model, exact = MODELS[kind]
    rng = random.Random(seed)
    tokens = [[rng.randrange(3, 336) for _ in range(count + decodes)] for count in own]
    start = [rng.randrange(3, 336) for _ in range(document)]
    paged = Paged(model, TorchBackend("cpu", cost=ALWAYS), block, blocks=(300 + 20 * 60) // block + 40)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Causality: one pass over a whole text gives the logits after each of its parts.
        want_document = _right(exact, start) if document else torch.empty(0)
        want_own = [_right(exact, start + each)[document:] for each in tokens]
        table = paged.take(document)
        at = 0
        while at < document:
            upto = min(document, at + rng.randint(1, 200))
            got, _ = paged.runner.forward([paged.row(start[at:upto], at, table)], np.arange(upto - at))
            _close(got.logits, want_document[at:upto], kind)
            at = upto
        tables = []
        for each in tokens:
            mine, copies = paged.fork(table, document)
            paged.pool.copy(copies)
            tables.append(paged.grow(mine, document + len(each)))
        for step in range(decodes + 1):
            rows, want = [], []
            for key, (each, count, mine) in enumerate(zip(tokens, own, tables, strict=True)):
                new = slice(0 if step == 0 else count + step - 1, count + step)
                rows.append(paged.row(each[new], document + new.start, mine, key=key))
                want.append(want_own[key][new])
            total = sum(len(row.tokens) for row in rows)
            got, plan = paged.runner.forward(rows, np.arange(total))
            _close(got.logits, torch.cat(want), kind)
            if document >= block and len(own) > 1:
                assert plan.counters.shared_nodes
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["packed", "int8"])
def test_long_contexts_are_cut_and_merged(kind: str) -> None:
    """Three readers of 1,300 tokens (cut in passes of 512), and one more alone."""
    model, exact = MODELS[kind]
    text = [3 + (7 * i * i + i) % 331 for i in range(1320)]
    paged = Paged(model, TorchBackend("cpu"), 16, blocks=200)
    table = paged.take(1300)
    out, _ = paged.runner.forward([paged.row(text[:1300], 0, table)], np.arange(1300))
    _close(out.logits, _right(exact, text[:1300]), kind)
    readers = []
    for _ in range(4):
        mine, copies = paged.fork(table, 1300)
        paged.pool.copy(copies)
        readers.append(paged.grow(mine, 1301))
    want = _right(exact, text[:1301])[1300]
    shared, plan = paged.runner.forward(
        [paged.row([text[1300]], 1300, mine, key=key) for key, mine in enumerate(readers[:3])], np.arange(3)
    )
    assert plan.counters.shared_nodes == 1
    _close(shared.logits, want.expand(3, -1), kind)
    alone, plan = paged.runner.forward([paged.row([text[1300]], 1300, readers[3])], np.arange(1))
    assert plan.counters.shared_nodes == 0
    _close(alone.logits, want[None], kind)


def test_what_is_read_is_counted_as_the_attention_of_single_layers_counts_it() -> None:
    model, _ = MODELS["packed"]
    counted = []
    for decoder in (model.decoder, None):
        paged = Paged(model, TorchBackend("cpu", cost=ALWAYS), 16)
        if decoder is None:
            fresh = adopt(tiny_hf("llama", **SHAPE).bfloat16(), None, dtype=torch.bfloat16)
            paged.runner = Runner(fresh, paged.pool, paged.backend)
        table = paged.take(32)
        paged.runner.step([paged.row(some_tokens(32), 0, table)])
        tails = [paged.grow(list(table), 33) for _ in range(5)]
        out = paged.runner.step([paged.row([9], 32, tail, key=key) for key, tail in enumerate(tails)])
        counted.append((out.kv_bytes_logical, out.kv_bytes_read, out.shared_nodes))
    assert counted[0] == counted[1]
    assert counted[0][0] > counted[0][1] > 0


def test_a_cached_prompt_is_read_and_not_written() -> None:
    model, _ = MODELS["packed"]
    paged = Paged(model, TorchBackend("cpu"), 16)
    table, text = paged.take(20), some_tokens(20)
    first, _ = paged.runner.forward([paged.row(text, 0, table)], np.asarray([19]))
    kept = paged.pool.storage.clone()
    again, _ = paged.runner.forward([paged.row(text[19:], 19, table, write_from=20)], np.asarray([0]))
    assert torch.equal(kept.view(torch.int16), paged.pool.storage.view(torch.int16))
    torch.testing.assert_close(again.logits, first.logits, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["packed", "int8"])
def test_a_broken_row_is_noticed_and_its_neighbours_are_not_touched(kind: str) -> None:
    model, _ = MODELS[kind]
    paged = Paged(model, TorchBackend("cpu"), 16)
    tables = [paged.take(16), paged.take(16)]
    paged.runner.step([paged.row(some_tokens(8), 0, table, sample=False) for table in tables])
    paged.pool.value[1][:, tables[1][0] * 16 + 3] = float("nan")
    out = paged.runner.step([paged.row([5], 8, table, key=key) for key, table in enumerate(tables)])
    assert out.finite == [True, False]
    assert out.tokens[1] is None


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit among batches of one tile: what somebody else asks must not move anybody's answer."""
    model, _ = MODELS["int8"]
    logits = []
    for others in (0, 3):
        paged = Paged(model, TorchBackend("cpu"), 16)
        tables = [paged.take(20) for _ in range(others + 1)]
        for key, table in enumerate(tables):
            paged.runner.step([paged.row(some_tokens(20 - key), 0, table)])
        rows = [paged.row([7], 20 - key, paged.grow(table, 32)) for key, table in enumerate(tables)]
        logits.append(paged.runner.forward(rows, np.asarray([0]))[0].logits)
    assert torch.equal(logits[0], logits[1])


def test_what_it_cannot_compute_is_refused() -> None:
    model, _ = MODELS["packed"]
    paged = Paged(model, TorchBackend("cpu"), 16)
    model.windows = (None, 4, None)
    try:
        with pytest.raises(ModelRefused, match="window"):
            paged.runner.step([paged.row([5], 0, paged.take(1))])
    finally:
        model.windows = (None,) * LAYERS
    paged.pool.key[1] = paged.pool.key[1].float()
    with pytest.raises(KernelError, match=r"pool is torch\.float32"):
        paged.runner.step([paged.row([5], 0, paged.take(1))])
    with pytest.raises(KernelError, match=r"\(24, 64\)"):
        MatrixProduct(torch.zeros(24, 64), None, eight=True)
    assert serves(model.model)
    assert not serves(tiny_hf("llama", **{**SHAPE, "intermediate_size": 200}))
    assert not serves(tiny_hf("llama", **{**SHAPE, "head_dim": 16, "num_attention_heads": 8}))


def test_biases_of_q_k_and_v() -> None:
    model, exact = _model(attention_bias=True)
    paged = Paged(model, TorchBackend("cpu"), 16)
    got, _ = paged.runner.forward([paged.row(some_tokens(30), 0, paged.take(30))], np.arange(30))
    _close(got.logits, _right(exact, some_tokens(30)), "packed")


def test_the_number_of_threads_moves_no_bit() -> None:
    """Many operations in a row with helpers coming and going: one that takes a unit of another operation, or
    a unit twice, shows here."""
    model, _ = MODELS["int8"]
    paged = Paged(model, TorchBackend("cpu"), 16, blocks=200)
    tables = [paged.take(60) for _ in range(20)]
    for key, table in enumerate(tables):
        paged.runner.step([paged.row(some_tokens(50, key), 0, table)])
    rows = [paged.row([7], 50, table, key=key) for key, table in enumerate(tables)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = paged.runner.forward(rows, np.arange(20))[0].logits
        for turn in range(60):
            torch.set_num_threads(1 + turn % 4)
            assert torch.equal(paged.runner.forward(rows, np.arange(20))[0].logits, want)
    finally:
        torch.set_num_threads(before)


def test_two_steps_at_once_both_come_out_right() -> None:
    """Two engines of one process: the helpers serve one of them, the other works alone."""
    model, _ = MODELS["packed"]
    others = [_model("packed")[0] for _ in range(2)]
    text = some_tokens(200)

    def logits(loaded: LoadedModel) -> torch.Tensor:
        paged = Paged(loaded, TorchBackend("cpu"), 16)
        return paged.runner.forward([paged.row(text, 0, paged.take(200))], np.arange(200))[0].logits

    want = logits(model)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            for got in pool.map(logits, others):
                assert torch.equal(got, want)


@pytest.mark.parametrize("faster", ["matrix", "fused"])
def test_the_faster_decoder_is_taken_and_remembered(
    faster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [[2.0, 2.0, 2.0], [1.0, 1.0, 2.5]]
    monkeypatch.setattr(matrix_choice, "step_times", lambda *a: times if faster == "matrix" else times[::-1])
    backend = TorchBackend("cpu")

    def half() -> LoadedModel:
        plain = tiny_hf("llama", **SHAPE)
        return adopt(plain, byte_level(), name="tiny", dtype=torch.bfloat16)

    model = half()
    chosen = accelerate(model, backend, 16, tmp_path)
    assert chosen is not None
    assert chosen.decoder == faster
    kind = MatrixLlama if faster == "matrix" else FastLlama
    assert isinstance(model.decoder, kind)
    assert ("matrix unit" in str(chosen)) == (faster == "matrix")
    again = half()
    assert accelerate(again, backend, 16, tmp_path) == chosen
    assert isinstance(again.decoder, kind)
    release(again)
    logits = []
    for loaded in (model, again):
        paged = Paged(loaded, backend, 16)
        row = Row(0, some_tokens(9), 0, paged.take(9), 0, False)
        logits.append(paged.runner.forward([row], np.arange(9))[0].logits)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("kept", [False, True])
def test_one_that_computes_something_else_leaves_the_fused_decoder(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused along with the fused decoder, which had passed: transformers' code then served."""
    monkeypatch.setattr(matrix_choice, "step_times", lambda *a: [[2.0], [1.0]])
    backend = TorchBackend("cpu")

    def half() -> LoadedModel:
        return adopt(tiny_hf("llama", **SHAPE), byte_level(), name="tiny", dtype=torch.bfloat16)

    if kept:
        assert accelerate(half(), backend, 16, tmp_path) is not None
    compute = MatrixLlama.__call__

    def zeros(decoder: MatrixLlama, *arguments: Any) -> Any:
        output = compute(decoder, *arguments)
        return replace(output, logits=torch.zeros_like(output.logits))

    monkeypatch.setattr(MatrixLlama, "__call__", zeros)
    model = half()
    chosen = accelerate(model, backend, 16, tmp_path)
    assert chosen is not None
    assert chosen.decoder == "fused"
    assert isinstance(model.decoder, FastLlama)
    assert "Steps do not run on the matrix unit: " in caplog.text
    assert ("that was chosen earlier is chosen anew" in caplog.text) is kept
