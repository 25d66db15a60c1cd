"""One sequence: its tokens, its page table, how far it has been computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.types import Priority, Scope, Segment

if TYPE_CHECKING:
    from engine.prefix_tree import Node

_TOKEN_BITS = 32
_ids = count(1)


class ScopeTable:
    """Scopes as small integers, so that a (scope, token) pair is one exactly comparable integer.

    `pair = scope_number << 32 | token`: two pairs are equal only if both halves are, so chains of pairs
    cannot be confused however scopes and tokens are chosen.
    """

    def __init__(self) -> None:
        self._number: dict[Scope, int] = {}
        self._scopes: list[Scope] = []

    def number(self, scope: Scope) -> int:
        """The scope's number, given out on first use."""
        found = self._number.get(scope)
        if found is None:
            found = self._number[scope] = len(self._scopes)
            self._scopes.append(scope)
        return found

    def scope_of(self, pair: int) -> Scope:
        """The scope half of a pair."""
        return self._scopes[pair >> _TOKEN_BITS]

    def pairs(self, tokens: Iterable[int], scope: Scope) -> list[int]:
        """Tokens of one scope as pairs. Raises `InvalidRequest` for a token outside 0 … 2³²−1."""
        base = self.number(scope) << _TOKEN_BITS
        # Added, not or-ed: a token of 33 bits would vanish in the scope's own bits and pass the check below.
        out = [base + token for token in tokens]
        if out and not (base <= min(out) and max(out) < base + (1 << _TOKEN_BITS)):
            raise InvalidRequest("a token id lies outside 0 to 2**32 - 1.")
        return out


def token_of(pair: int) -> int:
    """The token half of a pair."""
    return pair & ((1 << _TOKEN_BITS) - 1)


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """Tokens `start` to `end` of the sequence came from `document`."""

    document: str
    start: int
    end: int


class State(Enum):
    """Where a sequence is. PREEMPTED ones are in line again and keep their tokens and sampler state."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """A page table and the tokens it stands for.

    tokens, pairs   prompt and generated ids, and the same with their scopes (see `ScopeTable`)
    table           physical block of logical block i; covers at least `computed` tokens
    nodes           tree nodes of the leading published blocks: `nodes[i].block == table[i]`
    computed        tokens whose keys and values are in the pool, accepted
    index_limit     the tree may not index blocks that reach beyond this many tokens (a document
                    from there on was deleted while the sequence lived)
    pending         nodes that announce which prompt blocks it is computing
    promised        blocks that admission counted for the prompt and that are not taken yet
    width           running places it stands for: the choices still to be forked from it, itself included
    known           tree nodes that a look at the tree has found while it waits (dead ones at the end)
    closed          its conversation was closed: its page table does not stay open when it ends
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "choice",
        "closed",
        "computed",
        "conversation",
        "deadline",
        "documents",
        "drafts",
        "id",
        "index_limit",
        "known",
        "lent",
        "max_tokens",
        "nodes",
        "output_scope",
        "overtaken",
        "owner",
        "pairs",
        "pending",
        "preemptions",
        "principal",
        "priority",
        "private_from",
        "promised",
        "prompt_len",
        "state",
        "table",
        "table_cache",
        "tokens",
        "wait_on",
        "wait_round",
        "wait_seen",
        "waiting_for",
        "width",
    )

    def __init__(
        self,
        segments: Iterable[Segment],
        scopes: ScopeTable,
        *,
        output_scope: Scope,
        principal: str,
        conversation: str,
        max_tokens: int = 1,
        choice: int = 0,
        priority: Priority = Priority.INTERACTIVE,
        deadline: float | None = None,
        owner: Any = None,
        width: int = 1,
    ) -> None:
        self.id = next(_ids)
        self.arrival = self.id
        self.choice = choice
        self.owner = owner
        self.principal = principal
        self.conversation = conversation
        self.priority = priority
        self.lent: Priority | None = None
        self.deadline = deadline
        self.output_scope = output_scope
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.pairs: list[int] = []
        self.documents: list[DocumentSpan] = []
        self.private_from: int | None = None
        for segment in segments:
            start = len(self.tokens)
            self.tokens.extend(segment.tokens)
            self.pairs.extend(scopes.pairs(segment.tokens, segment.scope))
            if segment.document is not None and len(self.tokens) > start:
                self.documents.append(DocumentSpan(segment.document, start, len(self.tokens)))
            if self.private_from is None and segment.scope.private and len(self.tokens) > start:
                self.private_from = start
        if not self.tokens:
            raise InvalidRequest("The prompt is empty.")
        self.prompt_len = len(self.tokens)
        self.table: list[int] = []
        self.table_cache: NDArray[np.int64] | None = None
        self.nodes: list[Node] = []
        self.known: list[Node] = []
        self.closed = False
        self.width = width
        self.computed = 0
        self.index_limit: int | None = None
        self.promised = 0
        self.pending: list[Node] = []
        self.preemptions = 0
        self.state = State.WAITING
        self.overtaken = 0
        self.wait_on: Sequence | None = None
        self.wait_seen = -1
        self.wait_round = 0
        self.waiting_for: Literal["queue", "memory", "prefill"] = "queue"
        self.admitted_at: int | None = None
        self.drafts: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.state.value} {self.computed}/{len(self.tokens)} tokens>"

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def effective_priority(self) -> int:
        """Own priority, or the better one that a waiter lends."""
        own = self.priority.value
        return own if self.lent is None else min(own, self.lent.value)

    def append(self, token: int, scopes: ScopeTable) -> None:
        """Add one generated token (its KV is not computed yet)."""
        if self.private_from is None and self.output_scope.private:
            self.private_from = len(self.tokens)
        self.tokens.append(token)
        self.pairs.extend(scopes.pairs((token,), self.output_scope))

    def sibling(self, choice: int, at: int) -> Sequence:
        """A new sequence with the first `at` tokens of this one and no page table yet."""
        if not 0 < at <= len(self.tokens):
            raise InvalidRequest(f"a fork at token {at} of a sequence of {len(self.tokens)} is not possible.")
        other = object.__new__(Sequence)
        for name in Sequence.__slots__:
            setattr(other, name, getattr(self, name))
        other.id = next(_ids)
        other.choice = choice
        other.tokens, other.pairs = self.tokens[:at], self.pairs[:at]
        other.documents = [
            DocumentSpan(d.document, d.start, min(d.end, at)) for d in self.documents if d.start < at
        ]
        other.prompt_len = min(self.prompt_len, at)
        if other.private_from is not None and other.private_from >= at:
            other.private_from = None
        other.table, other.nodes, other.table_cache = [], [], None
        other.computed = other.promised = other.preemptions = other.overtaken = 0
        other.pending, other.known, other.width = [], [], 1
        other.wait_on = other.lent = other.admitted_at = None
        other.wait_seen, other.wait_round, other.drafts = -1, 0, []
        other.state = State.WAITING
        return other

    def table_array(self) -> NDArray[np.int64]:
        """The page table as an int64 array, rebuilt only after it changed."""
        if self.table_cache is None or len(self.table_cache) != len(self.table):
            self.table_cache = np.asarray(self.table, dtype=np.int64)
        return self.table_cache

    def documents_in(self, start: int, end: int) -> frozenset[str]:
        """Ids of the documents with tokens in `[start, end)`."""
        return frozenset(d.document for d in self.documents if d.start < end and d.end > start)
