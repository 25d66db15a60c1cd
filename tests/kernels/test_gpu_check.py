"""The script for the first GPU at hand: it runs, and it says so where there is nothing to run on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.api import Heads
from kernels.gpu_measure import Result
from kernels.triton_backend import TritonBackend
from tests.kernels.interpreter import needs_interpreter

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
    """Every code path but graphs, processes and FlexAttention, on tiny cases; the times mean nothing."""
    target = tmp_path / "out.json"
    done = run("--device", "cpu", "--small", "--json", str(target), interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correctness: 3 of 3 right" in done.stdout
    results = json.loads(target.read_text())["results"]
    assert {r["what"] for r in results} >= {"correctness", "prefill", "decode", "engine step, no graph"}
    assert any("8-bit KV" in r["case"] for r in results)


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(tmp_path: Path, minutes: float = 1.0) -> Any:
    return _script().Check(torch.device("cpu"), minutes, tmp_path / "out.json", small=True)


def test_a_section_that_fails_costs_no_other_its_result(tmp_path: Path) -> None:
    check = _check(tmp_path)
    check.section("one", lambda: [Result("decode", "a", seconds=1e-3)])
    check.section("two", lambda: 1 / 0)
    assert [r["what"] for r in json.loads((tmp_path / "out.json").read_text())["results"]] == [
        "decode",
        "failed",
    ]
    check.section("three", lambda: [Result("correctness", "b", passed=False)])
    text = _script().table(check.about, check.results)
    assert "FAILED  two  ZeroDivisionError" in text
    assert "WRONG  b" in text
    assert "| decode | a | 1,000 |" in text
    assert not _script().good(check.results[1])


@needs_interpreter
def test_no_speed_is_measured_after_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = _check(tmp_path)
    names = type(check).run.__globals__
    monkeypatch.setitem(names, "pool_correctness", lambda backend: Result("correctness", "w", passed=False))
    monkeypatch.setitem(names, "correctness_case", lambda *a, **k: Result("correctness", "c", passed=True))
    monkeypatch.setitem(names, "decode", lambda *a, **k: pytest.fail("measured"))
    check.run()
    assert {r.what for r in check.results} == {"correctness"}


@needs_interpreter
def test_when_the_time_is_up_the_rest_is_said_to_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = _check(tmp_path, minutes=-1.0)
    names = type(check).run.__globals__
    for name in ("pool_correctness", "correctness_case", "prefill"):
        monkeypatch.setitem(names, name, lambda *a, **k: Result("correctness", "c", passed=True))
    monkeypatch.setitem(names, "_engine", lambda *a, **k: [])
    check.run()
    assert check.about["cases_left_out"] == 1
    assert json.loads((tmp_path / "out.json").read_text())["about"]["cases_left_out"] == 1


@needs_interpreter
def test_variants_are_measured_where_the_chip_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Heads(32, 8, 128, 2, 2)
    for capability, kinds in (((8, 6), {5}), ((9, 0), {4, 5})):
        check = _check(tmp_path)
        backend = TritonBackend(torch.device("cpu"), capability=capability, processors=4)
        chosen = backend.launch_config(heads, 16)
        seen: set[int] = set()

        def measured(
            clock: Any,
            maker: Any,
            *rest: Any,
            what: str,
            seen: set[int] = seen,
            wide: Any = chosen.wide,
            **options: Any,
        ) -> Any:
            seen.add(maker.launch_config(heads, 16).narrow.stages)
            assert maker.launch_config(heads, 16).wide == wide
            assert options["eight_bit"] == (what == "decode, 8-bit KV")
            return Result(what, "c", seconds=1.0)

        monkeypatch.setitem(type(check).run.__globals__, "decode", measured)
        check._variants(None, backend, 1.0)
        assert seen == kinds
        assert len(check.results) == 2 * len(kinds)
        assert all(result.error is None for result in check.results)
