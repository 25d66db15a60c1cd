"""Questions that lean on the conversation: "And on Sundays?", "How much does it cost?".

No model rewrites them: a second search, with the question before it put in front, joins the fusion. Where a
question stands on its own only itself is searched for, so an old topic can't drag it along.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rag.terms import query_terms

_LEANING = re.compile(
    r"^\s*(?:and|but|so|also|or|then|what about|how about|why not|which one|same for)\b"
    r"|\b(?:it|its|they|them|their|he|him|his|she|her|hers|that|those|these|this|there|then|one|ones|both|"
    r"the same|else|former|latter|instead)\b",
    re.I,
)
_LEANING_EAST = re.compile(r"^(?:那|那么|它|他们|还有|这个|それ|その|では|じゃあ|これ|그|그럼|그것|이것)")
#: A question with so few telling words is taken to lean on the one before.
_SHORT = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """A text to search for, and its weight in the fusion."""

    text: str
    weight: float


def leans(question: str) -> bool:
    """True where the question by itself doesn't say what it is about."""
    return bool(
        _LEANING.search(question)
        or _LEANING_EAST.search(question.strip())
        or len(query_terms(question)) <= _SHORT
    )


def resolve(question: str, history: Sequence[str]) -> list[Variant]:
    """What to search for: the question, and for a leaning one also the question with its predecessor.

    `history` holds earlier questions, oldest first. Several leaning questions in a row reach back to the one
    that named the topic.
    """
    if not history or not leans(question):
        return [Variant(question, 1.0)]
    topic: list[str] = []
    for earlier in reversed(history):
        topic.insert(0, earlier.strip()[:500])
        if not leans(earlier) or len(topic) == 3:
            break
    return [Variant(question, 0.2), Variant(" ".join([*topic, question]), 1.0)]
