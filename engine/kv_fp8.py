"""A model whose KV pool holds 8-bit floats: may it, with which scales, and what does it cost.

Scales are found once, at load, from one fixed text that runs through pages of full precision (see
`kernels.fp8` for what they have to do and why one a head is enough).
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch

from engine.accuracy import token_ids
from engine.errors import KVDtypeRefused
from engine.model import LoadedModel
from engine.runner import Row, Runner
from kernels.api import AttentionBackend
from kernels.fp8 import CAPABILITY, KV_FP8, Scales, scale_for

#: Tokens that calibration looks at: as many of the text's as there are, the rest drawn from the vocabulary,
#: whose outliers a text does not have.
TOKENS = 512


def refuse_fp8(device: torch.device, backend: AttentionBackend) -> None:
    """Raise `KVDtypeRefused` where the device or the backend cannot keep 8-bit KV."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            name, (major, minor) = torch.cuda.get_device_name(device), capability
            raise KVDtypeRefused(
                f"{name} has compute capability {major}.{minor}; a KV pool of 8-bit floats needs "
                f"{CAPABILITY[0]}.{CAPABILITY[1]}, set the KV dtype to auto."
            )
    elif device.type != "cpu" or backend.name == "triton":
        # Under Triton's interpreter the kernels are tested, never served.
        raise KVDtypeRefused(f"{backend.name} on {device} keeps no 8-bit KV; set the KV dtype to auto.")


def use_fp8(model: LoadedModel, backend: AttentionBackend, block_size: int) -> None:
    """Let `model` keep its KV in e4m3 from now on: its pools, its bytes a block, its scales.

    The decoder must hand the pool's scales on, as `engine.bridge` does. Raises `KVDtypeRefused`.
    """
    refuse_fp8(model.device, backend)
    scales = calibrate(model, backend, block_size)
    model.kv_dtype, model.kv_scales = KV_FP8, scales
    model.shape = replace(model.shape, itemsize=KV_FP8.itemsize)
    model.description = f"{model.description.rstrip('.')}, KV in 8-bit floats."


def calibrate(model: LoadedModel, backend: AttentionBackend, block_size: int) -> tuple[Scales, ...]:
    """One `Scales` for each layer, from the largest K and V of each head over the fixed text."""
    rng = random.Random(0)
    tokens = token_ids(model.tokenizer, TOKENS) if model.tokenizer is not None else []
    tokens = tokens + [rng.randrange(model.vocab_size) for _ in range(TOKENS - len(tokens))]
    tokens = tokens[: model.shape.max_context]
    pool = model.new_pool(-(-len(tokens) // block_size), block_size)
    runner = Runner(model, pool, backend)
    row = Row(0, tokens, 0, range(pool.num_blocks), 0, False)
    runner.forward([row], np.empty(0, dtype=np.int64))
    filled = pool.storage[:, :, :, : len(tokens)]
    largest = filled.abs().amax(dim=(3, 4))  # [2, layers, kv_heads]
    if not bool(torch.isfinite(largest).all()):
        raise KVDtypeRefused(f"{model.name} computes K or V that are not finite; they have no scale.")
    found = scale_for(largest)
    return tuple(Scales(found[0, layer], found[1, layer]) for layer in range(model.shape.layers))
