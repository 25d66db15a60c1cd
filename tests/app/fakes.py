"""An engine and a tokenizer that tests own: they answer at once with what they are told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from engine.document_memory import DocumentMemory
from engine.ledger import MemorySnapshot, Row, SinceStart, Totals
from engine.service import EngineStatus, PageTableView
from engine.tree_picture import TreePicture
from engine.types import (
    Delta,
    Done,
    Event,
    Failed,
    GenerationRequest,
    ModelShape,
    Receipt,
    Segment,
    TokenLogprob,
    Waiting,
)

SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=8, itemsize=4, max_context=2048)


def receipt(prompt: int, reused: int, output: int) -> Receipt:
    return Receipt(
        prompt_tokens=prompt, reused_tokens=reused, computed_tokens=prompt - reused, output_tokens=output,
        blocks_copied=1, bytes_copied=2048,
        unshared_bytes=8192.0, fair_share_bytes=4096.0, saved_bytes=4096.0,
        reserved_bytes=131072, kv_bytes_logical=1000, kv_bytes_read=600.0, queued_s=0.0, ttft_s=0.25,
        decode_s=0.5,
    )  # fmt: skip


class CharTokenizer:
    """One id a character; three markers are control tokens. Enough of a tokenizer for templates."""

    MARKERS = ("<|im_start|>", "<|im_end|>", "<|end|>")
    all_special_ids = (1, 2, 3)
    added_tokens_decoder: Any = {1: "<|im_start|>", 2: "<|im_end|>", 3: "<|end|>"}  # noqa: RUF012

    def encode(
        self, text: str, add_special_tokens: bool = False, split_special_tokens: bool = False
    ) -> list[int]:
        ids: list[int] = []
        while text:
            marker = next((m for m in self.MARKERS if text.startswith(m)), None)
            if marker and not split_special_tokens:
                ids.append(self.MARKERS.index(marker) + 1)
                text = text[len(marker) :]
            else:
                ids.append(ord(text[0]) + 10)
                text = text[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.MARKERS[id - 1] if id < 4 else chr(id - 10) for id in ids)

    def get_chat_template(self) -> str:
        return "im"

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n"


@dataclass(slots=True)
class FakeGeneration:
    """Plays `script`; an entry that is a number is a pause in seconds, an async function is awaited, "hold"
    waits for `abort`."""

    script: list[Any]
    n: int = 1
    aborted: bool = False
    ended: bool = False
    id: str = "gen-1"
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> Event:
        while self.script:
            item = self.script[0]
            if item == "hold":
                await self._wake.wait()
                self.script = [Done(0, "aborted", "Half", (80,), receipt(20, 0, 1))]
                continue
            if callable(item):
                await item()
                self.script.pop(0)
                continue
            if isinstance(item, int | float):
                await asyncio.sleep(item)
                self.script.pop(0)
                continue
            self.script.pop(0)
            return item  # type: ignore[no-any-return]
        self.ended = True
        raise StopAsyncIteration

    def abort(self) -> None:
        self.aborted = self.aborted or not self.ended
        self._wake.set()


@dataclass(slots=True)
class FakeEngine:
    """Keeps every request. `script` is what the next generation plays, or makes it of the request; None
    answers "Hello." """

    requests: list[GenerationRequest] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)
    script: list[Any] | Callable[[GenerationRequest], list[Any]] | None = None
    refuse: Exception | None = None
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    closed: list[str] = field(default_factory=list)
    unlinked: list[str] = field(default_factory=list)
    pinned: set[str] = field(default_factory=set)
    stopped: bool = False
    ready_error: Exception | None = None
    tokenizer: Any = field(default_factory=CharTokenizer)

    def start(self) -> None: ...

    async def wait_ready(self) -> None:
        if self.ready_error is not None:
            raise self.ready_error

    def stop(self, timeout: float = 10.0) -> None:
        self.stopped = True

    def status(self) -> EngineStatus:
        return EngineStatus("ready", "A fake.", "fake-model", "cpu", "float32", "reference", SHAPE, 16, 64)

    async def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self.submitted.set()
        script = self.script if self.script is not None else hello(request)
        if callable(script):
            script = script(request)
        generation = FakeGeneration(list(script), request.n)
        self.generations.append(generation)
        return generation

    def resident_tokens(self, segments: Sequence[Segment]) -> int:
        return 0

    def close_conversation(self, conversation: str) -> None:
        self.closed.append(conversation)

    def unlink_document(self, document: str) -> int:
        self.unlinked.append(document)
        return 3

    def tree(self) -> TreePicture:
        return TreePicture((), 0, 0)

    def page_tables(self, conversation: str) -> list[PageTableView]:
        return []

    def documents(self, *, fresh: bool = False) -> dict[str, DocumentMemory]:
        """Every document that a prompt named is in memory, three blocks of it."""
        named = {s.document for r in self.requests for s in r.segments if s.document} - set(self.unlinked)
        return {
            id: DocumentMemory(3, 3, 0, 0, 1, 3 * (id in self.pinned), id in self.pinned)
            for id in named | self.pinned
        }

    def pin_document(self, document: str) -> int:
        self.pinned.add(document)
        return 3

    def unpin_document(self, document: str) -> None:
        self.pinned.discard(document)

    def memory(self) -> MemorySnapshot:
        conversation = self.requests[-1].conversation if self.requests else "c"
        row = Row(conversation, 1, 30, 2, 1, 131072, 4096, Fraction(3072), Fraction(1024))
        totals = Totals(2, 2, 262144, 8192, 6144)
        state, readers = bytes([2, 2, 0, 3]), bytes([2, 1, 0, 0])
        return MemorySnapshot(
            number=1, total_blocks=4, block_size=16, block_bytes=2048, free=1, held=2, retained=1, pinned=0,
            utilisation=0.9, readers=readers, soft_readers=readers, state=state,
            running={}, totals_running=totals, open={conversation: row}, totals_open=totals,
            since_start=SinceStart(), event_number=0,
        )  # fmt: skip


def hello(request: GenerationRequest) -> list[Event]:
    """Every choice says "Hello." in two pieces."""
    prompt = sum(len(segment.tokens) for segment in request.segments)
    wants = request.sampling.logprobs is not None
    events: list[Event] = [Waiting(1, "queue")]
    for choice in range(request.n):
        logprobs = (TokenLogprob(82, -0.1, ((82, -0.1), (83, -2.5))),) if wants else ()
        events.append(Delta(choice, "Hel", (82,), logprobs))
        events.append(Delta(choice, "lo.", (118,)))
        events.append(Done(choice, "stop", "Hello.", (82, 118), receipt(prompt, prompt // 2, 2)))
    return events


def failing(error: Exception) -> list[Event]:
    return [Delta(0, "Hel", (82,)), Failed(error)]


def events_of(body: str) -> list[Any]:
    """The JSON values of a server-sent stream, "[DONE]" as that string."""
    values: list[Any] = []
    for line in body.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            values.append(data if data == "[DONE]" else json.loads(data))
    return values
