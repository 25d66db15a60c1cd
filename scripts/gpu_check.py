"""Settle on one NVIDIA GPU whether the Triton kernels are right, and how fast: `make gpu-check`.

Needs torch, triton and this checkout (the engine's step also transformers), and ends within `--minutes`.
Prints its table last and writes the same as JSON after every section, so that whatever goes wrong in one
section costs no other its figures. Exit status 1 where a result is wrong or a section has failed; speed never
fails the check, it is reported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Overdue
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ParamSpec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NOTHING_DONE = "nothing was checked and no speed was measured"
try:
    import torch
    import triton
except ModuleNotFoundError as missing:
    print(f"The package {missing.name} is not installed: {NOTHING_DONE}.")
    raise SystemExit(2) from None

from kernels.api import BackendUnavailable  # noqa: E402
from kernels.fp8 import CAPABILITY  # noqa: E402
from kernels.gpu_measure import (  # noqa: E402
    Clock,
    DeeperBackend,
    Result,
    copy_bandwidth,
    correctness_case,
    correctness_in_process,
    decode,
    pool_correctness,
    prefill,
)
from kernels.roofline import LLAMA3_8B, QWEN3_8B, SMOLLM2, Decode, Heads  # noqa: E402
from kernels.triton_backend import TritonBackend, make_triton_backend  # noqa: E402

P = ParamSpec("P")
HEAD_DIMS = (64, 80, 96, 128, 256)
#: The line that the project's claims are about: 64 readers, 8K context.
CLAIMS = ((LLAMA3_8B, Decode(64, 0, 8192)), (LLAMA3_8B, Decode(64, 7376, 816)))


def decode_cases(small: bool) -> Iterator[tuple[Heads, Decode, bool]]:
    """(heads, work, compare with FlexAttention): the claims first, then the sweep, most telling first.

    FlexAttention is compiled anew for every shape, which takes longer than measuring all the rest.
    """
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


def fits(heads: Heads, work: Decode, device: torch.device, *, gathered: bool) -> bool:
    """Whether the tensors of a case take less than half of what is free; `gathered`: with a copy of each
    reader's whole K and V, which torch's attention needs."""
    if device.type != "cuda":
        return True
    tokens = work.tokens_two_phase + (work.tokens_one_phase if gathered else 0)
    free, _ = torch.cuda.mem_get_info(device)
    return 2 * tokens * heads.token_bytes < free


class Check:
    """One run: its sections in order of importance, each of which may fail alone."""

    def __init__(self, device: torch.device, minutes: float, target: Path, *, small: bool) -> None:
        self.device, self.target, self.small = device, target, small
        self.deadline = time.monotonic() + 60 * minutes
        self.results: list[Result] = []
        self.about: dict[str, object] = {
            "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "none (interpreter)",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    @property
    def time_left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def section(self, name: str, run: Callable[[], list[Result]]) -> list[Result]:
        """Run one section, keep what it found or why it failed, and write the file."""
        try:
            found = run()
        except Exception as error:  # the table must come, whatever a section does
            found = [Result("failed", name, error=f"{type(error).__name__}: {error}"[:500])]
        self.results += found
        self.save()
        if self.device.type == "cuda":
            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:  # an illegal access of the section shows up here at the latest
                self.results.append(
                    Result("failed", f"{name}: the device afterwards", error=str(error)[:500])
                )
        return found

    def save(self) -> None:
        """Write all there is so far."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        content = {"about": self.about, "results": [asdict(r) for r in self.results]}
        self.target.write_text(json.dumps(content, indent=1) + "\n")

    def run(self) -> None:
        """Everything until the time is up; what was left out is said. Raises `BackendUnavailable`."""
        backend = make_triton_backend(self.device)
        clock = Clock(self.device, repeats=1 if self.small else 7)
        bandwidth = copy_bandwidth(clock, 1 << 20 if self.small else 1 << 30)
        self.about["copy_bandwidth_bytes_per_s"] = bandwidth
        self.section("writing and copying", lambda: [pool_correctness(backend)])
        self.section("correctness", lambda: self._correctness(backend))
        if not all(good(result) for result in self.results):
            return  # no speed of a wrong result
        self.section("engine", lambda: _engine(clock, backend, small=self.small))
        heads = SMOLLM2 if self.small else LLAMA3_8B
        for chunk in (96,) if self.small else (512, 2048, 8192):
            self.section(f"prefill of {chunk}", partial(_one, prefill, clock, backend, heads, chunk))
        skipped = 0
        if not self.small:
            self._variants(clock, backend, bandwidth)
        for shape, work, flex in decode_cases(self.small):
            if self.time_left < 0 or not fits(shape, work, self.device, gathered=False):
                skipped += 1
                continue
            peers = ("sdpa", "flex")[: 1 + flex] if fits(shape, work, self.device, gathered=True) else ()
            self.section(
                f"decode {shape.name}",
                partial(_one, decode, clock, backend, shape, work, bandwidth, peers=peers),
            )
        self.about["cases_left_out"] = skipped
        self.save()

    def _variants(self, clock: Clock, backend: TritonBackend, bandwidth: float) -> None:
        """The claims' cases with a deeper pipeline, and with an 8-bit pool where the chip knows it."""
        deeper = DeeperBackend(self.device, capability=backend.capability, processors=backend.processors)
        kinds: list[tuple[str, TritonBackend, bool]] = [("decode, 5 stages", deeper, False)]
        if backend.capability >= CAPABILITY:
            kinds.append(("decode, 8-bit KV", backend, True))
        for what, maker, eight_bit in kinds:
            for shape, work in CLAIMS:
                self.section(
                    f"{what} of {work.shared} shared",
                    partial(
                        _one, decode, clock, maker, shape, work, bandwidth, eight_bit=eight_bit, what=what
                    ),
                )

    def _correctness(self, backend: TritonBackend) -> list[Result]:
        """Random trees, in several processes: each shape compiles kernels of its own, some seconds each.

        At most a third of the time; what has not come by then is said.
        """
        if self.device.type != "cuda":
            return [correctness_case(backend, seed, 64, longest=17) for seed in (0, 2)]
        jobs = [(str(self.device), seed, HEAD_DIMS[seed % len(HEAD_DIMS)]) for seed in range(40)]
        workers = max(1, min(8, (os.cpu_count() or 2) // 2))
        until = time.monotonic() + self.time_left / 3
        results: list[Result] = []
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        try:
            for job in [pool.submit(correctness_in_process, job) for job in jobs]:
                try:
                    results.append(job.result(timeout=max(0.1, until - time.monotonic())))
                except Overdue:
                    break
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # those that run end within seconds
        if not results:
            raise RuntimeError(f"none of {len(jobs)} cases ended in time")
        self.about["correctness_cases"] = f"{len(results)} of {len(jobs)} (as many as the time allowed)"
        return results


def good(result: Result) -> bool:
    """Neither wrong nor failed."""
    return result.passed is not False and result.error is None


def _one(measure: Callable[P, Result], *arguments: P.args, **named: P.kwargs) -> list[Result]:
    """A section of one result."""
    return [measure(*arguments, **named)]


def _engine(clock: Clock, backend: TritonBackend, *, small: bool) -> list[Result]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return [Result("engine step", "left out: transformers is not installed")]
    from scripts.gpu_engine import engine_steps

    return engine_steps(clock, backend, small=small)


def table(about: dict[str, object], results: list[Result]) -> str:
    """For people."""
    lines = [", ".join(f"{key} {value}" for key, value in about.items())]
    checks = [r for r in results if r.passed is not None]
    for r in results:
        if not good(r):
            lines.append(f"{'WRONG' if r.passed is False else 'FAILED'}  {r.case}  {r.error or r.extra}")
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
        print(f"No NVIDIA GPU is visible to torch: {NOTHING_DONE}.")
        return 2
    check = Check(device, options.minutes, options.json, small=options.small)
    try:
        check.run()
    except BackendUnavailable as error:
        print(f"{error}: {NOTHING_DONE}.")
        return 2
    print(table(check.about, check.results))
    return 0 if all(good(result) for result in check.results) else 1


if __name__ == "__main__":
    sys.exit(main())
