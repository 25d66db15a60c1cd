"""What a screen is told about the pool, made from one immutable snapshot of the ledger.

A block is one byte in base64, never a JSON object, and every viewer of one snapshot gets the same encoded
map; only the row of the viewer's own conversation differs. Others appear as counts, never by name.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine.ledger import MemorySnapshot, Row, Totals

#: Bytes of `map.state`, in the order of the legend.
STATES = ("free", "private", "published", "retained", "open_tail", "pinned")


def _row(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "reserved_bytes": row.reserved_bytes,
        "unshared_bytes": row.unshared_bytes,
        "fair_share_bytes": float(row.fair_share),
        "saved_bytes": float(row.saved),
        "blocks": row.blocks,
        "shared_blocks": row.shared_blocks,
    }


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "conversations": totals.conversations,
        "reserved_bytes": totals.reserved_bytes,
        "unshared_bytes": totals.unshared_bytes,
        "physical_bytes": totals.physical_bytes,
        "saved_bytes": totals.saved_bytes,
    }


def open_readers(snapshot: MemorySnapshot) -> bytes:
    """One saturating byte a block: running page tables and stored ones of open conversations."""
    running = np.frombuffer(snapshot.readers, dtype=np.uint8).astype(np.int32)
    stored = np.frombuffer(snapshot.soft_readers, dtype=np.uint8)
    both: bytes = np.minimum(running + stored, 255).astype(np.uint8).tobytes()
    return both


def encode_map(snapshot: MemorySnapshot) -> dict[str, Any]:
    """The block map: `state` (see `STATES`), `readers` of running page tables and `open_readers` counting
    open conversations too, each one saturating byte a block, base64."""
    return {
        "state": base64.b64encode(snapshot.state).decode(),
        "readers": base64.b64encode(snapshot.readers).decode(),
        "open_readers": base64.b64encode(open_readers(snapshot)).decode(),
    }


def figures_json(snapshot: MemorySnapshot) -> dict[str, Any]:
    """What is the same for everybody. Keys: `pool` (blocks by state), `running` and `open` (`everybody`'s
    totals; the two views are never added together), `since_start`."""
    since = snapshot.since_start
    return {
        "pool": {
            "total_blocks": snapshot.total_blocks,
            "block_bytes": snapshot.block_bytes,
            "block_size": snapshot.block_size,
            "free": snapshot.free,
            "held": snapshot.held,
            "retained": snapshot.retained,
            "pinned": snapshot.pinned,
            "utilisation": snapshot.utilisation,
        },
        "running": {"everybody": _totals(snapshot.totals_running)},
        "open": {"everybody": _totals(snapshot.totals_open)},
        "since_start": {
            "requests": since.requests,
            "saved_byte_seconds": since.saved_byte_seconds,
            "peak_saved_bytes": since.peak_saved_bytes,
            "prompt_tokens": since.prompt_tokens,
            "prefill_tokens_skipped": since.prefill_tokens_skipped,
            "prefill_tokens_computed": since.prefill_tokens_computed,
            "output_tokens": since.output_tokens,
            "blocks_copied": since.blocks_copied,
            "bytes_copied": since.bytes_copied,
            "evictions": since.evictions,
            "preemptions": since.preemptions,
            "kv_bytes_logical": since.kv_bytes_logical,
            "kv_bytes_read": since.kv_bytes_read,
            "answers": since.answers,
        },
    }


def mine_json(snapshot: MemorySnapshot, mine: str | None) -> dict[str, Any]:
    """One conversation, which the viewer owns: `mine` (its row in each view, or None) and `mine_blocks`."""
    views = {"running": snapshot.running, "open": snapshot.open}
    return {
        "mine": {view: _row(rows.get(mine)) if mine else None for view, rows in views.items()},
        "mine_blocks": sorted(set(snapshot.blocks_of(mine))) if mine else [],
    }
