"""A plain model of what may and what must be shared, written without a look at the engine's own index.

Two sets of chains, as nested dicts of (scope, token) pairs:

    accepted    every text that a completed step has accepted and no deletion has touched. Nobody may ever
                be given a token that is not in it: the upper bound of a hit.
    published   the whole blocks of it. While nothing has been evicted, every prompt must get at least its
                longest common prefix with these: the lower bound.

The oracle also keeps the page tables that open conversations had last, by the number of times each block
was freed, and computes all fair shares of both views in whole numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from engine.sequence import Sequence, State

_DOCUMENTS = "documents"
#: Divisible by every number of readers that occurs.
WHOLE = math.lcm(*range(1, 49))


class Chains:
    """A set of chains of units (a pair, or a block of pairs), each unit tagged with documents."""

    def __init__(self) -> None:
        self.root: dict[Any, dict[Any, Any]] = {}

    def add(self, units: Iterable[Any], documents: Iterable[frozenset[str]]) -> None:
        node = self.root
        for unit, tags in zip(units, documents, strict=True):
            node = node.setdefault(unit, {_DOCUMENTS: frozenset()})
            node[_DOCUMENTS] |= tags

    def remove(self, document: str) -> None:
        stack = [self.root]
        while stack:
            node = stack.pop()
            for unit in [u for u in node if u is not _DOCUMENTS]:
                if document in node[unit][_DOCUMENTS]:
                    del node[unit]
                else:
                    stack.append(node[unit])

    def longest(self, units: Iterable[Any]) -> tuple[int, dict[Any, Any]]:
        """Number of leading units that are in the set, and the node behind them."""
        node, found = self.root, 0
        for unit in units:
            if unit not in node:
                break
            node, found = node[unit], found + 1
        return found, node


class Oracle:
    def __init__(self, block_size: int, sharing: bool) -> None:
        self.size, self.sharing = block_size, sharing
        self.accepted, self.published = Chains(), Chains()
        self.limit: dict[int, int] = {}
        #: conversation -> sequence id -> [(block, times it was freed)]
        self.stored: dict[str, dict[int, list[tuple[int, int]]]] = {}
        self.reuse = 0

    def blocks(self, sequence: Sequence, end: int) -> list[tuple[int, ...]]:
        size = self.size
        return [tuple(sequence.pairs[at : at + size]) for at in range(0, end - size + 1, size)]

    def accept(self, sequence: Sequence, end: int) -> None:
        """A completed step has computed `sequence` up to `end`."""
        if not self.sharing:
            return
        end = min(end, self.limit.get(sequence.id, end))
        self.accepted.add(sequence.pairs[:end], (sequence.documents_in(at, at + 1) for at in range(end)))
        whole = self.blocks(sequence, end)
        tags = (sequence.documents_in(i * self.size, (i + 1) * self.size) for i in range(len(whole)))
        self.published.add(whole, tags)

    def unlink(self, document: str, live: Iterable[Sequence]) -> None:
        """From now on nothing that was computed of `document`, or behind it, may be hit."""
        before = {s: self.published.longest(self.blocks(s, s.computed))[0] for s in live}
        self.accepted.remove(document)
        self.published.remove(document)
        for sequence, blocks in before.items():
            limits = [d.start for d in sequence.documents if d.document == document]
            left = self.published.longest(self.blocks(sequence, sequence.computed))[0]
            if left < blocks:
                limits.append(left * self.size)
            if limits:
                self.limit[sequence.id] = min([*limits, self.limit.get(sequence.id, limits[0])])

    def bounds(self, sequence: Sequence) -> tuple[int, int]:
        """(must, may): the tokens that are hit at least while nothing was evicted, and at most."""
        may = self.accepted.longest(sequence.pairs)[0]
        whole = self.blocks(sequence, len(sequence))
        found, node = self.published.longest(whole)
        rest = sequence.pairs[found * self.size :]
        partial = 0
        for unit in node:
            if unit is not _DOCUMENTS:
                same = 0
                for a, b in zip(unit, rest, strict=False):
                    if a != b:
                        break
                    same += 1
                partial = max(partial, same)
        return found * self.size + partial, may

    def check_sharing(self, live: Iterable[Sequence]) -> None:
        """Readers of one block agree on everything up to its end; equal whole blocks are one block."""
        first: dict[int, Sequence] = {}
        where: dict[tuple[int, ...], int] = {}
        for s in live:
            for index, block in enumerate(s.table):
                other = first.setdefault(block, s)
                assert other.table[index] == block, f"block {block} lies at two places"
                valid = min(s.computed, other.computed, (index + 1) * self.size)
                assert s.pairs[:valid] == other.pairs[:valid], f"block {block} serves two different texts"
            if self.sharing and s.state is State.RUNNING:
                limit = min(s.computed, self.limit.get(s.id, s.computed))
                for index in range(limit // self.size):
                    chain = tuple(s.pairs[: (index + 1) * self.size])
                    block = where.setdefault(chain, s.table[index])
                    assert block == s.table[index], f"one chain lies in blocks {block} and {s.table[index]}"

    def shares(self, running: Iterable[Sequence], freed: list[int]) -> list[tuple[dict[str, int], int]]:
        """For the running and the open view: fair shares in 1/WHOLE blocks by conversation, and the number
        of blocks that the view names."""
        tables = [(s.conversation, list(s.table)) for s in running]
        stored = [
            (name, [block for block, times in entries if freed[block] == times])
            for name, kept in self.stored.items()
            for entries in kept.values()
        ]
        views = []
        for view in (tables, tables + stored):
            readers = Counter(block for _, table in view for block in table)
            shares: dict[str, int] = {}
            for name, table in view:
                if table:
                    shares[name] = shares.get(name, 0) + sum(WHOLE // readers[b] for b in table)
            views.append((shares, len(readers)))
        return views
