"""The block pool's accounts: who reads a block, how full it is, whether the tree knows it.

Life of a block::

                 allocate                     publish (full, accepted)
        FREE ───────────────▶ HELD, private ───────────────────────────▶ HELD, published
          ▲                        │    ▲                                   │        ▲
          │                        │    │ takeover                 last     │        │ a prompt
          │          last reader   │    │ (one new reader)         reader   │        │ matches it
          │          leaves        ▼    │                          leaves   ▼        │
          ├──────────────────── RETAINED, open tail            RETAINED, published ──┘
          │        evict / unlink       │                                   │
          └─────────────────────────────┴───────────────────────────────────┘

Only this class changes a reader count. A block is FREE only when nobody reads it, the tree does not
index it and no copy from or to it is in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.errors import IntegrityError
from engine.extents import FreeExtents

if TYPE_CHECKING:
    from engine.prefix_tree import Node
    from engine.sequence import Sequence


PUBLISHED, OPEN_TAIL, PINNED = 1, 2, 4


class BlockPool:
    """`num_blocks` blocks of `block_size` slots, their readers and their fill.

    readers[b]      the running sequences whose page table names block b (each at most once)
    soft[b]         stored page tables of open but idle conversations that name b; they prevent nothing
    filled[b]       accepted slots in b, counted from slot 0
    node[b]         where the prefix tree indexes b, if it does
    locks[b]        reasons to keep b although nobody reads it: a pin, a copy from or to it in flight
    generation[b]   counts how often b was freed, so that a stored table can tell a reused block

    kind[b]         0 not indexed, 1 published, 2 open tail; 4 is added where b is pinned
    origin[b]       where b began as a copy: source block, the source's generation then, slots copied

    The counters (`entries`, `held`, `held_filled`, `locked_retained`, `soft_entries`, `open_blocks`) are
    kept incrementally and recomputed from scratch by `engine.integrity.check`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.extents = FreeExtents(num_blocks)
        self.readers: list[set[Sequence]] = [set() for _ in range(num_blocks)]
        self.reader_count = np.zeros(num_blocks, dtype=np.int32)
        self.soft = np.zeros(num_blocks, dtype=np.int32)
        self.filled = [0] * num_blocks
        self.node: list[Node | None] = [None] * num_blocks
        self.locks = [0] * num_blocks
        self.kind = np.zeros(num_blocks, dtype=np.uint8)
        self.generation = np.zeros(num_blocks, dtype=np.int64)
        self.origin: dict[int, tuple[int, int, int]] = {}
        self.entries = 0
        self.held = 0
        self.held_filled = 0
        self.locked_retained = 0
        self.soft_entries = 0
        self.open_blocks = 0

    @property
    def free(self) -> int:
        """Number of empty blocks."""
        return self.extents.count

    @property
    def retained(self) -> int:
        """Number of blocks that nobody reads but that are not free (indexed, or a copy is in flight)."""
        return self.num_blocks - self.extents.count - self.held

    @property
    def allocatable(self) -> int:
        """Blocks that can be handed out now: the free ones and the retained ones that nothing locks.

        All of the latter can be reached leaf by leaf: whoever reads or locks a block also reads or locks
        its ancestors, so no unlocked block lies above a locked one.
        """
        return self.extents.count + self.retained - self.locked_retained

    def lock(self, block: int) -> None:
        """Keep `block` although nobody may read it. Balanced by `unlock`."""
        if block in self.extents:
            raise IntegrityError(f"block {block} is free and cannot be locked")
        self.locks[block] += 1
        if self.locks[block] == 1 and not self.readers[block]:
            self.locked_retained += 1

    def unlock(self, block: int) -> None:
        """Undo one `lock`; the caller then calls `free_if_unused`."""
        if not self.locks[block]:
            raise IntegrityError(f"block {block} is not locked")
        self.locks[block] -= 1
        if not self.locks[block] and not self.readers[block]:
            self.locked_retained -= 1

    def take(self, reader: Sequence, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Allocate `count` free blocks to `reader`; see `FreeExtents.take` for where they lie."""
        blocks = self.extents.take(count, after=after, room=room)
        for block in blocks:
            self.add_reader(block, reader)
        return blocks

    def add_reader(self, block: int, reader: Sequence) -> None:
        """`reader`'s page table now names `block`."""
        readers = self.readers[block]
        if reader in readers:
            raise IntegrityError(f"sequence {reader.id} would name block {block} twice")
        if block in self.extents:
            raise IntegrityError(f"block {block} is free and cannot be read")
        readers.add(reader)
        self.reader_count[block] += 1
        self.entries += 1
        if len(readers) == 1:
            self.held += 1
            self.held_filled += self.filled[block]
            self.locked_retained -= self.locks[block] > 0
            if not self.soft[block]:
                self.open_blocks += 1

    def drop_reader(self, block: int, reader: Sequence) -> None:
        """`reader`'s page table no longer names `block`; the caller then calls `free_if_unused`."""
        readers = self.readers[block]
        if reader not in readers:
            raise IntegrityError(f"sequence {reader.id} gave back block {block}, which it does not read")
        readers.remove(reader)
        self.reader_count[block] -= 1
        self.entries -= 1
        if not readers:
            self.held -= 1
            self.held_filled -= self.filled[block]
            self.locked_retained += self.locks[block] > 0
            if not self.soft[block]:
                self.open_blocks -= 1

    def set_filled(self, block: int, slots: int) -> None:
        """Slots 0 to `slots` of `block` hold accepted keys and values."""
        if self.readers[block]:
            self.held_filled += slots - self.filled[block]
        self.filled[block] = slots

    def add_soft(self, block: int, count: int = 1) -> None:
        """An idle conversation's stored page table names `block` (`count` −1: no longer)."""
        before = int(self.soft[block])
        if before + count < 0:
            raise IntegrityError(f"block {block} would have {before + count} soft readers")
        self.soft[block] = before + count
        self.soft_entries += count
        if not self.readers[block]:
            self.open_blocks += (before + count > 0) - (before > 0)

    def free_if_unused(self, block: int) -> bool:
        """Return `block` to the free extents if nothing refers to it any more."""
        if self.readers[block] or self.node[block] is not None or self.locks[block]:
            return False
        self.generation[block] += 1
        self.origin.pop(block, None)
        if self.soft[block]:
            self.add_soft(block, -int(self.soft[block]))
        self.filled[block] = 0
        self.extents.add(block)
        return True
