"""What sharing saves, for every conversation and for everybody, in two views that are never added together.

    running now          the page tables of running sequences
    open conversations   the same, and for each idle conversation the page table it had last, as far as its
                         blocks are still in memory: a *soft* reader, which counts but prevents nothing

In each view `fair_share` of a conversation is the sum over its page table entries of
`block_bytes / readers of the block`, an exact fraction; over all conversations it adds up, to the byte,
to the bytes of the blocks that the view names. `unshared` counts every entry as a block of its own (paging
alone), `reserved` is what a contiguous cache would hold, `saved = unshared - fair_share`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from engine.blocks import OPEN_TAIL, PINNED, PUBLISHED
from engine.histogram import TPOT_BOUNDS, TTFT_BOUNDS, Histogram, HistogramValue
from engine.memory import KVMemory
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import ModelShape, Receipt

IntArray = NDArray[np.int64]
#: Page tables (block ids, computed tokens) by conversation.
Tables = dict[str, list[tuple[IntArray, int]]]

#: The engine's own work; it never stays open.
SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation in one view. Bytes are exact; `fair_share` and `saved` are fractions of bytes."""

    conversation: str
    sequences: int
    tokens: int
    blocks: int
    shared_blocks: int
    reserved_bytes: int
    unshared_bytes: int
    fair_share: Fraction
    saved: Fraction


@dataclass(frozen=True, slots=True)
class Totals:
    """One view over all conversations: `saved_bytes = unshared_bytes - physical_bytes`."""

    conversations: int
    sequences: int
    reserved_bytes: int
    unshared_bytes: int
    physical_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that page tables name more than once."""
        return self.unshared_bytes - self.physical_bytes


@dataclass(frozen=True, slots=True)
class SinceStart:
    """Sums since the engine started; `saved_byte_seconds` and `peak_saved_bytes` are of the running view."""

    saved_byte_seconds: float = 0.0
    peak_saved_bytes: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens_skipped: int = 0
    prefill_tokens_computed: int = 0
    output_tokens: int = 0
    blocks_copied: int = 0
    bytes_copied: int = 0
    takeovers: int = 0
    merges: int = 0
    evictions: int = 0
    unlinked: int = 0
    preemptions: int = 0
    steps: int = 0
    kv_bytes_logical: int = 0
    kv_bytes_read: int = 0
    eligible_nodes: int = 0
    shared_nodes: int = 0
    answers: int = 0
    #: Time to the first token and time per later token, of the answers that have ended.
    ttft: HistogramValue = field(default_factory=HistogramValue)
    tpot: HistogramValue = field(default_factory=HistogramValue)


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved at one moment (seconds of the engine's clock), in each view."""

    at: float
    running_bytes: int
    open_bytes: int


class SavedHistory:
    """Samples of what sharing saved, from the start until now, at most `capacity` of them: when they become
    too many, every second one goes and samples are taken half as often."""

    def __init__(self, capacity: int = 480, every_s: float = 1.0) -> None:
        self.capacity, self.every_s = capacity, every_s
        self._samples: list[Saved] = []

    def add(self, sample: Saved) -> None:
        """Keep the sample unless the last one is too recent."""
        if self._samples and sample.at - self._samples[-1].at < self.every_s:
            return
        self._samples.append(sample)
        if len(self._samples) >= self.capacity:
            self._samples = self._samples[::2]
            self.every_s *= 2

    def samples(self) -> tuple[Saved, ...]:
        """Oldest first."""
        return tuple(self._samples)


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The whole memory at one moment, immutable, shared by all who look.

    readers, soft_readers, state have one byte a block. Readers saturate at 255. State: 0 free, 1 held and
    private, 2 held and published, 3 retained, 4 retained open tail, 5 retained and pinned.
    """

    number: int
    total_blocks: int
    block_size: int
    block_bytes: int
    free: int
    held: int
    retained: int
    pinned: int
    utilisation: float | None
    readers: bytes
    soft_readers: bytes
    state: bytes
    running: dict[str, Row]
    open: dict[str, Row]
    totals_running: Totals
    totals_open: Totals
    since_start: SinceStart
    event_number: int
    waiting: int = 0
    history: tuple[Saved, ...] = ()
    #: When it was taken, in seconds of the engine's clock.
    at: float = 0.0
    _blocks: dict[str, IntArray] = field(default_factory=dict, repr=False)

    def blocks_of(self, conversation: str) -> list[int]:
        """Blocks that the conversation's page tables name, running or stored, in logical order."""
        found = self._blocks.get(conversation)
        return [] if found is None else [int(b) for b in found]


FREE, HELD_PRIVATE, HELD_PUBLISHED, RETAINED, RETAINED_TAIL, RETAINED_PINNED = range(6)


@dataclass(slots=True)
class _Stored:
    """The last page tables of a conversation, with the generation each block had: a block that was
    freed since is no longer the conversation's, even if it has the same number."""

    touched: float
    tables: dict[int, tuple[IntArray, IntArray, int]] = field(default_factory=dict)


@dataclass(slots=True)
class StepSums:
    """What the step loop adds up beside the memory's own counters."""

    prefill_tokens_computed: int = 0
    output_tokens: int = 0
    kv_bytes_logical: int = 0
    kv_bytes_read: int = 0
    eligible_nodes: int = 0
    shared_nodes: int = 0


class Ledger:
    """Keeps the stored page tables of open conversations and the sums since start.

    idle_s          how long an idle conversation counts as open
    max_open        conversations kept open at most; the one idle longest goes first
    """

    def __init__(
        self,
        memory: KVMemory,
        scheduler: Scheduler,
        shape: ModelShape,
        *,
        idle_s: float = 900.0,
        max_open: int = 10_000,
    ) -> None:
        self.memory, self.scheduler, self.shape = memory, scheduler, shape
        self.block_bytes = shape.block_bytes(memory.block_size)
        self.reserved_bytes = memory.blocks_for(shape.max_context) * self.block_bytes
        self.idle_s, self.max_open = idle_s, max_open
        self.sums = StepSums()
        self.ttft, self.tpot = Histogram(TTFT_BOUNDS), Histogram(TPOT_BOUNDS)
        self.answers = 0
        self.history = SavedHistory()
        self.now = 0.0
        self._ticked: float | None = None
        self._saved_block_seconds = 0.0
        self._peak_saved_blocks = 0
        self._open: OrderedDict[str, _Stored] = OrderedDict()
        self._number = 0
        self._last: MemorySnapshot | None = None
        self._last_change: tuple[int, ...] = ()
        memory.on_release = self._store
        memory.on_admit = self._take_over

    # -- running sequences -----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Add the time since the last tick to the saved byte-seconds, with what was saved during it."""
        saved = self.memory.pool.entries - self.memory.pool.held
        if self._ticked is not None and now > self._ticked:
            self._saved_block_seconds += saved * (now - self._ticked)
        self._ticked = self.now = now
        self._peak_saved_blocks = max(self._peak_saved_blocks, saved)
        self._expire()
        self.history.add(Saved(now, saved * self.block_bytes, self._saved_open_bytes()))

    def _saved_open_bytes(self) -> int:
        pool = self.memory.pool
        return (pool.entries + pool.soft_entries - pool.open_blocks) * self.block_bytes

    def answered(self, receipt: Receipt) -> None:
        """One choice has ended: count its times."""
        self.answers += 1
        if receipt.ttft_s is not None:
            self.ttft.observe(receipt.ttft_s)
        if receipt.output_tokens > 1:
            self.tpot.observe(receipt.decode_s / (receipt.output_tokens - 1))

    def fair_share_blocks(self, sequence: Sequence) -> float:
        """The sequence's fair share in blocks, as a float for means over many steps."""
        return float((1.0 / self.memory.pool.reader_count[sequence.table_array()]).sum())

    # -- open conversations ----------------------------------------------------------------------------

    def _take_over(self, sequence: Sequence) -> None:
        """A conversation that runs again counts by its live page tables, not by the stored ones."""
        stored = self._open.get(sequence.conversation)
        if stored is None:
            return
        others = any(
            s.conversation == sequence.conversation and s is not sequence and s.table
            for s in self.scheduler.running
        )
        keep: set[int] = set()
        if others:
            keep = set(stored.tables) - {sequence.id}
        else:
            keep = {s.id for s in self.memory.live} & set(stored.tables) - {sequence.id}
        for key in set(stored.tables) - keep:
            self._drop_table(stored, key)

    def _store(self, sequence: Sequence) -> None:
        if sequence.conversation == SYSTEM or sequence.closed:
            return
        stored = self._open.get(sequence.conversation)
        if stored is None:
            stored = self._open[sequence.conversation] = _Stored(self.now)
            while len(self._open) > self.max_open:
                self._forget(next(iter(self._open)))
        stored.touched = self.now
        self._open.move_to_end(sequence.conversation)
        if sequence.id in stored.tables:
            self._drop_table(stored, sequence.id)
        count = self.memory.blocks_for(sequence.computed)
        blocks = sequence.table_array()[:count].copy()
        stored.tables[sequence.id] = (blocks, self.memory.pool.generation[blocks], sequence.computed)
        for block in blocks.tolist():
            self.memory.pool.add_soft(block)

    def _drop_table(self, stored: _Stored, key: int) -> None:
        blocks, generations, _ = stored.tables.pop(key)
        for block in self._alive(blocks, generations).tolist():
            self.memory.pool.add_soft(block, -1)

    def _alive(self, blocks: IntArray, generations: IntArray) -> IntArray:
        alive: IntArray = blocks[self.memory.pool.generation[blocks] == generations]
        return alive

    def touch(self, conversation: str) -> None:
        """Somebody looks at the conversation: it stays open."""
        if conversation in self._open:
            self._open[conversation].touched = self.now
            self._open.move_to_end(conversation)

    def close(self, conversation: str) -> None:
        """The conversation is no longer open; its blocks may stay retained.

        What still runs of it counts as running until it ends, and is not kept open afterwards.
        """
        for sequence in self.memory.live:
            if sequence.conversation == conversation:
                sequence.closed = True
        self._forget(conversation)

    def _forget(self, conversation: str) -> None:
        stored = self._open.pop(conversation, None)
        if stored is not None:
            for key in list(stored.tables):
                self._drop_table(stored, key)

    def _expire(self) -> None:
        while self._open:
            name, stored = next(iter(self._open.items()))
            if self.now - stored.touched <= self.idle_s:
                return
            self._forget(name)

    # -- views -----------------------------------------------------------------------------------------

    def _row(self, name: str, tables: list[tuple[IntArray, int]], read_by: dict[int, int]) -> Row:
        """`read_by`: number of readers -> entries of the tables whose block has so many."""
        sequences, tokens = len(tables), sum(length for _, length in tables)
        entries = sum(read_by.values())
        shared = entries - read_by.get(1, 0)
        unshared = entries * self.block_bytes
        # One fraction over a common denominator: adding fractions one by one takes most of a snapshot's time.
        common = math.lcm(*read_by)
        parts = sum(blocks * (common // readers_of) for readers_of, blocks in read_by.items())
        fair = Fraction(parts * self.block_bytes, common)
        reserved = sequences * self.reserved_bytes
        return Row(name, sequences, tokens, entries, shared, reserved, unshared, fair, unshared - fair)

    def tables(self, view: str) -> Tables:
        """Page tables (block ids, computed tokens) by conversation; `view` is "running" or "open"."""
        found: Tables = {}
        for sequence in self.scheduler.running:
            found.setdefault(sequence.conversation, []).append((sequence.table_array(), sequence.computed))
        if view == "open":
            for name, stored in self._open.items():
                for blocks, generations, length in stored.tables.values():
                    alive = self._alive(blocks, generations)
                    if len(alive):
                        size = self.memory.block_size
                        known = min(length, len(alive) * size)
                        found.setdefault(name, []).append((alive, known))
        return found

    def _view(self, view: str, tables: Tables) -> tuple[dict[str, Row], Totals]:
        pool = self.memory.pool
        readers = pool.reader_count if view == "running" else pool.reader_count + pool.soft
        read_by = _read_by(tables, readers)
        rows = {name: self._row(name, own, read_by[name]) for name, own in tables.items()}
        entries = pool.entries + (pool.soft_entries if view == "open" else 0)
        blocks = pool.held if view == "running" else pool.open_blocks
        totals = Totals(
            conversations=len(rows),
            sequences=sum(r.sequences for r in rows.values()),
            reserved_bytes=sum(r.reserved_bytes for r in rows.values()),
            unshared_bytes=entries * self.block_bytes,
            physical_bytes=blocks * self.block_bytes,
        )
        return rows, totals

    def since_start(self) -> SinceStart:
        """The sums up to now."""
        counters, done, sums = self.memory.counters, self.scheduler.counters, self.sums
        slot_bytes = self.block_bytes // self.memory.block_size
        return SinceStart(
            saved_byte_seconds=self._saved_block_seconds * self.block_bytes,
            peak_saved_bytes=self._peak_saved_blocks * self.block_bytes,
            requests=done.requests,
            prompt_tokens=done.prompt_tokens,
            prefill_tokens_skipped=done.prompt_tokens_skipped,
            prefill_tokens_computed=sums.prefill_tokens_computed,
            output_tokens=sums.output_tokens,
            blocks_copied=counters.blocks_copied,
            bytes_copied=counters.slots_copied * slot_bytes,
            takeovers=counters.takeovers,
            merges=counters.merges,
            evictions=counters.evictions,
            unlinked=counters.unlinked,
            preemptions=done.preemptions,
            steps=done.steps,
            kv_bytes_logical=sums.kv_bytes_logical,
            kv_bytes_read=sums.kv_bytes_read,
            eligible_nodes=sums.eligible_nodes,
            shared_nodes=sums.shared_nodes,
            answers=self.answers,
            ttft=self.ttft.value(),
            tpot=self.tpot.value(),
        )

    def _change(self) -> tuple[int, ...]:
        """Equal at two moments only if no block, page table, row or line changed in between."""
        memory, pool = self.memory, self.memory.pool
        return (
            self.scheduler.counters.steps,
            len(self.scheduler.waiting),
            memory.events.number,
            memory.tree.version,
            len(memory.tree.pinned),
            pool.entries,
            pool.held,
            pool.soft_entries,
            pool.free,
            len(self._open),
            self.answers,
        )

    def snapshot(self) -> MemorySnapshot:
        """Everything at this moment. Costs one pass over the page tables where anything has changed since the
        last one; where nothing has, only the clock goes on and the rest is shared with it."""
        self._number += 1
        change = self._change()
        if self._last is not None and change == self._last_change:
            self._last = replace(
                self._last,
                number=self._number,
                since_start=self.since_start(),
                history=self.history.samples(),
                at=self.now,
            )
        else:
            self._last, self._last_change = self._snapshot(), change
        return self._last

    def _snapshot(self) -> MemorySnapshot:
        pool = self.memory.pool
        open_tables = self.tables("open")
        running, totals_running = self._view("running", self.tables("running"))
        opened, totals_open = self._view("open", open_tables)
        held = pool.reader_count > 0
        kind = pool.kind & 3
        state = np.full(pool.num_blocks, RETAINED, dtype=np.uint8)
        state[kind == OPEN_TAIL] = RETAINED_TAIL
        state[(pool.kind & PINNED) != 0] = RETAINED_PINNED
        state[kind == 0] = HELD_PRIVATE
        state[held & (kind == PUBLISHED)] = HELD_PUBLISHED
        for start, length in pool.extents.extents():
            state[start : start + length] = FREE
        slots = pool.held * pool.block_size
        return MemorySnapshot(
            number=self._number,
            total_blocks=pool.num_blocks,
            block_size=pool.block_size,
            block_bytes=self.block_bytes,
            free=pool.free,
            held=pool.held,
            retained=pool.retained,
            pinned=len(self.memory.tree.pinned),
            utilisation=pool.held_filled / slots if slots else None,
            readers=np.minimum(pool.reader_count, 255).astype(np.uint8).tobytes(),
            soft_readers=np.minimum(pool.soft, 255).astype(np.uint8).tobytes(),
            state=state.tobytes(),
            running=running,
            open=opened,
            totals_running=totals_running,
            totals_open=totals_open,
            since_start=self.since_start(),
            event_number=self.memory.events.number,
            waiting=len(self.scheduler.waiting),
            history=self.history.samples(),
            at=self.now,
            _blocks={n: np.concatenate([t for t, _ in tables]) for n, tables in open_tables.items()},
        )


def _read_by(tables: Tables, readers: NDArray[np.int32]) -> dict[str, dict[int, int]]:
    """For each conversation: number of readers -> entries of its tables whose block has so many.

    All tables are counted at once: one by one that takes half of a snapshot's time.
    """
    found: dict[str, dict[int, int]] = {name: {} for name in tables}
    parts = [table for own in tables.values() for table, _ in own]
    if not parts:
        return found
    lengths = [sum(len(table) for table, _ in own) for own in tables.values()]
    counts = readers[np.concatenate(parts)]
    width = int(counts.max(initial=0)) + 1
    owner = np.repeat(np.arange(len(lengths)), lengths)
    table = np.bincount(owner * width + counts, minlength=len(lengths) * width).reshape(-1, width)
    names, (rows, columns) = list(tables), np.nonzero(table)
    for row, column, entries in zip(
        rows.tolist(), columns.tolist(), table[rows, columns].tolist(), strict=True
    ):
        found[names[row]][column] = entries
    return found
