"""The prefix tree as a picture: chains drawn as one node each, at most so many of them. No torch.

    root ── [instructions ×4] ── [document A ×40] ─┬─ [question, answer ×6]
                            │                      └─ [question, answer ×3]
                            └─── [document B ×25]

Blocks of a chain are joined as long as each has one successor with the same documents and readers, so
that a picture has as many nodes as there are places where something changes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from engine.memory import KVMemory
from engine.prefix_tree import Node


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One chain of indexed blocks.

    parent          index of the chain it continues in `TreePicture.nodes`, -1 at the root
    blocks          its blocks, from the root on; `tokens` of their slots are filled
    readers         running page tables that name each of its blocks; `open_readers` counts stored ones too
    documents       ids of the documents whose text it holds
    private         only one account may reuse it
    copied          how many of its blocks began as a copy of another's first slots
    below           indexed blocks of it and of everything behind it
    left_out        indexed blocks behind it that the picture does not show
    """

    parent: int
    blocks: tuple[int, ...]
    tokens: int
    readers: int
    open_readers: int
    documents: frozenset[str]
    private: bool
    open_tail: bool
    pinned: bool
    copied: int
    below: int = 0
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class TreePicture:
    """`nodes`, parents first. `blocks`: all that the tree indexes; `left_out` of them hang on the root and
    are not shown (those behind a shown node are counted there)."""

    nodes: tuple[TreeNode, ...]
    blocks: int
    left_out: int


class _Chains:
    """Walks the tree once; reader counts are read as lists, which is much faster one by one."""

    def __init__(self, memory: KVMemory) -> None:
        pool = memory.pool
        self.filled, self.origin = pool.filled, pool.origin
        self.size = pool.block_size
        self.running: list[int] = pool.reader_count.tolist()
        self.opened: list[int] = (pool.reader_count + pool.soft).tolist()
        self.found: list[TreeNode] = []
        stack = [(child, -1) for child in reversed(_children(memory.tree.root))]
        while stack:
            node, parent = stack.pop()
            index = len(self.found)
            rest = self._chain(node, parent)
            stack.extend((child, index) for child in reversed(rest))

    def _alike(self, a: Node, b: Node) -> bool:
        return (
            a.documents == b.documents
            and self.running[a.block] == self.running[b.block]
            and self.opened[a.block] == self.opened[b.block]
            and a.private == b.private
            and bool(a.pins) == bool(b.pins)
            and len(b.key) == self.size
        )

    def _chain(self, first: Node, parent: int) -> list[Node]:
        """Add the chain that begins with `first`; returns what follows it."""
        blocks, last = [first.block], first
        following = _children(first)
        while len(following) == 1 and self._alike(last, following[0]):
            last = following[0]
            blocks.append(last.block)
            following = _children(last)
        self.found.append(
            TreeNode(
                parent=parent,
                blocks=tuple(blocks),
                tokens=sum(self.filled[b] for b in blocks),
                readers=self.running[first.block],
                open_readers=self.opened[first.block],
                documents=first.documents,
                private=first.private,
                open_tail=len(first.key) < self.size,
                pinned=bool(first.pins),
                copied=sum(b in self.origin for b in blocks),
            )
        )
        return following


def _children(node: Node) -> list[Node]:
    return [child for bucket in node.children.values() for child in bucket.values()] + node.tails


def picture(memory: KVMemory, limit: int = 200) -> TreePicture:
    """The tree now, as at most `limit` chains: those with most behind them. Needs a memory at rest."""
    if limit < 1:
        raise ValueError(f"a picture needs at least one node, got limit={limit}")
    found = _Chains(memory).found
    below = [len(node.blocks) for node in found]
    children: list[list[int]] = [[] for _ in found]
    roots: list[int] = []
    for index in range(len(found) - 1, -1, -1):
        parent = found[index].parent
        if parent >= 0:
            below[parent] += below[index]
            children[parent].append(index)
        else:
            roots.append(index)
    # Always the widest chain whose parent is shown: a parent is at least as wide as what is behind it.
    candidates = [(-below[index], index) for index in roots]
    heapq.heapify(candidates)
    kept: list[int] = []
    while candidates and len(kept) < limit:
        _, index = heapq.heappop(candidates)
        kept.append(index)
        for child in children[index]:
            heapq.heappush(candidates, (-below[child], child))
    kept.sort()
    place = {index: number for number, index in enumerate(kept)}
    nodes = tuple(
        replace(
            found[index],
            parent=place[found[index].parent] if found[index].parent >= 0 else -1,
            below=below[index],
            left_out=sum(below[child] for child in children[index] if child not in place),
        )
        for index in kept
    )
    total = sum(below[index] for index in roots)
    return TreePicture(nodes, total, sum(below[index] for index in roots if index not in place))
