"""The engine's own step on a GPU, with random weights of an 8B shape: `scripts/gpu_check.py` runs it.

Steps of decodes run with and without CUDA graphs. Both must choose the same tokens and leave the same KV:
this is the only check of captured steps on the hardware they are made for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engine.cuda_graphs import CudaGraphDevice
from engine.loading import use_graphs
from engine.model import LoadedModel, adopt
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import SamplingParams
from kernels.gpu_measure import BLOCK, Clock, Result
from kernels.triton_backend import TritonBackend

#: Tokens of the document that all readers have in common.
DOCUMENT = 2048


def random_model(device: torch.device, *, small: bool) -> LoadedModel:
    """Llama with random weights: 8 of Llama-3-8B's 32 layers, a quarter of its vocabulary; or a tiny one."""
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32064,
    }
    if small:
        shape = {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 64,
        }
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=8192, bos_token_id=1, eos_token_id=None, pad_token_id=None
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return adopt(model, None, name="random Llama", source="made here", device=device, dtype=dtype)


class Readers:
    """A runner whose pool holds a document and a question of each reader."""

    def __init__(self, model: LoadedModel, backend: TritonBackend, readers: int, document: int) -> None:
        self.model, self.readers, self.document = model, readers, document
        shared = document // BLOCK
        self.pool = model.new_pool(shared + 2 * readers, BLOCK)
        self.pool.storage.zero_()
        self.runner = Runner(model, self.pool, backend)
        self.tables = [[*range(shared), shared + 2 * s, shared + 2 * s + 1] for s in range(readers)]
        tokens = [7 + i % 50 for i in range(document)]
        for start in range(0, document, 512):
            part = tokens[start : start + 512]
            self.runner.step([Row(0, part, start, self.tables[0], 0, False)])

    def rows(self, turn: int, count: int, params: SamplingParams) -> list[Row]:
        """The `turn`-th decode of the first `count` readers."""
        return [
            Row(s, [3 + (5 * s + turn) % 40], self.document + turn, self.tables[s], 0, True,
                SamplerState(params, s))
            for s in range(count)
        ]  # fmt: skip


def engine_steps(clock: Clock, backend: TritonBackend, *, small: bool) -> list[Result]:
    """Equality of captured and plain steps over several buckets and samplers, then their times."""
    model = random_model(clock.device, small=small)
    readers, document = (3, 32) if small else (64, DOCUMENT)
    plain = Readers(model, backend, readers, document)
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    }
    case = f"{model.shape.layers} layers, {readers} readers of one document of {document} tokens"
    if not clock.cuda:
        plain.runner.step(plain.rows(0, readers, kinds["greedy"]))
        took = clock.seconds(lambda: plain.runner.step(plain.rows(1, readers, kinds["greedy"])))
        return [Result("engine step, no graph", case, took)]
    graphed = Readers(model, backend, readers, document)
    use_graphs(graphed.runner, CudaGraphDevice(clock.device), readers)
    graphs = graphed.runner.graphs
    if graphs is None:
        raise RuntimeError("the model cannot be captured; the log says why")
    results = [_same(plain, graphed, kinds, readers)]
    results[0].extra["not_captured"] = float(graphs.unfit)
    for name, params in kinds.items():
        times = []
        for one in (plain, graphed):
            # Made once: seeding so many generators would cost more than the launch of a graph.
            rows = one.rows(9, readers, params)
            times.append(clock.seconds(partial(one.runner.step, rows)))
        results.append(Result(f"engine step, no graph, {name}", case, times[0]))
        results.append(
            Result(f"engine step, CUDA graph, {name}", case, times[1], extra={"faster": times[0] / times[1]})
        )
    return results


def _same(plain: Readers, graphed: Readers, kinds: dict[str, SamplingParams], readers: int) -> Result:
    """Padding rows change the shapes of products, and with them their rounding: a near-tie may fall the other
    way, so one token in a hundred may differ; KV must agree closely everywhere."""
    different = total = 0
    for turn, count in enumerate([readers, readers // 2 + 1, 1, 5]):
        for params in kinds.values():
            tokens = [one.runner.step(one.rows(turn, count, params)).tokens for one in (plain, graphed)]
            total += count
            different += sum(a != b for a, b in zip(*tokens, strict=True))
    largest = float((plain.pool.storage - graphed.pool.storage).abs().max())
    size = float(plain.pool.storage.abs().max())
    return Result(
        "correctness",
        "captured steps against plain ones",
        passed=different <= max(1, total // 100) and largest <= 0.05 * size,
        extra={"tokens": float(total), "different": float(different), "largest_kv_difference": largest},
    )
