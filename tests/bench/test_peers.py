"""The comparison's table: ratios within one run, against the better rival, and what is short is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from bench import peers
from bench.scaling import slope


def _row(engine: str, run: int = 0, **figures: Any) -> dict[str, Any]:
    return {
        "engine": engine, "workload": "same-doc", "which": "warm", "run": run, "errors": 0,
        "output_tok_per_s": 100.0, "start_s": 10.0, "pss_mib": 1000, "comparison": "vllm", **figures,
    }  # fmt: skip


def _throughput(rows: list[dict[str, Any]]) -> peers.Line | None:
    return next((line for line in peers.lines(rows) if line.title.startswith("same-doc, warm")), None)


def test_the_better_rival_of_each_run_counts_and_the_median_is_shown() -> None:
    rows = [
        row
        for run, (ours, plain, small) in enumerate([(300, 100, 150), (400, 200, 100), (100, 100, 50)])
        for row in (
            _row("ours", run, output_tok_per_s=ours),
            _row("vllm", run, output_tok_per_s=plain),
            _row("vllm-b32", run, output_tok_per_s=small),
        )
    ]
    line = _throughput(rows)
    assert line is not None
    assert (line.ratio, line.ours, line.theirs, line.runs) == (2.0, 300, 150, 3)
    assert line.rival in peers.VLLM


def test_less_is_better_where_seconds_are_measured() -> None:
    rows = [
        _row("ours", which="cold", wall_s=2.0),
        _row("vllm", which="cold", wall_s=8.0),
        _row("vllm-b32", which="cold", wall_s=6.0),
    ]
    line = next(line for line in peers.lines(rows) if line.title == "same-doc, cold, wall time")
    assert (line.ratio, line.rival) == (3.0, "vllm-b32")


@pytest.mark.parametrize("spoiled", [{"errors": 1}, {"output_tok_per_s": float("nan")}])
def test_a_pass_with_a_failed_request_does_not_count(spoiled: dict[str, Any]) -> None:
    rows = [_row("ours", **spoiled), _row("vllm")]
    assert _throughput(rows) is None


def test_the_table_says_what_is_short() -> None:
    def shown(ours: float) -> str:
        text = peers.table(peers.lines([_row("ours", output_tok_per_s=ours), _row("vllm")]))
        return next(line for line in text.splitlines() if line.startswith("| same-doc, warm"))

    assert "1.50 **short**" in shown(150)
    assert "short" not in shown(250)


def test_coread_is_served_with_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    words = peers.serve_command("{port}", "/data here", speculation=True).split(" COREAD_")
    names = [word.split("=")[0].lower() for word in words[1:]]
    assert len(names) >= 6
    assert set(names) <= set(Settings.model_fields)
    assert "{port}" in words[-1]
    assert words[0] == "/usr/bin/env XDG_CACHE_HOME='/data here-cache'"
    assert "COREAD_DATA_DIR='/data here'" in peers.serve_command("1", "/data here", speculation=False)


def test_a_folder_without_the_client_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main([str(tmp_path)])
    assert "compare.py" in capsys.readouterr().err


def test_every_workload_meets_the_rivals_that_its_goals_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    compiled = tmp_path / "__pycache__" / "amx-0123.so"
    compiled.parent.mkdir()
    compiled.touch()

    def run(command: list[str], check: bool) -> None:
        assert not compiled.exists(), "a first start compiles"
        compiled.touch()
        calls.append(command)
        Path(command[command.index("--out") + 1]).write_text(json.dumps([_row("ours")]))

    converted: list[Path] = []
    monkeypatch.setattr(peers, "convert_model", converted.append)
    monkeypatch.setattr(peers.amx_build, "FOLDER", tmp_path)
    monkeypatch.setattr(peers.subprocess, "run", run)
    rows = peers.measure(tmp_path, peers.WORKLOADS, 3, "python", False, starts=3)
    assert [row["comparison"] for row in rows] == ["llamacpp", "vllm", "start_s-1", "start_s-2"]
    served = [c[c.index("--ours") + 1] for c in calls]
    caches = [command.split("XDG_CACHE_HOME=")[1].split()[0] for command in served]
    assert len(set(caches)) == 4
    assert [str(path) for path in converted] == caches
    met = {w: c[c.index("--engines") + 1] for c in calls[:2] for w in peers.WORKLOADS if w in c}
    assert [c[2] for c in calls[2:]] == ["single", "single"]
    assert {c[c.index("--engines") + 1] for c in calls[2:]} == {"vllm,vllm-b32"}
    assert met == {w: "llamacpp" if w == "single" else "vllm,vllm-b32" for w in peers.WORKLOADS}


def test_a_first_start_counts_once_a_comparison_and_beside_its_rival() -> None:
    def start(comparison: str, ours: float, *theirs: float, run: int = 0) -> list[dict[str, Any]]:
        rows = [_row("ours", run, start_s=ours, comparison=comparison)]
        names = peers.VLLM if len(theirs) > 1 else peers.LLAMA
        return rows + [
            _row(name, run, start_s=value, comparison=comparison)
            for name, value in zip(names, theirs, strict=True)
        ]

    rows = [
        *start("llamacpp", 1.0, 5.0), *start("vllm", 10, 90, 80), *start("vllm", 10, 90, 80, run=1),
        *start("start_s-1", 10, 60, 70), *start("start_s-2", 40, 110, 100),
    ]  # fmt: skip
    line = next(line for line in peers.lines(rows) if line.title == "process start to first token")
    assert (line.ratio, line.ours, line.theirs, line.runs) == (6.0, 10, 80, 3)
    # Nothing else is taken from what was measured for the start alone.
    only = [row for row in rows if row["comparison"].startswith(peers.START)]
    assert [line.title for line in peers.lines(only)] == ["process start to first token"]


def test_figures_of_other_workloads_are_kept_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compare.py").touch()
    out = tmp_path / "peers.json"
    old = [_row("ours", workload="single"), _row("ours", output_tok_per_s=1.0)]
    out.write_text(json.dumps({"rows": old}))
    new = [_row("ours", output_tok_per_s=200), _row("vllm")]
    monkeypatch.setattr(peers, "measure", lambda *_: new)
    peers.main([str(tmp_path), "--only", "same-doc", "--add", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["rows"] == [old[0], *new]
    assert written["table"][0]["ratio"] == 2.0


def test_a_slope_is_what_least_squares_gives() -> None:
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2.0)
