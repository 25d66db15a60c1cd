"""A conversation as the entries of `gr.Chatbot`. Everything here is escaped; see `app.render`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app import receipts, render
from app.store import Message, Ranking
from app.updates import Source

Entry = dict[str, Any]

#: What a click on a source asks for; `desk.js` reads it. Ids are of our own making: hexadecimal.
SOURCE_LINK = "#cr-source-{message}-{number}"
_MARKS = (("verified", "✓ verified"), ("similar", "≈ similar"), ("unsupported", "? unsupported"))
_VERDICTS = (
    ("verified", "the answer states what this passage says"),
    ("similar", "close to what the answer says; check it"),
    ("unsupported", "the answer does not lean on this passage"),
)
_STATUS_NOTES = (
    ("stopped", "*Stopped before the end.*"),
    ("failed", "*This answer could not be finished.*"),
)


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a message stands among its alternatives: `ids[at]` is the one on screen."""

    ids: tuple[str, ...]
    at: int

    def links(self) -> list[str]:
        """The switcher, for a message that has alternatives."""
        if len(self.ids) < 2:
            return []
        before, after = (self.ids[(self.at + step) % len(self.ids)] for step in (-1, 1))
        return [
            f'[‹](#cr-branch-{before} "The version before this one")',
            f"{self.at + 1} of {len(self.ids)}",
            f'[›](#cr-branch-{after} "The version after this one")',
        ]


def user_entry(text: str, message: str | None = None, branch: Branch | None = None) -> Entry:
    """A question; a stored one (`message` is its id) can be edited."""
    shown = render.plain(text if len(text) <= 4_000 else text[:4_000] + " …")
    links = branch.links() if branch is not None else []
    links += [f"[Edit](#cr-edit-{message})"] if message is not None else []
    return {"role": "user", "content": "\n\n".join([shown, " ".join(links)]) if links else shown}


def draft_entries(text: str, stage: str, sources: Sequence[Source]) -> list[Entry]:
    """An answer that is being made: a line that says what happens, then the text so far."""
    if text:
        return [{"role": "assistant", "content": render.answer(text)}, *source_entries(sources)]
    title = render.plain(stage)
    return [{"role": "assistant", "content": "", "metadata": {"title": title, "status": "pending"}}]


def answer_entries(
    message: Message,
    sources: Sequence[Source],
    branch: Branch | None = None,
    block_size: int = 0,
) -> list[Entry]:
    """A finished answer: its text, its sources folded, its receipt folded. With alternatives the switcher,
    and (from the receipt, rounded up to blocks of `block_size` tokens) what this branch cost."""
    text = render.answer(message.text) if message.text.strip() else "*No text was written.*"
    extra = [note for status, note in _STATUS_NOTES if status == message.status]
    extra += [" ".join(_chip(source, message.id) for source in sources)] if sources else []
    extra.append(_rating(message))
    if branch is not None and (links := branch.links()):
        extra.append(" ".join([*links, *_cost(message.receipt, block_size)]))
    entries: list[Entry] = [{"role": "assistant", "content": "\n\n".join([text, *extra])}]
    entries += source_entries(sources, message.id)
    if message.receipt is not None:
        entries.append(
            {
                "role": "assistant",
                "content": receipts.table(message.receipt),
                "metadata": {"title": receipts.headline(message.receipt), "status": "done"},
            }
        )
    return entries


def verdict_words(verdict: str | None) -> str:
    """How an answer leans on a passage, with what the word means; "" where nothing was compared."""
    return next((f"{word}: {meaning}" for word, meaning in _VERDICTS if word == verdict), "")


def how_found(found: Ranking) -> str:
    """How search found a passage, in words: "search: dense rank 1, lexical rank 2, score 0.049"."""
    ranks = [f"{leg} rank {rank}" for leg, rank in found.ranks]
    return "search: " + ", ".join([*ranks, f"score {found.score:.3f}"])


def _rating(message: Message) -> str:
    links = [
        f'[👍](#cr-good-{message.id} "This answer helped")',
        f'[👎](#cr-bad-{message.id} "This answer did not help")',
    ]
    if message.feedback is not None:
        links.append(
            "*you found it helpful*" if message.feedback.rating == "good" else "*you found it wrong*"
        )
    return " ".join(links)


def _cost(receipt: dict[str, Any] | None, block_size: int) -> list[str]:
    if receipt is None or block_size < 1:
        return []
    blocks = math.ceil((receipt["computed_tokens"] + receipt["output_tokens"]) / block_size)
    return [f"· about {blocks:,} {'block' if blocks == 1 else 'blocks'} of its own"]


def _chip(source: Source, message: str) -> str:
    """A source on one short line under the answer; a click opens the document there."""
    mark = next((mark for verdict, mark in _MARKS if verdict == source.verdict), "")
    words = f"{source.number} {render.one_line(source.title, 40)}" + (f" · {mark}" if mark else "")
    return f"[{words}]({SOURCE_LINK.format(message=message, number=source.number)})"


def notes_entries(notes: Sequence[str]) -> list[Entry]:
    """What was left out of an answer's prompt and why, said once."""
    text = "\n\n".join(f"*{render.plain(note)}*" for note in notes)
    return [{"role": "assistant", "content": text}] if text else []


def source_entries(sources: Sequence[Source], message: str | None = None) -> list[Entry]:
    """One folded entry that holds all sources with their text; they open in the answer `message`."""
    if not sources:
        return []
    blocks = [_source(source, message) for source in sources]
    titles = list(dict.fromkeys(source.title for source in sources))
    names = ", ".join(render.one_line(title, 40) for title in titles[:3])
    more = f" and {len(titles) - 3} more" if len(titles) > 3 else ""
    noun = "Source" if len(sources) == 1 else "Sources"
    return [
        {
            "role": "assistant",
            "content": "\n\n".join(blocks),
            "metadata": {"title": f"{noun} · {names}{more}", "status": "done"},
        }
    ]


def _source(source: Source, message: str | None) -> str:
    head = f"**{source.number}. {render.one_line(source.title)}**"
    if message is not None and source.available:
        head = f"[{head}]({SOURCE_LINK.format(message=message, number=source.number)})"
    if not source.available:
        return f"{head}\n\n*This document was deleted or is no longer shared with you.*"
    where = [render.one_line(source.section)] if source.section else []
    where += [f"page {source.page}"] if source.page else []
    where += [words] if (words := verdict_words(source.verdict)) else []
    where += [render.plain(how_found(source.found))] if source.found is not None else []
    line = f"\n\n{' · '.join(where)}" if where else ""
    shown = source.text if len(source.text) <= 6_000 else source.text[:6_000] + " …"
    quoted = "\n".join(f"> {part}" for part in render.plain(shown.strip()).split("\n"))
    return f"{head}{line}\n\n{quoted}"
