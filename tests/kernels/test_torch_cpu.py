"""The fast torch backend against the float32 oracle, and its counters against a recount."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

import kernels.torch_cpu
import kernels.torch_plan
from kernels.api import BackendUnavailable, KernelError, get_backend
from kernels.plan import ALWAYS
from kernels.reference import ReferenceBackend
from kernels.torch_cpu import TorchBackend
from tests.kernels.cases import Batch, Case, batches, case_of, cases

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def check(case: Case, backend: TorchBackend) -> None:
    expected = case.expected()
    tolerance = TOLERANCE[case.query.dtype]
    two, _ = case.run(backend)
    one, _ = case.run(backend, shared_pass=False)
    torch.testing.assert_close(two.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(one.float(), expected, atol=tolerance, rtol=tolerance)
    assert two.dtype == case.query.dtype


@given(cases())
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("compiled", [False, True])
def test_equals_the_oracle_in_float32(compiled: bool, case: Case) -> None:
    check(case, TorchBackend(cost=ALWAYS, compiled=compiled))


@given(cases(dtypes=(torch.bfloat16, torch.float16)))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("compiled", [False, True])
def test_equals_the_oracle_in_half_precision(compiled: bool, case: Case) -> None:
    check(case, TorchBackend(cost=ALWAYS, compiled=compiled))


@given(cases())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("compiled", [False, True])
def test_small_tiles_views_and_split_batches_change_nothing(compiled: bool, case: Case) -> None:
    """The same with every threshold moved so that tiles, views, several batches and row splits all occur."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.torch_plan, "TILE_ROWS", 5)
        patch.setattr(kernels.torch_plan, "VIEW_TOKENS", 2)
        patch.setattr(kernels.torch_plan, "SOLO_TOKENS", 12)
        patch.setattr(kernels.torch_plan, "PADDING_TOKENS", 3)
        patch.setattr(kernels.torch_cpu, "MAX_SCORES", 200)
        check(case, TorchBackend(cost=ALWAYS, compiled=compiled))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_spelled_out_path_equals_the_oracle(case: Case) -> None:
    """What a GPU without Triton runs: no fused attention of the CPU."""
    backend = TorchBackend(cost=ALWAYS, compiled=False)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("the fused CPU attention was called")

        patch.setattr(kernels.torch_cpu, "fused_attention", refuse)
        patch.setattr(kernels.torch_cpu, "can_fuse", lambda device, soft_cap: False)
        check(case, backend)


@given(batches())
@settings(max_examples=60, deadline=None)
def test_bytes_are_counted_where_they_are_read(batch: Batch) -> None:
    case = case_of(batch, kv_heads=2, head_dim=8)
    for shared_pass, compiled in itertools.product((True, False), repeat=2):
        _, plan = case.run(TorchBackend(cost=ALWAYS, compiled=compiled), shared_pass=shared_pass)
        token_bytes = 2 * 2 * 8 * 4
        assert plan.tally.kv_bytes_logical == plan.counters.logical_tokens * token_bytes
        assert plan.tally.kv_bytes_read == plan.counters.physical_tokens * token_bytes
        assert plan.tally.shared_passes == plan.counters.shared_nodes
        assert (plan.tally.shared_passes > 0) == (shared_pass and plan.counters.eligible_nodes > 0)


def readers_of_one_document(readers: int, document_blocks: int, own: int, block_size: int = 16) -> Batch:
    document = list(range(document_blocks))
    tables = [[*document, 100 + s] for s in range(readers)]
    context = document_blocks * block_size + own
    return Batch(block_size, tables, [1] * readers, [context] * readers, 128)


def test_the_shared_pass_reads_a_document_once_for_all() -> None:
    case = case_of(readers_of_one_document(8, 40, 3))
    out, plan = case.run(TorchBackend())
    torch.testing.assert_close(out, case.expected(), atol=2e-5, rtol=2e-5)
    assert plan.tally.shared_passes == 1
    assert plan.tally.kv_bytes_read * 643 * 8 == plan.tally.kv_bytes_logical * (640 + 8 * 3)


def test_a_window_reads_only_what_it_sees() -> None:
    case = case_of(readers_of_one_document(4, 40, 3), window=10, head_dim=16)
    _, plan = case.run(TorchBackend(cost=ALWAYS))
    token_bytes = 2 * 2 * 16 * 4
    assert plan.tally.kv_bytes_logical == 4 * 10 * token_bytes
    assert plan.tally.kv_bytes_read == (7 + 4 * 3) * token_bytes  # seven of the document, once


def test_one_plan_serves_layers_with_and_without_a_window() -> None:
    case = case_of(readers_of_one_document(3, 5, 7))
    backend = TorchBackend(cost=ALWAYS)
    plan = case.batch.plan(backend)
    for window in (None, 20, None, 20, 3):
        case.options["sliding_window"] = window
        out = backend.attend(case.query, case.key_pool, case.value_pool, plan, **case.options)
        torch.testing.assert_close(out, case.expected(), atol=2e-5, rtol=2e-5)
    assert plan.tally.layers == 5


def test_a_strided_query_gives_the_same() -> None:
    case = case_of(readers_of_one_document(3, 5, 7))
    expected, _ = case.run(TorchBackend())
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not case.query.is_contiguous()
    assert torch.equal(case.run(TorchBackend())[0], expected)


def test_a_nan_in_one_sequence_stays_there() -> None:
    case = case_of(readers_of_one_document(4, 6, 5))
    clean, _ = case.run(TorchBackend())
    case.key_pool[:, case.batch.slots(2)[-1]] = float("nan")
    out, _ = case.run(TorchBackend())
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("backend", [ReferenceBackend(), TorchBackend()], ids=["reference", "torch"])
class TestPool:
    def test_write_takes_strided_rows_and_skips_minus_one(self, backend: TorchBackend) -> None:
        keys, values = torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)
        fused = torch.randn(3, 2 * 2 * 4)
        key, value = fused[:, :8].view(3, 2, 4), fused[:, 8:].view(3, 2, 4)
        backend.write(key, value, keys, values, torch.tensor([5, -1, 0]))
        assert torch.equal(keys[:, 5], key[0])
        assert torch.equal(values[:, 0], value[2])
        assert keys.count_nonzero() == values.count_nonzero() == 16

    def test_copy_takes_leading_slots_in_every_layer(self, backend: TorchBackend) -> None:
        keys = [torch.randn(2, 16, 4) for _ in range(3)]
        values = [torch.randn(2, 16, 4) for _ in range(3)]
        before = [k.clone() for k in keys]
        backend.copy_blocks(keys, values, [(0, 3, 3), (1, 2, 4), (0, 2 + 0 * 1, 0)][:2], 4)
        for old, new in zip(before, keys, strict=True):
            assert torch.equal(new[:, 12:15], old[:, 0:3])
            assert torch.equal(new[:, 15], old[:, 15])
            assert torch.equal(new[:, 8:12], old[:, 4:8])
            assert torch.equal(new[:, :8], old[:, :8])

    @pytest.mark.parametrize(
        "copies", [[(0, 1, 4), (2, 1, 4)], [(0, 1, 4), (1, 2, 4)], [(0, 1, 5)], [(-1, 1, 4)]]
    )
    def test_copies_that_depend_on_order_or_overrun_are_refused(
        self, backend: TorchBackend, copies: list[tuple[int, int, int]]
    ) -> None:
        pool = [torch.zeros(1, 16, 4)]
        with pytest.raises(KernelError):
            backend.copy_blocks(pool, pool, copies, 4)


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = case_of(readers_of_one_document(2, 2, 1))
    backend = TorchBackend()
    plan = case.batch.plan(backend)
    other = case.batch.plan(ReferenceBackend())
    with pytest.raises(KernelError, match="1 rows, the plan 2"):
        backend.attend(case.query[:1], case.key_pool, case.value_pool, plan, scale=1.0)
    with pytest.raises(KernelError, match="dtype"):
        backend.attend(case.query.half(), case.key_pool, case.value_pool, plan, scale=1.0)
    with pytest.raises(KernelError, match="sinks"):
        backend.attend(case.query, case.key_pool, case.value_pool, plan, scale=1.0, sinks=torch.zeros(5))
    with pytest.raises(KernelError, match="not made by"):
        backend.attend(case.query, case.key_pool, case.value_pool, other, scale=1.0)


def test_backends_are_found_by_name_and_nothing_falls_back_silently() -> None:
    assert get_backend("auto", "cpu").name == "torch_cpu"
    assert get_backend("reference", "cpu").name == "reference"
    assert get_backend("torch", "cpu").name == "torch"
    with pytest.raises(BackendUnavailable, match="torch_cpu runs on the CPU"):
        get_backend("torch_cpu", "cuda")
    with pytest.raises(BackendUnavailable, match="no backend 'flash'"):
        get_backend("flash", "cpu")
