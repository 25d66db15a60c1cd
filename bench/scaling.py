"""How the time of a decode step grows with readers and with the document: `python -m bench.scaling [--json]`.

Readers of one document, each with its own short tail, decode one token a step on the packaged model. With the
shared pass a step reads the document's KV once for all of them (physical bytes), without it once for each
(logical bytes)::

    readers 1 .. 64 on 1,800 tokens        step time against readers, shared pass on and off
    16 readers on 500 .. 7,500 tokens      step time against KV bytes; slopes by least squares

On and off take turns within one run, and the median over the rounds counts, so the ratio of the two slopes
does not depend on what else the machine did.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.loading import load
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import EngineConfig, SamplingParams

BLOCK = 16
#: Own tokens of each reader: question and half an answer.
TAIL = 64
READERS = (1, 2, 4, 8, 16, 32, 64)
DOCUMENTS = (500, 1_000, 1_800, 3_000, 4_500, 6_000, 7_500)


@dataclass(frozen=True, slots=True)
class Point:
    """One setting. Times are milliseconds a step, bytes are KV bytes over all layers."""

    readers: int
    document: int
    shared_ms: float
    unshared_ms: float
    physical_bytes: int
    logical_bytes: int


class Bench:
    """The packaged model over a pool that holds the longest document and all tails."""

    def __init__(self, readers: int, document: int) -> None:
        blocks = -(-document // BLOCK) + readers * (TAIL // BLOCK)
        # The pool that comes with it is only written by the warm-up: the rest of it takes no memory.
        loaded = load(EngineConfig(model="packaged", kv_pool_bytes=512 * 2**20))
        pool = loaded.model.new_pool(blocks, BLOCK)
        for tensor in (*pool.key, *pool.value):
            tensor.normal_()  # unwritten slots may hold anything, NaN included; here they stand for a text
        self.runners = {
            on: Runner(loaded.model, pool, loaded.runner.backend, shared_pass=on) for on in (True, False)
        }

    def point(self, readers: int, document: int, rounds: int) -> Point:
        """Median step times of the two ways, taken in turns."""
        shared = list(range(document // BLOCK))
        each = TAIL // BLOCK
        greedy = SamplingParams()
        start = document // BLOCK * BLOCK + TAIL - 1
        rows = [
            Row(
                reader,
                [100 + reader],
                start,
                shared + [len(shared) + reader * each + at for at in range(each)],
                start,
                True,
                SamplerState(greedy),
            )
            for reader in range(readers)
        ]
        times: dict[bool, list[float]] = {True: [], False: []}
        read = {True: 0, False: 0}
        for round_ in range(rounds + 1):
            for on, runner in self.runners.items():
                began = time.perf_counter()
                output = runner.step(rows)
                if round_:  # the first round pays for what is set up once
                    times[on].append(time.perf_counter() - began)
                read[on] = output.kv_bytes_read
        return Point(
            readers,
            document,
            statistics.median(times[True]) * 1e3,
            statistics.median(times[False]) * 1e3,
            read[True],
            read[False],
        )


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Least-squares slope, in milliseconds for each unit of `sizes`."""
    return float(np.polyfit(np.asarray(sizes), np.asarray(times), 1)[0])


def measure(rounds: int, readers: Sequence[int], documents: Sequence[int]) -> dict[str, Any]:
    """Both series and the slopes; the result is what `--json` prints."""
    most = 16
    bench = Bench(max(*readers, most), max(*documents, 1_800))
    by_readers = [bench.point(count, 1_800, rounds) for count in readers]
    by_document = [bench.point(most, tokens, rounds) for tokens in documents]
    tokens = [point.document for point in by_document]
    shared = slope(tokens, [point.shared_ms for point in by_document])
    unshared = slope(tokens, [point.unshared_ms for point in by_document])
    mib = 2**20
    return {
        "by_readers": [asdict(point) for point in by_readers],
        "by_document": [asdict(point) for point in by_document],
        "slope_shared_ms_per_1000_tokens": shared * 1_000,
        "slope_unshared_ms_per_1000_tokens": unshared * 1_000,
        "slope_ratio": unshared / shared,
        "ms_per_physical_mib": slope(
            [p.physical_bytes / mib for p in by_document], [p.shared_ms for p in by_document]
        ),
        "ms_per_logical_mib": slope(
            [p.logical_bytes / mib for p in by_document], [p.unshared_ms for p in by_document]
        ),
        "conditions": {
            "readers": most,
            "rounds": rounds,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
    }


def table(result: dict[str, Any]) -> str:
    """Both series in Markdown."""
    lines = [
        "| readers | document tokens | step, shared ms | step, not shared ms | physical MiB | logical MiB |",
        "|---|---|---|---|---|---|",
    ]
    for point in [*result["by_readers"], *result["by_document"]]:
        lines.append(
            f"| {point['readers']} | {point['document']:,} | {point['shared_ms']:.1f} "
            f"| {point['unshared_ms']:.1f} | {point['physical_bytes'] / 2**20:,.0f} "
            f"| {point['logical_bytes'] / 2**20:,.0f} |"
        )
    lines.append(
        "\n1,000 tokens more in the document of 16 readers: "
        f"{result['slope_shared_ms_per_1000_tokens']:.2f} ms a step shared, "
        f"{result['slope_unshared_ms_per_1000_tokens']:.2f} ms not shared "
        f"({result['slope_ratio']:.1f} times)."
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few points and rounds: directions only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    result = measure(2, (2, 8), (500, 2_000)) if args.quick else measure(7, READERS, DOCUMENTS)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", "utf-8")
    print(text if args.json else table(result))


if __name__ == "__main__":
    main()
