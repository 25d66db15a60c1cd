"""Settle on one NVIDIA GPU whether the Triton kernels are right, and how fast: `make gpu-check`.

Needs torch, triton and this checkout only, and ends within `--minutes`. Prints its table last and
writes the same as JSON. Exit status 1 where a result is wrong; speed never fails the check, it is reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from kernels.api import BackendUnavailable  # noqa: E402
from kernels.gpu_measure import Clock, Result, copy_bandwidth, correctness, decode, prefill, step  # noqa: E402
from kernels.roofline import LLAMA3_8B, QWEN3_8B, SMOLLM2, Decode, Heads  # noqa: E402
from kernels.triton_backend import make_triton_backend  # noqa: E402

#: The line that the project's claims are about: 64 readers, 8K context.
CLAIMS = ((LLAMA3_8B, Decode(64, 0, 8192)), (LLAMA3_8B, Decode(64, 7376, 816)))


def decode_cases(small: bool) -> Iterator[tuple[Heads, Decode, bool]]:
    """(heads, work, compare with torch): the claims first, then the sweep, most telling first."""
    if small:
        yield SMOLLM2, Decode(2, 144, 17), True
        return
    for heads, work in CLAIMS:
        yield heads, work, True
    for context, readers in (
        (8192, 64),
        (1024, 256),
        (65536, 8),
        (32768, 1),
        (4096, 16),
        (1024, 1),
        (16384, 128),
    ):
        for heads in (LLAMA3_8B, QWEN3_8B, SMOLLM2):
            for share in (0.9, 0.0, 0.99, 0.5) if readers > 1 else (0.0,):
                shared = int(context * share) // 16 * 16
                yield heads, Decode(readers, shared, context - shared), False


def fits(heads: Heads, work: Decode, device: torch.device, peers: bool) -> bool:
    """Whether the tensors of a case take less than half of what is free."""
    if device.type != "cuda":
        return True
    tokens = work.tokens_two_phase + (work.tokens_one_phase if peers else 0)
    free, _ = torch.cuda.mem_get_info(device)
    return 2 * tokens * heads.token_bytes < free


def measure(device: torch.device, minutes: float, *, small: bool) -> tuple[dict[str, object], list[Result]]:
    """Everything, in order of importance, until the time is up; what was left out is said."""
    deadline = time.monotonic() + 60 * minutes
    backend = make_triton_backend(device)
    clock = Clock(device, repeats=1 if small else 7)
    bandwidth = copy_bandwidth(clock, 1 << 20 if small else 1 << 30)
    about: dict[str, object] = {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "none (interpreter)",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bandwidth_bytes_per_s": bandwidth,
    }
    if small:
        results = correctness(backend, rounds=1, head_dims=(64,), longest=17)
    else:
        results = correctness(backend, rounds=40, head_dims=(64, 80, 96, 128, 256))
    if not all(result.passed for result in results):
        return about, results  # no speed of a wrong result

    skipped = 0
    tokens = (96,) if small else (512, 2048, 8192)
    heads = SMOLLM2 if small else LLAMA3_8B
    for chunk in tokens:
        results.append(prefill(clock, backend, heads, chunk))
    results += step(
        clock,
        backend,
        heads,
        layers=1 if small else 8,
        hidden=128 if small else 4096,
        readers=2 if small else 64,
        shared=9 if small else 128,
    )
    for shape, work, peers in decode_cases(small):
        if time.monotonic() > deadline or not fits(shape, work, device, peers):
            skipped += 1
            continue
        results.append(decode(clock, backend, shape, work, bandwidth, peers=peers))
    about["cases_left_out"] = skipped
    return about, results


def table(about: dict[str, object], results: list[Result]) -> str:
    """For people."""
    lines = [", ".join(f"{key} {value}" for key, value in about.items())]
    checks = [r for r in results if r.passed is not None]
    for r in checks:
        if not r.passed:
            lines.append(f"WRONG  {r.case}  {r.extra}")
    lines.append(f"correctness: {sum(bool(r.passed) for r in checks)} of {len(checks)} right")
    lines += ["| what | case | microseconds | details |", "|---|---|---|---|"]
    for r in results:
        if r.seconds is not None:
            details = ", ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in r.extra.items()
            )
            lines.append(f"| {r.what} | {r.case} | {r.seconds * 1e6:,.0f} | {details} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 right, 1 wrong, 2 no GPU that the kernels serve."""
    parser = argparse.ArgumentParser(description="Check the Triton kernels on an NVIDIA GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "gpu_check.json")
    parser.add_argument("--small", action="store_true", help="tiny cases: only proves that the script runs")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("No NVIDIA GPU is visible to torch: nothing was checked and no speed was measured.")
        return 2
    try:
        about, results = measure(device, options.minutes, small=options.small)
    except BackendUnavailable as error:
        print(f"{error}. Nothing was checked and no speed was measured.")
        return 2
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"about": about, "results": [asdict(r) for r in results]}, indent=1) + "\n"
    )
    print(table(about, results))
    return 0 if all(r.passed is not False for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
