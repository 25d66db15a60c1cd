"""Deliberate faults in the Triton kernels and in the tile plan, each of which the checks must notice.

The kernels' source is changed by one edit, imported from a file of its own and run under the interpreter
on cases that the unchanged source passes.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernels.triton_attention
import kernels.triton_backend
import kernels.triton_plan
import kernels.triton_pool
from tests.kernels.cases import Batch, Case, case_of, in_fp8
from tests.kernels.interpreter import interpreted_backend, needs_interpreter

pytestmark = needs_interpreter

#: Two nested shared nodes, a prefill chunk, decodes, ragged tails, a context long enough to be split.
TREE = Batch(
    16,
    [[3, 9, 4, 1, 30, 31, 32, 33, 34], [3, 9, 7], [3, 9, 11, 12, 13], [3, 9, 4, 1, 40]],
    [1, 1, 7, 1],
    [141, 40, 70, 66],
    64,
)
#: Many turns of the loop in one tile: decode and chunk.
LONG = Batch(16, [list(range(20)), list(range(20, 36))], [1, 5], [309, 250], 64)
CASES = {
    "long": lambda: case_of(LONG, head_dim=64, group=2, kv_heads=1),
    "plain": lambda: case_of(TREE, head_dim=64, group=2, kv_heads=2),
    "two parts": lambda: case_of(TREE, head_dim=80, group=3, kv_heads=1),
    "window": lambda: case_of(TREE, head_dim=64, group=2, kv_heads=1, window=21),
    "8-bit pool": lambda: in_fp8(case_of(TREE, head_dim=64, group=2, kv_heads=2, dtype=torch.float16)),
    "capped with sinks": lambda: case_of(TREE, head_dim=64, group=2, kv_heads=1, soft_cap=2.0, sinks=True),
}


def wrong(case: Case) -> bool:
    """Whether the result differs from the oracle's (or is not even computed)."""
    for shortest in (64, 1024):  # contexts split into single turns of the loop, and not split at all
        module = sys.modules[kernels.triton_backend.tile_plan.__module__]
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore", RuntimeWarning)
            patch.setattr(module, "SHORTEST_SPLIT", shortest)
            try:
                out, _ = case.run(interpreted_backend())
            except IndexError:
                return True
        tolerance = 2e-5 if out.dtype == torch.float32 else 6e-3
        if not torch.allclose(out.float(), case.expected(), atol=tolerance, rtol=tolerance):
            return True
    return False


numbers = itertools.count()


def edited(module: ModuleType, old: str, new: str, tmp_path: Path) -> ModuleType:
    """The module with one edit, from a file of its own (Triton reads the source of what it compiles)."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{source.count(old)} places read {old!r}"
    path = tmp_path / f"edited_{next(numbers)}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = changed  # dataclasses look there
    spec.loader.exec_module(changed)
    return changed


@pytest.mark.parametrize("case", CASES)
def test_the_unchanged_source_passes(case: str) -> None:
    assert not wrong(CASES[case]())


FAULTS: dict[str, tuple[str, str, str]] = {
    "scale of the keys missing": (
        "8-bit pool",
        "scale = scale * tl.load(key_scale + head)",
        "scale = scale",
    ),
    "scale of another head's values": (
        "8-bit pool",
        "tl.load(value_scale + head)",
        "tl.load(value_scale)",
    ),
    "causal mask off by one": (
        "plain",
        "keys[None, :] <= position[:, None])",
        "keys[None, :] < position[:, None])",
    ),
    "causal mask missing": (
        "plain",
        "seen = inside[None, :] & (keys[None, :] <= position[:, None])",
        "seen = inside[None, :] & (keys[None, :] >= 0)",
    ),
    "window off by one": ("window", "position[:, None] - WINDOW)", "position[:, None] - WINDOW - 1)"),
    "wrong head of the group": ("plain", "head * GROUP + stacked % GROUP", "head * GROUP + stacked % 1"),
    "wrong KV head": (
        "plain",
        "head.to(tl.int64) * slots * HEAD_DIM",
        "head.to(tl.int64) * 0 * slots * HEAD_DIM",
    ),
    "accumulator not rescaled": ("long", "acc_a = acc_a * rescale[:, None]\n        if MASKED", "if MASKED"),
    "second part not rescaled": (
        "two parts",
        "            acc_b = acc_b * rescale[:, None]\n            lane_b",
        "            lane_b",
    ),
    "sum not rescaled": (
        "long",
        "row_sum = row_sum * rescale + tl.sum(weights, 1)",
        "row_sum = row_sum + tl.sum(weights, 1)",
    ),
    "second part of the head ignored": (
        "two parts",
        "scores = tl.dot(query_b, key_b, scores, input_precision=PRECISION)",
        "scores = scores",
    ),
    "tail of the stretch ignored": (
        "plain",
        "masked_from, key_end, key_end, position",
        "masked_from, key_full, key_end, position",
    ),
    "unwritten V is loaded": (
        "plain",
        "value_a = tl.load(value_head + slot[:, None] + lane_a[None, :], mask=inside[:, None], other=0.0)",
        "value_a = tl.load(value_head + slot[:, None] + lane_a[None, :])",
    ),
    "slot inside the block ignored": ("plain", "keys % BLOCK_SIZE) * HEAD_DIM", "0 * keys) * HEAD_DIM"),
    "merge forgets to rescale": (
        "plain",
        "acc_a = acc_a * rescale + weight * tl.load",
        "acc_a = acc_a + weight * tl.load",
    ),
    "merge drops the last partial": (
        "plain",
        "for i in range(first, last):",
        "for i in range(first, last - 1):",
    ),
    "sink counted in no base": (
        "capped with sinks",
        "top = tl.load(sinks + head).to(tl.float32) * LOG2E",
        "top = tl.load(sinks + head).to(tl.float32)",
    ),
    "cap forgotten": ("capped with sinks", "scores = scores * soft_cap", "scores = scores * LOG2E"),
    "partials of other heads": (
        "plain",
        "entry = (target + local).to(tl.int64) * (KV_HEADS * GROUP) + q_head_index",
        "entry = (target + local).to(tl.int64) * (KV_HEADS * GROUP) + head",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernels_is_caught(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, old, new = FAULTS[fault]
    changed = edited(kernels.triton_attention, old, new, tmp_path)
    monkeypatch.setattr(kernels.triton_backend, "attention_kernel", changed.attention_kernel)
    monkeypatch.setattr(kernels.triton_backend, "merge_kernel", changed.merge_kernel)
    assert wrong(CASES[case]())


PLAN_FAULTS = {
    "rows of the first sequence": ("offset = plan.query_starts[s]", "offset = plan.query_starts[0]"),
    "splits overlap": (
        "tiles[:, 3] = table[owner, 3] + index * even[owner]",
        "tiles[:, 3] = table[owner, 3] + index * even[owner] // 2",
    ),
    "unmasked part too long": (
        "seen_by_all // keys_per_turn * keys_per_turn",
        "-(-seen_by_all // keys_per_turn) * keys_per_turn",
    ),
    "blocks of the first segment": (
        "block_base = self.block_total - first_block",
        "block_base = -first_block",
    ),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_fault_in_the_tiles_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = edited(kernels.triton_plan, *PLAN_FAULTS[fault], tmp_path)
    monkeypatch.setattr(kernels.triton_backend, "tile_plan", changed.tile_plan)
    # Block 0 behind the last block id: a fault that reads too far must be wrong, not end the process.
    layout, pack = kernels.triton_plan.layout, kernels.triton_plan.pack

    def roomy(*args: Any) -> Any:
        where = layout(*args)
        return replace(where, size=where.size + 64)

    def emptied(tiles: Any, where: Any, host: Any) -> int:
        host[:] = 0
        return pack(tiles, where, host)

    monkeypatch.setattr(kernels.triton_backend, "layout", roomy)
    monkeypatch.setattr(kernels.triton_backend, "pack", emptied)
    assert wrong(CASES["plain"]())


def pool_is_wrong() -> bool:
    backend = interpreted_backend()
    # Room before the pools, so that a fault's stray write to slot -1 harms nobody else.
    keys, values = (torch.zeros(64 + 2 * 64 * 64)[64:].view(2, 64, 64) for _ in range(2))
    values.normal_()
    key, value = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    expected = values.clone()
    backend.write(key, value, keys, values, torch.tensor([20, -1, 1]))
    expected[:, 20], expected[:, 1] = value[0], value[2]
    written = torch.equal(values, expected)
    backend.copy_blocks([keys], [values], [(1, 3, 5)], 16)
    expected[:, 48:53] = expected[:, 16:21]
    return not (written and torch.equal(values, expected))


POOL_FAULTS: dict[str, tuple[str, str]] = {
    "minus one is written": ("if slot < 0:", "if slot < -1:"),
    "all slots are copied": ("inside = lane < count * HEAD_DIM", "inside = lane < BLOCK_SIZE * HEAD_DIM"),
    "values of the key": (
        "tl.store(value_pool + row + lane, new_value",
        "tl.store(value_pool + row + lane, new_key",
    ),
}


@pytest.mark.parametrize("fault", POOL_FAULTS)
def test_a_fault_in_writing_and_copying_is_caught(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not pool_is_wrong()
    torch.manual_seed(0)
    changed = edited(kernels.triton_pool, *POOL_FAULTS[fault], tmp_path)
    monkeypatch.setattr(kernels.triton_backend, "write_kernel", changed.write_kernel)
    monkeypatch.setattr(kernels.triton_backend, "copy_kernel", changed.copy_kernel)
    assert pool_is_wrong()
