"""One request and its choices while they are in the engine: text so far and the sums of the receipt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.detokenize import TextStream, TextUpdate
from engine.drafting import PromptLookup
from engine.errors import EngineError
from engine.sampler import SamplerState
from engine.sequence import Sequence
from engine.types import Event, Failed, GenerationRequest, Receipt


class Request:
    """A submitted request; `choices` grows from one to `n` when the prompt has been computed."""

    def __init__(
        self, id: str, request: GenerationRequest, sink: Callable[[Event | None], None], submitted: float
    ) -> None:
        self.id, self.request, self.submitted = id, request, submitted
        self.choices: list[Choice] = []
        self.aborted = False
        self._sink = sink
        self._ended = False

    def open_choices(self) -> list[Choice]:
        """Choices that have not ended."""
        return [choice for choice in self.choices if not choice.done]

    def sink(self, event: Event) -> None:
        """Pass an event on; nothing follows the end."""
        if not self._ended:
            self._sink(event)

    def fail(self, error: EngineError) -> None:
        """The last event."""
        self.sink(Failed(error))
        self.end()

    def end(self) -> None:
        """Nothing follows: the sink gets None, once."""
        if not self._ended:
            self._ended = True
            self._sink(None)


class Choice:
    """One answer in the making."""

    def __init__(self, request: Request, sequence: Sequence, state: SamplerState, tokenizer: Any) -> None:
        self.request, self.sequence, self.state = request, sequence, state
        sequence.owner = self
        self.index = sequence.choice
        self.done = False
        self.told: tuple[int, str] = (0, "")
        self.reused = 0
        self.waited_for_prefill = False
        self.text = ""
        self._stream = TextStream(tokenizer, request.request.sampling.stop)
        self._update: TextUpdate | None = None
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._computed = 0
        self._steps = 0
        self._blocks = 0
        self._fair_blocks = 0.0
        self._copies = 0
        self._copied_bytes = 0
        self._lookup = PromptLookup()
        self._drafted = 0
        self._accepted = 0
        self._logical = 0.0
        self._read = 0.0

    def admitted(self, now: float, reused: int, *, resumed: bool) -> None:
        """It runs; hits of a resumption after preemption are not savings and are not counted."""
        if self._admitted is None:
            self._admitted = now
        if not resumed:
            self.reused = reused

    def held(self, blocks: int, fair_blocks: float) -> None:
        """One more step in which its page table had `blocks` entries."""
        self._steps += 1
        self._blocks += blocks
        self._fair_blocks += fair_blocks

    def copied(self, slots: int, slot_bytes: int) -> None:
        """One block was copied for it."""
        self._copies += 1
        self._copied_bytes += slots * slot_bytes

    def computed(self, tokens: int, logical: float, read: float) -> None:
        """A chunk of `tokens` went through the model."""
        self._computed += tokens
        self._logical += logical
        self._read += read

    def draft(self, most: int) -> list[int]:
        """Tokens that may come next."""
        return self._lookup.propose(self.sequence.tokens, most)

    def verified(self, drafted: int, accepted: int) -> None:
        """A step found `accepted` of `drafted` tokens right."""
        self._drafted += drafted
        self._accepted += accepted
        self._lookup.learn(drafted, accepted, len(self.sequence))

    def push(self, token: int, now: float) -> TextUpdate:
        """Add a sampled token to the text."""
        if self._first_token is None:
            self._first_token = now
        self._last_token = now
        self._update = self._stream.push([token])
        self.text += self._update.text
        return self._update

    def finish_text(self) -> str:
        """What was held back, now that nothing follows."""
        update = self._stream.finish()
        self._update = update
        self.text += update.text
        return update.text

    def kept_tokens(self) -> tuple[int, ...]:
        """Generated ids up to the last whole token before a stop string."""
        generated = self.sequence.tokens[self.sequence.prompt_len :]
        return tuple(generated if self._update is None else generated[: self._update.kept_tokens])

    def receipt(self, now: float, block_bytes: int, reserved_bytes: int) -> Receipt:
        """The receipt as of now."""
        steps = max(1, self._steps)
        unshared = self._blocks / steps * block_bytes
        fair = self._fair_blocks / steps * block_bytes
        submitted, prompt = self.request.submitted, self.sequence.prompt_len
        reached = self._admitted is not None
        first, last = self._first_token, self._last_token
        return Receipt(
            prompt_tokens=prompt,
            reused_tokens=self.reused,
            computed_tokens=min(prompt - self.reused, self._computed),
            output_tokens=self.sequence.generated,
            blocks_copied=self._copies,
            bytes_copied=self._copied_bytes,
            unshared_bytes=unshared,
            fair_share_bytes=fair,
            saved_bytes=unshared - fair,
            reserved_bytes=reserved_bytes if reached else 0,
            kv_bytes_logical=round(self._logical),
            kv_bytes_read=self._read,
            queued_s=(self._admitted if self._admitted is not None else now) - submitted,
            ttft_s=None if first is None else first - submitted,
            decode_s=0.0 if first is None or last is None else last - first,
            preemptions=self.sequence.preemptions,
            waited_for_prefill=self.waited_for_prefill,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
        )
