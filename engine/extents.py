"""Free blocks of the pool as extents, so that consecutive logical blocks tend to be consecutive in memory.

A run of physically consecutive blocks is read as one view without a copy, which is what makes the shared
pass cheap on a CPU. Nothing depends on adjacency for being right: any free block is acceptable.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from engine.errors import IntegrityError


class FreeExtents:
    """The set of free block ids, kept as maximal runs `[start, start + length)`.

    Every call is O(log extents) apart from the list moves of `bisect`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.count = 0
        self._length_at: dict[int, int] = {}  # start -> length
        self._start_before: dict[int, int] = {}  # end (exclusive) -> start
        self._by_length: list[tuple[int, int]] = []  # (length, start), sorted
        self._free = bytearray(num_blocks)
        if num_blocks:
            self._insert(0, num_blocks)
            self._free[:] = b"\x01" * num_blocks
            self.count = num_blocks

    def __contains__(self, block: int) -> bool:
        return 0 <= block < self.num_blocks and self._free[block] == 1

    def extents(self) -> list[tuple[int, int]]:
        """All `(start, length)` in address order."""
        return sorted(self._length_at.items())

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_length, (length, start))

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length

    def add(self, block: int) -> None:
        """Give one block back. Raises `IntegrityError` where it is free already."""
        if not 0 <= block < self.num_blocks:
            raise IntegrityError(f"there is no block {block} in a pool of {self.num_blocks}")
        if self._free[block]:
            raise IntegrityError(f"block {block} was freed twice")
        self._free[block] = 1
        self.count += 1
        start, length = block, 1
        if block in self._start_before:
            start = self._start_before[block]
            length += self._remove(start)
        if block + 1 in self._length_at:
            length += self._remove(block + 1)
        self._insert(start, length)

    def _cut(self, start: int, count: int) -> range:
        """Take the first `count` blocks of the extent that begins at `start`."""
        rest = self._remove(start) - count
        if rest:
            self._insert(start + count, rest)
        self._free[start : start + count] = bytes(count)
        self.count -= count
        return range(start, start + count)

    def take(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Take `count` blocks, in as few runs as can be had.

        after   a block whose successors are preferred (the end of the sequence's last run)
        room    blocks that the same sequence will want next: a new run is placed where they fit behind it

        Raises `IntegrityError` where fewer than `count` are free: callers check first.
        """
        if count > self.count:
            raise IntegrityError(f"{count} blocks were asked for and {self.count} are free")
        taken: list[int] = []
        if after is not None and after + 1 in self._length_at and count:
            taken.extend(self._cut(after + 1, min(count, self._length_at[after + 1])))
        while len(taken) < count:
            want = count - len(taken)
            # Best fit for the whole wish, else for what is needed now, else the largest there is.
            for size in (want + room, want):
                at = bisect_left(self._by_length, (size, -1))
                if at < len(self._by_length):
                    break
            else:
                at = len(self._by_length) - 1
            length, start = self._by_length[at]
            taken.extend(self._cut(start, min(want, length)))
        return taken
