"""Deliberate faults of one line, each of which the simulation must catch; without a fault it must not cry."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from engine.errors import IntegrityError
from tests.engine.mutants import Fault, load

FAULTS = (
    # reference counts
    Fault("reference count", "engine.blocks", "        self.reader_count[block] -= 1\n", "        pass\n"),
    Fault(
        "reference count",
        "engine.blocks",
        "        if self.readers[block] or self.node[block] is not None or self.locks[block]:\n",
        "        if len(self.readers[block]) > 1 or self.node[block] is not None or self.locks[block]:\n",
    ),
    Fault(
        "reference count",
        "engine.memory",
        "            pool.drop_reader(source, sequence)  # locked by the copy: `finish_copies` lets it go\n",
        "            pass\n",
    ),
    Fault(
        "generation of a freed block",
        "engine.blocks",
        "        self.generation[block] += 1\n",
        "        pass\n",
    ),
    # time of publication
    Fault(
        "time of publication",
        "engine.memory",
        "<= min(sequence.computed, limit):\n",
        "<= min(len(sequence.table) * size, len(sequence.pairs), limit):\n",
        world=16,
    ),
    Fault(
        "time of publication",
        "engine.memory",
        "        full, slots = divmod(sequence.computed, size)\n",
        "        full, slots = divmod(min(len(sequence), len(sequence.table) * size), size)\n",
    ),
    # scopes
    Fault(
        "scope comparison",
        "engine.sequence",
        "        base = self.number(scope) << _TOKEN_BITS\n",
        "        base = 0\n",
    ),
    Fault(
        "scope comparison",
        "engine.prefix_tree",
        "        if key[i] != pairs[start + i]:\n",
        "        if key[i] & 0xFFFFFFFF != pairs[start + i] & 0xFFFFFFFF:\n",
    ),
    # length of a partial match
    Fault(
        "partial length",
        "engine.memory",
        "        return len(self.nodes) * block_size + self.slots\n",
        "        return len(self.nodes) * block_size + self.slots + (self.partial is not None)\n",
    ),
    Fault(
        "partial length",
        "engine.prefix_tree",
        "            return i\n    return limit",
        "            return i + 1\n    return limit",
    ),
    Fault(
        "partial length",
        "engine.memory",
        "            valid = sequence.computed - index * size\n",
        "            valid = sequence.computed - index * size - 1\n",
    ),
    # takeover
    Fault(
        "takeover",
        "engine.memory",
        "            and slots == len(partial.key) < size\n",
        "            and slots <= len(partial.key) < size\n",
        world=8,
    ),
    Fault(
        "takeover",
        "engine.memory",
        "                self.tree.remove(node)\n                self.pool.add_reader(block, sequence)\n",
        "                self.pool.add_reader(block, sequence)\n",
        world=24,
    ),
    # copies and writes
    Fault(
        "order of copy and write",
        "engine.memory",
        "            self._copy(sequence, source, target, valid)\n",
        "            pass\n",
    ),
    Fault(
        "order of copy and write",
        "engine.memory",
        "        return self.pool.readers[block] == {sequence} and self.pool.node[block] is None\n",
        "        return self.pool.node[block] is None\n",
    ),
    Fault(
        "order of copy and write",
        "engine.memory",
        "        return self.pool.readers[block] == {sequence} and self.pool.node[block] is None\n",
        "        return self.pool.readers[block] == {sequence}\n",
    ),
    Fault(
        "copy of an evicted source",
        "engine.memory",
        "        self.pool.lock(source)\n        self.pool.lock(target)\n",
        "        self.pool.lock(target)\n        self.pool.lock(target)\n",
    ),
    Fault(
        "copy left behind by a preempted reader",
        "engine.memory",
        "                self._copies.remove(copy)\n",
        "                pass\n",
        world=46,
    ),
    # waiters
    Fault(
        "waking of waiters",
        "engine.scheduler",
        "        return self._round - sequence.wait_round < self.limits.stalled_rounds\n",
        "        return True\n",
        world=12,
    ),
    Fault(
        "waking of waiters",
        "engine.memory",
        "                self.tree.drop_pending(node)\n",
        "                pass\n",
    ),
    Fault(
        "waking of waiters",
        "engine.scheduler",
        "        producer = match.pending.producer if match.pending is not None else None\n",
        "        producer = sequence.wait_on or (match.pending and match.pending.producer)\n",
    ),
    Fault(
        "succession of a stalled prefill",
        "engine.prefix_tree",
        "            node.producer = successor\n",
        "            pass\n",
        world=12,
    ),
    # victims
    Fault(
        "choice of victim",
        "engine.scheduler",
        "        candidates = [s for s in self.running if s is not protected]\n",
        "        candidates = [protected]\n",
    ),
    Fault(
        "choice of victim",
        "engine.prefix_tree",
        "            and not self.pool.readers[node.block]\n            and not self.pool.locks",
        "            and not self.pool.locks",
    ),
    Fault(
        "choice of victim",
        "engine.prefix_tree",
        "            and node.is_leaf\n            and not self.pool.readers",
        "            and not self.pool.readers",
    ),
    Fault(
        "eviction order loses a block",
        "engine.prefix_tree",
        "        self._forget(node)\n        self.consider(parent)\n\n    def unlink",
        "        self._forget(node)\n\n    def unlink",
    ),
    # dedup
    Fault(
        "dedup",
        "engine.memory",
        "                self._merge(index, block, node)\n",
        "                pass\n",
    ),
    Fault("dedup", "engine.memory", "            reader.table[index] = winner.block\n", "            pass\n"),
    Fault(
        "dedup",
        "engine.memory",
        "            reader.table_cache = None\n        self.counters.merges",
        "        self.counters.merges",
    ),
    # deletion
    Fault(
        "unlink",
        "engine.memory",
        "                sequence.index_limit = min(limits + known)\n",
        "                sequence.index_limit = max(limits + known)\n",
        world=30,
    ),
    Fault(
        "unlink",
        "engine.memory",
        "            limits = [span.start for span in sequence.documents if span.document == document]\n",
        "            limits = list[int]()\n",
    ),
    Fault(
        "unlink",
        "engine.prefix_tree",
        "            stack.extend(gone.tails)\n            for below",
        "            for below",
    ),
    # pins
    Fault(
        "pins",
        "engine.memory",
        "            self.pool.lock(node.block)\n            self.pool.kind",
        "            self.pool.kind",
    ),
    Fault(
        "pins",
        "engine.memory",
        "                wanted.update(node.chain())\n",
        "                wanted.add(node)\n",
    ),
    # admission
    Fault(
        "admission",
        "engine.memory",
        "        self.promised -= sequence.promised\n        sequence.promised = 0\n",
        "        sequence.promised = 0\n",
    ),
    Fault(
        "admission",
        "engine.memory",
        "            copied = [index for index in copied if not self._reclaim(sequence, index)]\n",
        "            copied = []\n",
        world=20,
    ),
    Fault(
        "admission",
        "engine.memory",
        "        room = pool.allocatable - secured - self.promised - headroom\n",
        "        room = pool.allocatable - self.promised - headroom\n",
    ),
    Fault(
        "admission",
        "engine.memory",
        "            if fresh - match.takeover <= room - unread:\n",
        "            if fresh - match.takeover <= room:\n",
    ),
    # shares
    Fault(
        "fair share",
        "engine.ledger",
        "        fair = Fraction(parts * self.block_bytes, common)\n",
        "        fair = Fraction((parts + 1) * self.block_bytes, common)\n",
    ),
    Fault(
        "fair share",
        "engine.ledger",
        'pool.reader_count if view == "running" else pool.reader_count + pool.soft\n',
        "pool.reader_count + pool.soft\n",
    ),
    Fault(
        "fair share",
        "engine.ledger",
        "            self.memory.pool.add_soft(block, -1)\n",
        "            pass\n",
    ),
    Fault(
        "fair share",
        "engine.ledger",
        "generation[blocks] == generations]\n",
        "generation[blocks] >= generations]\n",
    ),
    # counters
    Fault(
        "hits counted again after preemption",
        "engine.scheduler",
        "        if sequence.admitted_at is None:\n            sequence.admitted_at",
        "        if True:\n            sequence.admitted_at",
    ),
    Fault(
        "extents",
        "engine.extents",
        "        rest = self._remove(start) - count\n",
        "        rest = self._remove(start) - count - 1\n",
    ),
)

REQUIRED = {
    "reference count",
    "time of publication",
    "scope comparison",
    "partial length",
    "takeover",
    "order of copy and write",
    "waking of waiters",
    "choice of victim",
    "dedup",
    "unlink",
    "fair share",
}


def drive(modules: dict[str, ModuleType], first: int, worlds: int, operations: int) -> None:
    """Worlds of all block sizes, from desperately small to comfortable."""
    driver = modules["tests.engine.world"].RandomDriver
    for seed in [first, *range(worlds)]:
        r = random.Random(seed)
        driver(seed, r.choice([3, 6, 10, 16, 40]), r.choice([1, 2, 4, 16])).run(operations)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}: {f.new.strip()[:40]}")
def test_a_fault_is_caught(fault: Fault) -> None:
    modules = load(fault)
    with pytest.raises((AssertionError, IntegrityError, ArithmeticError)):
        drive(modules, fault.world, 60, operations=120)


def test_nothing_is_caught_without_a_fault() -> None:
    drive(load(None), 0, 6, operations=120)


def test_every_kind_of_fault_is_tried() -> None:
    assert {fault.kind for fault in FAULTS} >= REQUIRED
    assert len(FAULTS) >= 20
