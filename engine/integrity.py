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
        _require(len(set(sequence.table)) == len(sequence.table), "{} names a block twice", sequence)
        _require(
            sequence.computed <= len(sequence.table) * size,
            "{} has computed more than it has blocks for",
            sequence,
        )
        _require(len(sequence.nodes) * size <= sequence.computed, "{} published unaccepted slots", sequence)
        for index, block in enumerate(sequence.table):
            readers[block] += 1
            _require(sequence in pool.readers[block], "{} is no reader of its block {}", sequence, block)
            valid = min(size, sequence.computed - index * size)
            _require(
                pool.filled[block] >= valid, "block {} has fewer slots than {} computed", block, sequence
            )
        for index, node in enumerate(sequence.nodes):
            _require(node.alive, "{} holds a removed node", sequence)
            _require(
                node.block == sequence.table[index], "{}: node and page table differ at {}", sequence, index
            )
            key = tuple(sequence.pairs[index * size : (index + 1) * size])
            _require(node.key == key, "{} reads block {} of another chain", sequence, node.block)
        if sequence.table_cache is not None:
            _require(sequence.table_cache.tolist() == sequence.table, "{}: stale page table array", sequence)
        _require(sequence.promised >= 0, "{} was promised {} blocks", sequence, sequence.promised)
    indexed: set[int] = set()
    queued = tree.queued()
    _check_pending(memory, tree.root)
    for node in tree.walk():
        _check_node(memory, node)
        _check_pending(memory, node)
        _require(
            not tree.evictable(node) or id(node) in queued,
            "block {} is missing in eviction order",
            node.block,
        )
        _require(node.block not in indexed, "block {} is indexed twice", node.block)
        indexed.add(node.block)
    free = 0
    for block in range(pool.num_blocks):
        _require(
            len(pool.readers[block]) == readers[block], "block {} has readers that do not hold it", block
        )
        _require(int(pool.reader_count[block]) == readers[block], "block {}: wrong reader count", block)
        _require(
            (pool.node[block] is not None) == (block in indexed), "block {}: index and tree differ", block
        )
        if block in pool.extents:
            free += 1
            unused = not (readers[block] or block in indexed or pool.locks[block] or pool.soft[block])
            _require(unused and pool.filled[block] == 0, "free block {} is in use", block)
        else:
            used = readers[block] or block in indexed or pool.locks[block]
            _require(bool(used), "block {} is neither free nor used: it leaked", block)
    _check_counters(memory, readers, free)
    _check_pins(memory)


def _check_node(memory: KVMemory, node: Node) -> None:
    pool, tree, size = memory.pool, memory.tree, memory.block_size
    parent = node.parent
    if parent is None:
        raise IntegrityError("the root was met below itsel")
    full = len(node.key) == size
    known = parent.child(node.key) is node if full else node in parent.tails
    _require(known and node.alive, f"block {node.block} is not reachable from its parent")
    _require(0 < len(node.key) <= size and pool.filled[node.block] == len(node.key), "fill of {}", node.block)
    kind = (PUBLISHED if full else OPEN_TAIL) | (PINNED if node.pins else 0)
    _require(int(pool.kind[node.block]) == kind, "block {} is shown as another kind than it is", node.block)
    _require(pool.node[node.block] is node, "block {} points at another node", node.block)
    _require(full or (node.is_leaf and not pool.readers[node.block]), "open tail {} is read", node.block)
    _require(node.private or not parent.private, "block {} turned public behind private text", node.block)
    if parent is not tree.root:
        missing = pool.readers[node.block] - pool.readers[parent.block]
        _require(not missing, "block {} is read without the one in front of it", node.block)
        kept = pool.readers[parent.block] or pool.locks[parent.block] or not pool.locks[node.block]
        _require(bool(kept), "block {} is locked and the one in front of it is not kept", node.block)
    for document in node.documents:
        _require(node in tree.by_document.get(document, ()), "block {} lost its document", node.block)


def _check_pending(memory: KVMemory, parent: Node) -> None:
    for key, node in parent.pending.items():
        producer = node.producer
        _require(node.alive and node.parent is parent and node.key == key, "a pending node is out of place")
        _require(parent.child(key) is None, "block {}… is pending and published", node.key[:2])
        _require(
            producer is not None and producer in memory.live and node in producer.pending,
            "nobody computes a pending node ({})",
            producer,
        )
        limit = None if producer is None else producer.index_limit
        end = sum(1 for _ in node.chain()) * memory.block_size
        _require(limit is None or end <= limit, "a pending node lies behind a deleted document")
        _check_pending(memory, node)


def _check_counters(memory: KVMemory, readers: Counter[int], free: int) -> None:
    pool = memory.pool
    held = len([b for b, n in readers.items() if n])
    _require(pool.free == free, "{} blocks are counted free and {} are", pool.free, free)
    _require(pool.held == held, "{} blocks are counted held and {} are", pool.held, held)
    _require(pool.free + pool.retained + pool.held == pool.num_blocks, "free + retained + held is not N")
    _require(pool.entries == sum(readers.values()), "page table entries are miscounted")
    filled = sum(pool.filled[b] for b in readers)
    _require(pool.held_filled == filled, "{} filled slots are counted and {} are", pool.held_filled, filled)
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
        _require(node.alive and bool(node.pins) and pool.locks[node.block] > 0, "pin of block {}", node.block)
        _require(not node.private, "private block {} is pinned", node.block)
        parent = node.parent
        _require(
            parent is tree.root or parent in tree.pinned, "block {} is pinned without its chain", node.block
        )


def _require(holds: bool, message: str, *values: object) -> None:
    if not holds:  # the message is put together only now: a check of a large pool makes many
        raise IntegrityError(message.format(*values))
