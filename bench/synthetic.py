"""Passages by our own generator, as many as wanted and the same for the same seed.

Words are made of syllables and drawn from a Zipf distribution, as words of a language are: a few stand in
most passages, most in a few. Each document has a topic, which prefers words of its own. Vectors are unit
vectors from a mixture with one centre a topic: embedding 100,000 passages with a real model would take hours
on a small machine, and an exact search costs the same whatever the vectors say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]

_ONSETS = [
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "v",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
_CODAS = ["", "n", "r", "l", "m", "st", "ck", "t"]
#: Function words, which stand in nearly every passage of a real text.
_COMMON = [
    "the",
    "of",
    "and",
    "in",
    "to",
    "a",
    "is",
    "that",
    "for",
    "it",
    "with",
    "as",
    "on",
    "by",
    "this",
    "from",
    "at",
    "or",
    "an",
    "be",
]


@dataclass(frozen=True, slots=True)
class SyntheticDocument:
    """`passages` joined by empty lines are the document; `vectors` [len(passages), dimension] are unit."""

    number: int
    title: str
    passages: list[str]
    vectors: Vectors


class Corpus:
    """A language of its own: `documents` writes in it, `questions` asks about what was written."""

    def __init__(
        self, *, seed: int = 11, words: int = 40_000, topics: int = 200, dimension: int = 384
    ) -> None:
        self._seed, self._topics, self._dimension = seed, topics, dimension
        chance = np.random.default_rng(seed)
        made: dict[str, None] = dict.fromkeys(_COMMON)
        while len(made) < words:
            syllables = int(chance.integers(2, 5))
            made["".join(_syllable(chance) for _ in range(syllables))] = None
        self.words = np.array(list(made))
        weights = 1.0 / np.arange(1, words + 1) ** 1.02
        self._cumulative = np.cumsum(weights / weights.sum())
        self._centres = _unit(chance.normal(size=(topics, dimension)))
        # A topic's own words: 300 of the rarer ones.
        self._own = chance.integers(200, words, size=(topics, 300))

    def documents(self, count: int, passages: int = 20, first: int = 0) -> Iterator[SyntheticDocument]:
        """`count` documents of `passages` passages of 60 to 140 words each, numbered from `first`."""
        for number in range(first, first + count):
            topic, texts, chance = self._passages(number, passages)
            noise = chance.normal(scale=0.6 / np.sqrt(self._dimension), size=(passages, self._dimension))
            vectors = _unit(self._centres[topic] + noise)
            title = " ".join(self.words[self._own[topic][:2]]).title()
            yield SyntheticDocument(number, f"{title} {number}", texts, vectors)

    def questions(self, count: int, documents: int, passages: int = 20) -> list[str]:
        """Known-item questions: each asks with six words of a passage of one of the first `documents`."""
        chance = np.random.default_rng([self._seed, 10**9])
        asked: list[str] = []
        for number in chance.integers(documents, size=count):
            _, texts, _ = self._passages(int(number), passages)
            text = texts[int(chance.integers(len(texts)))].split()
            some = [w.strip(".") for w in chance.choice(text, size=6, replace=False)]
            asked.append(f"What does it say about {' '.join(some[:3])} and {' '.join(some[3:])}?")
        return asked

    def _passages(self, number: int, count: int) -> tuple[int, list[str], np.random.Generator]:
        """Topic and texts of one document, and the generator for what follows them."""
        chance = np.random.default_rng([self._seed, number])
        topic = int(chance.integers(self._topics))
        return topic, [self._text(chance, topic, int(chance.integers(60, 141))) for _ in range(count)], chance

    def _text(self, chance: np.random.Generator, topic: int, length: int) -> str:
        general = np.searchsorted(self._cumulative, chance.random(length))
        own = self._own[topic][np.minimum(chance.geometric(0.02, length) - 1, 299)]
        chosen = self.words[
            np.where(chance.random(length) < 0.25, own, np.minimum(general, len(self.words) - 1))
        ]
        sentences = [" ".join(chosen[i : i + 14]).capitalize() + "." for i in range(0, length, 14)]
        return " ".join(sentences)


def _syllable(chance: np.random.Generator) -> str:
    return (
        _ONSETS[int(chance.integers(len(_ONSETS)))]
        + _VOWELS[int(chance.integers(len(_VOWELS)))]
        + _CODAS[int(chance.integers(len(_CODAS)))]
    )


def _unit(matrix: npt.NDArray[np.float64]) -> Vectors:
    unit: Vectors = (matrix / np.linalg.norm(matrix, axis=-1, keepdims=True)).astype(np.float32)
    return unit
