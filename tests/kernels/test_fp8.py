"""8-bit pools: every backend equals the oracle over the same pool widened to float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings

from kernels.api import AttentionBackend, KernelError
from kernels.fp8 import HEADROOM, KV_FP8, MAXIMUM, Scales, load, scale_for, store
from kernels.plan import ALWAYS
from kernels.reference import ReferenceBackend
from kernels.torch_cpu import TorchBackend
from tests.kernels.cases import Batch, Case, case_of, cases, in_fp8
from tests.kernels.interpreter import bfloat16_products, interpreted_backend, needs_interpreter

TREE = Batch(16, [[3, 9, 4, 1], [3, 9, 7], [3, 9, 11, 12, 13]], [1, 5, 1], [60, 40, 70], 64)


@pytest.fixture(autouse=True)
def _quiet_and_exact() -> Iterator[None]:
    with warnings.catch_warnings(), bfloat16_products():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def check(case: Case, backend: AttentionBackend, tolerance: float) -> None:
    small = in_fp8(case)
    out, plan = small.run(backend)
    torch.testing.assert_close(out.float(), small.expected(), atol=tolerance, rtol=tolerance)
    assert (
        plan.tally.kv_bytes_logical
        == sum(case.batch.context_lens) * 2 * case.key_pool.shape[0] * (case.key_pool.shape[2])
    )


@given(case=cases(max_sequences=4, max_query=6, block_sizes=(2, 16)))
@settings(max_examples=25, deadline=None)
def test_torch_and_the_oracle_widen_the_pool(case: Case) -> None:
    if case.options["sliding_window"] is not None:
        case.options["sliding_window"] = None  # the bytes counted are then those of whole contexts
    check(case, TorchBackend(cost=ALWAYS), 1e-4)
    small = in_fp8(case)
    torch.testing.assert_close(small.run(ReferenceBackend())[0], small.expected(), atol=1e-6, rtol=1e-6)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "group": 3},
        {"head_dim": 80, "group": 2},
        {"head_dim": 128, "group": 4, "sinks": True, "soft_cap": 4.0},
    ],
    ids=["64", "80", "128 capped with sinks"],
)
def test_triton_widens_the_pool(dtype: torch.dtype, shape: dict[str, int | float | bool]) -> None:
    case = case_of(TREE, kv_heads=2, dtype=dtype, **shape)  # type: ignore[arg-type]
    check(case, interpreted_backend(), 5e-2 if dtype == torch.bfloat16 else 6e-3)


def backends() -> list[AttentionBackend]:
    return [ReferenceBackend(), TorchBackend(), interpreted_backend()]


@needs_interpreter
@pytest.mark.parametrize("which", [0, 1, 2], ids=["reference", "torch", "triton"])
def test_writes_round_cut_off_and_skip(which: int) -> None:
    backend = backends()[which]
    keys, values = (torch.zeros(2, 32, 64, dtype=KV_FP8) for _ in range(2))
    scales = Scales(torch.tensor([0.25, 0.5]), torch.tensor([1.0, 2.0]))
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(3, 4, 64, generator=generator).half()
    if which == 2:  # numbers of four bits, which need no rounding: the interpreter loses its carry
        fused = (torch.randint(-15, 16, (3, 4, 64), generator=generator) / 4).half()
    fused[0, 0, 0], fused[0, 1, 1] = 1e4, -1e4  # far outside of 448 scales
    key, value = fused[:, :2], fused[:, 2:]
    backend.write(key, value, keys, values, torch.tensor([5, -1, 31]), scales=scales)
    assert torch.equal(keys[:, 5].float(), store(key, scales.key)[0].float())
    assert torch.equal(values[:, 31].float(), store(value, scales.value)[2].float())
    assert keys[0, 5, 0].float() == MAXIMUM
    assert keys[1, 5, 1].float() == -MAXIMUM
    written = {5, 31}
    assert all(not keys[:, slot].float().any() for slot in range(32) if slot not in written)
    backend.copy_blocks([keys], [values], [(0, 1, 7)], 16)
    assert torch.equal(keys[:, 16 + 5].float(), keys[:, 5].float())


def test_the_error_of_a_number_is_a_sixteenth_whatever_the_scale() -> None:
    values = (
        torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1e-3, 1.0, 300.0])[None, :, None]
    )
    scale = scale_for(values.abs().amax(dim=(0, 2)))
    again = load(store(values, scale).transpose(0, 1), scale).transpose(0, 1)
    large = values.abs() / scale[None, :, None] > 2.0**-6
    assert large.float().mean() > 0.99
    assert ((again - values).abs() / values.abs())[large].max() <= 1 / 16
    assert (values.abs().amax(dim=(0, 2)) / scale * HEADROOM <= MAXIMUM).all()


def test_a_pool_and_scales_that_do_not_belong_together_are_refused() -> None:
    case = case_of(TREE)
    small = in_fp8(case)
    one = Scales(torch.ones(2), torch.ones(2))
    for backend in (ReferenceBackend(), TorchBackend()):
        plan = case.batch.plan(backend)
        options = {**small.options, "scales": None}
        with pytest.raises(KernelError, match="goes with scales"):
            backend.attend(small.query, small.key_pool, small.value_pool, plan, **options)
        with pytest.raises(KernelError, match="goes without scales"):
            backend.attend(case.query, case.key_pool, case.value_pool, plan, scale=1.0, scales=one)
        wrong = {**small.options, "scales": Scales(torch.ones(3), torch.ones(3))}
        with pytest.raises(KernelError, match="do not fit 2 KV heads"):
            backend.attend(small.query, small.key_pool, small.value_pool, plan, **wrong)
