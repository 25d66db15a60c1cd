"""The same policies in front of a real model: throughput, and two readers of one long document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
import transformers

from bench.meter import Meter
from bench.play import NoText, Played, Player, WallClock
from bench.policies import PAGED, RESERVATION, SHARED, Policy
from bench.trace import LAST_ID, Chat, Trace, Turn
from engine.core import EngineCore
from engine.kv_pool import KVPool
from engine.loading import load
from engine.model import LoadedModel, adopt
from engine.runner import Runner
from engine.scheduler import Limits
from engine.types import EngineConfig
from kernels.api import get_backend


@cache
def packaged(threads: int | None = None) -> LoadedModel:
    """The packaged language model, checked at load as in service; its own small pool is dropped."""
    return load(EngineConfig(kv_pool_bytes=64 << 20, threads=threads)).model


@cache
def mechanics(max_context: int = 16_384) -> LoadedModel:
    """A two-layer Llama with random weights and a long context: shows what memory does, says nothing."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=LAST_ID,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        eos_token_id=None,
        initializer_range=0.3,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return adopt(model.eval(), None, name="two-layer Llama, random weights", source="made here")


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """One policy in front of a real model. Seconds are wall-clock seconds."""

    policy: str
    pool_slots: int
    pool_bytes: int
    requests: int
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    peak_sequences: int
    mean_sequences: float
    refused: int
    failed: int
    preemptions: int
    prompt_tokens: int
    prompt_tokens_skipped: int
    prompt_tokens_computed: int
    kv_bytes_logical: int
    kv_bytes_read: int
    ttft_p50_s: float
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Run:
    played: Played
    meter: Meter
    core: EngineCore


def _play(
    model: LoadedModel, policy: Policy, trace: Trace, slots: int, *, keep_answers: bool = False
) -> _Run:
    """Play `trace` on `model`, with the limits that the engine serves with."""
    config = EngineConfig()
    limits = Limits(
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_queued=config.max_queued,
        max_running_per_principal=config.max_running_per_principal,
        max_queued_per_principal=config.max_queued_per_principal,
    )
    blocks, limits = policy.pool(slots, limits)
    backend = get_backend("auto", model.device)
    pool = KVPool(model.shape, blocks, policy.block_size, model.dtype, model.device)
    runner = Runner(model, pool, backend)
    runner.warm_up()
    meter, clock = Meter(runner), WallClock()
    core = EngineCore(
        meter,
        model.tokenizer or NoText(),
        model.shape,
        num_blocks=blocks,
        block_size=policy.block_size,
        limits=limits,
        clock=clock,
        vocab_size=model.vocab_size,
        sharing=policy.sharing,
    )
    player = Player(core, meter, trace, clock)
    player.keep_answers = keep_answers
    played = player.run()
    core.check_integrity()
    return _Run(played, meter, core)


def throughput(model: LoadedModel, policy: Policy, trace: Trace, *, reservations: int) -> ThroughputResult:
    """Play `trace` under `policy` in a pool of `reservations` times the longest context."""
    slots = reservations * RESERVATION
    run = _play(model, policy, trace, slots)
    played, totals, inside = run.played, run.core.ledger.since_start(), run.meter.inside
    return ThroughputResult(
        policy=policy.name,
        pool_slots=slots,
        pool_bytes=slots * model.shape.block_bytes(1),
        requests=played.completed,
        requests_per_s=played.completed / played.seconds,
        output_tokens=played.output_tokens,
        output_tokens_per_s=played.output_tokens / played.seconds,
        peak_sequences=run.meter.peak.sequences,
        mean_sequences=inside.sequences / inside.seconds,
        refused=sum(played.refused.values()),
        failed=sum(played.failed.values()),
        preemptions=totals.preemptions,
        prompt_tokens=totals.prompt_tokens,
        prompt_tokens_skipped=totals.prefill_tokens_skipped,
        prompt_tokens_computed=totals.prefill_tokens_computed,
        kv_bytes_logical=totals.kv_bytes_logical,
        kv_bytes_read=totals.kv_bytes_read,
        ttft_p50_s=median(played.ttft_s),
        seconds=played.seconds,
    )


@dataclass(frozen=True, slots=True)
class TwoUsersResult:
    """Two readers of one document at once.

    blocks            held while both run, with sharing; `unshared_blocks` without
    bound_blocks      one copy of what both read, each reader's own text, and one block more for each
    same_answers      both engines generated the same ids, greedily
    """

    model: str
    document_tokens: int
    prompt_tokens: int
    own_tokens: int
    block_bytes: int
    blocks: int
    bound_blocks: int
    unshared_blocks: int
    blocks_copied: int
    bytes_copied: int
    bytes: int
    unshared_bytes: int
    same_answers: bool
    computed_prompt_tokens: int
    unshared_computed_prompt_tokens: int

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def two_users(
    model: LoadedModel, document: int, *, instructions: int = 37, answer: int = 40
) -> TwoUsersResult:
    """Two questions on one document of `document` tokens, asked at the same moment.

    The instructions' length is no multiple of the block, so that the document ends inside one and the
    second reader has to copy.
    """
    questions = (21, 30)
    chats = tuple(
        Chat(number, 0.0, 0, (Turn(0.0, question, answer),)) for number, question in enumerate(questions)
    )
    trace = Trace(1, instructions, (document,), chats)
    slots = 2 * model.shape.max_context
    shared = _play(model, SHARED, trace, slots, keep_answers=True)
    unshared = _play(model, PAGED, trace, slots, keep_answers=True)
    size, common = SHARED.block_size, instructions + document
    # The last token's keys and values are never computed.
    own = [question + answer - 1 for question in questions]
    block_bytes = model.shape.block_bytes(size)
    totals, alone = shared.core.ledger.since_start(), unshared.core.ledger.since_start()
    return TwoUsersResult(
        model=model.name,
        document_tokens=document,
        prompt_tokens=totals.prompt_tokens,
        own_tokens=sum(own),
        block_bytes=block_bytes,
        blocks=shared.meter.fullest.held_blocks,
        bound_blocks=-(-common // size) + sum(-(-tokens // size) + 1 for tokens in own),
        unshared_blocks=unshared.meter.fullest.held_blocks,
        blocks_copied=totals.blocks_copied,
        bytes_copied=totals.bytes_copied,
        bytes=shared.meter.fullest.held_blocks * block_bytes,
        unshared_bytes=unshared.meter.fullest.held_blocks * block_bytes,
        same_answers=shared.played.answers == unshared.played.answers,
        computed_prompt_tokens=totals.prefill_tokens_computed,
        unshared_computed_prompt_tokens=alone.prefill_tokens_computed,
    )
