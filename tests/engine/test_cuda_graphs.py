"""Captured decode steps, with a stand-in for the GPU that keeps the order of what is asked of it.

The stand-in's replay runs the captured pass again: it finds nothing but what lies in the static vector, just
as a graph does. Kernels run under Triton's interpreter.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.cuda_graphs import DecodeGraphs, bucket_for, bucket_sizes, fill_rows
from engine.loading import say_why_not_triton, use_graphs
from engine.model import LoadedModel
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import Copy, SamplingParams
from kernels.api import Heads, KernelError, get_backend
from kernels.triton_plan import Capacity
from kernels.triton_static import capacity_for
from tests.engine.tiny import some_tokens, tiny_model
from tests.kernels.interpreter import interpreted_backend, needs_interpreter


@given(most=st.integers(1, 600))
def test_buckets_hold_every_batch_with_little_padding(most: int) -> None:
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 30
    for rows in range(1, most + 1):
        size = bucket_for(rows, sizes)
        assert size is not None
        assert rows <= size <= max(rows + 3, rows * 5 // 4)
    assert bucket_for(most + 1, sizes) is None


def test_padding_rows_are_written_nowhere() -> None:
    head = np.full((3, 4), 77, dtype=np.int64)
    fill_rows(head, [5, 6], np.array([10, 20]), np.array([3, 9]))
    assert head.tolist() == [[5, 6, 0, 0], [10, 20, 0, 0], [3, 9, -1, -1]]


class Recorder:
    """A `GraphDevice` without a device: `calls` in order.

    As a graph, it does not keep what it has captured: a replay of what nobody else kept is an error.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.uploaded: list[int] = []

    def host_vector(self, size: int) -> Tensor:
        return torch.full((size,), 99, dtype=torch.int32)

    def wait_uploaded(self) -> None:
        self.calls.append("wait")

    def upload(self, host: Tensor, target: Tensor) -> None:
        self.calls.append("upload")
        self.uploaded.append(host.numel())
        target[: host.numel()].copy_(host)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.calls.append("capture")
        run()
        kept = weakref.ref(run)

        def replay() -> None:
            self.calls.append("replay")
            captured = kept()
            assert captured is not None, "the graph reads memory that has gone to others"
            captured()

        return replay


#: Of `SHAPE`, in float32.
HEADS = Heads(4, 2, 64, 4, 4)
SHAPE = {"head_dim": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


def model_of(family: str = "llama") -> LoadedModel:
    return tiny_model(family, **SHAPE)


class Pair:
    """The same model with and without graphs over two equal pools, which hold three documents."""

    def __init__(self, model: LoadedModel, most_rows: int = 8) -> None:
        self.model, self.device = model, Recorder()
        self.backends = [interpreted_backend(), interpreted_backend()]
        pools = [model.new_pool(40, 16, fill_nan=True) for _ in self.backends]
        self.plain, self.graphed = (
            Runner(model, pool, backend) for pool, backend in zip(pools, self.backends, strict=True)
        )
        self.graphs = DecodeGraphs(model, pools[1], self.backends[1], self.device, most_rows=most_rows)
        self.graphed.graphs = self.graphs
        order = list(range(40))
        random.Random(3).shuffle(order)
        # Everybody reads A; 0 to 2 read B behind it; then each has a block of its own.
        a, b = order[:2], order[2:4]
        self.tables = [
            [*a, *b, order[10 + s], order[20 + s]] if s < 3 else [*a, order[10 + s]] for s in range(8)
        ]
        for runner in (self.plain, self.graphed):
            runner.step(
                [
                    Row(0, some_tokens(64, 1), 0, [*a, *b], 0, False),
                    Row(1, some_tokens(20, 2), 0, [*a, 9], 32, False),
                ]
            )

        self.at = [64 if s < 3 else 32 for s in range(8)]

    def rows(self, which: Sequence[int], params: SamplingParams) -> list[Row]:
        """The next token of some sequences; `advance` says that it has been computed."""
        return [
            Row(
                s,
                [3 + (7 * s + self.at[s]) % 90],
                self.at[s],
                self.tables[s],
                0,
                True,
                SamplerState(params, s),
            )
            for s in which
        ]

    def advance(self, which: Sequence[int]) -> None:
        for s in which:
            self.at[s] += 1


PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, logprobs=2),
]


@needs_interpreter
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_padded_replays_equal_unpadded_steps(family: str) -> None:
    """Batches that grow and shrink over buckets of 1 to 8, with windows and sinks (gpt_oss) and without."""
    pair = Pair(model_of(family))
    for turn, count in enumerate([5, 8, 1, 3]):
        which = list(range(count))
        for params in PARAMS[: 1 + (turn == 0)]:
            outs = [runner.step(pair.rows(which, params)) for runner in (pair.plain, pair.graphed)]
            assert outs[0].tokens == outs[1].tokens
            assert outs[1].finite == [True] * count
            for one, two in zip(outs[0].logprobs, outs[1].logprobs, strict=True):
                assert one is not None
                assert two is not None
                assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
            for name in ("kv_bytes_logical", "kv_bytes_read", "eligible_nodes", "shared_nodes"):
                assert getattr(outs[0], name) == getattr(outs[1], name), name
            assert count < 2 or outs[1].kv_bytes_read < outs[1].kv_bytes_logical
        pair.advance(which)
    torch.testing.assert_close(
        pair.plain.pool.storage, pair.graphed.pool.storage, atol=1e-5, rtol=1e-5, equal_nan=True
    )
    assert pair.device.calls.count("replay") == 5
    assert pair.device.calls.count("capture") == 3  # buckets 8, 1 and 4, each once
    assert pair.graphs.unfit == 0


@needs_interpreter
def test_a_step_waits_fills_sends_replays_in_this_order() -> None:
    pair = Pair(model_of())
    pair.graphed.step(pair.rows([0, 1, 2], PARAMS[0]))
    assert pair.device.calls == ["upload", "capture", "wait", "upload", "replay"]
    whole, used = pair.device.uploaded
    assert used < whole  # block ids come last: only those in use are sent
    pair.advance([0, 1, 2])
    pair.graphed.step(pair.rows([0, 1, 2, 3], PARAMS[0]))
    assert pair.device.calls[5:] == ["wait", "upload", "replay"]


@needs_interpreter
def test_all_buckets_are_captured_before_service_the_largest_first() -> None:
    pair = Pair(model_of(), most_rows=4)
    pair.graphs.capture_all()
    sizes = list(pair.device.uploaded)
    assert pair.device.calls == ["upload", "capture"] * 3
    assert sizes == sorted(sizes, reverse=True)
    before = pair.graphed.pool.storage.clone()
    pair.graphs.capture_all()
    assert pair.device.calls.count("capture") == 3
    torch.testing.assert_close(pair.graphed.pool.storage, before, rtol=0, atol=0, equal_nan=True)


@needs_interpreter
def test_chunks_drafts_and_large_batches_run_without_a_graph() -> None:
    pair = Pair(model_of(), most_rows=2)
    assert pair.graphs.why_not([1, 1]) is None
    assert pair.graphs.why_not([1, 2]) == "the step has rows of more than one token"
    assert pair.graphs.why_not([1] * 3) == "the step has 3 rows, the largest graph 2"
    rows = pair.rows([0, 1, 2], PARAMS[0])
    assert pair.graphed.step(rows).tokens == pair.plain.step(pair.rows([0, 1, 2], PARAMS[0])).tokens
    assert pair.device.calls == []


@needs_interpreter
def test_a_plan_that_does_not_fit_runs_without_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def smaller(*args: Any, **kwargs: Any) -> Capacity:
        return replace(capacity_for(*args, **kwargs), blocks=2)

    monkeypatch.setattr("kernels.triton_static.capacity_for", smaller)
    pair = Pair(model_of())
    out = pair.graphed.step(pair.rows([0, 1, 2, 3], PARAMS[0]))
    assert out.tokens == pair.plain.step(pair.rows([0, 1, 2, 3], PARAMS[0])).tokens
    assert "replay" not in pair.device.calls
    assert pair.graphs.unfit == 1
    assert out.kv_bytes_read > 0


@needs_interpreter
def test_nan_stays_in_its_row_and_forks_are_copied_first() -> None:
    pair = Pair(model_of())
    for runner in (pair.plain, pair.graphed):
        runner.step(pair.rows([0, 1], PARAMS[0]))
        runner.pool.key[1][:, pair.tables[1][4] * 16] = float("nan")
    pair.advance([0, 1])
    state = SamplerState(SamplingParams(temperature=1.0, seed=1))
    fork = [*pair.tables[0][:4], 39]
    outs = []
    for runner in (pair.plain, pair.graphed):
        rows = pair.rows([0, 1], PARAMS[0])
        rows[1] = Row(1, rows[1].tokens, rows[1].start, rows[1].page_table, 0, True, state)
        rows.append(Row(2, [8], 65, fork, 0, True, SamplerState(PARAMS[0])))
        outs.append(runner.step(rows, [Copy(pair.tables[0][4], 39, 1)]))
    assert outs[0].tokens == outs[1].tokens
    assert outs[1].finite == [True, False, True]
    assert state.peek() == SamplerState(SamplingParams(temperature=1.0, seed=1)).uniform()


def test_a_backend_that_waits_for_the_device_is_refused() -> None:
    model = model_of()
    backend = get_backend("torch_cpu", "cpu")
    pool = model.new_pool(8, 16)
    with pytest.raises(ValueError, match="cannot be captured"):
        DecodeGraphs(model, pool, backend, Recorder(), most_rows=4)
    with pytest.raises(KernelError, match="cannot be captured"):
        backend.static_plans(HEADS, rows=2, layers=(None,), block_size=16, context_blocks=4)


@needs_interpreter
def test_a_captured_pass_with_an_unknown_window_is_refused() -> None:
    """It would read the arrays of nobody: an empty graph that answers with whatever the memory held."""
    backend = interpreted_backend()
    plans = backend.static_plans(HEADS, rows=2, layers=(None,), block_size=16, context_blocks=4)
    plan = plans.template(torch.zeros(plans.size, dtype=torch.int32))
    pool = torch.zeros(2, 64, 64)
    with pytest.raises(KernelError, match="no arrays"):
        backend.attend(torch.zeros(2, 4, 64), pool, pool, plan, scale=1.0, sliding_window=7)


@needs_interpreter
def test_a_model_that_cannot_be_captured_is_served_without_graphs_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair(model_of())

    class Refusing(Recorder):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    use_graphs(pair.plain, Refusing(), 4)
    assert pair.plain.graphs is None
    assert "cannot be captured: operation not permitted" in caplog.text
    assert pair.model.description.endswith(", without CUDA graphs.")
    use_graphs(pair.plain, Recorder(), 4)
    assert pair.plain.graphs is not None


def test_a_gpu_below_8_0_is_said_to_run_attention_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    model = model_of()
    say_why_not_triton(model, get_backend("torch_cpu", "cpu"), "auto")
    assert "7.5" not in model.description  # on a CPU there is nothing to say
    model.device = torch.device("cuda")
    say_why_not_triton(model, get_backend("auto", "cuda"), "auto")
    assert (
        "attention in torch (torch; compute capability 7.5, the Triton kernels need 8.0)" in model.description
    )
    assert "compute capability 7.5" in caplog.text


def test_a_backend_chosen_by_a_setting_is_not_blamed_on_the_gpu() -> None:
    model = model_of()
    model.device = torch.device("cuda")
    say_why_not_triton(model, get_backend("reference", "cpu"), "reference")
    assert model.description.endswith(", attention in torch (reference; as set: backend reference).")
