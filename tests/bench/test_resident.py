"""Where resident memory lies: from the kernel's text, and of this process."""

from __future__ import annotations

import mmap
import os
import sys

import pytest

from bench.resident import parsed, resident

SMAPS = """\
55d000000000-55d000400000 r-xp 00000000 08:01 17 /usr/bin/python3.11
Size:               4096 kB
Rss:                1024 kB
Pss:                 512 kB
55d000400000-55d000800000 rw-p 00000000 00:00 0 [heap]
Rss:                3000 kB
Anonymous:          3000 kB
7f0000000000-7f0008010000 rw-p 00000000 00:00 0
Size:             131136 kB
Rss:               65536 kB
7f1000000000-7f1040000000 rw-p 00000000 00:00 0
Rss:              100000 kB
VmFlags: rd wr mr mw me ac
"""
KB, MB = 1024, 2**20


def test_the_pool_is_the_smallest_mapping_that_holds_it() -> None:
    found = parsed(SMAPS, 128 * MB)
    assert found.pool == 65_536 * KB
    assert found.pool_mapping == 0x8010000
    assert found.files == 1_024 * KB
    assert found.other == 103_000 * KB
    assert found.total == (1_024 + 3_000 + 65_536 + 100_000) * KB
    assert found.beside_pool == found.total - found.pool


def test_a_pool_on_huge_pages_lies_in_a_mapping_without_its_ends() -> None:
    found = parsed(SMAPS, 131 * MB)  # its mapping has 128 MiB and 64 KiB
    assert found.pool_mapping == 0x8010000
    assert found.pool == 65_536 * KB


def test_no_more_is_the_pool_than_it_has_bytes() -> None:
    assert parsed(SMAPS, 32 * MB).pool == 32 * MB
    assert parsed(SMAPS, 4_096 * MB).pool == parsed(SMAPS, 0).pool == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")
def test_pages_count_once_they_are_written() -> None:
    size = 64 * MB
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pool:
        before = resident(os.getpid(), size)
        pool[: size // 2] = b"x" * (size // 2)
        after = resident(os.getpid(), size)
    assert after.total - before.total == pytest.approx(size // 2, abs=8 * MB)
