"""The compiled operations against plain torch, and torch against the formula."""

from __future__ import annotations

import pytest
import torch

from engine.compiled_ops import MIN_ROWS, CompiledOps
from engine.small_ops import Rows, SmallOps, TorchOps

TORCH = TorchOps(torch.bfloat16)
COMPILED = CompiledOps()
ROWS = [1, 5, 3 * MIN_ROWS + 1]


@pytest.fixture(autouse=True)
def _two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _rows(count: int, width: int, scaled: bool, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(count, width, generator=generator) * 3).bfloat16()
    return Rows(values, torch.rand(count, generator=generator) + 0.5 if scaled else None)


def _close(got: Rows, want: Rows, eight: bool) -> None:
    assert got.values.dtype == want.values.dtype == (torch.int8 if eight else torch.bfloat16)
    assert (got.scale is None) == (want.scale is None) == (not eight)
    if eight:
        # The order of a sum may move a value over a rounding boundary: by one step, rarely.
        step = (got.values.int() - want.values.int()).abs()
        assert int(step.max()) <= 1
        assert float(step.float().mean()) < 0.01
        torch.testing.assert_close(got.scale, want.scale, rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(got.values, want.values, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("delta", [None, False, True])
def test_norm(count: int, eight: bool, delta: bool | None) -> None:
    hidden = torch.randn(count, 40) * 5
    weight = torch.rand(40) + 0.1
    added = None if delta is None else _rows(count, 40, delta)
    ours, theirs = hidden.clone(), hidden.clone()
    got = COMPILED.norm(ours, added, weight, 1e-5, eight)
    want = TORCH.norm(theirs, added, weight, 1e-5, eight)
    torch.testing.assert_close(ours, theirs)
    _close(got, want, eight)
    total = hidden if added is None else hidden + added.full()
    plain = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(want.full(), plain, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("scaled", [False, True])
def test_rotate(count: int, scaled: bool) -> None:
    qkv = _rows(count, 7 * 8, scaled)
    angle = torch.rand(count, 4) * 6
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    got = COMPILED.rotate(qkv, cos, sin, 3, 2)
    want = TORCH.rotate(qkv, cos, sin, 3, 2)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)
    # Complex numbers: the two halves are real and imaginary parts, turned by the angle.
    q = qkv.full()[:, :24].view(count, 3, 2, 4)
    turned = torch.complex(q[:, :, 0], q[:, :, 1]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(
        want[0].float(), torch.cat([turned.real, turned.imag], -1), rtol=0.01, atol=0.02
    )
    torch.testing.assert_close(want[2].float().flatten(1), qkv.full()[:, 40:], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_gate(count: int, eight: bool, scaled: bool) -> None:
    both = _rows(count, 2 * 37, scaled)
    both.values[0, 0], both.values[0, 1] = 80.0, -80.0  # far out in both tails of the exponential
    got, want = COMPILED.gate(both, eight), TORCH.gate(both, eight)
    _close(got, want, eight)


@pytest.mark.parametrize("count", ROWS)
def test_cast(count: int) -> None:
    x = _rows(count, 33, False).values
    _close(COMPILED.cast(x, True), TORCH.cast(x, True), True)
    assert COMPILED.cast(x, False).values is x
    torch.testing.assert_close(TORCH.cast(x, True).full(), x.float(), rtol=0, atol=0.06)


@pytest.mark.parametrize("ops", [TORCH, COMPILED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_stays_visible_and_alone_behind_integers(ops: SmallOps, bad: float) -> None:
    x = _rows(4, 16, False).values
    clean = ops.cast(x, True).values.clone()
    x[2, 3] = bad
    got = ops.cast(x, True)
    assert got.full().isfinite().all(dim=1).tolist() == [True, True, False, True]
    for row in (0, 1, 3):
        assert torch.equal(got.values[row], clean[row])
    both = ops.gate(Rows(x), True)
    assert both.full().isnan().all(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("ops", [TORCH, COMPILED])
def test_a_row_of_zeros(ops: SmallOps) -> None:
    got = ops.cast(torch.zeros(1, 8).bfloat16(), True)
    assert got.full().tolist() == [[0.0] * 8]


def test_a_rows_result_does_not_depend_on_its_neighbours() -> None:
    both = _rows(100, 2 * 24, True)
    assert both.scale is not None
    whole = COMPILED.gate(both, True).values.clone()
    for row in (0, 49, 99):
        alone = COMPILED.gate(Rows(both.values[row : row + 1], both.scale[row : row + 1]), True)
        assert torch.equal(alone.values[0], whole[row])
