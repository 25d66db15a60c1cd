"""The step loop: requests in, events out. One thread drives it; `engine.service` is that thread.

    submit ─▶ waiting ─▶ schedule ─▶ copies, forward, sampling ─▶ accept, publish ─▶ events
                 ▲           │               (runner)                     │
                 └─preempted─┘                                            └─▶ done, failed

Between two steps the memory is consistent, so others may look and act then: `lock` is held while the
memory changes and released during the forward pass, which changes none of its accounts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Indexable
from typing import Any, Protocol

from engine.choice import Choice, Request
from engine.errors import (
    ContextTooLong,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    NonFiniteLogits,
    StepFailed,
)
from engine.integrity import check
from engine.ledger import Ledger
from engine.memory import KVMemory
from engine.runner import Row, StepOutput
from engine.sampler import SamplerState
from engine.scheduler import Chunk, Limits, Scheduler, Step
from engine.sequence import Sequence, State
from engine.types import (
    Copy,
    Delta,
    Done,
    Event,
    FinishReason,
    GenerationRequest,
    ModelShape,
    Reading,
    TokenLogprob,
    Waiting,
)

log = logging.getLogger("coread.engine")

MAX_CHOICES = 16


class StepRunner(Protocol):
    """What the loop needs of `engine.runner.Runner`."""

    def step(self, rows: Indexable[Row], copies: Indexable[Copy] = ()) -> StepOutput:
        """Copies, then the forward pass, then sampling."""
        ...


class EngineCore:
    """Scheduler, memory and ledger around one runner.

    clock   seconds, monotonic; injected so that tests own the time
    """

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Any,
        shape: ModelShape,
        *,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        clock: Callable[[], float],
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
        sharing: bool = True,
    ) -> None:
        self.runner, self.tokenizer, self.shape = runner, tokenizer, shape
        self.eos_token_ids, self.vocab_size = eos_token_ids, vocab_size
        self.clock = clock
        self.lock = threading.RLock()
        self.memory = KVMemory(num_blocks, block_size, sharing=sharing)
        self.scheduler = Scheduler(self.memory, limits)
        self.ledger = Ledger(self.memory, self.scheduler, shape)
        self.requests: dict[str, Request] = {}
        self._aborted: list[Request] = []
        #: Called before each forward pass, when what is known before it has been handed to the readers.
        self.before_forward: Callable[[], None] | None = None

    # -- requests --------------------------------------------------------------------------------------

    def submit(self, id: str, request: GenerationRequest, sink: Callable[[Event | None], None]) -> Request:
        """Put a request in line; its events go to `sink`, in order, on the stepping thread, then None.

        Raises `InvalidRequest`, `ContextTooLong`, `PoolTooSmall` or `LimitReached`, and then keeps nothing.
        """
        request.sampling.validate()
        if not 1 <= request.n <= MAX_CHOICES:
            raise InvalidRequest(f"n is {request.n}; it must lie between 1 and {MAX_CHOICES}.")
        prompt = sum(len(segment.tokens) for segment in request.segments)
        if prompt + request.sampling.max_tokens > self.shape.max_context:
            raise ContextTooLong(prompt, request.sampling.max_tokens, self.shape.max_context)
        if self.vocab_size is not None:
            for segment in request.segments:
                if (
                    len(segment.tokens)
                    and not 0 <= min(segment.tokens) <= max(segment.tokens) < self.vocab_size
                ):
                    raise InvalidRequest(f"A token id lies outside 0 to {self.vocab_size - 1}.")
        with self.lock:
            now = self.clock()
            made = Request(id, request, sink, now)
            sequence = Sequence(
                request.segments,
                self.memory.scopes,
                output_scope=request.output_scope,
                principal=request.principal,
                conversation=request.conversation,
                max_tokens=request.sampling.max_tokens,
                priority=request.priority,
                deadline=None if request.deadline_s is None else now + request.deadline_s,
                width=request.n,
            )
            state = SamplerState(request.sampling, 0, sequence.tokens)
            made.choices.append(Choice(made, sequence, state, self.tokenizer))
            self.scheduler.add(sequence)
            self.requests[id] = made
        return made

    def abort(self, id: str) -> None:
        """Stop a request in whatever phase it is; its blocks are free after at most one step."""
        with self.lock:
            request = self.requests.get(id)
            if request is not None and not request.aborted:
                request.aborted = True
                self._aborted.append(request)

    @property
    def busy(self) -> bool:
        """True while there is anything to do."""
        return bool(self.requests or self._aborted)

    def fail_all(self, error: EngineError) -> None:
        """Every request ends with `error`; the memory is given back."""
        with self.lock:
            self._aborted.clear()
            for request in list(self.requests.values()):
                self._fail(request, error, keep_tail=False)

    def check_integrity(self) -> None:
        """Recompute all accounts; raises `IntegrityError`."""
        with self.lock:
            check(self.memory)

    # -- one step --------------------------------------------------------------------------------------

    def step(self) -> int:
        """Run one step; returns the number of tokens that went through the model (0: nothing to do)."""
        with self.lock:
            self._finish_aborted()
            now = self.clock()
            self.ledger.tick(now)
            self._draft()
            step = self.scheduler.schedule(now)
            self._announce(step, now)
            if not step.chunks:
                self.memory.finish_copies()
                return 0
            self._account(step)
            rows = [self._row(chunk) for chunk in step.chunks]
        if self.before_forward is not None:
            self.before_forward()
        outputs, error = self._run(rows, step.copies)
        if error is not None:
            # The readers are only told the error's name.
            log.error("a step of %d rows could not be computed", len(rows), exc_info=error)
        with self.lock:
            now = self.clock()
            self.ledger.tick(now)
            # Failed rows leave while the copies are still open: a copy that may not have been carried out
            # goes with them, and what they had before the step (an open tail they continued) is kept.
            done = self._drop_failed(step, outputs, error)
            self.memory.finish_copies()
            for chunk, output in done:
                self._take(chunk, output, now)
            return step.tokens

    def _draft(self) -> None:
        """Propose tokens for the sequences that decode; the scheduler takes what has room."""
        rows = self.scheduler.limits.max_draft_rows
        if rows <= 0:
            return
        decodes = [s for s in self.scheduler.running if s.computed == len(s) - 1 and s.generated]
        for sequence in decodes:
            most = min((rows - len(decodes)) // len(decodes), self.shape.max_context - len(sequence))
            sequence.drafts = sequence.owner.draft(most)

    def _finish_aborted(self) -> None:
        aborted, self._aborted = self._aborted, []
        for request in aborted:
            for choice in request.open_choices():
                self._end(choice, "aborted", self.clock())

    def _announce(self, step: Step, now: float) -> None:
        for sequence, reused in step.admitted:
            choice: Choice = sequence.owner
            choice.admitted(now, reused, resumed=sequence.preemptions > 0)
            self._emit(choice.request, Reading(min(sequence.computed, reused), sequence.prompt_len, reused))
        for sequence, error in step.failed:
            self._fail(sequence.owner.request, error)
        for place, sequence in enumerate(self.scheduler.waiting, start=1):
            choice = sequence.owner
            if (place, sequence.waiting_for) != choice.told and sequence.state is State.WAITING:
                choice.told = (place, sequence.waiting_for)
                choice.waited_for_prefill |= sequence.waiting_for == "prefill"
                self._emit(choice.request, Waiting(place, sequence.waiting_for))

    def _account(self, step: Step) -> None:
        """Add this step to the receipts: what the page tables hold while it runs."""
        size = self.memory.block_size
        for copy in step.copies:
            for reader in self.memory.pool.readers[copy.target]:
                reader.owner.copied(copy.slots, self.ledger.block_bytes // size)
        for chunk in step.chunks:
            choice: Choice = chunk.sequence.owner
            choice.held(len(chunk.sequence.table), self.ledger.fair_share_blocks(chunk.sequence))

    def _row(self, chunk: Chunk) -> Row:
        sequence = chunk.sequence
        return Row(
            key=sequence.id,
            tokens=[*sequence.tokens[chunk.start : chunk.known_end], *chunk.drafts],
            start=chunk.start,
            page_table=list(sequence.table),
            write_from=chunk.write_from,
            sample=chunk.sample,
            state=sequence.owner.state if chunk.sample else None,
            drafts=len(chunk.drafts),
        )

    def _run(self, rows: list[Row], copies: list[Copy]) -> tuple[list[_RowOutput | None], Exception | None]:
        """Run the rows together; in halves where the device has too little memory for all of them.

        Copies may be repeated: a row of the first half may have written behind the copied slots of a
        source, never inside them.
        """
        try:
            output = self.runner.step(rows, copies)
        except Exception as error:
            if not _out_of_memory(error) or len(rows) == 1:
                return [None] * len(rows), error
            half = len(rows) // 2
            first, error_1 = self._run(rows[:half], copies)
            second, error_2 = self._run(rows[half:], copies if error_1 is not None else [])
            return first + second, error_1 or error_2
        sums = self.ledger.sums
        sums.kv_bytes_logical += output.kv_bytes_logical
        sums.kv_bytes_read += output.kv_bytes_read
        sums.eligible_nodes += output.eligible_nodes
        sums.shared_nodes += output.shared_nodes
        contexts = [row.start + len(row.tokens) for row in rows]
        whole = sum(contexts)
        return [
            _RowOutput(
                output.tokens[i],
                output.finite[i],
                output.logprobs[i],
                output.kv_bytes_logical * contexts[i] / whole,
                output.kv_bytes_read * contexts[i] / whole,
                output.further.get(i, []),
            )
            for i in range(len(rows))
        ], None

    def _drop_failed(
        self, step: Step, outputs: list[_RowOutput | None], error: Exception | None
    ) -> list[tuple[Chunk, _RowOutput]]:
        """Fail the requests of rows without usable numbers; returns the other rows."""
        done = []
        for chunk, output in zip(step.chunks, outputs, strict=True):
            request = chunk.sequence.owner.request
            if output is None:
                name = type(error).__name__ if error is not None else "unknown error"
                failure = StepFailed(f"The model could not compute this step ({name}); please ask again.")
                failure.__cause__ = error
                self._fail(request, failure)
            elif not output.finite:
                broken = NonFiniteLogits("The model's numbers broke down for this text (NaN).")
                self._fail(request, broken, keep_tail=False)
            else:
                done.append((chunk, output))
        return done

    def _take(self, chunk: Chunk, output: _RowOutput, now: float) -> None:
        sequence = chunk.sequence
        choice: Choice = sequence.owner
        if sequence.state is not State.RUNNING:  # its request has failed with another of its choices
            return
        self.scheduler.accept(chunk)
        choice.computed(chunk.known_end - chunk.start, output.kv_bytes_logical, output.kv_bytes_read)
        prompt = max(0, min(chunk.known_end, sequence.prompt_len) - chunk.start)
        self.ledger.sums.prefill_tokens_computed += prompt
        if choice.request.aborted:
            return
        if not chunk.sample:
            self._emit(
                choice.request,
                Reading(min(chunk.end, sequence.prompt_len), sequence.prompt_len, choice.reused),
            )
            return
        if sequence.generated == 0 and choice.index == 0:
            self._fork_siblings(choice, now)
        token = output.token
        if token is None:
            raise EngineUnavailable("a row that samples came back without a token")
        self._sampled(choice, token, output.logprob, now)
        # Each further token says that the one before it had been drafted: its KV is computed already.
        for further, logprob in output.further:
            if choice.done:
                break
            self.scheduler.accept_draft(sequence)
            self._sampled(choice, further, logprob, now)
        if chunk.drafts:
            choice.verified(len(chunk.drafts), len(output.further))

    def _fork_siblings(self, first: Choice, now: float) -> None:
        """n > 1: the other choices read what the first one has computed, tail included."""
        request = first.request
        for index in range(len(request.choices), request.request.n):
            child = first.sequence.sibling(index, first.sequence.prompt_len)
            state = SamplerState(request.request.sampling, index, child.tokens)
            choice = Choice(request, child, state, self.tokenizer)
            request.choices.append(choice)
            self.scheduler.fork(first.sequence, child)
            choice.admitted(now, child.prompt_len - 1, resumed=False)

    def _sampled(self, choice: Choice, token: int, logprob: TokenLogprob | None, now: float) -> None:
        sequence, sampling = choice.sequence, choice.request.request.sampling
        if token in self.eos_token_ids and not sampling.ignore_eos:
            self._end(choice, "stop", now)
            return
        sequence.append(token, self.memory.scopes)
        self.ledger.sums.output_tokens += 1
        update = choice.push(token, now)
        finished: FinishReason | None = None
        if update.stopped:
            finished = "stop"
        elif sequence.generated >= sampling.max_tokens:
            finished = "length"
        self._emit(
            choice.request,
            Delta(choice.index, update.text, (token,), (logprob,) if logprob is not None else ()),
        )
        if finished is not None:
            self._end(choice, finished, now)

    # -- ends ------------------------------------------------------------------------------------------

    def _end(self, choice: Choice, reason: FinishReason, now: float) -> None:
        request = choice.request
        rest = choice.finish_text()
        if rest and reason != "aborted":
            self._emit(request, Delta(choice.index, rest, ()))
        done = Done(
            choice.index,
            reason,
            choice.text,
            choice.kept_tokens(),
            choice.receipt(now, self.ledger.block_bytes, self.ledger.reserved_bytes),
        )
        self.ledger.answered(done.receipt)
        choice.done = True
        self.scheduler.remove(choice.sequence)
        self._emit(request, done)
        if not request.open_choices():
            self.requests.pop(request.id, None)
            request.end()

    def _fail(self, request: Request, error: EngineError, keep_tail: bool = True) -> None:
        for choice in request.open_choices():
            choice.done = True
            if choice.sequence.state is not State.FINISHED:
                self.scheduler.remove(choice.sequence, keep_tail=keep_tail)
        self.requests.pop(request.id, None)
        request.fail(error)

    def _emit(self, request: Request, event: Event) -> None:
        if request.aborted and not isinstance(event, Done):
            return
        request.sink(event)


class _RowOutput:
    """One row's part of a `StepOutput`; bytes are the step's, divided by context length."""

    __slots__ = ("finite", "further", "kv_bytes_logical", "kv_bytes_read", "logprob", "token")

    def __init__(
        self,
        token: int | None,
        finite: bool,
        logprob: TokenLogprob | None,
        logical: float,
        read: float,
        further: list[tuple[int, TokenLogprob | None]],
    ) -> None:
        self.token, self.finite, self.logprob, self.further = token, finite, logprob, further
        self.kv_bytes_logical, self.kv_bytes_read = logical, read


def _out_of_memory(error: Exception) -> bool:
    """Torch has a class of its own for the GPU's memory; for the CPU's it raises a plain `RuntimeError`."""
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error):
        return True
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
