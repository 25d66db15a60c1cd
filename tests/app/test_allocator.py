"""The allocator is told to share arenas, and free memory goes back to the system."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: Twelve threads at a time take 16 MiB each in small pieces and let go of them; the last piece of each stays.
_PROGRAM = """
import ctypes, json, sys, threading
from app.allocator import few_arenas, give_back
from bench.resident import resident
import os

if sys.argv[1] == "few":
    assert few_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
gate = threading.Barrier(12)

def work():
    gate.wait()
    pieces = [libc.malloc(65_536) for _ in range(256)]
    for piece in pieces:
        ctypes.memset(piece, 1, 65_536)
    libc.malloc(64)
    for piece in pieces:
        libc.free(piece)

before = resident(os.getpid(), 0).other
threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
kept = resident(os.getpid(), 0).other - before
give_back()
print(json.dumps([kept, resident(os.getpid(), 0).other - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_free_memory_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "few"], capture_output=True, text=True, check=True, timeout=60
    )
    kept, left = json.loads(done.stdout)
    assert left < 8 * 2**20
    assert left <= kept
