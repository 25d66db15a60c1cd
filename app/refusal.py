"""What stands in the place of an answer where the documents do not seem to hold one (`rag.gate`).

A refusal is a message that no model wrote. It leaves no trace in later prompts, and the passages with it are
marked as what they are: the closest ones, not sources.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.pages.words import Phrase, phrase
from app.store import Message
from app.updates import Source

#: The verdict of a passage that came closest and that no answer was made from.
CLOSEST = "closest"
#: Characters of a passage that are quoted to a program.
_QUOTED = 400


def refusal() -> Phrase:
    """The sentence."""
    return phrase("answer.refused")


def is_refusal(message: Message) -> bool:
    """True for a message that was stored in the place of an answer: no model wrote it, and what stands with
    it came closest only. An earlier version may have worded it in another way, and an answer of which a part
    was kept while the engine was down may name no model."""
    if message.role != "assistant" or message.model is not None:
        return False
    return message.text == refusal() or any(r.verdict == CLOSEST for r in message.references)


def refusal_text(closest: Sequence[Source]) -> str:
    """The sentence with the passages below it, for programs that show nothing but text."""
    parts = [str(refusal())]
    for source in closest:
        where = " · ".join(part for part in (source.title, source.section) if part)
        text = " ".join(source.text.split())
        parts.append(f"{source.number}. {where}: “{text[:_QUOTED]}{'…' if len(text) > _QUOTED else ''}”")
    return "\n\n".join(parts)
