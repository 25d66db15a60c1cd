"""From page tables to a tree of physical segments, once a step for all layers. No torch here.

The sequences of a batch are laid out as a trie over their physical block ids. A trie node with two or
more readers is *eligible*: its keys and values can be read once for all of its readers instead of once
for each. A cost model says whether that pays; what does not becomes part of the nodes below it and in
the end of each sequence's own work.

    instructions ─┬─ document A ─┬─ reader 0          shared: [instructions] by 0 1 2 3
    (0 1 2 3)     │  (0 1 2)     ├─ reader 1                  [document A]   by 0 1 2
                  │              └─ reader 2          own:    what is left of 0, 1, 2 and 3
                  └─ reader 3

A shared segment only covers whole blocks that lie before the first query of every one of its readers,
so all of its queries see all of its keys: no causal mask is needed there (a sliding window still cuts).
A sequence's own segment starts where its last shared one ends and reaches to its context's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class PlanError(ValueError):
    """The batch contradicts itself, e.g. a page table that is too short for its context."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """When one pass for all readers is cheaper than each reader's own.

    A shared pass spares `tokens * (readers - 1)` token reads and costs a fixed amount (launches, the
    merge) that is worth `overhead_tokens` of them: see the constants `CPU` and `GPU` below, which are leads
    to be measured again on new hardware.
    """

    overhead_tokens: int
    min_readers: int = 2

    def worth(self, readers: int, tokens: int) -> bool:
        """True where a node of `tokens` KV tokens read by `readers` sequences takes the shared pass."""
        return readers >= self.min_readers and tokens * (readers - 1) >= self.overhead_tokens


#: One pass is some 15 small torch calls (about 100 us a layer); an own token costs a gather (copy of K
#: and V) and its products, about 0.2 us a reader for 3 KV heads of 64 in bfloat16 on two cores.
CPU = CostModel(overhead_tokens=384)
#: All nodes share one launch, so a node costs a few tiles' start-up and one more partial result to merge.
GPU = CostModel(overhead_tokens=128)
#: Every eligible node takes the shared pass: for tests.
ALWAYS = CostModel(overhead_tokens=0)
#: For backends that know no shared pass.
NEVER = CostModel(overhead_tokens=1 << 62)


@dataclass(frozen=True, slots=True)
class Run:
    """Physically consecutive token slots: `[slot, slot + tokens)` of the pool's second dimension."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Logical positions `[start, end)` that all `readers` (indices of sequences) have in common."""

    readers: tuple[int, ...]
    start: int
    end: int
    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def clipped(self, start: int) -> Segment:
        """The part at or after logical position `start` (for a sliding window); may be empty."""
        if start <= self.start:
            return self
        skip = min(start, self.end) - self.start
        runs: list[Run] = []
        for run in self.runs:
            if skip >= run.tokens:
                skip -= run.tokens
            else:
                runs.append(Run(run.slot + skip, run.tokens - skip))
                skip = 0
        return Segment(self.readers, min(start, self.end), self.end, tuple(runs))


@dataclass(frozen=True, slots=True)
class PlanCounters:
    """What one layer without a sliding window reads, in KV tokens (one K and one V vector a head).

    logical_tokens   each sequence reads its whole context: what an engine without shared passes reads
    physical_tokens  each shared segment once, each own segment once
    eligible_nodes   trie nodes with two or more readers and at least one whole block
    shared_nodes     segments that take the shared pass
    """

    logical_tokens: int
    physical_tokens: int
    eligible_nodes: int
    shared_nodes: int


@dataclass(slots=True)
class Tally:
    """What `attend` really did with a plan, summed over layers; the backend counts where it reads."""

    kv_bytes_logical: int = 0
    kv_bytes_read: int = 0
    shared_passes: int = 0
    layers: int = 0

    def add(self, reads: tuple[int, int, int], token_bytes: int, layers: int = 1) -> None:
        """Count layers that each read `(tokens logically, tokens really, shared passes)`."""
        logical, read, shared = reads
        self.layers += layers
        self.kv_bytes_logical += layers * logical * token_bytes
        self.kv_bytes_read += layers * read * token_bytes
        self.shared_passes += layers * shared


@dataclass(slots=True)
class AttentionPlan:
    """One step's batch. Sequence `s` has `query_lens[s]` rows of the packed query from `query_starts[s]` on.

    `shared` is ordered root first. `own[s]` belongs to sequence `s`. `state` is whatever the backend
    that made the plan keeps beside it (index tensors); nobody else looks into it. `padding` rows follow the
    batch's own in the packed query where a captured graph has a fixed number of rows: they read nothing and
    their output means nothing.
    """

    block_size: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_starts: tuple[int, ...]
    tables: tuple[IntArray, ...]
    shared: tuple[Segment, ...]
    own: tuple[Segment, ...]
    counters: PlanCounters
    tally: Tally = field(default_factory=Tally)
    state: Any = None
    padding: int = 0

    @property
    def rows(self) -> int:
        """T: number of rows of the packed query that belong to a sequence."""
        return sum(self.query_lens)

    @property
    def padded_rows(self) -> int:
        """All rows of the packed query."""
        return self.rows + self.padding

    def first_query(self, sequence: int) -> int:
        """Logical position of the sequence's first query."""
        return self.context_lens[sequence] - self.query_lens[sequence]


def build_plan(
    *,
    page_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    cost: CostModel,
    shared_pass: bool = True,
) -> AttentionPlan:
    """Plan one step.

    Args:
        page_tables: per sequence, physical block ids; only the first `ceil(context / block_size)` are
            looked at. `array.array` and numpy arrays are read faster than lists.
        query_lens: new tokens of each sequence, at least 1.
        context_lens: tokens of each sequence including the new ones.
        shared_pass: False makes everything own work (one phase).

    Raises:
        PlanError: lengths that do not fit together, a page table that is too short, a negative block id.
    """
    if not len(page_tables) == len(query_lens) == len(context_lens):
        raise PlanError(
            f"{len(page_tables)} page tables, {len(query_lens)} query lengths and {len(context_lens)} "
            "context lengths do not describe one batch"
        )
    if block_size < 1:
        raise PlanError(f"block size {block_size} is not positive")
    tables: list[IntArray] = []
    for s, (table, queries, context) in enumerate(zip(page_tables, query_lens, context_lens, strict=True)):
        if not 1 <= queries <= context:
            raise PlanError(f"sequence {s} has {queries} queries in a context of {context}")
        needed = -(-context // block_size)
        if len(table) < needed:
            raise PlanError(f"sequence {s} needs {needed} blocks for {context} tokens and has {len(table)}")
        # A copy: the caller goes on appending to its page tables while the step runs.
        ids = np.array(table[:needed], dtype=np.int64)
        if int(ids.min()) < 0:
            raise PlanError(f"sequence {s} names block {int(ids.min())}")
        tables.append(ids)

    starts = [context - queries for context, queries in zip(context_lens, query_lens, strict=True)]
    builder = _Builder(tables, [start // block_size for start in starts], block_size, cost, shared_pass)
    if tables:
        builder.run()
    own = tuple(
        Segment((s,), pending, context, segment_runs(table, pending, context, block_size))
        for s, (table, pending, context) in enumerate(zip(tables, builder.pending, context_lens, strict=True))
    )
    physical = sum(n.tokens for n in builder.shared) + sum(n.tokens for n in own)
    counters = PlanCounters(sum(context_lens), physical, builder.eligible, len(builder.shared))
    offsets = np.concatenate([[0], np.cumsum(np.asarray(query_lens, dtype=np.int64))])[:-1]
    return AttentionPlan(
        block_size=block_size,
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        query_starts=tuple(int(o) for o in offsets),
        tables=tuple(tables),
        shared=tuple(builder.shared),
        own=own,
        counters=counters,
    )


def segment_runs(table: IntArray, start: int, end: int, block_size: int) -> tuple[Run, ...]:
    """The maximal physically consecutive stretches that hold logical positions `[start, end)`."""
    if end <= start:
        return ()
    first, last = start // block_size, (end - 1) // block_size
    ids = table[first : last + 1]
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    edges = [0, *breaks.tolist(), len(ids)]
    runs: list[Run] = []
    for a, b in pairwise(edges):
        low = max(start, (first + a) * block_size)
        high = min(end, (first + b) * block_size)
        runs.append(Run(int(ids[a]) * block_size + low - (first + a) * block_size, high - low))
    return tuple(runs)


class _Builder:
    """Depth-first walk of the trie. `limits[s]`: whole blocks of `s` that lie before its first query."""

    def __init__(
        self, tables: list[IntArray], limits: list[int], block_size: int, cost: CostModel, shared_pass: bool
    ) -> None:
        self.tables, self.limits, self.block_size = tables, limits, block_size
        self.cost, self.shared_pass = cost, shared_pass
        self.shared: list[Segment] = []
        self.eligible = 0
        #: Per sequence: the first token that no shared segment covers.
        self.pending = [0] * len(tables)

    def run(self) -> None:
        # An explicit stack: the depth of the trie is the length of a page table at worst.
        stack = [(group, 0) for group in reversed(self._split(list(range(len(self.tables))), 0))]
        while stack:
            members, depth = stack.pop()
            end = self._common(members, depth)
            if end > depth:
                self._node(members, end)
            stack.extend((group, end) for group in reversed(self._split(members, end)))

    def _split(self, members: list[int], depth: int) -> list[list[int]]:
        """Group by the block at `depth`; members that have no shareable block there, and loners, drop out."""
        groups: dict[int, list[int]] = {}
        for s in members:
            if self.limits[s] > depth:
                groups.setdefault(int(self.tables[s][depth]), []).append(s)
        return [group for group in groups.values() if len(group) >= 2]

    def _common(self, members: list[int], depth: int) -> int:
        """How far all members name the same blocks, at most to the smallest limit."""
        end = min(self.limits[s] for s in members)
        first = self.tables[members[0]]
        for s in members[1:]:
            different = np.flatnonzero(first[depth:end] != self.tables[s][depth:end])
            if different.size:
                end = depth + int(different[0])
        return end

    def _node(self, members: list[int], end: int) -> None:
        self.eligible += 1
        # All members have the same pending start: a node above took all of them or none.
        start, stop = self.pending[members[0]], end * self.block_size
        if not self.shared_pass or not self.cost.worth(len(members), stop - start):
            return
        runs = segment_runs(self.tables[members[0]], start, stop, self.block_size)
        self.shared.append(Segment(tuple(members), start, stop, runs))
        for s in members:
            self.pending[s] = stop
