"""Choosing the fastest decoder that is accurate enough, on the machine it will run on.

In order: is the architecture one that `FastLlama` computes; do its logits equal the model's own
(conformance, tight); does the whole step run faster on the processor's matrix unit (`engine.matrix_llama`,
as many products in 8 bits as can be afforded) than in that decoder in 16 bits, and if so nothing else is
tried, although a decoder of 8- and 4-bit products might come nearer to it for one reader; otherwise, which
form of each product is fastest here (measured, not assumed); how many of the 8-bit ones can be afforded
(likelihood on a fixed text, at most `BUDGET` worse than transformers' own); the same once more for 4-bit
products in steps of a handful of tokens. The choice is kept in the cache directory, because measuring takes
some seconds and the machine stays the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine import conformance, matrix_choice
from engine.accuracy import TEXT, likelihood, token_ids
from engine.errors import ModelRefused
from engine.fast_llama import ROLES, FastLlama, Maker, fused_weight, supports
from engine.linear import (
    DenseLinear,
    Int4Linear,
    Int8Linear,
    Linear,
    PackedLinear,
    available,
    forms,
    has_inner,
)
from engine.matrix_llama import MatrixLlama
from engine.model import LoadedModel
from engine.small_ops import SmallOps, TorchOps
from engine.step_times import in_turns
from kernels.api import AttentionBackend

log = logging.getLogger(__name__)

#: Largest allowed increase of the negative log-likelihood, relative.
BUDGET = 0.01
#: Rows at which products are measured: one reader, a few, many, and a prefill chunk.
MEASURED_ROWS = (1, 8, 32, 256)
#: Rows at which 4-bit products are measured against the ones chosen; they serve up to the largest number of
#: rows at which they win.
FEW_ROWS = (1, 2, 4)
#: Logits of 8-bit products: they differ from the model's by quantisation, which the likelihood judges;
#: this only catches a decoder that computes something else altogether.
REDUCED = conformance.Tolerance(rms=0.6, peak=8.0)
_TEXT_TOKENS = 384
_VERSION = 3


@dataclass(frozen=True, slots=True)
class Acceleration:
    """What runs. `kinds`: form of each product ("int8-inner": 8 bits but for the first and last layers).

    few        roles whose products are 4-bit in steps of at most `few_rows` tokens
    nll_few    likelihood with these
    decoder    "fused", or "matrix": the whole step on the processor's matrix unit, where nothing was timed
               product by product (`microseconds` is empty) and no small operations stand between (`ops`)
    """

    kinds: dict[str, str]
    ops: str
    nll_reference: float
    nll: float
    microseconds: dict[str, dict[str, list[float]]]
    few: list[str] = field(default_factory=list)
    few_rows: int = 0
    nll_few: float = 0.0
    decoder: str = "fused"

    @property
    def cost(self) -> float:
        """Relative increase of the negative log-likelihood, the larger one where there are two."""
        worst = max(self.nll, self.nll_few) if self.few else self.nll
        return worst / self.nll_reference - 1.0

    def __str__(self) -> str:
        if set(self.kinds.values()) == {"dense"}:
            return f"fused decoder in full precision (small operations: {self.ops})"
        forms = ", ".join(f"{role} {kind}" for role, kind in self.kinds.items())
        few, rate = "", f"{self.nll:.4f}"
        if self.few:
            few = f"; up to {self.few_rows} tokens a step {', '.join(self.few)} int4"
            rate += f" and {self.nll_few:.4f}"
        how = f"small operations: {self.ops}" if self.decoder == "fused" else "whole steps on the matrix unit"
        return (
            f"fused decoder ({forms}{few}; {how}); negative log-likelihood {rate} "
            f"against {self.nll_reference:.4f} ({self.cost:+.2%}, limit {BUDGET:+.0%})"
        )


def accelerate(
    model: LoadedModel, backend: AttentionBackend, block_size: int = 16, cache_dir: Path | None = None
) -> Acceleration | None:
    """Give `model` a faster decoder where there is one; None where transformers' own stays.

    Only for the CPU and the families of `engine.fast_llama`. Raises `ModelRefused` if the fused decoder does
    not compute what the model computes. To be called after the model's own conformance check and before
    service. The transformers model stays complete; see `release`.
    """
    if model.device.type != "cpu" or not supports(model.model):
        return None
    before = model.decoder
    try:
        return _accelerate(model, backend, block_size, cache_dir)
    except ModelRefused:
        model.decoder = before  # exact, as the caller has checked
        raise


def _accelerate(
    model: LoadedModel, backend: AttentionBackend, block_size: int, cache_dir: Path | None
) -> Acceleration:
    ops = _small_ops(model)
    if model.dtype != torch.bfloat16:
        # Full precision: fewer and larger products, nothing reduced.
        model.decoder = FastLlama(model.model, model.shape.max_context, ops, lambda role: DenseLinear)
        conformance.check(model, backend, block_size)
        kinds = dict.fromkeys(ROLES, "dense")
        return Acceleration(kinds, ops.name, 1.0, 1.0, {})
    path = _choice_path(model, cache_dir)
    known = _read(path, matrix=matrix_choice.possible(model))
    if known is not None and known.decoder == "matrix":
        before = model.decoder
        try:
            model.decoder = matrix_choice.decoder(model, known.kinds)
            conformance.check(model, backend, block_size, REDUCED)
            return known
        except ModelRefused as error:
            log.warning("The decoder that was chosen earlier is chosen anew: %s", error)
            model.decoder, known = before, None
    if known is not None:
        model.decoder = FastLlama(model.model, model.shape.max_context, ops, lambda role: _maker("dense"))
        for role, kind in known.kinds.items():
            _set(model, role, kind)
        _set_few(model, {role: _products(model, role, "int4") for role in known.few}, known.few_rows)
        conformance.check(model, backend, block_size, REDUCED)
        return replace(known, ops=ops.name)
    chosen = _choose(model, backend, block_size, ops)
    _write(path, chosen)
    return chosen


def _small_ops(model: LoadedModel) -> SmallOps:
    """Compiled where the compiler is installed and agrees with torch, otherwise torch's own, said aloud."""
    if model.dtype == torch.bfloat16:
        try:
            from engine.compiled_ops import CompiledOps

            return CompiledOps()
        except ImportError as error:
            log.warning("Small operations run in torch, which is slower: %s", error)
    return TorchOps(model.dtype)


def _maker(kind: str) -> Maker:
    makers: dict[str, Maker] = {
        "dense": DenseLinear,
        "packed": PackedLinear,
        "int4": lambda weight, bias: _no_bias(Int4Linear(weight), bias),
        "int8": lambda weight, bias: PackedLinear(weight, bias) if bias is not None else Int8Linear(weight),
    }
    return makers[kind]


def _no_bias(product: Linear, bias: Tensor | None) -> Linear:
    if bias is not None:
        raise ValueError(f"a product in the form {product.kind} has no bias")
    return product


def _products(model: LoadedModel, role: str, kind: str) -> list[Linear]:
    """All products of a role in one form."""
    full = "packed" if available("packed") else "dense"
    return [
        _maker(form)(*fused_weight(model.model, role, layer))
        for layer, form in enumerate(forms(kind, 1 if role == "head" else model.shape.layers, full))
    ]


def _set(model: LoadedModel, role: str, kind: str) -> list[Linear]:
    if not isinstance(model.decoder, FastLlama):
        raise TypeError(f"the decoder {model.decoder.name} has no products to replace")
    return model.decoder.set_products(role, _products(model, role, kind))


def _set_few(model: LoadedModel, products: dict[str, list[Linear]], rows: int) -> None:
    if not isinstance(model.decoder, FastLlama):
        raise TypeError(f"the decoder {model.decoder.name} has no products to replace")
    model.decoder.set_few(products, rows)


def _choose_few(
    model: LoadedModel, decoder: FastLlama, ops: SmallOps, nll: Callable[[], float], most: float
) -> tuple[list[str], int, float]:
    """`(roles, rows, likelihood)`: which products are 4-bit in steps of at most `rows` tokens, so that the
    likelihood with them stays below `most`. No roles where none is faster or none can be afforded."""
    four: dict[str, list[Linear]] = {}
    gains: dict[str, list[float]] = {}
    for role in ROLES:
        weight, bias = fused_weight(model.model, role, 0)
        if role == "head" or bias is not None or not Int4Linear.serves(weight):
            continue
        now = [getattr(layer, role) for layer in decoder.layers]
        candidate = _products(model, role, "int4")
        old, new = _measure((now, candidate), ops, FEW_ROWS)
        gain = [(a - b) * len(candidate) for a, b in zip(old, new, strict=True)]
        if gain[0] > 0.05 * old[0] * len(candidate):
            four[role], gains[role] = candidate, gain
    # Dropped first is what saves least.
    for role in sorted(four, key=lambda role: gains[role][0]):
        decoder.set_few(four, _TEXT_TOKENS)  # judged on the whole text at once: rows do not depend on others
        value = nll()
        log.info("%s in int4: negative log-likelihood %.4f (at most %.4f)", ", ".join(four), value, most)
        if value <= most:
            rows = max(
                count for at, count in enumerate(FEW_ROWS) if at == 0 or sum(gains[r][at] for r in four) > 0
            )
            decoder.set_few(four, rows)
            return list(four), rows, value
        del four[role]
    decoder.set_few({}, 0)
    return [], 0, 0.0


def _choose(model: LoadedModel, backend: AttentionBackend, block_size: int, ops: SmallOps) -> Acceleration:
    started = time.monotonic()
    text = token_ids(model.tokenizer, min(_TEXT_TOKENS, model.shape.max_context))

    def nll() -> float:
        return likelihood(model, backend, block_size, text)

    reference = nll()
    full = "packed" if available("packed") else "dense"
    decoder = FastLlama(model.model, model.shape.max_context, ops, lambda role: _maker(full))
    model.decoder = decoder
    conformance.check(model, backend, block_size)
    if matrix_choice.possible(model):
        try:
            taken = matrix_choice.choose(model, backend, block_size, nll, reference * (1 + BUDGET), REDUCED)
        except ModelRefused as error:
            log.warning("Steps do not run on the matrix unit: %s", error)
            model.decoder, taken = decoder, None
        if taken is not None:
            kinds, best = taken
            chosen = Acceleration(kinds, "none", reference, best, {}, decoder="matrix")
            log.info("Chose a decoder in %.1f s: %s", time.monotonic() - started, chosen)
            return chosen
    kinds = dict.fromkeys(ROLES, full)
    best = nll()
    timings: dict[str, dict[str, list[float]]] = {}
    if available("int8"):
        gains: list[tuple[float, str]] = []
        spare: dict[str, list[Linear]] = {}
        for role in ROLES:
            eight = _products(model, role, "int8")
            if not eight[0].quantised:
                continue  # a product with a bias stays as it is
            old = decoder.set_products(role, eight)
            decoder.set_products(role, old)
            times = dict(zip((full, "int8"), _measure((old, eight), ops, MEASURED_ROWS), strict=True))
            timings[role] = times
            gain = sum(math.log(a / b) for a, b in zip(times[full], times["int8"], strict=True))
            if gain > 0.05 * len(MEASURED_ROWS):
                saved = sum(a - b for a, b in zip(times[full][:3], times["int8"][:3], strict=True))
                gains.append((saved * len(eight), role))
                spare[role] = eight
        # The product that saves most is tried first, so the budget goes where it buys most.
        for _, role in sorted(gains, reverse=True):
            old = decoder.set_products(role, spare.pop(role))
            for kind in ("int8", "int8-inner"):
                if kind == "int8-inner":
                    if role == "head" or not has_inner(model.shape.layers):
                        continue
                    decoder.set_products(role, _products(model, role, kind))
                now = nll()
                log.info("%s in %s: negative log-likelihood %.4f (%.4f)", role, kind, now, reference)
                if now <= reference * (1 + BUDGET):
                    kinds[role], best = kind, now
                    break
            else:
                decoder.set_products(role, old)
        conformance.check(model, backend, block_size, REDUCED)
    few: tuple[list[str], int, float] = ([], 0, 0.0)
    if available("int4"):
        few = _choose_few(model, decoder, ops, nll, reference * (1 + BUDGET))
        conformance.check(model, backend, block_size, REDUCED)
    chosen = Acceleration(kinds, ops.name, reference, best, timings, *few)
    log.info("Chose a decoder in %.1f s: %s", time.monotonic() - started, chosen)
    return chosen


def _measure(
    candidates: Sequence[Sequence[Linear]], ops: SmallOps, row_counts: Sequence[int], budget_s: float = 0.04
) -> list[list[float]]:
    """Microseconds a call of each candidate for each of `row_counts`, quantising the input included.

    A candidate's products are used one after another, so that their weights come from memory as in service.
    """
    result: list[list[float]] = [[] for _ in candidates]
    for rows in row_counts:
        x = torch.randn((rows, candidates[0][0].in_features)).to(torch.bfloat16)
        calls = [partial(_multiply, products, ops, x) for products in candidates]
        best = in_turns(calls, 5, budget_s)
        for place, seconds in enumerate(best):
            result[place].append(round(seconds * 1e6, 1))
    return result


def _multiply(products: Sequence[Linear], ops: SmallOps, x: Tensor, turn: int) -> None:
    product = products[turn % len(products)]
    product(ops.cast(x, product.quantised).values)


def _choice_path(model: LoadedModel, cache_dir: Path | None) -> Path | None:
    """Where the choice for this model on this machine is kept; what could change it is in the name."""
    if cache_dir is None:
        return None
    embedding = model.model.get_input_embeddings().weight
    facts = [
        _VERSION,
        model.name,
        str(model.model.config.to_json_string()),
        [float(value) for value in embedding[:: max(1, embedding.shape[0] // 16), 0]],
        torch.__version__,
        platform.machine(),
        torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {},
        matrix_choice.possible(model),
        TEXT,
    ]
    digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
    return cache_dir / "decoders" / f"{digest}.json"


def _read(path: Path | None, *, matrix: bool) -> Acceleration | None:
    """A kept choice; None where there is none that can be read and used. `matrix`: the unit can be used."""
    if path is None:
        return None
    try:
        known = Acceleration(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    usable = set(known.kinds) == set(ROLES) and known.cost <= BUDGET and set(known.few) < set(ROLES)
    needed = {kind.removesuffix("-inner") for kind in known.kinds.values()} | (
        {"int4"} if known.few else set()
    )
    if known.decoder == "matrix":
        return known if usable and matrix else None
    return known if usable and all(available(kind) for kind in needed) else None


def _write(path: Path | None, chosen: Acceleration) -> None:
    """Keep a choice; a directory that cannot be written costs some seconds at every start."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(chosen)), "utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("The choice of a decoder could not be kept in %s: %s", path, error)


def release(model: LoadedModel) -> None:
    """Give back the memory of the transformers weights that a fused decoder has its own copies of.

    After this the transformers model cannot run any more; its embedding stays, the decoder uses it.
    """
    if not isinstance(model.decoder, (FastLlama, MatrixLlama)):
        return
    for block in model.model.base_model.layers:
        for parameter in [*block.self_attn.parameters(), *block.mlp.parameters()]:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
