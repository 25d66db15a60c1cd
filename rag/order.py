"""In which order documents stand in a prompt. Reuse is prefix-exact: B after A never reuses B alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

D = TypeVar("D", bound="Ordered")


class Ordered(Protocol):
    """What canonical order goes by."""

    @property
    def collection_id(self) -> str: ...
    @property
    def document_id(self) -> str: ...
    @property
    def part(self) -> int: ...


def canonical(documents: Sequence[D]) -> list[D]:
    """The same documents always in the same order, whoever asks and whatever the question was."""
    return sorted(documents, key=lambda d: (d.collection_id, d.document_id, d.part))


def reuse_aware(documents: Sequence[D], resident: Callable[[Sequence[D]], int]) -> list[D]:
    """What is in memory already comes first: grow the chain by the document that adds most resident tokens.

    `resident(chain)` is how many leading tokens of a prompt with this chain of documents are in memory. Once
    nothing more is resident the rest follows in canonical order. Asks at most n² / 2 times for n documents.
    """
    chain: list[D] = []
    rest = canonical(documents)
    held = resident(chain) if rest else 0
    while rest:
        gains = [resident([*chain, candidate]) - held for candidate in rest]
        best = max(gains)
        if best <= 0:
            break
        chain.append(rest.pop(gains.index(best)))
        held += best
    return chain + rest
