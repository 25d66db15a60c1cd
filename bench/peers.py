"""Coread beside other engines, on one machine and over one HTTP client: `python -m bench.peers FOLDER`.

FOLDER holds `compare.py`, which starts every engine anew for every workload, replays a cold and a warm pass,
and writes one JSON object a pass. Here it is told how to serve Coread, its rows are gathered, every figure
becomes a ratio to the better of the rival's set-ups *in the same run*; the median over the runs is shown.
The first start of each engine, with nothing in its cache but the model, happens once a comparison: `--starts`
makes more of them.
Greedy decoding, equal bytes of KV cache, no cache of answers: the warm pass asks other questions.

    python -m bench.peers FOLDER                     # the five workloads, three runs: more than an hour
    python -m bench.peers FOLDER --speculation       # the same with drafting on (kept apart)
    python -m bench.peers FOLDER --only same-doc --runs 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.settings import load_settings
from kernels import amx_build

WORKLOADS = ("single", "short", "same-doc", "long-doc", "zipf")
#: What every engine gets for its KV cache, bytes.
POOL_BYTES = 2 * 2**30
#: The packaged model's bare name, as `/v1/models` lists it: it is served without any search.
MODEL = "SmolLM2-135M-Instruct"
VLLM = ("vllm", "vllm-b32")
LLAMA = ("llamacpp",)
OURS = "ours"
#: The key of the figure, and what the names of the comparisons begin with that are made for it alone.
START = "start_s"
#: Key of a row: by which call of `compare.py` it was measured.
COMPARISON = "comparison"


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table. `key`: a figure of a pass; `higher` where more is better."""

    title: str
    workload: str
    which: str
    key: str
    rivals: tuple[str, ...]
    higher: bool
    must: float
    aim: float


GOALS = (
    Goal("same-doc, warm, output tokens/s", "same-doc", "warm", "output_tok_per_s", VLLM, True, 2.0, 4.0),
    Goal("same-doc, cold, wall time", "same-doc", "cold", "wall_s", VLLM, False, 2.0, 3.0),
    Goal("long-doc, cold, slowest TTFT", "long-doc", "cold", "ttft_p95_s", VLLM, False, 2.0, 4.0),
    Goal("long-doc, warm, TPOT p50", "long-doc", "warm", "tpot_p50_s", VLLM, False, 1.7, 3.0),
    Goal("zipf, cold, wall time", "zipf", "cold", "wall_s", VLLM, False, 1.6, 2.5),
    Goal("zipf, cold, TTFT p95", "zipf", "cold", "ttft_p95_s", VLLM, False, 3.0, 6.0),
    Goal("short, output tokens/s", "short", "cold", "output_tok_per_s", VLLM, True, 1.2, 1.5),
    Goal("single, output tokens/s", "single", "cold", "output_tok_per_s", LLAMA, True, 0.8, 1.2),
    Goal("process start to first token", "", "", START, VLLM, False, 5.0, 10.0),
    Goal("proportional memory beside the KV pool", "", "", "pss_mib", VLLM, False, 1 / 0.7, 2.0),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A goal as measured: medians over the runs, and the ratio (above 1: Coread is ahead)."""

    title: str
    ours: float
    rival: str
    theirs: float
    ratio: float
    must: float
    aim: float
    runs: int


Rows = Sequence[dict[str, Any]]


def lines(rows: Rows) -> list[Line]:
    """The table from `compare.py`'s rows. Goals for which an engine was not measured are left out."""
    return [line for goal in GOALS if (line := _line(goal, rows)) is not None]


def _line(goal: Goal, rows: Rows) -> Line | None:
    if goal.key == START:
        # One first start a comparison, whatever it replays: another comparison is another run.
        rows = [{**row, "run": row[COMPARISON]} for row in rows]
    else:
        rows = [row for row in rows if not row[COMPARISON].startswith(START)]
    runs = sorted({row["run"] for row in rows})
    found: list[tuple[float, float, str, float]] = []
    for run in runs:
        ours = _value(goal, rows, OURS, run)
        rivals = {name: _value(goal, rows, name, run) for name in goal.rivals}
        measured = {name: value for name, value in rivals.items() if value is not None}
        if ours is None or not measured:
            continue
        better: Callable[..., str] = max if goal.higher else min
        rival = better(measured, key=measured.__getitem__)
        theirs = measured[rival]
        found.append((ours / theirs if goal.higher else theirs / ours, ours, rival, theirs))
    if not found:
        return None
    middle = sorted(found)[(len(found) - 1) // 2]
    return Line(
        goal.title,
        statistics.median(ours for _, ours, _, _ in found),
        middle[2],
        statistics.median(theirs for *_, theirs in found),
        statistics.median(ratio for ratio, *_ in found),
        goal.must,
        goal.aim,
        len(found),
    )


def _value(goal: Goal, rows: Rows, engine: str, run: int) -> float | None:
    """A failed request spoils its pass: its figure then does not count."""
    same = [row for row in rows if row["engine"] == engine and row["run"] == run]
    if goal.workload:
        same = [row for row in same if (row["workload"], row["which"]) == (goal.workload, goal.which)]
    if not goal.workload:  # beside the rival, in the same comparison
        beside = {row[COMPARISON] for row in rows if row["engine"] in goal.rivals}
        same = [row for row in same if row[COMPARISON] in beside]
    values = [float(row[goal.key]) for row in same if not row["errors"] and row[goal.key] is not None]
    if not values or any(math.isnan(value) for value in values):
        return None
    return max(values)  # one pass, or the most memory that any of them took


def table(measured: Sequence[Line]) -> str:
    """Markdown; a ratio below its *must* is said to be."""
    head = "| | Coread | best rival | its figure | ratio | must | aim | runs |\n" + "|---" * 8 + "|\n"
    return head + "\n".join(
        f"| {line.title} | {line.ours:g} | {line.rival} | {line.theirs:g} | {line.ratio:.2f}"
        f"{' **short**' if line.ratio < line.must else ''} | {line.must:.2f} | {line.aim:.2f} | {line.runs} |"
        for line in measured
    )


def serve_command(port: str, data_dir: str, speculation: bool) -> str:
    """How Coread is served for the comparison: no limits for one person, the same bytes of KV, and what it
    keeps from one start to the next beside its data."""
    environment = {
        "XDG_CACHE_HOME": f"{data_dir}-cache",
        "COREAD_DATA_DIR": data_dir,
        "COREAD_KV_POOL_BYTES": str(POOL_BYTES),
        "COREAD_MAX_TOKENS_PER_MINUTE": "0",
        "COREAD_MAX_RUNNING_PER_PERSON": "64",
        "COREAD_MAX_QUEUED_PER_PERSON": "256",
        "COREAD_SAMPLE": "false",
        "COREAD_SPECULATION": str(speculation).lower(),
    }
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    coread = Path(sys.executable).parent / "coread"
    return f"/usr/bin/env {settings} {coread} serve --host 127.0.0.1 --port {port}"


def convert_model(cache: Path) -> None:
    """Have the packaged model's converted form lie in a cache (what `XDG_CACHE_HOME` names): the rivals' own
    form of it was made when they were installed, too."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    code = "import engine.model as m, engine.types as t; m.load_model(t.EngineConfig())"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.DEVNULL)


def forget_library() -> None:
    """Remove what was compiled for the matrix unit, which lies beside Python's own compiled files."""
    for built in (amx_build.FOLDER / "__pycache__").glob("amx-*.so"):
        built.unlink()


def measure(
    folder: Path, workloads: Sequence[str], runs: int, python: str, speculation: bool, starts: int = 1
) -> Rows:
    """Run `compare.py`; its output goes through.

    Raises `subprocess.CalledProcessError` if it ends with an error. Each workload meets the rivals that its
    goals name, and no others: llama.cpp shares nothing between running sequences and would take minutes where
    many read one document, and nobody compares vLLM where one person is alone. Where vLLM is met, it and
    Coread are also started `starts - 1` times more with nothing in their caches but the model.
    """
    rows: list[dict[str, Any]] = []
    calls: list[tuple[str, Sequence[str], list[str], int]] = []
    for engines in (LLAMA, VLLM):
        named = {goal.workload for goal in GOALS if goal.rivals == engines}
        if chosen := [workload for workload in workloads if workload in named]:
            calls.append((engines[0], engines, chosen, runs))
            if engines == VLLM:
                calls += [(f"{START}-{n}", engines, ["single"], 1) for n in range(1, starts)]
    with tempfile.TemporaryDirectory(prefix="coread-peers-") as work:
        for name, rivals, replayed, times in calls:
            convert_model(Path(f"{work}/{name}-cache"))
            forget_library()
            out = Path(work) / f"{name}.json"
            command = [
                python, str(folder / "compare.py"), *replayed,
                "--engines", ",".join(rivals), "--runs", str(times), "--out", str(out),
                "--ours", serve_command("{port}", f"{work}/{name}", speculation), "--ours-model", MODEL,
            ]  # fmt: skip
            subprocess.run(command, check=True)
            rows += [{**row, COMPARISON: name} for row in json.loads(out.read_text("utf-8"))]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with compare.py")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="a workload; may be repeated")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--starts", type=int, default=3, help="first starts of each engine")
    parser.add_argument("--python", help="interpreter of the peers' environment")
    parser.add_argument("--speculation", action="store_true", help="serve Coread with drafting on")
    parser.add_argument("--add", action="store_true", help="keep what --out has of other workloads")
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers.json"))
    args = parser.parse_args(arguments)
    load_settings()  # a setting that cannot be is said now, not by a server that does not start
    if not (args.folder / "compare.py").is_file():
        parser.error(f"{args.folder} holds no compare.py")
    home = os.environ.get("PEERS_HOME", str(Path.home() / ".cache" / "peers"))
    python = args.python or f"{home}/venv/bin/python"
    chosen = args.only or list(WORKLOADS)
    rows = list(measure(args.folder, chosen, args.runs, python, args.speculation, args.starts))
    if args.add and args.out.exists():
        old = json.loads(args.out.read_text("utf-8"))["rows"]
        anew = {row[COMPARISON] for row in rows if row[COMPARISON].startswith(START)}

        def stays(row: dict[str, Any]) -> bool:
            if row[COMPARISON].startswith(START):
                return row[COMPARISON] not in anew
            return row["workload"] not in chosen

        rows = [*filter(stays, old), *rows]
    result = lines(rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps(
            {
                "speculation": args.speculation,
                "machine": {"cores": os.cpu_count(), "machine": platform.machine()},
                "table": [asdict(line) for line in result],
                "rows": rows,
            },
            indent=1,
        )
        + "\n",
        "utf-8",
    )
    print("\n" + table(result))
    shown = {line.title for line in result}
    if missing := [goal.title for goal in GOALS if goal.title not in shown]:
        print("\nWithout a figure, as a pass was not run or a request failed: " + "; ".join(missing))


if __name__ == "__main__":
    main()
