"""Keep the C library's allocator from holding on to what the server no longer uses.

glibc gives each thread an arena of its own, up to eight for each CPU, and an arena gives back only what is
free at its end. Dozens of threads take turns at building prompts and updates, so that each arena grows to
the largest that any of them ever needed: a gigabyte after five minutes of fifty readers.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys

log = logging.getLogger("coread")
#: `mallopt`'s name for the number of arenas, from malloc.h.
_M_ARENA_MAX = -8
#: The threads that compute are few, and Python's own take turns anyway.
_ARENAS = 2
EVERY_S = 60.0


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc; musl, macOS and Windows have none of the two functions."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def few_arenas() -> bool:
    """Have threads share arenas; to be called before they start. False where the allocator is another one."""
    library = _glibc()
    return library is not None and bool(library.mallopt(_M_ARENA_MAX, _ARENAS))


def give_back() -> bool:
    """Return free pages of all arenas to the system; True where there were some. Takes milliseconds, without
    Python's lock."""
    library = _glibc()
    return library is not None and bool(library.malloc_trim(ctypes.c_size_t(0)))


async def give_back_forever(every_s: float = EVERY_S) -> None:
    """`give_back` again and again until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(give_back)
