"""From settings to a checked runner: model, backend, pool, conformance, warm-up."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.accelerate import accelerate, release
from engine.conformance import ConformanceReport, check
from engine.errors import ModelRefused, PoolTooSmall
from engine.kv_pool import KVPool
from engine.model import LoadedModel, cache_directory, load_model
from engine.runner import Runner
from engine.service import default_pool_bytes, quiet_libraries
from engine.types import EngineConfig
from kernels.api import AttentionBackend, get_backend

log = logging.getLogger(__name__)

#: Share of the memory that is free on a GPU after the weights that the pool takes.
GPU_POOL_SHARE = 0.85


@dataclass(slots=True)
class LoadedEngine:
    """Everything that outlives a restart of the step loop."""

    model: LoadedModel
    runner: Runner
    backend_name: str
    num_blocks: int
    conformance: ConformanceReport


def load(config: EngineConfig) -> LoadedEngine:
    """Load the model, prove the paged path on it, size the pool and run typical shapes once.

    Raises `ModelNotFound`, `ModelRefused`, `PoolTooSmall`.
    """
    quiet_libraries()
    model = load_model(config)
    backend = get_backend(config.backend, model.device)
    report = check(model, backend, config.block_size)
    _speed_up(model, backend, config)
    budget = config.kv_pool_bytes
    if budget is None:
        budget = default_pool_bytes()
        if model.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(model.device)[0] * GPU_POOL_SHARE)
    num_blocks = KVPool.blocks_within(budget, model.shape, config.block_size)
    if num_blocks < 2:
        raise PoolTooSmall(2, num_blocks, config.block_size)
    if config.max_batch_tokens < config.max_running:
        raise ModelRefused(
            f"A step of {config.max_batch_tokens} tokens has no room for {config.max_running} answers."
        )
    pool = KVPool(model.shape, num_blocks, config.block_size, model.dtype, model.device)
    runner = Runner(model, pool, backend, shared_pass=config.shared_pass)
    runner.warm_up()
    return LoadedEngine(model, runner, backend.name, num_blocks, report)


def _speed_up(model: LoadedModel, backend: AttentionBackend, config: EngineConfig) -> None:
    """Take the fused decoder where there is one; `extra["decoder"] = "transformers"` keeps the other."""
    if config.extra.get("decoder", "auto") == "transformers":
        return
    try:
        chosen = accelerate(model, backend, config.block_size, cache_directory(config))
    except ModelRefused as error:
        log.warning("The fused decoder is not used, transformers' own code is: %s", error)
        return
    if chosen is not None:
        model.description = f"{model.description.rstrip('.')}, {chosen}."
        release(model)
