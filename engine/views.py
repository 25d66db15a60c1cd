"""Page tables and single blocks as viewers are shown them: copies, made while the core's lock is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.memory import KVMemory
from engine.sequence import token_of

if TYPE_CHECKING:  # it brings torch
    from engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class PageTableView:
    """One sequence's page table: physical block, readers and fill of each logical block."""

    sequence: int
    conversation: str
    running: bool
    tokens: int
    blocks: tuple[int, ...]
    readers: tuple[int, ...]
    filled: tuple[int, ...]
    #: Slots that the block got by a copy when texts parted inside it; 0: it is no copy.
    copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block, as it is now. `first_token` is the position of its first slot in its chain, None where the
    tree does not index it; `private`: only one account may reuse it, or nobody yet; `copied_from` is the
    source of its copy while that still holds the same text; `tokens` are those that the tree knows it by."""

    block: int
    readers: int
    open_readers: int
    filled: int
    documents: frozenset[str]
    private: bool
    first_token: int | None
    copied_slots: int
    copied_from: int | None
    tokens: tuple[int, ...] = ()


def page_tables(core: EngineCore, conversation: str) -> list[PageTableView]:
    """The running page tables of a conversation, or the stored ones where it is idle."""
    pool = core.memory.pool
    running = [s for s in core.scheduler.running if s.conversation == conversation]
    found = [(s.id, True, s.computed, s.table_array()) for s in running]
    if not found:
        stored = core.ledger.tables("open").get(conversation, [])
        found = [(-1, False, tokens, table) for table, tokens in stored]
    return [
        PageTableView(
            key,
            conversation,
            live,
            tokens,
            tuple(table.tolist()),
            tuple((pool.reader_count + pool.soft)[table].tolist()),
            tuple(pool.filled[b] for b in table.tolist()),
            tuple(pool.origin[b][2] if b in pool.origin else 0 for b in table.tolist()),
        )
        for key, live, tokens, table in found
    ]


def block_view(memory: KVMemory, block: int) -> BlockView | None:
    """What one block holds now; None where there is no such block."""
    pool = memory.pool
    if not 0 <= block < pool.num_blocks:
        return None
    node = pool.node[block]
    source, generation, slots = pool.origin.get(block, (-1, -1, 0))
    same = source >= 0 and int(pool.generation[source]) == generation
    return BlockView(
        block=block,
        readers=int(pool.reader_count[block]),
        open_readers=int(pool.reader_count[block] + pool.soft[block]),
        filled=pool.filled[block],
        documents=node.documents if node is not None else frozenset(),
        private=node is None or node.private,
        first_token=None if node is None else (sum(1 for _ in node.chain()) - 1) * pool.block_size,
        copied_slots=slots,
        copied_from=source if same else None,
        tokens=() if node is None else tuple(token_of(pair) for pair in node.key),
    )
