"""Huge pages are asked for within the memory, and only there."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest
import torch

from kernels import huge_pages

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")


class _Libc:
    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def madvise(self, start: Any, size: Any, _: int) -> int:
        self.asked.append((start.value, size.value))
        return -1  # declined: nobody minds


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    libc = _Libc()

    def make(_: object) -> _Libc:
        return libc

    monkeypatch.setattr(ctypes, "CDLL", make)
    return libc.asked


@on_linux
def test_whole_pages_within_the_memory(asked: list[tuple[int, int]]) -> None:
    memory = torch.empty(9 << 20, dtype=torch.uint8)[12_345:]
    huge_pages.advise(memory)
    ((start, size),) = asked
    assert start % huge_pages.SIZE == size % huge_pages.SIZE == 0
    assert memory.data_ptr() <= start
    assert start + size <= memory.data_ptr() + memory.nbytes
    assert size >= memory.nbytes - 2 * huge_pages.SIZE


@on_linux
def test_small_memory_is_left_alone(asked: list[tuple[int, int]]) -> None:
    huge_pages.advise(torch.empty(4096))
    assert asked == []


def test_what_is_allocated_begins_on_one() -> None:
    memory = huge_pages.allocate(5_000_000)
    assert memory.data_ptr() % huge_pages.SIZE == 0
    assert memory.shape == (5_000_000,)
    memory.fill_(7)
    assert int(memory[-1]) == 7
