"""The Triton kernels under the interpreter against the float32 oracle (tests/conftest.py switches it on).

`KERNEL_EXAMPLES=500 pytest tests/kernels/test_triton.py` runs a longer search.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kernels.triton_plan
from kernels.api import BackendUnavailable, Heads, KernelError, Reads, get_backend
from kernels.triton_backend import Step, TritonBackend
from kernels.triton_plan import Capacity, layout, pack
from tests.kernels.cases import Batch, Case, batches, case_of
from tests.kernels.interpreter import bfloat16_products, interpreted_backend, needs_interpreter

pytestmark = needs_interpreter
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 5e-2}
EXAMPLES = settings(
    max_examples=int(os.environ.get("KERNEL_EXAMPLES", "12")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.fixture(autouse=True)
def _quiet_and_exact() -> Iterator[None]:
    with warnings.catch_warnings(), bfloat16_products():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's exp2 overflows where the GPU's gives inf
        yield


@st.composite
def triton_cases(draw: st.DrawFn) -> Case:
    batch = draw(batches(block_sizes=(16, 32), max_sequences=4, max_query=6))
    return case_of(
        batch,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from([64, 80])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, max(batch.context_lens) + 1)),
        soft_cap=draw(st.sampled_from([None, None, 4.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


def check(case: Case) -> None:
    """Two passes and one pass both equal the oracle, and the counters say which was which."""
    expected = case.expected()
    tolerance = TOLERANCE[case.query.dtype]
    for shared_pass in (True, False):
        out, plan = case.run(interpreted_backend(), shared_pass=shared_pass)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
        if case.options["sliding_window"] is None:
            assert plan.tally.shared_passes == plan.counters.shared_nodes
        if not shared_pass:
            assert plan.tally.shared_passes == 0


@given(case=triton_cases(), shortest=st.sampled_from([16, 64, 256]))
@EXAMPLES
def test_equals_the_oracle_on_random_trees(case: Case, shortest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.triton_plan, "SHORTEST_SPLIT", shortest)
        check(case)


TREE = Batch(16, [[3, 9, 4, 1], [3, 9, 7], [3, 9, 11, 12, 13]], [1, 5, 1], [60, 40, 70], 64)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_head_dimension_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    check(case_of(TREE, head_dim=head_dim, group=2, kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_every_group_size_fills_tiles_over_several_tokens(group: int) -> None:
    check(case_of(TREE, head_dim=64, group=group, kv_heads=1))


@pytest.mark.parametrize("context", [15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_lengths_around_the_edges_of_blocks_and_tiles(context: int) -> None:
    blocks = list(range(50, 50 + 9))
    batch = Batch(16, [blocks, [*blocks[:3], *range(10, 16)]], [1, 1], [context, context], 64)
    check(case_of(batch, head_dim=64, group=2, kv_heads=1))


def test_many_readers_of_one_document_share_tiles() -> None:
    tables = [[7, 3, 5, 9, 20 + s] for s in range(40)]
    batch = Batch(16, tables, [1] * 40, [64 + 1 + s % 16 for s in range(40)], 64)
    case = case_of(batch, head_dim=64, group=4, kv_heads=1)
    out, plan = case.run(interpreted_backend())
    torch.testing.assert_close(out, case.expected(), atol=2e-5, rtol=2e-5)
    assert plan.tally.shared_passes == 1
    assert plan.counters.physical_tokens == 64 + sum(1 + s % 16 for s in range(40))
    token_bytes = 2 * 64 * 4
    assert plan.tally.kv_bytes_read == plan.counters.physical_tokens * token_bytes


def test_a_captured_graphs_capacity_changes_nothing() -> None:
    """Padded tiles and lists, as a CUDA graph's static vector holds them, with stale numbers in it before."""
    case = case_of(TREE, head_dim=64, group=2, kv_heads=2)
    backend = interpreted_backend()
    plan = case.batch.plan(backend)
    capacity = Capacity(
        tokens=plan.rows, narrow_tiles=16, wide_tiles=16, rows=64, blocks=64, merges=64, partials=64
    )
    static = torch.full((1024,), 123456, dtype=torch.int32)
    heads = Heads(4, 2, 64, 4, 4)
    tiles = backend.tiles(plan, heads, None)
    where = layout(tiles, capacity)
    assert where.partials > tiles.partials
    pack(tiles, where, static.numpy())
    plan.state.steps[None, heads] = Step(
        tiles.narrow.config, tiles.wide.config, where, static, Reads(*tiles.reads)
    )
    out = backend.attend(case.query, case.key_pool, case.value_pool, plan, **case.options)
    torch.testing.assert_close(out, case.expected(), atol=2e-5, rtol=2e-5)


class TestPool:
    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_write_takes_strided_rows_and_skips_minus_one(self, head_dim: int) -> None:
        keys, values = torch.zeros(2, 32, head_dim), torch.zeros(2, 32, head_dim)
        fused = torch.randn(3, 4 * head_dim)
        key = fused[:, : 2 * head_dim].view(3, 2, head_dim)
        value = fused[:, 2 * head_dim :].view(3, 2, head_dim)
        interpreted_backend().write(key, value, keys, values, torch.tensor([5, -1, 31]))
        assert torch.equal(keys[:, 5], key[0])
        assert torch.equal(values[:, 31], value[2])
        assert keys.count_nonzero() == values.count_nonzero() == 4 * head_dim

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_copy_takes_leading_slots_in_every_layer(self, dtype: torch.dtype) -> None:
        keys = [torch.randn(2, 64, 80).to(dtype) for _ in range(3)]
        values = [torch.randn(2, 64, 80).to(dtype) for _ in range(3)]
        pools = [*keys, *values]
        before = [pool.clone() for pool in pools]
        interpreted_backend().copy_blocks(keys, values, [(0, 3, 5), (1, 2, 16)], 16)
        for old, new in zip(before, pools, strict=True):
            assert torch.equal(new[:, 48:53], old[:, :5])
            assert torch.equal(new[:, 53:], old[:, 53:])
            assert torch.equal(new[:, 32:48], old[:, 16:32])
            assert torch.equal(new[:, :32], old[:, :32])

    def test_pools_that_the_kernels_cannot_address_are_refused(self) -> None:
        backend = interpreted_backend()
        pool = torch.zeros(2, 64, 64)
        with pytest.raises(KernelError, match="does not match"):
            backend.copy_blocks([pool], [pool[:, :32]], [(0, 1, 4)], 16)
        with pytest.raises(KernelError, match="know no"):
            backend.copy_blocks([pool.double()], [pool.double()], [(0, 1, 4)], 16)
        odd = torch.zeros(2 * 64 * 64 + 1)[1:].view(2, 64, 64)
        with pytest.raises(KernelError, match="16 bytes"):
            backend.copy_blocks([odd], [odd], [(0, 1, 4)], 16)


def test_the_backend_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(get_backend("triton", "cpu"), TritonBackend)  # under the interpreter
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendUnavailable, match="need an NVIDIA GPU"):
        get_backend("triton", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert get_backend("auto", "cuda").name == "torch"
    with pytest.raises(BackendUnavailable, match=r"T4 has compute capability 7\.5"):
        get_backend("triton", "cuda")
