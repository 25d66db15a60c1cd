"""What the memory holds of each document, found in one walk over the prefix tree. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory import KVMemory
from engine.prefix_tree import Node


@dataclass(slots=True)
class DocumentMemory:
    """One document in memory.

    blocks          indexed blocks that hold text of it
    behind          indexed blocks that go when it is unlinked: these, and what was computed behind them
    held            those of `behind` that a running page table names: they go with their last reader
    running         running page tables that read it
    open_readers    these, and the stored ones of open conversations
    pinned          blocks that are kept for it, common ancestors included
    """

    blocks: int = 0
    behind: int = 0
    held: int = 0
    running: int = 0
    open_readers: int = 0
    pinned: int = 0
    #: It is to be kept, whether or not any of it has been computed yet.
    kept: bool = False


def document_memory(memory: KVMemory) -> dict[str, DocumentMemory]:
    """Every document of which something is in memory, or which is pinned, by id. Needs a memory at rest.

    A page table goes down one path of the tree, so where a path meets a document first, its readers are
    the document's.
    """
    pool = memory.pool
    running: list[int] = pool.reader_count.tolist()
    opened: list[int] = (pool.reader_count + pool.soft).tolist()
    found = {id: DocumentMemory(kept=True) for id in memory.pinned_documents}
    for node in memory.tree.pinned:
        for id in node.pins:
            found.setdefault(id, DocumentMemory(kept=True)).pinned += 1
    nothing: frozenset[str] = frozenset()
    stack: list[tuple[Node, frozenset[str]]] = [(child, nothing) for child in _children(memory.tree.root)]
    while stack:
        node, above = stack.pop()
        here = above | node.documents
        for id in node.documents:
            entry = found.setdefault(id, DocumentMemory())
            entry.blocks += 1
            if id not in above:
                entry.running += running[node.block]
                entry.open_readers += opened[node.block]
        for id in here:
            found[id].behind += 1
            found[id].held += running[node.block] > 0
        stack.extend((child, here) for child in _children(node))
    return found


def _children(node: Node) -> list[Node]:
    return [child for bucket in node.children.values() for child in bucket.values()] + node.tails
