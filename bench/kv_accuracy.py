"""What 8-bit KV costs in accuracy: `python -m bench.kv_accuracy` prints the table of docs/kernels.md.

Mean negative log-likelihood of the fixed text of `engine.accuracy` by the packaged model on the CPU, with the
KV pool in the model's own precision and in e4m3, whose scales are then made coarser or moved on purpose.
"""

from __future__ import annotations

import argparse
from typing import Literal

from torch import Tensor

from engine.accuracy import likelihood, token_ids
from engine.conformance import FP8_TOLERANCE, check
from engine.kv_fp8 import use_fp8
from engine.model import load_model
from engine.types import EngineConfig
from kernels.api import get_backend
from kernels.fp8 import HEADROOM, Scales

BLOCK_SIZE = 16
Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def moved(scales: tuple[Scales, ...], factor: float) -> tuple[Scales, ...]:
    """All scales times a power of two."""
    return tuple(Scales(one.key * factor, one.value * factor) for one in scales)


def coarser(scales: tuple[Scales, ...], *, whole_model: bool) -> tuple[Scales, ...]:
    """One scale a layer for K and one for V, or one of each for the whole model: the largest."""

    def largest(parts: list[Tensor]) -> float:
        return max(float(part.max()) for part in parts)

    groups = [list(scales)] if whole_model else [[one] for one in scales]
    made: list[Scales] = []
    for group in groups:
        key, value = largest([one.key for one in group]), largest([one.value for one in group])
        made += [Scales(one.key * 0 + key, one.value * 0 + value) for one in group]
    return tuple(made)


def measure(dtype: Precision, tokens: int) -> list[str]:
    """Rows of the table for one precision of the model."""
    model = load_model(EngineConfig(model="packaged", device="cpu", dtype=dtype))
    backend = get_backend("torch_cpu", "cpu")
    text = token_ids(model.tokenizer, tokens)
    exact = likelihood(model, backend, BLOCK_SIZE, text)
    rows = [f"| {dtype} | none | {exact:.4f} | | {check(model, backend, BLOCK_SIZE).rms_error:.1e} |"]
    use_fp8(model, backend, BLOCK_SIZE)
    found = model.kv_scales
    if found is None:
        raise ValueError("a model with 8-bit KV has no scales")
    report = check(model, backend, BLOCK_SIZE, FP8_TOLERANCE)
    variants = {
        f"one a head, headroom {HEADROOM:g}": (found, f"{report.rms_error:.1e}"),
        f"one a head, headroom {HEADROOM * 16:g}": (moved(found, 16.0), ""),
        f"one a head, headroom {HEADROOM / 16:g}: much is cut off": (moved(found, 1 / 16), ""),
        "one a layer": (coarser(found, whole_model=False), ""),
        "one for the model": (coarser(found, whole_model=True), ""),
    }
    for name, (scales, error) in variants.items():
        model.kv_scales = scales
        cost = likelihood(model, backend, BLOCK_SIZE, text)
        rows.append(f"| {dtype} | {name} | {cost:.4f} | {cost / exact - 1:+.2%} | {error} |")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure what 8-bit KV costs in accuracy.")
    parser.add_argument("--tokens", type=int, default=1000, help="most tokens of the text that are read")
    parser.add_argument("--dtypes", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    options = parser.parse_args(arguments)
    print("| model in | scales | nats a token | cost | logits |\n|---|---|---|---|---|")
    for dtype in [one for one in PRECISIONS if one in options.dtypes]:
        print("\n".join(measure(dtype, options.tokens)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
