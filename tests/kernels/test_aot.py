"""Ahead-of-time compilation without a GPU: what the machine code must and must not hold."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.aot import MARKERS, Report, faults, main, table
from kernels.aot_matrix import CAPABILITIES, Variant, matrix
from kernels.fp8 import CAPABILITY as FP8_CAPABILITY
from kernels.triton_config import HEAD_DIMS, SHARED_LIMIT

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


def test_the_whole_matrix_has_every_tile_for_every_chip_head_and_pool() -> None:
    found = {
        (v.capability, v.head_dim, v.tile, v.options, v.fp8)
        for v in matrix(quick=False)
        if v.kernel == "attention"
    }
    for capability in CAPABILITIES:
        for fp8 in (False, True) if capability >= FP8_CAPABILITY else (False,):
            for head_dim in HEAD_DIMS:
                for tile in ("narrow", "wide", "tall"):
                    assert {(capability, head_dim, tile, on, fp8) for on in (False, True)} <= found
    assert len(matrix(quick=True)) < 20


def test_the_kept_results_are_of_todays_kernels_and_without_a_fault() -> None:
    """A launcher that chooses otherwise must be compiled again: `make kernels`."""
    kept = [Report(**one) for one in json.loads((ROOT / "bench" / "results" / "kernels.json").read_text())]
    wanted = [
        (v.kernel, v.configuration, "{}.{}".format(*v.capability), SHARED_LIMIT[v.capability])
        for v in matrix(quick=False)
    ]
    assert [(r.kernel, r.configuration, r.capability, r.shared_limit) for r in kept] == wanted
    assert [(r.configuration, faults(r)) for r in kept if faults(r)] == []
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page.split(MARKERS[0])[1].split(MARKERS[1])[0].strip() == table(kept)


def test_without_triton_it_says_that_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 2
    assert "nothing was compiled" in capsys.readouterr().out


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
