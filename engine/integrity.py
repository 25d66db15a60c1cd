"""Recompute every account of the memory from the page tables and compare. Used by tests after every
operation and by the service when it is idle."""

from __future__ import annotations

from collections import Counter

from engine.blocks import OPEN_TAIL, PINNED, PUBLISHED
from engine.errors import IntegrityError
from engine.memory import KVMemory
from engine.prefix_tree import Node


def check(memory: KVMemory) -> None:
    """Raise `IntegrityError` naming the first invariant that does not hold.

    - free + retained + held = N, each free block free in every respect
    - reader counts equal the page tables; counters equal their sums
    - tree: parent links, exact keys, one node a block, tags; no node points at a free block
    - eviction order: every leaf that may be evicted has its place in it, so no memory is out of reach
    - pending nodes: announced by a running sequence that knows them, under a parent that is alive
    - a partly filled or unaccepted block is never published; a published prefix matches its readers
    - whoever reads or locks a block also reads or locks the blocks in front of it
    - pins: their chains are whole, at most half the pool
    """
    pool, tree, size = memory.pool, memory.tree, memory.block_size
    readers: Counter[int] = Counter()
    for sequence in memory.live:
        _require(len(set(sequence.table)) == len(sequence.table), f"{sequence} names a block twice")
        _require(
            sequence.computed <= len(sequence.table) * size,
            f"{sequence} has computed more than it has blocks for",
        )
        _require(len(sequence.nodes) * size <= sequence.computed, f"{sequence} published unaccepted slots")
        for index, block in enumerate(sequence.table):
            readers[block] += 1
            _require(sequence in pool.readers[block], f"{sequence} is no reader of its block {block}")
            valid = min(size, sequence.computed - index * size)
            _require(pool.filled[block] >= valid, f"block {block} has fewer slots than {sequence} computed")
        for index, node in enumerate(sequence.nodes):
            _require(node.alive, f"{sequence} holds a removed node")
            _require(
                node.block == sequence.table[index], f"{sequence}: node and page table differ at {index}"
            )
            key = tuple(sequence.pairs[index * size : (index + 1) * size])
            _require(node.key == key, f"{sequence} reads block {node.block} of another chain")
        if sequence.table_cache is not None:
            _require(sequence.table_cache.tolist() == sequence.table, f"{sequence}: stale page table array")
        _require(sequence.promised >= 0, f"{sequence} was promised {sequence.promised} blocks")
    indexed: set[int] = set()
    queued = tree.queued()
    _check_pending(memory, tree.root)
    for node in tree.walk():
        _check_node(memory, node)
        _check_pending(memory, node)
        _require(
            not tree.evictable(node) or id(node) in queued, f"block {node.block} is missing in eviction order"
        )
        _require(node.block not in indexed, f"block {node.block} is indexed twice")
        indexed.add(node.block)
    free = 0
    for block in range(pool.num_blocks):
        _require(len(pool.readers[block]) == readers[block], f"block {block} has readers that do not hold it")
        _require(int(pool.reader_count[block]) == readers[block], f"block {block}: wrong reader count")
        _require(
            (pool.node[block] is not None) == (block in indexed), f"block {block}: index and tree differ"
        )
        if block in pool.extents:
            free += 1
            unused = not (readers[block] or block in indexed or pool.locks[block] or pool.soft[block])
            _require(unused and pool.filled[block] == 0, f"free block {block} is in use")
        else:
            used = readers[block] or block in indexed or pool.locks[block]
            _require(bool(used), f"block {block} is neither free nor used: it leaked")
    _check_counters(memory, readers, free)
    _check_pins(memory)


def _check_node(memory: KVMemory, node: Node) -> None:
    pool, tree, size = memory.pool, memory.tree, memory.block_size
    parent = node.parent
    if parent is None:
        raise IntegrityError("the root was met below itself")
    full = len(node.key) == size
    known = parent.child(node.key) is node if full else node in parent.tails
    _require(known and node.alive, f"block {node.block} is not reachable from its parent")
    _require(0 < len(node.key) <= size and pool.filled[node.block] == len(node.key), f"fill of {node.block}")
    kind = (PUBLISHED if full else OPEN_TAIL) | (PINNED if node.pins else 0)
    _require(int(pool.kind[node.block]) == kind, f"block {node.block} is shown as another kind than it is")
    _require(pool.node[node.block] is node, f"block {node.block} points at another node")
    _require(full or (node.is_leaf and not pool.readers[node.block]), f"open tail {node.block} is read")
    _require(node.private or not parent.private, f"block {node.block} turned public behind private text")
    if parent is not tree.root:
        missing = pool.readers[node.block] - pool.readers[parent.block]
        _require(not missing, f"block {node.block} is read without the one in front of it")
        kept = pool.readers[parent.block] or pool.locks[parent.block] or not pool.locks[node.block]
        _require(bool(kept), f"block {node.block} is locked and the one in front of it is not kept")
    for document in node.documents:
        _require(node in tree.by_document.get(document, ()), f"block {node.block} lost its document")


def _check_pending(memory: KVMemory, parent: Node) -> None:
    for key, node in parent.pending.items():
        producer = node.producer
        _require(node.alive and node.parent is parent and node.key == key, "a pending node is out of place")
        _require(parent.child(key) is None, f"block {node.key[:2]}… is pending and published")
        _require(
            producer is not None and producer in memory.live and node in producer.pending,
            f"nobody computes a pending node ({producer})",
        )
        _check_pending(memory, node)


def _check_counters(memory: KVMemory, readers: Counter[int], free: int) -> None:
    pool = memory.pool
    held = len([b for b, n in readers.items() if n])
    _require(pool.free == free, f"{pool.free} blocks are counted free and {free} are")
    _require(pool.held == held, f"{pool.held} blocks are counted held and {held} are")
    _require(pool.free + pool.retained + pool.held == pool.num_blocks, "free + retained + held is not N")
    _require(pool.entries == sum(readers.values()), "page table entries are miscounted")
    filled = sum(pool.filled[b] for b in readers)
    _require(pool.held_filled == filled, f"{pool.held_filled} filled slots are counted and {filled} are")
    _require(0 <= filled <= held * pool.block_size, "utilisation lies outside 0 to 1")
    locked = sum(1 for b in range(pool.num_blocks) if pool.locks[b] and not readers[b])
    _require(pool.locked_retained == locked, "locked retained blocks are miscounted")
    _require(pool.soft_entries == int(pool.soft.sum()), "soft readers are miscounted")
    opened = sum(1 for b in range(pool.num_blocks) if readers[b] or pool.soft[b])
    _require(pool.open_blocks == opened, "blocks of open conversations are miscounted")
    _require(memory.promised == sum(s.promised for s in memory.live), "promised blocks are miscounted")
    starts = [start for start, _ in pool.extents.extents()]
    _require(sum(n for _, n in pool.extents.extents()) == free and len(set(starts)) == len(starts), "extents")


def _check_pins(memory: KVMemory) -> None:
    tree, pool = memory.tree, memory.pool
    _require(len(tree.pinned) <= pool.num_blocks // 2, "more than half the pool is pinned")
    for node in tree.pinned:
        _require(node.alive and bool(node.pins) and pool.locks[node.block] > 0, f"pin of block {node.block}")
        _require(not node.private, f"private block {node.block} is pinned")
        parent = node.parent
        _require(
            parent is tree.root or parent in tree.pinned, f"block {node.block} is pinned without its chain"
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
