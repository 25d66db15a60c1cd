"""A conversation as the entries of `gr.Chatbot`. Everything here is escaped; see `app.render`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app import receipts, render
from app.store import Message
from app.updates import Source

Entry = dict[str, Any]

_VERDICTS = (
    ("verified", "the answer states what this passage says"),
    ("similar", "close to what the answer says; check it"),
    ("unsupported", "the answer does not lean on this passage"),
)
_STATUS_NOTES = (
    ("stopped", "*Stopped before the end.*"),
    ("failed", "*This answer could not be finished.*"),
)


def user_entry(text: str) -> Entry:
    shown = text if len(text) <= 4_000 else text[:4_000] + " …"
    return {"role": "user", "content": render.plain(shown)}


def draft_entries(text: str, stage: str, sources: Sequence[Source]) -> list[Entry]:
    """An answer that is being made: a line that says what happens, then the text so far."""
    if text:
        return [{"role": "assistant", "content": render.answer(text)}, *source_entries(sources)]
    title = render.plain(stage)
    return [{"role": "assistant", "content": "", "metadata": {"title": title, "status": "pending"}}]


def answer_entries(message: Message, sources: Sequence[Source], notes: Sequence[str] = ()) -> list[Entry]:
    """A finished answer: its text, its sources folded, its receipt folded."""
    text = render.answer(message.text) if message.text.strip() else "*No text was written.*"
    extra = [note for status, note in _STATUS_NOTES if status == message.status]
    extra += [f"*{render.plain(note)}*" for note in notes]
    entries: list[Entry] = [{"role": "assistant", "content": "\n\n".join([text, *extra])}]
    entries += source_entries(sources)
    if message.receipt is not None:
        entries.append(
            {
                "role": "assistant",
                "content": receipts.table(message.receipt),
                "metadata": {"title": receipts.headline(message.receipt), "status": "done"},
            }
        )
    return entries


def source_entries(sources: Sequence[Source]) -> list[Entry]:
    """One folded entry that holds all sources with the text that the model was given."""
    if not sources:
        return []
    blocks = [_source(source) for source in sources]
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


def _source(source: Source) -> str:
    head = f"**{source.number}. {render.one_line(source.title)}**"
    if not source.available:
        return f"{head}\n\n*This document was deleted or is no longer shared with you.*"
    where = [render.one_line(source.section)] if source.section else []
    where += [f"page {source.page}"] if source.page else []
    where += [f"{verdict}: {meaning}" for verdict, meaning in _VERDICTS if verdict == source.verdict]
    line = f"\n\n{' · '.join(where)}" if where else ""
    shown = source.text if len(source.text) <= 6_000 else source.text[:6_000] + " …"
    quoted = "\n".join(f"> {part}" for part in render.plain(shown.strip()).split("\n"))
    return f"{head}{line}\n\n{quoted}"
