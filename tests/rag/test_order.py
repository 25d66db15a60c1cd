from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag.order import NEAR, canonical, needed, reuse_aware, staying
from rag.prompt import PromptDocument

NAMES = "abcdefgh"
DOCS = {name: PromptDocument(name, "c", name, name * (10 + n)) for n, name in enumerate(NAMES)}


def size(document: PromptDocument) -> int:
    return len(document.text)


class Memory:
    """Holds chains of documents; a prefix of one is in memory."""

    def __init__(self, *chains: str) -> None:
        self.chains, self.asked = chains, 0

    def __call__(self, chain: Sequence[PromptDocument]) -> int:
        self.asked += 1
        names = "".join(d.document_id for d in chain)
        held = max(
            (next((i for i, n in enumerate(names) if c[i : i + 1] != n), len(names)) for c in self.chains),
            default=0,
        )
        return 7 + sum(size(d) for d in chain[:held])  # the instructions are always there


def chosen(memory: Memory, must: str, spare: str = "", places: int = 0) -> str:
    found = reuse_aware([DOCS[n] for n in must], memory, size, spare=[DOCS[n] for n in spare], places=places)
    return "".join(d.document_id for d in found)


def computed(memory: Memory, names: str) -> int:
    chain = [DOCS[n] for n in names]
    return sum(map(size, chain)) - (memory(chain) - 7)


@given(st.lists(st.permutations(NAMES).map(lambda p: "".join(p[:3])), max_size=4),
       st.permutations(NAMES), st.integers(0, 4), st.integers(0, 4))  # fmt: skip
def test_the_needed_are_there_once_and_nothing_is_dearer_than_canonical_order(
    chains: list[str], found: list[str], count: int, places: int
) -> None:
    memory = Memory(*chains)
    must, spare = "".join(found[:count]), "".join(found[count:])
    got = chosen(memory, must, spare, places)
    assert len(set(got)) == len(got) == max(count, places)
    assert set(must) <= set(got)
    first = "".join(d.document_id for d in canonical([DOCS[n] for n in found[: len(got)]]))
    assert computed(memory, got) <= computed(memory, first)
    assert got == chosen(Memory(*chains), must, spare, places)


def test_a_spare_one_is_taken_where_a_needed_one_stands_behind_it() -> None:
    assert chosen(Memory("ha"), "a", "bh", 2) == "ha"
    assert chosen(Memory(), "a", "bh", 2) == "ab"  # nothing is in memory: by rank


def test_what_costs_nothing_is_taken_by_rank() -> None:
    assert chosen(Memory("ab", "ac"), "a", "cb", 2) == "ac"


def test_a_cheap_chain_is_found_behind_a_dear_first_step() -> None:
    """Step by step the longest gain would come first: "h" is longer than "b", but "b" leads to all of it."""
    assert chosen(Memory("h", "bca"), "a", "hbc", 3) == "bca"


def test_nothing_is_asked_without_documents_and_the_search_ends() -> None:
    memory = Memory()
    assert chosen(memory, "") == ""
    assert memory.asked == 0
    everything = Memory(*("".join(NAMES[i:] + NAMES[:i]) for i in range(8)))
    assert len(chosen(everything, "ab", NAMES[2:], 6)) == 6
    assert everything.asked <= 301


@pytest.mark.parametrize(
    ("scores", "leading", "places", "which"),
    [
        ([1.0, NEAR, NEAR - 0.01, 0.2], "1000", 3, [0, 1]),
        ([1.0, 0.99, 0.98], "100", 2, [0, 1]),
        ([1.0, 0.5, 0.4, 0.3], "1010", 3, [0, 2]),  # one of the searches ranks the third first
        ([1.0, 0.5, 0.4, 0.3], "1001", 3, [0]),
        ([0.04], "0", 3, [0]),
        ([], "", 3, []),
    ],
)
def test_what_scores_nearly_as_well_as_the_best_or_leads_a_search_is_needed(
    scores: list[float], leading: str, places: int, which: list[int]
) -> None:
    assert needed(scores, [sign == "1" for sign in leading], places) == which


def names(documents: Sequence[PromptDocument]) -> str:
    return "".join(d.document_id for d in documents)


def test_what_stood_in_front_stays_up_to_the_first_that_leaves() -> None:
    def kept(settled: str, must: str, spare: str, places: int) -> str:
        front, needs, others = ([DOCS[n] for n in part] for part in (settled, must, spare))
        return names(staying(front, needs, others, places))

    assert kept("hab", "a", "hb", 3) == "hab"
    assert kept("hab", "a", "hb", 2) == "ha"  # no place for b
    assert kept("hab", "ab", "h", 2) == "ab"  # no place for h: what is needed stays all the same
    assert kept("gab", "a", "b", 3) == "a"  # g has left, so b is as dear there as anywhere
