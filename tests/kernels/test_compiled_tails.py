"""The compiled kernel for decodes' own tails: what the batches of `test_torch_cpu` meet only by chance."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import kernels.compiled_tails
from kernels.plan import ALWAYS
from kernels.torch_cpu import TorchBackend
from kernels.torch_plan import Tails, build_work
from tests.kernels.cases import Batch, case_of

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
#: Lengths of tails around the kernel's rounds of 4 and 32 keys, in blocks that lie in no order.
LENGTHS = [1, 3, 4, 5, 31, 32, 33, 64, 100, 7]


def decodes(lengths: list[int], shared_blocks: int = 0, block_size: int = 16) -> Batch:
    """Single queries whose own blocks are strewn over the pool, behind a document that all of them read."""
    free = [(7 * i + 3) % 251 for i in range(251)]
    document = [free.pop() for _ in range(shared_blocks)]
    tables = [[*document, *(free.pop() for _ in range(-(-own // block_size)))] for own in lengths]
    contexts = [shared_blocks * block_size + own for own in lengths]
    return Batch(block_size, tables, [1] * len(lengths), contexts, 251)


@pytest.fixture(params=[False, True], ids=["one thread", "threads"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.param:
        torch.set_num_threads(3)
        monkeypatch.setattr(kernels.compiled_tails, "MIN_TOKENS", 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("shared_blocks", [0, 5])
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"soft_cap": 3.0}, {"sinks": True}, {"window": 9, "sinks": True}]
)
def test_equals_the_oracle(
    dtype: torch.dtype, group: int, shared_blocks: int, options: dict[str, object]
) -> None:
    """Slots that hold no token of anybody are NaN in every case."""
    case = case_of(decodes(LENGTHS, shared_blocks), group=group, head_dim=24, dtype=dtype, **options)  # type: ignore[arg-type]
    out, plan = case.run(TorchBackend(cost=ALWAYS, compiled=True))
    assert all(work.tails is not None for work in plan.state.work.values())
    torch.testing.assert_close(out.float(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_neighbours_change_no_bit() -> None:
    """A row's result depends on its own tail alone: no padding to the longest, no order of sums."""
    backend = TorchBackend(compiled=True)
    case = case_of(decodes(LENGTHS), dtype=torch.bfloat16)
    together, _ = case.run(backend)
    for s in range(len(LENGTHS)):
        batch = Batch(16, [case.batch.page_tables[s]], [1], [LENGTHS[s]], 251)
        plan = batch.plan(backend)
        alone = backend.attend(case.query[s : s + 1], case.key_pool, case.value_pool, plan, **case.options)
        assert torch.equal(alone[0], together[s])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("of_value", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_broken_token_is_seen_by_its_reader_alone(value: float, of_value: bool, dtype: torch.dtype) -> None:
    case = case_of(decodes([40, 40, 40], 3), dtype=dtype)
    clean, _ = case.run(TorchBackend(compiled=True))
    pool = case.value_pool if of_value else case.key_pool
    pool[:, case.batch.slots(1)[-20]] = value
    out, _ = case.run(TorchBackend(compiled=True))
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = case_of(decodes([70, 70], 2))
    case.query *= 300  # scores of some thousands: all weight on one key
    out, _ = case.run(TorchBackend(cost=ALWAYS, compiled=True))
    torch.testing.assert_close(out, case.expected(), atol=1e-3, rtol=1e-3)


def test_a_chunk_and_decodes_share_a_step() -> None:
    batch = decodes(LENGTHS[:5], 4)
    batch.query_lens[2] = 5
    case = case_of(batch)
    out, plan = case.run(TorchBackend(cost=ALWAYS, compiled=True))
    torch.testing.assert_close(out, case.expected(), atol=2e-5, rtol=2e-5)
    tails = next(iter(plan.state.work.values())).tails
    assert isinstance(tails, Tails)
    assert np.diff(tails.first).astype(bool).tolist() == [True, True, *[False] * 5, True, True]
    assert tails.started.all()


def test_pools_that_the_kernel_cannot_read_take_the_batches() -> None:
    case = case_of(decodes([20, 30], 2), dtype=torch.float16)
    out, plan = case.run(TorchBackend(compiled=True))
    torch.testing.assert_close(out.float(), case.expected(), atol=4e-3, rtol=4e-3)
    assert all(work.tails is None for work in plan.state.work.values())
    gaps = case_of(decodes([20, 30], 2))
    gaps.key_pool = gaps.key_pool.transpose(0, 1).contiguous().transpose(0, 1)
    out, plan = gaps.run(TorchBackend(compiled=True))
    torch.testing.assert_close(out, gaps.expected(), atol=2e-5, rtol=2e-5)
    assert all(work.tails is None for work in plan.state.work.values())


def test_threads_get_even_shares_that_cover_all_rows() -> None:
    plan = decodes([1, 900, 1, 30, 30, 30]).plan(TorchBackend())
    tails = build_work(plan, None, torch.device("cpu"), compiled=True).tails
    assert tails is not None
    total, kv_heads = int(tails.work[-1]) * 3, 3
    cuts = [kernels.compiled_tails._cut(tails.work, kv_heads, total * part // 4) for part in range(1, 4)]
    assert cuts == sorted(cuts)
    assert cuts[0] >= 0
    assert cuts[-1] <= 6 * kv_heads
    assert {cut // kv_heads for cut in cuts} == {1}  # the long tail is cut between its KV heads


def test_without_the_compiler_torch_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.compiled_tails", None)
    with caplog.at_level(logging.WARNING, "kernels.torch_cpu"):
        backend = TorchBackend()
    assert not backend.compiled
    assert "slower" in caplog.text
    case = case_of(decodes([20, 30], 2))
    torch.testing.assert_close(case.run(backend)[0], case.expected(), atol=2e-5, rtol=2e-5)
    assert not TorchBackend(name="torch").compiled
