"""Whether the decoder on the matrix unit is taken, and which of its products are in 8 bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from engine import conformance
from engine.conformance import Tolerance
from engine.fast_llama import ROLES, fused_weight
from engine.linear import forms, has_inner
from engine.matrix_llama import MatrixLlama, products, serves
from engine.model import LoadedModel
from engine.step_times import STEPS, step_times
from kernels.api import AttentionBackend

log = logging.getLogger(__name__)


def possible(model: LoadedModel) -> bool:
    """Whether the unit is here, and the model fits."""
    return all(window is None for window in model.windows) and serves(model.model)


def decoder(model: LoadedModel, kinds: Mapping[str, str]) -> MatrixLlama:
    """The decoder with the products of each role in its form ("int8", "int8-inner"; others are bfloat16)."""
    return MatrixLlama(
        model.model,
        model.shape.max_context,
        {role: _forms(model, role, kind) for role, kind in kinds.items()},
    )


def choose(
    model: LoadedModel,
    backend: AttentionBackend,
    block_size: int,
    likelihood: Callable[[], float],
    most: float,
    tolerance: Tolerance,
) -> tuple[dict[str, str], float] | None:
    """Take it, with as many products in 8 bits as keep `likelihood()` (negative, of `model.decoder`) within
    `most`: the forms and the likelihood. None, with the decoder as it was, where that one is faster.

    A product in 8 bits takes half the time of one in 16 here, with few rows (half the bytes) and with many
    (twice the products an instruction). So the largest weights are tried first; only the whole is measured.

    Raises `ModelRefused` if it does not compute what the model computes; what decodes then is the caller's.
    """
    other = model.decoder
    kinds = dict.fromkeys(ROLES, "bfloat16")
    matrix = model.decoder = decoder(model, kinds)
    conformance.check(model, backend, block_size)
    best = likelihood()
    for role in sorted(ROLES, key=lambda role: -_weights(model, role)):
        before = matrix.products[role]
        for kind in ("int8", "int8-inner"):
            if kind == "int8-inner" and (role == "head" or not has_inner(model.shape.layers)):
                continue
            matrix.set_products(role, products(model.model, role, _forms(model, role, kind)))
            now = likelihood()
            log.info("%s in %s: negative log-likelihood %.4f (at most %.4f)", role, kind, now, most)
            if now <= most:
                kinds[role], best = kind, now
                break
        else:
            matrix.set_products(role, before)
    conformance.check(model, backend, block_size, tolerance)
    times = step_times(model, backend, block_size, (other, matrix))
    log.info("Milliseconds of steps of %s: %s %s, on the matrix unit %s", STEPS, other.name, *times)
    if sum(math.log(a / b) for a, b in zip(*times, strict=True)) <= 0:
        model.decoder = other
        return None
    model.decoder = matrix
    return kinds, best


def _forms(model: LoadedModel, role: str, kind: str) -> list[str]:
    return forms(kind, 1 if role == "head" else model.shape.layers, "bfloat16")


def _weights(model: LoadedModel, role: str) -> int:
    """How many weights a role has, in all layers."""
    return fused_weight(model.model, role, 0)[0].numel() * len(_forms(model, role, "int8"))
