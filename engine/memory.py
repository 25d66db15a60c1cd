"""The KV memory: page tables, sharing, copy-on-write, publication, eviction, pins. No torch.

`KVMemory` decides which blocks a sequence may read and write; the tensors themselves are moved by the
runner, which executes the `Copy` list of a step before the step's writes. Its verbs pair: `match` looks,
`admit` acts on what was found; `prepare` makes a range writable, `commit` accepts what was written;
`fork` adds a reader, `release` takes one away.

The rule that everything rests on is enforced in `_writable`, the only place that hands out a block for
writing: **a block is written only by its single reader and only while unpublished.**

    two forks of one sequence, 16-slot blocks, 21 tokens in common

    before            A ─▶ [ 0..15 ] [16..20 ·····]        one tail, two readers
                      B ─▶ [ 0..15 ]──┘
    A writes token 21
    after             A ─▶ [ 0..15 ] [16..20 21 ···]       A got a fresh block, 5 slots copied
                      B ─▶ [ 0..15 ] [16..20 ·····]        B is alone with the old one: no copy later
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.block_events import BlockEvents
from engine.blocks import PINNED, BlockPool
from engine.errors import IntegrityError, LimitReached
from engine.prefix_tree import Node, PrefixTree
from engine.sequence import ScopeTable, Sequence
from engine.types import Copy, Segment


@dataclass(slots=True)
class Match:
    """What the tree has for a sequence: whole blocks, then `slots` slots of `partial`.

    takeover  the partial block is an open tail that may be continued in place
    pending   the next whole block is being computed right now by somebody else
    """

    nodes: list[Node] = field(default_factory=list)
    partial: Node | None = None
    slots: int = 0
    takeover: bool = False
    pending: Node | None = None

    def tokens(self, block_size: int) -> int:
        """Number of prompt tokens that need not be computed."""
        return len(self.nodes) * block_size + self.slots


@dataclass(slots=True)
class MemoryCounters:
    """Counts since start."""

    evictions: int = 0
    blocks_copied: int = 0
    slots_copied: int = 0
    takeovers: int = 0
    merges: int = 0
    published: int = 0
    unlinked: int = 0


class KVMemory:
    """All accounts of one pool.

    num_blocks, block_size   size of the pool
    sharing                  False: nothing is indexed, every prompt is computed (for comparisons)
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, sharing: bool = True, document_bonus: int = 32
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = PrefixTree(self.pool, document_bonus)
        self.scopes = ScopeTable()
        self.events = BlockEvents()
        self.counters = MemoryCounters()
        self.sharing = sharing
        self.live: set[Sequence] = set()
        self.promised = 0
        self.pinned_documents: set[str] = set()
        #: Called with a sequence before its page table is given up, and after it got one.
        self.on_release: Callable[[Sequence], None] | None = None
        self.on_admit: Callable[[Sequence], None] | None = None
        self._copies: list[Copy] = []
        self._copy_of: dict[int, Copy] = {}

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.pool.block_size

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens take."""
        return -(-tokens // self.pool.block_size)

    # -- arrival ---------------------------------------------------------------------------------------

    def register(self, sequence: Sequence) -> None:
        """From now on a deletion of a document also concerns this sequence, waiting or running."""
        self.live.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Its page table must have been released."""
        if sequence.table:
            raise IntegrityError(f"sequence {sequence.id} still holds {len(sequence.table)} blocks")
        self.live.discard(sequence)

    def need(self, sequence: Sequence) -> int:
        """Blocks that the sequence takes when it is finished (its last token's KV is never computed)."""
        return self.blocks_for(max(len(sequence), sequence.prompt_len + sequence.max_tokens - 1))

    def _target(self, sequence: Sequence) -> int:
        """Blocks that admission counts: all tokens so far, and the next one where its KV will be needed."""
        return min(self.need(sequence), self.blocks_for(len(sequence) + 1))

    def capacity_for(self, sequence: Sequence) -> int:
        """Blocks that the sequence can ever have: all but those pinned for chains that are not its own."""
        pinned = len(self.tree.pinned)
        if pinned and self.need(sequence) > self.pool.num_blocks - pinned:
            pinned -= sum(node in self.tree.pinned for node in self.match(sequence).nodes)
        return self.pool.num_blocks - pinned

    def match(self, sequence: Sequence) -> Match:
        """What the tree has for the sequence's tokens. Changes nothing."""
        if not self.sharing:
            return Match()
        pairs, end, size = sequence.pairs, len(sequence.pairs), self.block_size
        nodes = list(self.tree.descend(pairs, end, sequence.known))
        parent, at = (nodes[-1] if nodes else self.tree.root), len(nodes) * size
        partial, slots = self.tree.best_partial(parent, pairs, at, end)
        takeover = (
            partial is not None
            and slots == len(partial.key) < size
            and not self.pool.readers[partial.block]
            and not self.pool.locks[partial.block]
        )
        return Match(nodes, partial, slots, takeover, self.tree.pending_below(parent, pairs, at, end))

    def resident_tokens(self, segments: Iterable[Segment]) -> int:
        """How many leading tokens of these segments are in memory now."""
        pairs: list[int] = []
        for segment in segments:
            pairs.extend(self.scopes.pairs(segment.tokens, segment.scope))
        nodes = self.tree.descend(pairs, len(pairs)) if self.sharing else []
        at = len(nodes) * self.block_size
        if not self.sharing:
            return 0
        return at + self.tree.best_partial(nodes[-1] if nodes else self.tree.root, pairs, at, len(pairs))[1]

    def fits(self, sequence: Sequence, match: Match, headroom: int = 0) -> bool:
        """True where the sequence can be admitted with `match`: after its hits are secured, enough blocks
        are left for the rest of its prompt, its first generated token and the block a partial hit is
        copied into. Drops the partial hit from `match` where only that stands in the way.
        """
        pool = self.pool
        secured = sum(not pool.readers[n.block] and not pool.locks[n.block] for n in match.nodes)
        room = pool.allocatable - secured - self.promised - headroom
        fresh = self._target(sequence) - len(match.nodes)
        if match.partial is not None:
            # The source of the copy may not be evicted; a block taken over is one that need not be found.
            unread = not pool.readers[match.partial.block] and not pool.locks[match.partial.block]
            if fresh - match.takeover <= room - unread:
                return True
            match.partial, match.slots, match.takeover = None, 0, False
        return fresh <= room

    def admit(self, sequence: Sequence, match: Match) -> None:
        """Make `sequence` a reader of what `match` found; `fits` must have said yes in this state."""
        if sequence.table:
            raise IntegrityError(f"sequence {sequence.id} was admitted twice")
        self.live.add(sequence)
        self.tree.clock += 1
        size = self.block_size
        for node in match.nodes:
            self._read(sequence, node)
        sequence.nodes, sequence.known = list(match.nodes), []
        if match.partial is not None:
            node = match.partial
            if match.takeover:
                block = node.block
                self.tree.remove(node)
                self.pool.add_reader(block, sequence)
                sequence.table.append(block)
                self.counters.takeovers += 1
                self.events.add("taken_over", block, sequence.conversation, slots=match.slots)
            else:
                self.tree.touch(node)
                # Locked first: making room for the copy must not evict its source.
                self.pool.lock(node.block)
                target = self._take(
                    sequence, 1, room=self.blocks_for(len(sequence) - len(match.nodes) * size)
                )
                self._copy(sequence, node.block, target[0], match.slots)
                self.pool.unlock(node.block)
        sequence.table_cache = None
        sequence.computed = match.tokens(size)
        if match.slots:
            self.pool.set_filled(sequence.table[-1], match.slots)
        self._tag_hits(sequence, match)
        sequence.promised = max(0, self._target(sequence) - len(sequence.table))
        self.promised += sequence.promised
        self._announce(sequence)
        if self.on_admit is not None:
            self.on_admit(sequence)

    def _read(self, sequence: Sequence, node: Node) -> None:
        self.pool.add_reader(node.block, sequence)
        sequence.table.append(node.block)
        self.tree.touch(node)
        readers = len(self.pool.readers[node.block])
        if readers > 1:
            self.events.add("shared", node.block, sequence.conversation, slots=readers)

    def _tag_hits(self, sequence: Sequence, match: Match) -> None:
        """Equal text may come from several documents: a hit block belongs to this one, too."""
        size = self.block_size
        for span in sequence.documents:
            for index in range(span.start // size, min(len(match.nodes), self.blocks_for(span.end))):
                self.tree.tag(match.nodes[index], span.document)

    def _announce(self, sequence: Sequence) -> None:
        """Tell newcomers which whole prompt blocks this sequence is going to compute.

        Where somebody has announced one already, this sequence was admitted because that one makes no
        progress: it succeeds to the announcement, so that the others wait for it and do not all compute.
        """
        if not self.sharing or sequence.index_limit is not None:
            return
        size = self.block_size
        parent = sequence.nodes[-1] if sequence.nodes else self.tree.root
        for start in range(len(sequence.nodes) * size, len(sequence.tokens) - size + 1, size):
            key = tuple(sequence.pairs[start : start + size])
            documents = sequence.documents_in(start, start + size)
            private = self._private(sequence, start + size)
            node = self.tree.add_pending(parent, key, private, documents, sequence)
            if node is None:
                node = self.tree.take_pending(parent, key, sequence)
                if node is None:
                    return
                for document in documents:
                    self.tree.tag(node, document)
            sequence.pending.append(node)
            parent = node

    @staticmethod
    def _private(sequence: Sequence, end: int) -> bool:
        return sequence.private_from is not None and sequence.private_from < end

    # -- writing ---------------------------------------------------------------------------------------

    def prepare(self, sequence: Sequence, end: int) -> bool:
        """Make the slots from `sequence.computed` to `end` writable: all of them, or none and False.

        Takes the missing blocks, and copies a block that is published or has other readers before its
        first write. Where there is no room for such a copy and nobody else reads the block, it is taken
        out of the index instead and written in place.
        """
        size, pool = self.block_size, self.pool
        missing = max(0, self.blocks_for(end) - len(sequence.table))
        first = sequence.computed // size
        copied = [
            index
            for index in range(first, min(len(sequence.table), self.blocks_for(end)))
            if end > sequence.computed and not self._writable(sequence, index)
        ]
        if missing + len(copied) > pool.allocatable:
            copied = [index for index in copied if not self._reclaim(sequence, index)]
            if missing + len(copied) > pool.allocatable:
                return False
        for index in copied:
            valid = sequence.computed - index * size
            source = sequence.table[index]
            [target] = self._take(sequence, 1, at=index)
            self._copy(sequence, source, target, valid)
            pool.set_filled(target, valid)
            pool.drop_reader(source, sequence)  # locked by the copy: `finish_copies` lets it go
            del sequence.nodes[index:]
        if missing:
            self._take(sequence, missing, room=sequence.promised)
            kept = max(0, sequence.promised - missing)
            self.promised -= sequence.promised - kept
            sequence.promised = kept
        return True

    def _reclaim(self, sequence: Sequence, index: int) -> bool:
        """Evict a block that `sequence` alone reads from the index, with what is retained below it."""
        block = sequence.table[index]
        node = self.pool.node[block]
        if node is None or self.pool.readers[block] != {sequence}:
            return False
        below = [node]
        for member in below:
            used = member is not node and self.pool.readers[member.block]
            if self.pool.locks[member.block] or used:
                return False
            below.extend(child for bucket in member.children.values() for child in bucket.values())
            below.extend(member.tails)
        for removed in self.tree.unlink(node):
            self.counters.evictions += 1
            self.events.add("evicted", removed.block, "")
            self.pool.free_if_unused(removed.block)
        del sequence.nodes[index:]
        return True

    def _writable(self, sequence: Sequence, index: int) -> bool:
        """The copy-on-write rule: only its single reader writes a block, and only while unpublished."""
        block = sequence.table[index]
        return self.pool.readers[block] == {sequence} and self.pool.node[block] is None

    def _take(self, sequence: Sequence, count: int, *, at: int | None = None, room: int = 0) -> list[int]:
        """Blocks for `sequence`, appended to its page table (or put at index `at`); evicts as needed."""
        while self.pool.free < count:
            victim = self.tree.next_victim()
            if victim is None:
                raise IntegrityError(
                    f"{count} blocks were promised and {self.pool.free} of {self.pool.num_blocks} are free"
                )
            self._evict(victim)
        previous = sequence.table[at - 1 if at is not None else -1] if sequence.table and at != 0 else None
        blocks = self.pool.take(sequence, count, after=previous, room=room)
        if at is None:
            sequence.table.extend(blocks)
        else:
            sequence.table[at] = blocks[0]
        sequence.table_cache = None
        return blocks

    def _evict(self, node: Node) -> None:
        block = node.block
        self.tree.remove(node)
        self.counters.evictions += 1
        self.events.add("evicted", block, "")
        self.pool.free_if_unused(block)

    def _copy(self, sequence: Sequence, source: int, target: int, slots: int) -> None:
        """Order a copy for this step. Copies of one step never depend on each other: one whose source is
        itself still to be filled by a copy takes the slots from where that one takes them."""
        earlier = self._copy_of.get(source)
        if earlier is not None and earlier.slots >= slots:
            source = earlier.source
        elif earlier is not None:
            raise IntegrityError(f"block {source} is to be copied before it is filled")
        copy = Copy(source, target, slots)
        self._copies.append(copy)
        self._copy_of[target] = copy
        self.pool.lock(source)
        self.pool.lock(target)
        self.counters.blocks_copied += 1
        self.counters.slots_copied += slots
        self.pool.origin[target] = (source, int(self.pool.generation[source]), slots)
        self.events.add("copied", source, sequence.conversation, target, slots)

    def step_copies(self) -> list[Copy]:
        """The copies that must be executed before the writes of this step."""
        return list(self._copies)

    def finish_copies(self) -> None:
        """The step's copies are done (or its sequences have failed): their blocks are let go."""
        copies, self._copies = self._copies, []
        self._copy_of = {}
        for copy in copies:
            self._let_go(copy)

    def _cancel_copies(self, sequence: Sequence) -> None:
        """Copies into blocks that nobody else reads are pointless once `sequence` leaves in mid-step."""
        for block in sequence.table:
            copy = self._copy_of.get(block)
            if copy is not None and self.pool.readers[block] == {sequence}:
                del self._copy_of[block]
                self._copies.remove(copy)
                self.counters.blocks_copied -= 1
                self.counters.slots_copied -= copy.slots
                self._let_go(copy)
                self.pool.set_filled(block, 0)
                sequence.computed = min(sequence.computed, sequence.table.index(block) * self.block_size)

    def _let_go(self, copy: Copy) -> None:
        for block in (copy.source, copy.target):
            self.pool.unlock(block)
            self.pool.free_if_unused(block)
            node = self.pool.node[block]
            if node is not None:
                self.tree.consider(node)

    def commit(self, sequence: Sequence, computed: int) -> None:
        """Accept the keys and values of the tokens up to `computed`; publishes the blocks now full."""
        size = self.block_size
        if not sequence.computed <= computed <= len(sequence.table) * size:
            raise IntegrityError(
                f"sequence {sequence.id} cannot go from {sequence.computed} to {computed} computed tokens "
                f"with {len(sequence.table)} blocks"
            )
        for index in range(sequence.computed // size, self.blocks_for(computed)):
            self.pool.set_filled(sequence.table[index], min(size, computed - index * size))
        sequence.computed = computed
        if self.sharing:
            self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        size, tree = self.block_size, self.tree
        limit = sequence.computed if sequence.index_limit is None else sequence.index_limit
        while (end := (len(sequence.nodes) + 1) * size) <= min(sequence.computed, limit):
            index = len(sequence.nodes)
            parent = sequence.nodes[-1] if sequence.nodes else tree.root
            key, block = tuple(sequence.pairs[end - size : end]), sequence.table[index]
            node = parent.child(key)
            if node is None:
                documents = sequence.documents_in(end - size, end)
                node = tree.insert(parent, key, block, self._private(sequence, end), documents)
                self.counters.published += 1
                self.events.add("published", block, sequence.conversation)
                self._pin_new(node)
            elif node.block != block:
                self._merge(index, block, node)
            tree.touch(node)
            sequence.nodes.append(node)
        while sequence.pending and not sequence.pending[0].alive:
            sequence.pending.pop(0)

    def _merge(self, index: int, loser: int, winner: Node) -> None:
        """Two sequences filled equal blocks: every reader of the loser moves to the indexed one."""
        for reader in list(self.pool.readers[loser]):
            if reader.table[index] != loser:
                raise IntegrityError(f"block {loser} lies at different places of its readers' tables")
            self.pool.drop_reader(loser, reader)
            self.pool.add_reader(winner.block, reader)
            reader.table[index] = winner.block
            reader.table_cache = None
        self.counters.merges += 1
        self.events.add("merged", loser, "", winner.block)
        self.pool.free_if_unused(loser)

    # -- leaving and branching -------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` (made by `Sequence.sibling`) becomes a reader of everything that `parent` has computed
        of its tokens, the tail included. Nothing is copied until one of them writes into a shared tail."""
        if child.table or child.pairs != parent.pairs[: len(child.pairs)]:
            raise IntegrityError(f"sequence {child.id} is no fork of sequence {parent.id}")
        self.tree.clock += 1
        computed = min(len(child), parent.computed)
        for index in range(self.blocks_for(computed)):
            block = parent.table[index]
            self.pool.add_reader(block, child)
            child.table.append(block)
            self.events.add("shared", block, child.conversation, slots=len(self.pool.readers[block]))
        child.table_cache = None
        child.computed = computed
        child.nodes = parent.nodes[: computed // self.block_size]
        self.live.add(child)
        if self.on_admit is not None:
            self.on_admit(child)

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence stops computing its prompt: what it announced is no longer on its way."""
        for node in sequence.pending:
            if node.alive:
                self.tree.drop_pending(node)
        sequence.pending = []

    def release(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """Give up the page table. Published blocks stay retained; with `keep_tail` the partly filled last
        block stays as an open tail, if it is the sequence's own and nothing indexed says the same."""
        if self.on_release is not None and sequence.table:
            self.on_release(sequence)
        self.withdraw(sequence)
        self.tree.clock += 1
        self._cancel_copies(sequence)
        if keep_tail:
            self._keep_tail(sequence)
        for block in reversed(sequence.table):
            self.pool.drop_reader(block, sequence)
            node = self.pool.node[block]
            if node is None:
                self.pool.free_if_unused(block)
            elif not self.pool.readers[block]:
                self.tree.touch(node)
                self.tree.consider(node)
        self.promised -= sequence.promised
        sequence.promised = 0
        sequence.table, sequence.nodes, sequence.table_cache, sequence.computed = [], [], None, 0

    def _keep_tail(self, sequence: Sequence) -> None:
        size = self.block_size
        full, slots = divmod(sequence.computed, size)
        if not self.sharing or not slots or len(sequence.nodes) != full:
            return
        if sequence.index_limit is not None and sequence.index_limit < sequence.computed:
            return
        block = sequence.table[full]
        if not self._writable(sequence, full) or self.pool.locks[block]:
            return
        parent = sequence.nodes[-1] if sequence.nodes else self.tree.root
        start, end = full * size, sequence.computed
        if self.tree.best_partial(parent, sequence.pairs, start, end)[1] == slots:
            return
        for tail in list(parent.tails):
            shorter = tail.key == tuple(sequence.pairs[start : start + len(tail.key)])
            if shorter and not self.pool.readers[tail.block] and not self.pool.locks[tail.block]:
                gone = tail.block
                self.tree.remove(tail)
                self.pool.free_if_unused(gone)
        self.pool.set_filled(block, slots)
        key = tuple(sequence.pairs[start:end])
        documents = sequence.documents_in(start, end)
        self.tree.insert(parent, key, block, self._private(sequence, end), documents)

    # -- documents -------------------------------------------------------------------------------------

    def unlink_document(self, document: str) -> int:
        """No new hits on `document` or on anything computed behind it, from now on.

        Blocks that somebody still reads go with their last reader, the others at once. Returns the
        number of blocks taken out of the index.
        """
        self.unpin_document(document)
        gone, unpinned = 0, set()
        while document in self.tree.by_document:
            node = next(iter(self.tree.by_document[document]))
            top = max((n for n in node.chain() if document in n.documents), key=_height)
            for removed in self.tree.unlink(top):
                gone += 1
                if removed.pins:
                    unpinned |= removed.pins
                    self._unpin(removed)
                self.events.add("unlinked", removed.block, "")
                self.pool.free_if_unused(removed.block)
        for other in unpinned:
            self._shrink_pin(other)
        self.counters.unlinked += gone
        for sequence in self.live:
            limits = [span.start for span in sequence.documents if span.document == document]
            dead = next((i for i, node in enumerate(sequence.nodes) if not node.alive), None)
            if dead is not None:
                limits.append(dead * self.block_size)
            if limits:
                known = [sequence.index_limit] if sequence.index_limit is not None else []
                sequence.index_limit = min(limits + known)
                del sequence.nodes[sequence.index_limit // self.block_size :]
        return gone

    def pin_document(self, document: str) -> int:
        """Keep the document's blocks and their ancestors from eviction; returns how many it pins now.

        What is computed of the document later is pinned as it is published. Raises `LimitReached` where
        more than half the pool would be pinned, or a request that was already accepted would not fit.
        """
        wanted: set[Node] = set()
        for node in self.tree.by_document.get(document, ()):
            if node.block >= 0 and not node.private and len(node.key) == self.block_size:
                wanted.update(node.chain())
        if not self._may_pin(wanted - self.tree.pinned):
            raise LimitReached("pinned blocks (half of the memory)", self.pool.num_blocks // 2)
        self.pinned_documents.add(document)
        for node in wanted:
            self._pin(node, document)
        return len(wanted)

    def _may_pin(self, new: set[Node]) -> bool:
        total = len(self.tree.pinned) + len(new)
        if total > self.pool.num_blocks // 2:
            return False
        after = self.tree.pinned | new
        for sequence in self.live:
            own = sum(node in after for node in sequence.nodes)
            if self.need(sequence) > self.pool.num_blocks - total + own:
                return False
        return True

    def _pin(self, node: Node, document: str) -> None:
        if not node.pins:
            self.tree.pinned.add(node)
            self.pool.lock(node.block)
            self.pool.kind[node.block] |= PINNED
        node.pins.add(document)

    def _pin_new(self, node: Node) -> None:
        for document in node.documents & self.pinned_documents:
            chain = set(node.chain())
            if not node.private and self._may_pin(chain - self.tree.pinned):
                for member in chain:
                    self._pin(member, document)

    def unpin_document(self, document: str) -> None:
        """Undo `pin_document`; blocks that other pins name stay."""
        self.pinned_documents.discard(document)
        for node in [n for n in self.tree.pinned if document in n.pins]:
            node.pins.discard(document)
            if not node.pins:
                self._unpin(node)
                self.tree.consider(node)

    def _shrink_pin(self, document: str) -> None:
        """Behind some blocks in front of it, the document is gone: they are not kept for it any longer."""
        pinned = [node for node in self.tree.pinned if document in node.pins]
        needed = {member for node in pinned if document in node.documents for member in node.chain()}
        for node in pinned:
            if node not in needed:
                node.pins.discard(document)
                if not node.pins:
                    self._unpin(node)
                    self.tree.consider(node)

    def _unpin(self, node: Node) -> None:
        node.pins.clear()
        self.tree.pinned.discard(node)
        self.pool.unlock(node.block)
        self.pool.kind[node.block] &= ~PINNED & 0xFF


def _height(node: Node) -> int:
    """Larger is nearer to the root."""
    return -sum(1 for _ in node.chain())
