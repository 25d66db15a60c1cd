"""Small random models of several families, and a minimal driver of the runner for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from engine.kv_pool import KVPool
from engine.model import LoadedModel, adopt
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import Copy, SamplingParams
from kernels.api import AttentionBackend, get_backend

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large weights: logits that differ clearly, so that greedy choices are no coin tosses.
    "initializer_range": 0.3,
}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 20}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 11},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **changes: Any) -> Any:
    config, _, own = _FAMILIES[family]
    return getattr(transformers, config)(**{**_COMMON, **own, **changes})


def tiny_hf(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, float32, its attention untouched."""
    torch.manual_seed(seed)
    model = getattr(transformers, _FAMILIES[family][1])(tiny_config(family, **changes)).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name:  # initialised to nothing that a test could see
            parameter.data.normal_(0.0, 1.0)
    return model


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> LoadedModel:
    """The same, ready for the runner."""
    return adopt(tiny_hf(family, seed, **changes), None, name=f"tiny {family}")


@torch.inference_mode()
def eager_logits(family: str, tokens: Sequence[int], seed: int = 0) -> torch.Tensor:
    """`[len(tokens), vocab]` of an independent copy of the model with its own eager attention."""
    model = tiny_hf(family, seed)
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def eager_greedy(family: str, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """transformers' own greedy continuation, with eager attention."""
    model = tiny_hf(family, seed)
    model.set_attn_implementation("eager")
    out = model.generate(
        input_ids=torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, use_cache=True
    )
    return [int(token) for token in out[0, len(prompt) :]]


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


class Paged:
    """A runner with a pool full of NaN whose blocks are handed out in shuffled order."""

    def __init__(
        self,
        model: LoadedModel,
        backend: str | AttentionBackend = "reference",
        block_size: int = 4,
        blocks: int = 64,
    ) -> None:
        self.model, self.size = model, block_size
        self.backend = get_backend(backend, "cpu") if isinstance(backend, str) else backend
        self.pool = KVPool(model.shape, blocks, block_size, model.dtype, "cpu", fill_nan=True)
        self.runner = Runner(model, self.pool, self.backend)
        self.free = list(range(blocks))
        random.Random(1).shuffle(self.free)

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.size))]

    def grow(self, table: list[int], tokens: int) -> list[int]:
        while len(table) * self.size < tokens:
            table.append(self.free.pop())
        return table

    def fork(self, table: list[int], tokens: int) -> tuple[list[int], list[Copy]]:
        """A table that shares whole blocks with `table` and copies the partly filled one."""
        whole = tokens // self.size
        if tokens % self.size == 0:
            return table[:whole], []
        block = self.free.pop()
        return [*table[:whole], block], [Copy(table[whole], block, tokens % self.size)]

    def row(
        self,
        tokens: Sequence[int],
        start: int,
        table: Sequence[int],
        *,
        key: int = 0,
        write_from: int = 0,
        sample: bool = True,
        params: SamplingParams | None = None,
    ) -> Row:
        state = SamplerState(params or SamplingParams(temperature=0.0)) if sample else None
        return Row(key, tokens, start, table, write_from, sample, state)

    def greedy(self, prompt: Sequence[int], count: int, chunk: int = 1000) -> list[int]:
        """Prefill in chunks, then decode, alone in the batch."""
        table: list[int] = []
        token: int | None = None
        for at in range(0, len(prompt), chunk):
            part = prompt[at : at + chunk]
            last = at + chunk >= len(prompt)
            out = self.runner.step([self.row(part, at, self.grow(table, at + len(part)), sample=last)])
            token = out.tokens[0]
        answer = [_some(token)]
        while len(answer) < count:
            at = len(prompt) + len(answer) - 1
            out = self.runner.step([self.row(answer[-1:], at, self.grow(table, at + 1))])
            answer.append(_some(out.tokens[0]))
        return answer


def _some(token: int | None) -> int:
    assert token is not None
    return token
