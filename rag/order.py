"""Which documents stand in a prompt, and in which order. Reuse is prefix-exact: B after A never reuses B.

Order by itself saves little where every prompt holds exactly the passages that rank first: two questions
seldom find the same ones. More is saved by *which* passages are taken. What scores nearly as well as the best
passage, or is the best by one of the searches, must stand in the prompt (`needed`); the others are
interchangeable, since hardly any of them holds the answer, and those are taken that need the least computing
(`reuse_aware`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

D = TypeVar("D", bound="Ordered")

#: A passage whose fused score is at least this share of the best one's is not interchangeable. On the
#: development half of the sample questions no gold passage among the first three lies below 0.95; with 0.94
#: as the border prompts lost some all the same, with other questions.
NEAR = 0.9
#: So many of the first passages found are looked at for one that is in memory.
CANDIDATES = 60
#: Questions to the engine for one prompt; what has been found until then is taken.
_ASKS = 300


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
    return sorted(documents, key=_key)


def needed(scores: Sequence[float], leading: Sequence[bool], places: int) -> list[int]:
    """Which of the first `places` passages must stand in a prompt.

    scores    fused scores, best first
    leading   whether one of the searches that were fused ranks the passage first: where they disagree, fusion
              may be wrong
    """
    found = list(zip(scores, leading, strict=True))[:places]
    return [i for i, (score, leads) in enumerate(found) if leads or score >= NEAR * scores[0]]


def reuse_aware(
    must: Sequence[D],
    resident: Callable[[Sequence[D]], int],
    size: Callable[[D], int],
    *,
    spare: Sequence[D] = (),
    places: int = 0,
) -> list[D]:
    """`must`, and as many of `spare` as fill `places`, so that the fewest tokens have to be computed.

    must, spare     best first; `spare` are interchangeable
    places          documents in all; those of `must` stand there even where they are more
    resident        how many leading tokens of a prompt with this chain of documents are in memory
    size            tokens of a document

    First stands a chain that is in memory, found by search over all such chains, then the rest in canonical
    order. Of equally cheap choices the better ranked one is taken, but the search ends with the first that
    costs nothing.
    """
    found = [*must, *spare]
    free = max(0, places - len(must))
    sizes = [size(document) for document in found]
    start = asked = 0
    best: list[int] = []
    lowest: tuple[int, int] | None = None

    def complete(chain: Sequence[int]) -> list[int]:
        rest = [i for i in range(len(must)) if i not in chain]
        open_places = free - sum(i >= len(must) for i in chain)
        others = (i for i in range(len(must), len(found)) if i not in chain)
        return rest + [i for i, _ in zip(others, range(open_places), strict=False)]

    def walk(chain: list[int], held: int) -> None:
        nonlocal asked, best, lowest
        chosen = chain + complete(chain)
        cost = (sum(sizes[i] for i in chosen) - held, sum(chosen))
        if lowest is None or cost < lowest:
            best, lowest = chain, cost
        if held < sum(sizes[i] for i in chain):
            return  # the last one is only partly in memory: nothing behind it can be
        spares = sum(i >= len(must) for i in chain)
        for i in range(len(found) if spares < free else len(must)):
            if i in chain:
                continue
            if asked == _ASKS or lowest[0] == 0:
                return
            asked += 1
            longer = resident([found[j] for j in [*chain, i]]) - start
            if longer > held:
                walk([*chain, i], longer)

    if found:
        start = resident([])
        walk([], 0)
    return [found[i] for i in best] + canonical([found[i] for i in complete(best)])


def staying(settled: Sequence[D], must: Sequence[D], spare: Sequence[D], places: int) -> list[D]:
    """Those of the turn before that keep their places in front: the needed ones, and of the spare ones as
    many as there are places for, up to the first that leaves. Behind that nothing is reused, and a spare one
    is no cheaper there than anywhere else.
    """
    wanted, others = {_key(d): d for d in must}, {_key(d): d for d in spare}
    free = places - len(wanted)
    front: list[D] = []
    unbroken = True
    for document in settled:
        key = _key(document)
        if key in wanted:
            front.append(wanted[key])
        elif unbroken and free > 0 and key in others:
            front.append(others[key])
            free -= 1
        else:
            unbroken = False
    return front


def _key(document: Ordered) -> tuple[str, str, int]:
    return document.collection_id, document.document_id, document.part
