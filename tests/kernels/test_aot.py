"""Ahead-of-time compilation without a GPU: what the machine code must and must not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.aot import CAPABILITIES, Report, Variant, faults, matrix
from kernels.triton_config import HEAD_DIMS

ROOT = Path(__file__).resolve().parents[2]
GOOD = Report(
    kernel="attention",
    configuration="head 64",
    capability="8.0",
    registers=128,
    spills=0,
    shared_bytes=30_000,
    shared_limit=166_912,
    tensor_core=128,
    tensor_instruction="HMMA.16816",
    wide_loads=32,
    narrow_loads=1,
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spills": 8}, "8 spill"),
        ({"shared_bytes": 200_000}, "200000 bytes of shared memory of 166912"),
        ({"tensor_core": 1}, "1 tensor-core instructions for 2 products"),
        ({"wide_loads": 0}, "no 16-byte loads"),
        ({"narrow_loads": 64}, "64 loads of one element"),
    ],
)
def test_each_fault_of_a_compiled_kernel_is_named(change: dict[str, int], words: str) -> None:
    assert faults(GOOD) == []
    assert words in faults(replace(GOOD, **change))[0]  # type: ignore[arg-type]


def test_the_whole_matrix_has_every_tile_for_every_chip_and_head() -> None:
    found = {(v.capability, v.head_dim, v.tile) for v in matrix(quick=False) if v.kernel == "attention"}
    for capability in CAPABILITIES:
        for head_dim in HEAD_DIMS:
            assert {(capability, head_dim, tile) for tile in ("narrow", "wide", "tall")} <= found
    assert len(matrix(quick=True)) < 20


def test_a_variant_is_what_the_launcher_chooses() -> None:
    variant = Variant("attention", (9, 0), 128, tile="wide")
    assert variant.config.block_m == 64
    assert variant.configuration == "head 128, bf16, wide, 64x64, 4 warps, 3 stages, group 4, block 16"


@pytest.mark.slow
def test_the_small_matrix_compiles_without_a_fault(tmp_path: Path) -> None:
    """Real compilation for 8.0 and 9.0, in a process of its own (in this one Triton interprets)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kernels.aot",
            "--quick",
            "--workers",
            "2",
            "--cache",
            str(tmp_path / "cache"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{len(matrix(quick=True))} kernels, 0 with faults" in done.stdout
