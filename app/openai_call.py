"""One running request of `/v1`: what is asked, what has come of it, and how that reads as JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.errors import AppError
from app.limits import MeteredGeneration
from app.openai_schema import ChatRequest
from app.principal import Principal
from app.prompting import Built
from engine.types import Delta, Done, Event, Failed, Receipt, Segment, TokenLogprob

#: No line ends in an event stream, but some clients' ways of reading lines take them for such (Python's
#: `str.splitlines`, JavaScript before 2019). JSON escapes all the others by itself.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


class Decoder(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def decode(self, ids: list[int]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered."""

    segments: Sequence[Segment]
    #: What is said in the place of an answer, where the documents do not seem to say; "" elsewhere.
    said: str = ""
    #: The documents that were read, each with its version.
    read: frozenset[tuple[str, int]] = frozenset()
    #: What an answer may lean on, and the collections that it was read from; None where nothing was searched.
    built: Built | None = None
    readable: frozenset[str] = frozenset()


@dataclass(slots=True)
class Choice:
    """What has come of one choice so far."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    receipt: Receipt | None = None
    citations: dict[str, Any] | None = None


@dataclass(slots=True)
class Call:
    """One running request."""

    id: str
    model: str
    created: int
    body: ChatRequest
    prompt: Prompt
    #: None where the documents do not seem to say: then `prompt.said` is the answer.
    generation: MeteredGeneration | None
    headers: dict[str, str]
    choices: dict[int, Choice]
    principal: Principal
    #: None where no model is asked.
    decoder: Decoder | None = None
    #: Why it may not go on: its key was revoked, or the account locked.
    refused: AppError | None = None
    #: Has the key no longer watched.
    unwatch: Callable[[], None] | None = None

    def abort(self) -> None:
        if self.generation is not None:
            self.generation.abort()

    def refuse(self, why: AppError) -> None:
        """Let it end here; whoever serves it finds out at the next `check`."""
        self.refused = why
        self.abort()

    def check(self) -> None:
        """Raises what `refuse` was told."""
        if self.refused is not None:
            raise self.refused

    def end(self) -> None:
        """It is over, however it ended."""
        self.abort()
        if self.unwatch is not None:
            self.unwatch()

    async def events(self) -> AsyncIterator[Event]:
        """What the engine tells of the request, or what it would tell had it written what is said instead."""
        if self.generation is not None:
            async for event in self.generation:
                yield event
            return
        nothing = Receipt(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, None, 0.0)
        for index in self.choices:
            yield Delta(index, self.prompt.said, ())
            yield Done(index, "stop", self.prompt.said, (), nothing)

    def note(self, event: Event, *, keep: bool) -> None:
        """Note what an event says; `keep` its text and log-probabilities for an answer that is sent whole."""
        match event:
            case Delta() if keep:
                choice = self.choices[event.choice]
                choice.text += event.text
                choice.logprobs += event.logprobs
            case Done():
                choice = self.choices[event.choice]
                choice.text, choice.tokens, choice.receipt = event.text, len(event.tokens), event.receipt
                choice.finish = "length" if event.reason == "length" else "stop"
            case Failed():
                raise event.error

    def usage(self) -> dict[str, Any]:
        """Counts of the engine. A prompt is computed once for all its choices, and counted once."""
        receipts = [c.receipt for c in self.choices.values() if c.receipt is not None]
        prompt = receipts[0].prompt_tokens if receipts else 0
        written = sum(receipt.output_tokens for receipt in receipts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": min((r.reused_tokens for r in receipts), default=0)},
        }

    def logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        decoder = self.decoder
        if not self.body.logprobs or decoder is None:
            return None
        wanted = self.body.top_logprobs or 0
        texts: dict[int, str] = {}

        def token(id: int, logprob: float) -> dict[str, Any]:
            if id not in texts:
                texts[id] = str(decoder.decode([id]))
            text = texts[id]
            # JSON has no infinity; this is how OpenAI writes it.
            logprob = max(logprob, -9999.0)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

        return {
            "content": [
                {
                    **token(item.token, item.logprob),
                    "top_logprobs": [token(id, value) for id, value in item.top[:wanted]],
                }
                for item in items
            ],
            "refusal": None,
        }

    def frame(self, choices: list[Any], kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
        citations: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if citations is not None:
            choice["citations"] = citations
        return event_of(self.frame([choice]))

    def whole(self) -> str:
        """The whole answer. For a thread: a quarter of a million log-probabilities hold up every page."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self.logprobs(choice.logprobs),
                "finish_reason": choice.finish,
            }
            | ({} if choice.citations is None else {"citations": choice.citations})
            for index, choice in self.choices.items()
        ]
        answer = self.frame(choices, "chat.completion") | {"usage": self.usage()}
        return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event_of(value: dict[str, Any]) -> str:
    """A server-sent event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for code, escaped in _LINE_ENDS:
        text = text.replace(code, escaped)
    return f"data: {text}\n\n"
