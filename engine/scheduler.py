"""Which sequences run in the next step, and how many tokens of each. No torch.

One mixed batch a step: decodes first, then chunks of running prefills, then newcomers, under one token
budget. A newcomer needs a place, blocks, and nobody computing its next block already:

    waiting ──admit──▶ running ──finish / abort──▶ gone
       ▲                  │
       └──── preempt ─────┘      tokens and sampler state are kept; resuming is mostly a hit

Nobody starves: newcomers with the longest cached prefix go first, but each admission that passes an
earlier arrival is counted for the one passed over, and after `max_overtakes` it is next, strictly. Work
always ends: the oldest sequence of the best priority is never preempted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.errors import DeadlineExceeded, EngineError, IntegrityError, LimitReached, PoolTooSmall
from engine.memory import KVMemory, Match
from engine.sequence import Sequence, State
from engine.types import Copy, Priority


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and one principal may take.

    max_batch_tokens            tokens of one step, decodes included
    max_running, max_queued     sequences in all; a request for n choices counts as n when it runs
    *_per_principal             the same for one principal (with nothing running, one request always may)
    pool_share_per_principal    share of the pool that the blocks read by one principal alone may take;
                                a principal with nothing running is always allowed one request
    max_overtakes               how often a request may be passed over before it is strictly next
    stalled_rounds              rounds without progress after which a shared prefill is not waited for
    max_draft_rows              decodes and drafts together of one step; 0: no drafts
    match_window                waiting requests considered in one round, a quarter of them of one principal
    """

    max_batch_tokens: int = 512
    max_running: int = 64
    max_queued: int = 256
    max_running_per_principal: int = 64
    max_queued_per_principal: int = 256
    pool_share_per_principal: float = 1.0
    max_overtakes: int = 8
    stalled_rounds: int = 8
    match_window: int = 64
    max_draft_rows: int = 0


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + count` of `sequence` go through the model in this step.

    Positions below `write_from` are in the pool already and are not written again: a fully cached prompt
    runs its last token only to get logits. `sample`: the chunk reaches the sequence's last token. `drafts`
    are proposed tokens behind that one, counted in `count`; only what is accepted of them is committed.
    """

    sequence: Sequence
    start: int
    count: int
    write_from: int
    sample: bool
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the chunk, drafts included."""
        return self.start + self.count

    @property
    def known_end(self) -> int:
        """Position after the last token that is the sequence's own."""
        return self.end - len(self.drafts)

    def drop_drafts(self) -> None:
        """Compute the sequence's own tokens only."""
        self.count -= len(self.drafts)
        self.drafts = ()


@dataclass(slots=True)
class Step:
    """One batch: the copies come before the writes."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, EngineError]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class SchedulerCounters:
    """Since start. Queries and hits are counted once a request, at its first admission."""

    requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_skipped: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """Waiting and running sequences over one `KVMemory`."""

    def __init__(self, memory: KVMemory, limits: Limits) -> None:
        if limits.max_batch_tokens < 1 or limits.max_running < 1:
            raise ValueError("a step needs room for at least one token of one sequence")
        self.memory = memory
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        self._round = 0

    # -- arrival and departure -------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence in line.

        Raises `PoolTooSmall` where it can never fit, `LimitReached` where the line is full.
        """
        need, capacity = self.memory.need(sequence), self.memory.capacity_for(sequence)
        if need > capacity:
            raise PoolTooSmall(need, capacity, self.memory.block_size)
        if len(self.waiting) >= self.limits.max_queued:
            raise LimitReached("waiting requests", self.limits.max_queued)
        queued = sum(s.principal == sequence.principal for s in self.waiting)
        if queued >= self.limits.max_queued_per_principal:
            raise LimitReached("waiting requests of your own", self.limits.max_queued_per_principal)
        self.memory.register(sequence)
        self.waiting.append(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` runs from now on beside `parent` and shares all its blocks.

        Raises `PoolTooSmall` where the child could not be finished even if it ran alone.
        """
        if parent.state is not State.RUNNING:
            raise IntegrityError(f"{parent} is not running and cannot be forked in place")
        need, capacity = self.memory.need(child), self.memory.capacity_for(child)
        if need > capacity:
            raise PoolTooSmall(need, capacity, self.memory.block_size)
        self.memory.fork(parent, child)
        parent.width = max(1, parent.width - 1)
        child.state = State.RUNNING
        self.running.append(child)

    def remove(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """The sequence has ended, in whatever phase it is; its blocks are given back at once."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.memory.release(sequence, keep_tail=keep_tail)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        self.memory.forget(sequence)

    def position(self, sequence: Sequence) -> int:
        """Place in line, from 1."""
        return self.waiting.index(sequence) + 1

    # -- one step --------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> Step:
        """The next step. May be empty. `now` is the clock that deadlines are measured by."""
        self._round += 1
        self.counters.steps += 1
        step = Step()
        self._expire(now, step)
        self._lend_priority()
        budget = self._continue_running(step)
        budget = self._admit(step, 0 if step.preempted else budget)
        self._grow(step, budget)
        if not step.chunks and self.waiting and not self.running:
            # Nothing runs, so nothing will be given back: what does not fit now never will.
            head = min(self.waiting, key=lambda s: (s.priority.value, s.arrival))
            needed = self.memory.need(head)
            self._fail(step, head, PoolTooSmall(needed, self.memory.pool.allocatable, self.memory.block_size))
        for waiter in self.waiting:
            if waiter.wait_on is not None and waiter.wait_on.state is not State.RUNNING:
                waiter.wait_on = None
                if waiter.waiting_for == "prefill":
                    waiter.waiting_for = "queue"
        step.copies = self.memory.step_copies()
        return step

    def accept(self, chunk: Chunk) -> None:
        """The step is done and this chunk's keys and values are finite: count and publish them, drafts
        left out (see `accept_draft`)."""
        if chunk.known_end > chunk.sequence.computed:
            self.memory.commit(chunk.sequence, chunk.known_end)

    def accept_draft(self, sequence: Sequence) -> None:
        """The token just appended was drafted, and its keys and values were computed in this step."""
        self.memory.commit(sequence, len(sequence))

    def _fail(self, step: Step, sequence: Sequence, error: EngineError) -> None:
        self.remove(sequence)
        step.failed.append((sequence, error))

    def _expire(self, now: float, step: Step) -> None:
        for sequence in [*self.running, *self.waiting]:
            if sequence.deadline is not None and now > sequence.deadline:
                self._fail(
                    step, sequence, DeadlineExceeded("The answer was not finished within its time limit.")
                )

    def _lend_priority(self) -> None:
        for sequence in self.running:
            sequence.lent = None
        for waiter in self.waiting:
            producer = waiter.wait_on
            if producer is None or producer.state is not State.RUNNING:
                continue
            if producer.lent is None or waiter.priority.value < producer.lent.value:
                producer.lent = waiter.priority

    def _continue_running(self, step: Step) -> int:
        budget = self.limits.max_batch_tokens
        order = sorted(self.running, key=lambda s: (s.effective_priority, s.arrival, s.choice))
        decodes = [s for s in order if len(s) - s.computed <= 1]
        prefills = [s for s in order if len(s) - s.computed > 1]
        # Batch prefills leave room for interactive newcomers; `_grow` gives back what those do not take.
        newcomers = any(s.priority is Priority.INTERACTIVE for s in self.waiting)
        background = max(1, budget // 4) if newcomers else budget
        spare = self._rows_for_drafts(decodes)
        for sequence in decodes + prefills:
            if sequence.state is not State.RUNNING:
                continue
            batch_prefill = sequence.effective_priority > 0 and len(sequence) - sequence.computed > 1
            allowed = min(budget, background) if batch_prefill else budget
            if allowed <= 0:
                break
            chunk = _chunk(sequence, allowed)
            if chunk.sample and sequence.drafts and spare > 0:
                chunk.drafts = tuple(
                    sequence.drafts[: min(spare, sequence.max_tokens - sequence.generated - 1)]
                )
                chunk.count += len(chunk.drafts)
            sequence.drafts = []
            while not self.memory.prepare(sequence, chunk.end):
                if chunk.drafts:  # a guess is not worth anybody's place
                    chunk.drop_drafts()
                    continue
                victim = self._victim()
                budget += self._preempt(victim, step)
                if victim is sequence:
                    break
            if sequence.state is State.RUNNING:
                step.chunks.append(chunk)
                budget -= chunk.count
                spare -= len(chunk.drafts)
                background -= chunk.count if batch_prefill else 0
        return budget

    def _rows_for_drafts(self, decodes: list[Sequence]) -> int:
        """Rows that drafts may add to this step, so that every decode still gets its own."""
        most = min(self.limits.max_draft_rows, self.limits.max_batch_tokens)
        return max(0, most - len(decodes))

    def _grow(self, step: Step, budget: int) -> None:
        """Give the tokens that are left to the prefill chunks of this step, as far as memory goes."""
        for chunk in step.chunks:
            more = min(budget, len(chunk.sequence) - chunk.known_end)
            if more > 0 and self.memory.prepare(chunk.sequence, chunk.end + more):
                chunk.count += more
                chunk.sample = chunk.end == len(chunk.sequence)
                budget -= more

    def _victim(self) -> Sequence:
        """Whose private work is cheapest to redo; never the oldest of the best priority."""
        protected = min(self.running, key=lambda s: (s.priority.value, s.arrival, s.choice))
        candidates = [s for s in self.running if s is not protected]
        if not candidates:
            raise IntegrityError(f"{protected} runs alone and does not fit the pool that admitted it")
        count = self.memory.pool.reader_count
        alone = {s.id: int((count[s.table_array()] == 1).sum()) for s in candidates}
        return min(
            candidates,
            key=lambda s: (-s.effective_priority, alone[s.id] == 0, alone[s.id], -s.arrival, -s.choice),
        )

    def _preempt(self, victim: Sequence, step: Step) -> int:
        """Put `victim` back in line; returns the tokens of the step that this sets free."""
        refund = sum(chunk.count for chunk in step.chunks if chunk.sequence is victim)
        step.chunks = [chunk for chunk in step.chunks if chunk.sequence is not victim]
        self.running.remove(victim)
        self.memory.release(victim)
        victim.state = State.PREEMPTED
        victim.preemptions += 1
        victim.waiting_for = "memory"
        self.waiting.append(victim)
        self.counters.preemptions += 1
        step.preempted.append(victim)
        return refund

    # -- admission -------------------------------------------------------------------------------------

    def _urgent(self, sequence: Sequence) -> bool:
        limit = self.limits.max_overtakes * (1 if sequence.priority is Priority.INTERACTIVE else 8)
        return sequence.overtaken >= limit

    def _rank(self, sequence: Sequence, match: Match) -> tuple[int, int, int, int]:
        if self._urgent(sequence):
            return (0, 0, 0, sequence.arrival)
        return (1, sequence.priority.value, -match.tokens(self.memory.block_size), sequence.arrival)

    def _admit(self, step: Step, budget: int) -> int:
        # Looked at even where nobody can be admitted: who waits for a prefill says so, and lends priority.
        while self.waiting:
            chosen = self._next_to_admit()
            if chosen is None or budget <= 0:
                break
            sequence, match = chosen
            self._start(step, sequence, match)
            chunk = _chunk(sequence, budget)
            if not self.memory.prepare(sequence, chunk.end):
                raise IntegrityError(f"{sequence} was admitted without the blocks for its first chunk")
            step.chunks.append(chunk)
            budget -= chunk.count
        return budget

    def _next_to_admit(self) -> tuple[Sequence, Match] | None:
        places: Counter[str] = Counter()
        for running in self.running:
            places[running.principal] += running.width
        free_places = self.limits.max_running - places.total()
        for waiter in self.waiting:
            waiter.waiting_for = "queue"
        window = self._window(places)
        matches = {sequence: self.memory.match(sequence) for sequence in window}
        # Room for the next block of everybody who runs, so that an admission does not lead to a preemption.
        headroom = min(len(self.running), self.memory.pool.num_blocks // 16)
        alone: dict[str, int] = {}
        for sequence, match in matches.items():
            if self._waits_for_prefill(sequence, match):
                sequence.waiting_for = "prefill"
        for sequence in sorted(window, key=lambda s: self._rank(s, matches[s])):
            match = matches[sequence]
            if sequence.waiting_for == "prefill" or not self._within_share(sequence, match, alone):
                continue
            if sequence.width <= free_places or not self.running:
                if self.memory.fits(sequence, match, headroom):
                    return sequence, match
                sequence.waiting_for = "memory"
            if self._urgent(sequence) or sequence.state is State.PREEMPTED:
                # What becomes free is kept for it; nobody else gets in before.
                return None
        return None

    def _window(self, places: Counter[str]) -> list[Sequence]:
        """The waiting requests to consider now: urgent ones, then by priority and arrival.

        Those whose principal has all its places in use are left out, and nobody has more than a quarter:
        however long one principal's line is, it does not hide the others behind it.
        """
        self.waiting.sort(key=lambda s: (s.priority.value, s.arrival, s.choice))
        limit, size = self.limits.max_running_per_principal, self.limits.match_window
        window: list[Sequence] = []
        considered: Counter[str] = Counter()
        for sequence in sorted(self.waiting, key=lambda s: not self._urgent(s)):
            if len(window) >= size:
                break
            taken = places[sequence.principal]
            full = taken > 0 and taken + sequence.width > limit
            if not full and considered[sequence.principal] < max(1, size // 4):
                considered[sequence.principal] += 1
                window.append(sequence)
        return window

    def _waits_for_prefill(self, sequence: Sequence, match: Match) -> bool:
        """True while somebody else computes the next whole block of this prompt and gets on with it."""
        producer = match.pending.producer if match.pending is not None else None
        if producer is None or producer.state is not State.RUNNING:
            sequence.wait_on = None
            return False
        if sequence.wait_on is not producer or producer.computed > sequence.wait_seen:
            sequence.wait_on, sequence.wait_seen, sequence.wait_round = (
                producer,
                producer.computed,
                self._round,
            )
        return self._round - sequence.wait_round < self.limits.stalled_rounds

    def _within_share(self, sequence: Sequence, match: Match, alone: dict[str, int]) -> bool:
        """Whether the principal's share of the pool has room for it; `alone` remembers what is in use."""
        share, principal, memory = self.limits.pool_share_per_principal, sequence.principal, self.memory
        if share >= 1.0 or not any(s.principal == principal for s in self.running):
            return True
        if principal not in alone:
            mine = {block for s in self.running if s.principal == principal for block in s.table}
            readers = memory.pool.readers
            alone[principal] = sum(all(r.principal == principal for r in readers[block]) for block in mine)
        fresh = memory.blocks_for(len(sequence) + 1) - len(match.nodes)
        return alone[principal] + fresh <= share * memory.pool.num_blocks

    def _start(self, step: Step, sequence: Sequence, match: Match) -> None:
        self.memory.admit(sequence, match)
        self.waiting.remove(sequence)
        for other in self.waiting:
            earlier = (other.priority.value, other.arrival) < (sequence.priority.value, sequence.arrival)
            passed = earlier or (other.arrival < sequence.arrival)
            if passed and other.waiting_for != "prefill":
                other.overtaken += 1
        reused = min(sequence.computed, sequence.prompt_len - 1)
        if sequence.admitted_at is None:
            sequence.admitted_at = self._round
            if sequence.choice == 0:
                self.counters.requests += 1
                self.counters.prompt_tokens += sequence.prompt_len
                self.counters.prompt_tokens_skipped += reused
        sequence.state = State.RUNNING
        sequence.wait_on = None
        sequence.overtaken = 0
        self.running.append(sequence)
        step.admitted.append((sequence, reused))


def _chunk(sequence: Sequence, budget: int) -> Chunk:
    """The next tokens of `sequence`; the last one again where all are computed."""
    start = min(sequence.computed, len(sequence) - 1)
    count = min(len(sequence) - start, budget)
    return Chunk(sequence, start, count, sequence.computed, start + count == len(sequence))
