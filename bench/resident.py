"""Where a process's resident memory lies, as the kernel counts it: KV pool, mapped files, everything else.

The pool takes its pages from the system when they are first written, so a server's resident memory grows
until every block has been used once, whatever else it does. Only what lies beside it can tell of a leak.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernels import huge_pages


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes. `pool_mapping`: size of the mapping that the pool was found in (0: in none); the nearer to the
    pool's own size, the surer that nothing else is counted as the pool."""

    pool: int
    files: int
    other: int
    pool_mapping: int

    @property
    def total(self) -> int:
        return self.pool + self.files + self.other

    @property
    def beside_pool(self) -> int:
        """What a leak would show in."""
        return self.files + self.other


def resident(process: int, pool_bytes: int) -> Resident:
    """Look at a process of this user's (Linux). Raises OSError where it has gone."""
    return parsed(Path(f"/proc/{process}/smaps").read_text(encoding="utf-8", errors="replace"), pool_bytes)


def parsed(smaps: str, pool_bytes: int) -> Resident:
    """The same from the text of `/proc/PID/smaps`.

    The pool is one allocation, so it lies in one anonymous mapping: the smallest that can hold it. Where it
    is on huge pages, what of it fills whole ones is a mapping of its own, and the two ends are in others.
    """
    anonymous: list[tuple[int, int]] = []
    files, size, named = 0, 0, False
    for line in smaps.splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            begin, end = fields[0].split("-")
            size, named = int(end, 16) - int(begin, 16), len(fields) > 5 and fields[5].startswith("/")
        elif fields[0] == "Rss:":
            if named:
                files += int(fields[1]) * 1024
            else:
                anonymous.append((size, int(fields[1]) * 1024))
    least = pool_bytes - 2 * huge_pages.SIZE if pool_bytes > 4 * huge_pages.SIZE else pool_bytes
    holding = min((found for found in anonymous if pool_bytes and found[0] >= least), default=(0, 0))
    pool = min(holding[1], pool_bytes)
    return Resident(pool, files, sum(rss for _, rss in anonymous) - pool, holding[0])
