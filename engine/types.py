"""The engine's vocabulary, shared by everything above it. No torch here.

A request is a list of `Segment`s (tokens with a scope), what comes back is a stream of `Event`s and
one `Receipt` for each choice. Times are seconds of `time.monotonic`, sizes are bytes, counts are tokens or
blocks as the name says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """Who may reuse the KV of a token. Always derived by the server, never taken from a caller."""

    kind: Literal["public", "collection", "account"]
    id: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("public", "collection", "account"):
            raise ValueError(f"unknown scope kind {self.kind!r}")
        if (self.kind == "public") != (self.id == ""):
            raise ValueError(f"a {self.kind} scope {'has no' if self.kind == 'public' else 'needs an'} id")

    @classmethod
    def public(cls) -> Scope:
        """Text that the server itself sets, such as its instructions."""
        return cls("public")

    @classmethod
    def collection(cls, id: str) -> Scope:
        """A document's text, reusable by everybody who may read the collection."""
        return cls("collection", id)

    @classmethod
    def account(cls, id: str) -> Scope:
        """Anything else: questions, answers, text sent by an API caller."""
        return cls("account", id)

    @property
    def private(self) -> bool:
        """True where only one account may reuse the token."""
        return self.kind == "account"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive prompt tokens of one scope and one origin.

    `document` is the id of the document the tokens came from (None for anything else); it is what
    `unlink_document` and `pin_document` find the blocks by. `origin` is a label for people:
    "instructions", "document", "history", "question".
    """

    tokens: Sequence[int]
    scope: Scope
    origin: str = "text"
    document: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy, whatever the other values are."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    #: None: no log-probabilities; k >= 0: of the chosen token and the k best.
    logprobs: int | None = None

    def validate(self) -> None:
        """Raise `InvalidRequest` naming the first value that is out of range."""
        from engine.errors import InvalidRequest

        checks: list[tuple[str, float, float, float]] = [
            ("temperature", self.temperature, 0.0, 5.0),
            ("top_k", self.top_k, 0, 1_000_000),
            ("top_p", self.top_p, 1e-6, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 0.1, 10.0),
            ("max_tokens", self.max_tokens, 1, 1_000_000),
        ]
        if self.logprobs is not None:
            checks.append(("logprobs", self.logprobs, 0, 20))
        for name, value, low, high in checks:
            if not low <= value <= high:  # also refuses NaN
                raise InvalidRequest(f"{name} is {value!r}; it must lie between {low:g} and {high:g}.")
        if len(self.stop) > 16 or any(not s or len(s) > 200 for s in self.stop):
            raise InvalidRequest("stop takes at most 16 strings of 1 to 200 characters.")


class Priority(Enum):
    """Interactive requests run before batch ones."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    principal      whose limits it counts against
    conversation   the row it counts for on the screens ("system" is the engine's own work)
    output_scope   scope of the generated tokens; an account scope except in tests
    deadline_s     seconds from submission after which the request fails with `DeadlineExceeded`
    """

    segments: Sequence[Segment]
    sampling: SamplingParams
    principal: str
    conversation: str
    output_scope: Scope
    n: int = 1
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one choice cost and what sharing saved, in the engine's own counts.

    Bytes are means over the steps of the answer (prefill included): `unshared_bytes` is what the page
    table would take if every entry were a block of its own, `fair_share_bytes` is each block divided by
    its readers, `saved_bytes` their difference.
    """

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks_copied: int
    bytes_copied: int
    unshared_bytes: float
    fair_share_bytes: float
    saved_bytes: float
    reserved_bytes: int
    kv_bytes_logical: int
    kv_bytes_read: float
    queued_s: float
    ttft_s: float | None
    decode_s: float
    preemptions: int = 0
    waited_for_prefill: bool = False
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first one; None where there were fewer than two."""
        if self.output_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.output_tokens - 1) / self.decode_s


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request is in line. `position` counts from 1; `reason` is "queue", "memory" or "prefill"
    (somebody else is computing the same document right now)."""

    position: int
    reason: Literal["queue", "memory", "prefill"]


@dataclass(frozen=True, slots=True)
class Reading:
    """Prefill progress: `done` of `total` prompt tokens, `reused` of them from shared blocks."""

    done: int
    total: int
    reused: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a chosen token and of the best alternatives (token id, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice, with the token ids it came from. Text never ends in half a character."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class Done:
    """One choice has ended. `tokens` are all generated ids (to be carried, never re-tokenised)."""

    choice: int
    reason: FinishReason
    text: str
    tokens: tuple[int, ...]
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request has failed; nothing follows."""

    error: Exception


Event = Waiting | Reading | Delta | Done | Failed


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `slots` token slots of block `source` into block `target` (all layers, K and V)."""

    source: int
    target: int
    slots: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory needs to know of a model. `itemsize` is bytes per KV element."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    max_context: int

    def block_bytes(self, block_size: int) -> int:
        """`2 · layers · kv_heads · head_dim · block_size · itemsize` (K and V of one block)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * block_size * self.itemsize


@dataclass(slots=True)
class EngineConfig:
    """Settings of the engine. `model` is "packaged", a local folder, a hub id, or "auto": the packaged one if
    it is installed, else a hub id that fits the device."""

    model: str = "packaged"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: "auto": the KV pool holds what the model computes in; "fp8": 8-bit floats, half the bytes or less.
    kv_dtype: Literal["auto", "fp8"] = "auto"
    backend: Literal["auto", "reference", "torch_cpu", "torch", "triton"] = "auto"
    block_size: int = 16
    #: Bytes of the KV pool; None: a default for the device.
    kv_pool_bytes: int | None = None
    max_context: int | None = None
    max_batch_tokens: int = 512
    max_running: int = 64
    max_queued: int = 256
    max_running_per_principal: int = 16
    max_queued_per_principal: int = 32
    pool_share_per_principal: float = 1.0
    #: Switch off to compare with an engine without sharing; nothing else changes.
    sharing: bool = True
    shared_pass: bool = True
    #: Replay steps of decodes as CUDA graphs where there is a GPU whose backend allows it.
    cuda_graphs: bool = True
    #: Verify tokens drafted from the text at hand: fewer steps where answers repeat it, same answers.
    speculation: bool = False
    #: Rows of a step up to which drafts are added: beyond, an extra row costs as much as a token.
    draft_rows: int = 24
    threads: int | None = None
    seed: int = 0
    extra: dict[str, str] = field(default_factory=dict)
