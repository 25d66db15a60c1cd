"""Drafting from the text at hand: answers over documents repeat their wording.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"): where the last tokens of a sequence have occurred
before, what followed them is proposed as the continuation. One step then verifies several tokens:

    sequence   … the anchor weighs 1,200 | kg          the model's own next token is sampled at every
    drafted                                 and is      position, as it would have been without a draft;
    sampled                              kg and has     up to the first difference the draft was right
    accepted                             kg and has     and the steps in between are saved

A draft is a point mass, so "accept with probability p(draft), else sample from p without it" (the rejection
rule of Leviathan et al. 2023, alg. 1) is the same as sampling from p and comparing. With one random
number a token, in order, a seeded answer with drafts is the same as without.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Length of the context that must recur, longest first.
_GRAMS = (4, 2)
_FIRST, _MOST = 4, 8
#: Tokens to wait after drafts were wrong, doubled with every failure in a row up to the last.
_PAUSE, _LONGEST_PAUSE = 2, 32


class PromptLookup:
    """Proposes tokens for one sequence and adapts how many to how often it was right."""

    __slots__ = ("_indexed", "_length", "_next", "_pause", "_places")

    def __init__(self) -> None:
        #: n-gram -> position after its latest occurrence that is followed by something
        self._places: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self._length = _FIRST
        self._pause = _PAUSE
        self._next = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`; empty where nothing recurs or none are due."""
        self._index(tokens)
        count = min(self._length, most)
        if count <= 0 or len(tokens) < self._next:
            return []
        for gram in _GRAMS:
            at = self._places.get(tuple(tokens[-gram:])) if len(tokens) > gram else None
            if at is not None:
                return list(tokens[at : at + count])
        return []

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """`accepted` of `drafted` tokens were right; the sequence now has `length` tokens."""
        if accepted == drafted:
            self._length = min(_MOST, self._length * 2)
        elif accepted == 0:
            self._length = max(1, self._length // 2)
        if accepted:
            self._pause = _PAUSE
        else:
            self._next = length + self._pause
            self._pause = min(_LONGEST_PAUSE, self._pause * 2)

    def _index(self, tokens: Sequence[int]) -> None:
        """Enter every n-gram that ends before the last token."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for gram in _GRAMS:
                if end >= gram:
                    self._places[tuple(tokens[end - gram : end])] = end
        self._indexed = len(tokens)
