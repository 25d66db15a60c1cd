"""The script for the first GPU at hand: it runs, and it says so where there is nothing to run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


def run(*arguments: str, interpret: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_nothing_was_measured(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    done = run("--json", str(target), interpret="0")
    assert done.returncode == 2
    assert "no speed was measured" in done.stdout
    assert not target.exists()


@pytest.mark.slow
def test_all_of_it_runs_under_the_interpreter(tmp_path: Path) -> None:
    """Every code path but graphs and FlexAttention, on tiny cases; the times mean nothing."""
    target = tmp_path / "out.json"
    done = run("--device", "cpu", "--small", "--json", str(target), interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correctness: 2 of 2 right" in done.stdout
    results = json.loads(target.read_text())["results"]
    assert {r["what"] for r in results} >= {"correctness", "prefill", "decode", "step, CUDA graph"}
