"""A conversation as the entries of `gr.Chatbot`. Everything here is escaped; see `app.render`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app import receipts, render
from app.pages.words import Phrase, Words
from app.refusal import CLOSEST, is_refusal
from app.store import Message, Ranking
from app.updates import Best, Source

Entry = dict[str, Any]

#: What a click on a source asks for; `desk.js` reads it. Ids are of our own making: hexadecimal.
SOURCE_LINK = "#cr-source-{message}-{number}"
_VERDICTS = ("verified", "similar", "unsupported", CLOSEST)
#: Branches whose cost is listed; a click goes through all.
_MAX_COSTS = 8
#: Notes that stand under their answer for good; the others are in its receipt.
_LASTING = ("note.looped",)


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a message stands among its alternatives: `ids[at]` is the one on screen. `blocks`: what each
    computed for itself, in blocks; 0 where nothing was computed (yet)."""

    ids: tuple[str, ...]
    at: int
    blocks: tuple[int, ...] = ()

    def switcher(self, w: Words) -> str:
        """Links to the neighbours and what each branch cost, for a message that has alternatives."""
        if len(self.ids) < 2:
            return ""
        before, after = (self.ids[(self.at + step) % len(self.ids)] for step in (-1, 1))
        parts = [
            f'[‹](#cr-branch-{before} "{w("branch.before")}")',
            w("branch.at", at=self.at + 1, of=len(self.ids)),
            f'[›](#cr-branch-{after} "{w("branch.after")}")',
        ]
        if self.blocks and self.blocks[self.at]:
            parts.append("· " + w("branch.cost", n=self.blocks[self.at]))
        others = [
            f"{n + 1}: {cost:,}" for n, cost in enumerate(self.blocks[:_MAX_COSTS]) if n != self.at and cost
        ]
        if others:
            parts.append("· " + w("branch.others", costs=", ".join(others)))
        return " ".join(parts)


def costs(messages: Iterable[Message], block_size: int) -> dict[str, int]:
    """For each message of a conversation, the blocks that the answers from it downwards computed: prompt
    tokens that were not reused, and the answers. Each answer is rounded up to whole blocks."""
    listed = list(messages)
    total = {message.id: 0 for message in listed}
    parents: Mapping[str, str | None] = {message.id: message.parent_id for message in listed}
    for message in listed:
        if message.receipt is None or block_size < 1:
            continue
        own = math.ceil((message.receipt["computed_tokens"] + message.receipt["output_tokens"]) / block_size)
        at: str | None = message.id
        while at is not None and at in total:
            total[at] += own
            at = parents[at]
    return total


def user_entry(text: str, w: Words, message: str | None = None, branch: Branch | None = None) -> Entry:
    """A question; a stored one (`message` is its id) can be edited."""
    shown = render.plain(text if len(text) <= 4_000 else text[:4_000] + " …")
    links = [f"[{w('answer.edit')}](#cr-edit-{message})"] if message is not None else []
    links += [switcher] if branch is not None and (switcher := branch.switcher(w)) else []
    return {"role": "user", "content": "\n\n".join([shown, " ".join(links)]) if links else shown}


def draft_entries(
    text: str, stage: str, sources: Sequence[Source], w: Words, best: Best | None = None
) -> list[Entry]:
    """An answer that is being made: the text so far, then a line that says what happens, with the sentence of
    the documents that the answer seems to rest on."""
    entries: list[Entry] = [{"role": "assistant", "content": render.answer(text)}] if text else []
    entries.append(
        {
            "role": "assistant",
            "content": _best(best, w) if best is not None else "",
            "metadata": {"title": render.plain(w.tell(stage)), "status": "pending"},
        }
    )
    return entries + (source_entries(sources, w) if text else [])


def _best(best: Best, w: Words) -> str:
    sentence = best.sentence.strip()
    shown = sentence if len(sentence) <= 600 else sentence[:600] + " …"
    quoted = "\n".join(f"> {part}" for part in render.plain(shown).split("\n"))
    return f"{w('answer.passage_now')} **{render.one_line(best.source.title, 80)}**\n\n{quoted}"


def answer_entries(
    message: Message,
    sources: Sequence[Source],
    w: Words,
    branch: Branch | None = None,
    private: Sequence[Source] = (),
) -> list[Entry]:
    """A finished answer: its text, its sources folded, its receipt folded; with alternatives the switcher.
    `private`: what stood behind the history in its prompt, where nobody else can share it."""
    said = w("answer.refused") if is_refusal(message) else message.text
    text = render.answer(said) if said.strip() else f"*{w('answer.nothing')}*"
    extra = [f"*{w('answer.' + message.status)}*"] if message.status in ("stopped", "failed") else []
    if message.receipt is not None and (limit := message.receipt.get("length_limit")):
        extra.append(f"*{w('answer.length', n=limit)}*")
    if message.receipt is not None and (line := sentences_line(message.receipt.get("sentences"), w)):
        extra.append(line)
    notes = receipts.notes(message.receipt)
    extra += [f"*{render.plain(w.tell(note))}*" for note in notes if note.key in _LASTING]
    extra += [" ".join(_chip(source, message.id, w) for source in sources)] if sources else []
    extra.append(_tools(message, w))
    if branch is not None and (switcher := branch.switcher(w)):
        extra.append(switcher)
    entries: list[Entry] = [{"role": "assistant", "content": "\n\n".join([text, *extra])}]
    entries += source_entries(sources, w, message.id)
    if message.receipt is not None:
        titles = ", ".join(dict.fromkeys(render.one_line(source.title, 60) for source in private))
        entries.append(
            {
                "role": "assistant",
                "content": "\n\n".join(
                    [receipts.table(message.receipt, w, titles)]
                    + [render.plain(w.tell(note)) for note in notes if note.key not in _LASTING]
                ),
                "metadata": {"title": receipts.headline(message.receipt, w), "status": "done"},
            }
        )
    return entries


def sentences_line(counts: Mapping[str, int] | None, w: Words) -> str:
    """How far the marks reach in an answer of several sentences: "Of 3 sentences: 1 ✓ verified, 2 ≈ similar";
    "" where there is one, or where all are verified and each source says so."""
    total = sum((counts or {}).values())
    if counts is None or total < 2 or counts.get("verified") == total:
        return ""
    parts = [f"{counts[verdict]:,} {w('source.' + verdict)}" for verdict in _VERDICTS if counts.get(verdict)]
    return f"*{w('answer.sentences', n=total, parts=w('answer.comma').join(parts))}*"


def marks_line(sources: Sequence[Source], w: Words) -> str:
    """The sources of an answer that is stored nowhere, each with its mark; nothing there is to be opened."""
    return "; ".join(
        f"{source.number} {render.one_line(_title(source, w), 40)} {mark_words(source.verdict, w)}".rstrip()
        for source in sources
    )


def mark_words(verdict: str | None, w: Words) -> str:
    """A source's mark, "✓ verified"; "" where nothing was compared."""
    return w(f"source.{verdict}") if verdict in _VERDICTS else ""


def verdict_words(verdict: str | None, w: Words) -> str:
    """How an answer leans on a passage, with what the word means; "" where nothing was compared."""
    return w(f"source.{verdict}_why") if verdict in _VERDICTS else ""


def how_found(found: Ranking, w: Words) -> str:
    """How search found a passage, in words: "search: dense rank 1, lexical rank 2, score 0.049"."""
    ranks = [w("source.rank", leg=leg, rank=rank) for leg, rank in found.ranks]
    return w("source.found", how=", ".join([*ranks, w("source.score", score=found.score)]))


def _tools(message: Message, w: Words) -> str:
    """Words, not pictures: a reader without an emoji font sees them, and a screen reader says them."""
    links = [
        f"[{w('answer.copy')}](#cr-copy-{message.id})",
        f'[{w("answer.helped")}](#cr-good-{message.id} "{w("answer.helped_why")}")',
        f'[{w("answer.helped_not")}](#cr-bad-{message.id} "{w("answer.helped_not_why")}")',
    ]
    if message.feedback is not None:
        links.append(f"*{w('answer.rated_' + message.feedback.rating)}*")
    return " ".join(links)


def _chip(source: Source, message: str, w: Words) -> str:
    """A source on one short line under the answer; a click opens the document there."""
    parts = [f"{source.number} {render.one_line(_title(source, w), 40)}", mark_words(source.verdict, w)]
    words = " · ".join(part for part in parts if part)
    return f"[{words}]({SOURCE_LINK.format(message=message, number=source.number)})"


def _title(source: Source, w: Words) -> str:
    if source.replaced:
        return w("source.replaced_title", title=source.title)
    return source.title if source.available else w("source.gone_title")


def notes_entries(notes: Sequence[str], w: Words) -> list[Entry]:
    """What was left out of an answer's prompt and why, said once; then it stands in the receipt. What ended
    the answer stands under it already."""
    said = [note for note in notes if not isinstance(note, Phrase) or note.key not in _LASTING]
    text = "\n\n".join(f"*{render.plain(w.tell(note))}*" for note in said)
    return [{"role": "assistant", "content": text}] if text else []


def source_entries(sources: Sequence[Source], w: Words, message: str | None = None) -> list[Entry]:
    """One folded entry that holds all sources with their text; they open in the answer `message`."""
    if not sources:
        return []
    titles = list(dict.fromkeys(_title(source, w) for source in sources))
    names = ", ".join(render.one_line(title, 40) for title in titles[:3])
    more = w("source.more", n=len(titles) - 3) if len(titles) > 3 else ""
    return [
        {
            "role": "assistant",
            "content": "\n\n".join(_source(source, w, message) for source in sources),
            "metadata": {"title": f"{w('source.sources', n=len(sources))} · {names}{more}", "status": "done"},
        }
    ]


def _source(source: Source, w: Words, message: str | None) -> str:
    head = f"**{source.number}. {render.one_line(_title(source, w))}**"
    if message is not None and source.available:
        head = f"[{head}]({SOURCE_LINK.format(message=message, number=source.number)})"
    if not source.available:
        return f"{head}\n\n*{w('source.replaced' if source.replaced else 'source.gone')}*"
    where = [render.one_line(source.section)] if source.section else []
    where += [w("source.page", page=source.page)] if source.page else []
    where += [words] if (words := verdict_words(source.verdict, w)) else []
    where += [render.plain(how_found(source.found, w))] if source.found is not None else []
    line = f"\n\n{' · '.join(where)}" if where else ""
    shown = render.plain(render.quoted(source.text).strip())
    quoted = "\n".join(f"> {part}" for part in shown.split("\n"))
    return f"{head}{line}\n\n{quoted}"
