"""From settings to a checked runner: model, backend, pool, conformance, warm-up."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import psutil
import torch

from engine import early
from engine.accelerate import accelerate, release
from engine.conformance import FP8_TOLERANCE, ConformanceReport, check
from engine.cuda_graphs import CudaGraphDevice, DecodeGraphs, GraphDevice
from engine.device_memory import CudaMeter, gpu_pool_bytes
from engine.errors import ModelRefused, PoolTooSmall
from engine.kv_fp8 import refuse_fp8, use_fp8
from engine.kv_pool import KVPool
from engine.model import LoadedModel, cache_directory, load_model
from engine.runner import Runner
from engine.types import EngineConfig
from kernels.api import AttentionBackend, get_backend

log = logging.getLogger(__name__)


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

    Raises `ModelNotFound`, `ModelRefused` (`KVDtypeRefused` where 8-bit KV cannot be kept), `PoolTooSmall`.
    """
    quiet_libraries()
    early.begin(config)
    model = load_model(config)
    backend = get_backend(config.backend, model.device)
    say_why_not_triton(model, backend, config.backend)
    if config.kv_dtype == "fp8":
        refuse_fp8(model.device, backend)
    if config.max_batch_tokens < config.max_running:
        raise ModelRefused(
            f"A step of {config.max_batch_tokens} tokens has no room for {config.max_running} answers."
        )
    report = check(model, backend, config.block_size)
    if config.kv_dtype == "fp8":
        use_fp8(model, backend, config.block_size)
        report = check(model, backend, config.block_size, FP8_TOLERANCE)
    else:
        _speed_up(model, backend, config)
    num_blocks = KVPool.blocks_within(_pool_bytes(model, backend, config), model.shape, config.block_size)
    if num_blocks < 2:
        raise PoolTooSmall(2, num_blocks, config.block_size)
    pool = model.new_pool(num_blocks, config.block_size)
    runner = Runner(model, pool, backend, shared_pass=config.shared_pass)
    runner.warm_up()
    if config.cuda_graphs and model.device.type == "cuda" and backend.captures:
        use_graphs(runner, CudaGraphDevice(model.device), config.max_running)
    return LoadedEngine(model, runner, backend.name, num_blocks, report)


def use_graphs(runner: Runner, device: GraphDevice, most_rows: int) -> None:
    """Capture steps of up to `most_rows` decodes; a model that cannot be captured is served without them."""
    graphs = DecodeGraphs(runner.model, runner.pool, runner.backend, device, most_rows=most_rows)
    try:
        with torch.inference_mode():
            graphs.capture_all()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ModelRefused) as error:
        log.warning("Steps are not replayed as CUDA graphs, the model cannot be captured: %s", error)
        runner.model.description = f"{runner.model.description.rstrip('.')}, without CUDA graphs."
        return
    runner.graphs = graphs


def say_why_not_triton(model: LoadedModel, backend: AttentionBackend, wanted: str) -> None:
    """In the log, and in the description that `coread doctor` and the pages show.

    `wanted`: the backend setting; "auto" has found what the device can do.
    """
    if model.device.type != "cuda" or backend.captures:
        return
    if wanted == "auto":
        major, minor = torch.cuda.get_device_capability(model.device)
        why = f"compute capability {major}.{minor}, the Triton kernels need 8.0"
    else:
        why = f"as set: backend {wanted}"
    log.warning("Attention on the GPU does not run in the Triton kernels (%s): %s.", backend.name, why)
    model.description = f"{model.description.rstrip('.')}, attention in torch ({backend.name}; {why})."


def _pool_bytes(model: LoadedModel, backend: AttentionBackend, config: EngineConfig) -> int:
    if config.kv_pool_bytes is not None:
        return config.kv_pool_bytes
    if model.device.type != "cuda":
        return default_pool_bytes()
    return gpu_pool_bytes(
        CudaMeter(model.device),
        model,
        backend,
        block_size=config.block_size,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
    )


def _speed_up(model: LoadedModel, backend: AttentionBackend, config: EngineConfig) -> None:
    """Take the fused decoder where there is one; `extra["decoder"] = "transformers"` keeps the other.

    Not with 8-bit KV: on a CPU, the only place where there is one, that is for measuring.
    """
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


def default_pool_bytes() -> int:
    """KV budget of a CPU machine: a quarter of the memory that is available, at most 2 GiB."""
    available = int(psutil.virtual_memory().available)
    return max(64 << 20, min(2 << 30, available // 4))


def quiet_libraries() -> None:
    """Keep progress bars and hub chatter of the libraries out of the log."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
