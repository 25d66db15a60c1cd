"""The ways of giving out memory that are compared, each a setting of the same pool, tree and scheduler.

contiguous   a sequence takes one whole reservation: a pool whose block is the reservation
paged        blocks of 16 slots, nothing shared
shared       blocks of 16 slots, shared by exact prefix, copied on write: how Coread serves
ideal        blocks of one slot, nothing shared: no slot is ever wasted
ideal_shared blocks of one slot, shared: neither a slot wasted nor a token held twice
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.scheduler import Limits

BLOCK = 16
RESERVATION = 8_192


@dataclass(frozen=True, slots=True)
class Policy:
    """`block_size` slots a block; `sharing` as in `EngineConfig`."""

    name: str
    title: str
    block_size: int
    sharing: bool

    def pool(self, slots: int, limits: Limits) -> tuple[int, Limits]:
        """Blocks of a pool of `slots` token slots, and the limits that go with it.

        The scheduler keeps a sixteenth of the pool (at most a block for each running sequence) free for
        growth. Reservations never grow, so that contiguous allocation gets these blocks on top of its
        budget and as many places as the budget has reservations: it is not to look worse than it is.
        """
        blocks = slots // self.block_size
        if self.block_size < RESERVATION:
            return blocks, limits
        spare = 0
        while (blocks + spare) // 16 > spare:
            spare += 1
        return blocks + spare, replace(limits, max_running=min(limits.max_running, blocks))


CONTIGUOUS = Policy("contiguous", "(a) contiguous reservation", RESERVATION, False)
PAGED = Policy("paged", "(b) paging alone", BLOCK, False)
SHARED = Policy("shared", "(c) paging, sharing, copy-on-write", BLOCK, True)
IDEAL = Policy("ideal", "(d) ideal: one-slot blocks", 1, False)
IDEAL_SHARED = Policy("ideal_shared", "(d) ideal with sharing: one-slot blocks", 1, True)
