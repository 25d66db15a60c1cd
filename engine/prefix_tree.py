"""Which computed blocks can be used again, by the exact tokens and scopes that lead to them.

A node stands for one block under its parent: the path from the root spells the whole chain of
(scope, token) pairs. Children are found by comparing pairs, never by a digest, so there is nothing that
could collide. Three kinds of node::

    root ── [instructions 0] ── [instructions 1|doc 0] ── [doc 1] ── [doc 2]      published (full)
                                                             │  └──── [doc 2'…]    open tail (partly full)
                                                             └─────── [doc 3?]     pending: being computed

The tree knows nothing of page tables beyond reader counts, and never allocates: `engine.memory` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.blocks import OPEN_TAIL, PUBLISHED, BlockPool
from engine.errors import IntegrityError

if TYPE_CHECKING:
    from engine.sequence import Sequence as RunningSequence

Key = tuple[int, ...]


class Node:
    """One indexed block. `key` has `block_size` pairs (fewer: an open tail); `block` is -1 for the root
    and for pending nodes."""

    __slots__ = (
        "alive",
        "block",
        "children",
        "documents",
        "key",
        "last_used",
        "parent",
        "pending",
        "pins",
        "private",
        "producer",
        "tails",
    )

    def __init__(self, parent: Node | None, key: Key, block: int, private: bool) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.private = private
        self.documents: frozenset[str] = frozenset()
        #: first pair -> key -> node: a partial match looks only at children that share the first pair.
        self.children: dict[int, dict[Key, Node]] = {}
        self.tails: list[Node] = []
        self.pending: dict[Key, Node] = {}
        self.producer: RunningSequence | None = None
        self.last_used = 0
        self.pins: set[str] = set()
        self.alive = True

    def child(self, key: Key) -> Node | None:
        """The published child with exactly this key."""
        bucket = self.children.get(key[0])
        return None if bucket is None else bucket.get(key)

    @property
    def is_leaf(self) -> bool:
        """True where no other indexed block depends on this one."""
        return not self.children and not self.tails

    def chain(self) -> Iterator[Node]:
        """This node and its ancestors, the root left out."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


def common_prefix(key: Key, pairs: Sequence[int], start: int, end: int) -> int:
    """How many leading pairs of `key` equal `pairs[start:end]`."""
    limit = min(len(key), end - start)
    for i in range(limit):
        if key[i] != pairs[start + i]:
            return i
    return limit


class PrefixTree:
    """The index itself, its eviction order and its tags.

    document_bonus   by how many uses a document's block counts as more recent than a private one
    """

    def __init__(self, pool: BlockPool, document_bonus: int = 32) -> None:
        self.pool = pool
        self.root = Node(None, (), -1, False)
        self.document_bonus = document_bonus
        self.clock = 0
        self.version = 0
        self.by_document: dict[str, set[Node]] = {}
        self.pinned: set[Node] = set()
        self._heap: list[tuple[int, int, Node]] = []
        self._pushes = 0

    # -- looking ---------------------------------------------------------------------------------------

    def descend(self, pairs: Sequence[int], end: int, known: list[Node] | None = None) -> list[Node]:
        """Published nodes that spell a prefix of `pairs[:end]`, whole blocks only.

        known   what an earlier call found for the same pairs. It is brought up to date and returned: a
                node never outlives its ancestors, so the path is good up to its last node that is alive.
        """
        path: list[Node] = [] if known is None else known
        while path and not path[-1].alive:
            path.pop()
        size, node = self.pool.block_size, path[-1] if path else self.root
        for start in range(len(path) * size, end - size + 1, size):
            found = node.child(tuple(pairs[start : start + size]))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def best_partial(
        self, parent: Node, pairs: Sequence[int], start: int, end: int
    ) -> tuple[Node | None, int]:
        """The child or open tail of `parent` with the longest common prefix with `pairs[start:end]`.

        Returns it with the number of matching pairs, or `(None, 0)`. Among equals an open tail wins
        (it may be taken over without a copy), then the one used last.
        """
        if start >= end:
            return None, 0
        best: Node | None = None
        best_rank = (0, False, 0)
        candidates: list[Node] = [t for t in parent.tails if t.key[0] == pairs[start]]
        candidates.extend(parent.children.get(pairs[start], {}).values())
        for node in candidates:
            match = common_prefix(node.key, pairs, start, end)
            rank = (match, len(node.key) == match, node.last_used)
            if rank > best_rank:
                best, best_rank = node, rank
        return best, best_rank[0]

    def pending_below(self, parent: Node, pairs: Sequence[int], start: int, end: int) -> Node | None:
        """The pending node that would continue `parent` with the whole block `pairs[start:…]`."""
        size = self.pool.block_size
        if start + size > end or not parent.pending:
            return None
        return parent.pending.get(tuple(pairs[start : start + size]))

    def walk(self) -> Iterator[Node]:
        """All published nodes and open tails, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node is not self.root:
                yield node
            for bucket in node.children.values():
                stack.extend(bucket.values())
            stack.extend(node.tails)

    # -- changing --------------------------------------------------------------------------------------

    def insert(self, parent: Node, key: Key, block: int, private: bool, documents: frozenset[str]) -> Node:
        """Index `block` as a child of `parent`; an open tail where the key is shorter than a block."""
        if not parent.alive:
            raise IntegrityError("a block cannot be indexed under one that was removed")
        node = Node(parent, key, block, private or parent.private)
        node.last_used = self.clock
        if len(key) == self.pool.block_size:
            bucket = parent.children.setdefault(key[0], {})
            if key in bucket:
                raise IntegrityError(f"blocks {bucket[key].block} and {block} would be indexed for one chain")
            bucket[key] = node
            waiting = parent.pending.pop(key, None)
            if waiting is not None:
                node.pending = waiting.pending
                for below in node.pending.values():
                    below.parent = node
                waiting.alive = False
                self._untag(waiting)
        else:
            parent.tails.append(node)
        self.pool.node[block] = node
        self.pool.kind[block] = PUBLISHED if len(key) == self.pool.block_size else OPEN_TAIL
        self._tag(node, documents)
        self.version += 1
        return node

    def add_pending(
        self, parent: Node, key: Key, private: bool, documents: frozenset[str], producer: RunningSequence
    ) -> Node | None:
        """Announce that `producer` is computing this block; None where somebody does already."""
        if key in parent.pending or parent.child(key) is not None:
            return None
        node = Node(parent, key, -1, private or parent.private)
        node.producer = producer
        parent.pending[key] = node
        self._tag(node, documents)
        return node

    def take_pending(self, parent: Node, key: Key, successor: RunningSequence) -> Node | None:
        """`successor` computes this pending block from now on; None where nobody has announced it."""
        node = parent.pending.get(key)
        if node is not None:
            if node.producer is not None:
                node.producer.pending.remove(node)
            node.producer = successor
        return node

    def drop_pending(self, node: Node) -> None:
        """Withdraw a pending node and all pending ones below it."""
        stack = [node]
        if node.parent is not None and node.parent.pending.get(node.key) is node:
            del node.parent.pending[node.key]
        while stack:
            gone = stack.pop()
            stack.extend(gone.pending.values())
            gone.pending = {}
            gone.alive = False
            self._untag(gone)
        self.version += 1

    def remove(self, node: Node) -> None:
        """Take one leaf out of the index (its block is then freed or kept by the caller)."""
        parent = node.parent
        if parent is None or not node.is_leaf:
            raise IntegrityError("only a leaf of the tree can be removed by itself")
        self._detach(node)
        for below in list(node.pending.values()):
            self.drop_pending(below)
        self._forget(node)
        self.consider(parent)

    def unlink(self, node: Node) -> list[Node]:
        """Take `node` and everything below it out of the index at once; returns them, parents first."""
        parent = node.parent
        if parent is None:
            raise IntegrityError("the root cannot be unlinked")
        if node.block < 0:
            self.drop_pending(node)
            return []
        self._detach(node)
        removed: list[Node] = []
        stack = [node]
        while stack:
            gone = stack.pop()
            for bucket in gone.children.values():
                stack.extend(bucket.values())
            stack.extend(gone.tails)
            for below in list(gone.pending.values()):
                self.drop_pending(below)
            gone.children, gone.tails = {}, []
            removed.append(gone)
            self._forget(gone)
        self.consider(parent)
        return removed

    def _detach(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            return
        if len(node.key) == self.pool.block_size:
            bucket = parent.children[node.key[0]]
            del bucket[node.key]
            if not bucket:
                del parent.children[node.key[0]]
        else:
            parent.tails.remove(node)

    def _forget(self, node: Node) -> None:
        node.alive = False
        self.pool.node[node.block] = None
        self.pool.kind[node.block] = 0
        self._untag(node)
        self.version += 1

    def tag(self, node: Node, document: str) -> None:
        """`node` also holds text of `document`."""
        if document not in node.documents:
            node.documents |= {document}
            self.by_document.setdefault(document, set()).add(node)

    def _tag(self, node: Node, documents: frozenset[str]) -> None:
        node.documents = documents
        for document in documents:
            self.by_document.setdefault(document, set()).add(node)

    def _untag(self, node: Node) -> None:
        for document in node.documents:
            nodes = self.by_document.get(document)
            if nodes is not None:
                nodes.discard(node)
                if not nodes:
                    del self.by_document[document]

    # -- eviction --------------------------------------------------------------------------------------

    def touch(self, node: Node) -> None:
        """`node` was used now."""
        node.last_used = self.clock

    def evictable(self, node: Node) -> bool:
        """True where the node's block may be given to somebody else right now."""
        return (
            node.alive
            and node.block >= 0
            and node.is_leaf
            and not self.pool.readers[node.block]
            and not self.pool.locks[node.block]
        )

    def consider(self, node: Node) -> None:
        """Put `node` into the eviction order if it may be evicted; called when that may have changed."""
        if node.parent is not None and self.evictable(node):
            if len(self._heap) > 4 * self.pool.num_blocks + 64:
                # Entries of nodes that were used again are dropped lazily; without evictions they pile up.
                self._heap = [entry for entry in self._heap if self._current(entry)]
                heapq.heapify(self._heap)
            self._pushes += 1
            heapq.heappush(self._heap, (self._rank(node), self._pushes, node))

    def queued(self) -> set[int]:
        """`id` of each node that has a valid place in the eviction order, for the integrity check."""
        return {id(entry[2]) for entry in self._heap if self._current(entry)}

    def _current(self, entry: tuple[int, int, Node]) -> bool:
        return self.evictable(entry[2]) and entry[0] == self._rank(entry[2])

    def _rank(self, node: Node) -> int:
        return node.last_used + (0 if node.private else self.document_bonus)

    def next_victim(self) -> Node | None:
        """The leaf to evict next, or None. It stays in the tree until `remove` is called."""
        while self._heap:
            if self._current(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None
