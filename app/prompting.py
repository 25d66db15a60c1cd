"""From a question to the engine's segments: which text goes in, and whose it is.

`rag` lays the prompt out; the scopes of its segments are turned into the engine's here. What a person may
no longer read leaves the prompt, together with the earlier answers that were made from it. So do earlier
answers that no passage supports: a model takes what it said before for true, and one wrong answer would make
the next ones wrong.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from app.errors import NotFoundHere, StillWarmingUp
from app.knowledge import Knowledge
from app.pages.words import Phrase, phrase
from app.refusal import is_refusal
from app.repetition import loop_start
from app.settings import Settings
from app.store import Message, Ranking, Reference, Zone
from engine.errors import ContextTooLong
from engine.types import Scope, Segment
from rag.cite import attribute, sentences
from rag.order import CANDIDATES, needed
from rag.prompt import Prompt, PromptDocument, PromptLayout, PromptSegment, Turn
from rag.rerank import LEG as RERANKED
from rag.split import heading_over
from rag.types import DocumentText, Hit

if TYPE_CHECKING:
    from engine.service import EngineService

_STRENGTH = ("unsupported", "similar", "verified")
#: A cited sentence is shown with what surrounds it, up to so many characters on either side.
_AROUND = 300
#: At most so many sources are shown under an answer.
_MAX_SOURCES = 6
#: Passages shown where the documents do not seem to hold an answer.
_CLOSEST = 3


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one version of a document that goes into a prompt."""

    document_id: str
    version: int
    collection_id: str
    start: int
    stop: int

    @classmethod
    def of(cls, reference: Reference) -> Span:
        return cls(
            reference.document_id, reference.version, reference.collection_id, reference.start, reference.stop
        )

    @classmethod
    def whole(cls, document: DocumentText) -> Span:
        return cls(document.id, document.version, document.collection_id, 0, len(document.text))

    @property
    def part(self) -> int:
        """Tells the stretches of one document apart, in their order."""
        return (self.start << 32) | self.stop

    def reference(
        self, number: int, zone: Zone, verdict: str | None = None, found: Ranking | None = None
    ) -> Reference:
        return Reference(
            number, self.document_id, self.version, self.collection_id, self.start, self.stop,
            zone=zone, verdict=verdict, found=found,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """A span as it stands in the prompt, with its text."""

    span: Span
    zone: Zone
    text: str
    #: For `rag.cite`, which calls what it compares passages.
    passage_id: int
    found: Ranking | None = None
    #: Where the sections in it begin, each with the document's title and the headings over it.
    headings: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """A prompt that is ready for the engine, and what stands in it."""

    segments: tuple[Segment, ...]
    placed: tuple[Placed, ...]
    notes: tuple[Phrase, ...] = ()
    #: The documents do not seem to hold an answer: there are no segments, and `placed` came closest.
    refused: bool = False

    @property
    def read(self) -> frozenset[tuple[str, int]]:
        """The documents that were read for it, each with the version that was."""
        return frozenset((p.span.document_id, p.span.version) for p in self.placed)


class Cited(NamedTuple):
    """What an answer leans on. `sentences`: how many of its sentences have each verdict that occurs."""

    references: tuple[Reference, ...]
    sentences: dict[str, int]


#: A source that is shown: where, how the answer leans on it, how search found it.
_Shown = tuple[Span, str, Ranking | None]


class EngineResidency:
    """Tells `rag`'s layout what the engine has in memory."""

    def __init__(self, engine: EngineService) -> None:
        self._engine = engine

    def resident_tokens(self, segments: Sequence[PromptSegment]) -> int:
        return self._engine.resident_tokens([engine_segment(segment) for segment in segments])


def engine_segment(segment: PromptSegment) -> Segment:
    """The engine's segment of one of `rag`'s: the only place where a prompt's scopes are made."""
    match segment.scope_kind:
        case "public":
            scope = Scope.public()
        case "collection":
            scope = Scope.collection(segment.scope_id)
        case "account":
            scope = Scope.account(segment.scope_id)
    return Segment(segment.tokens, scope, segment.origin, segment.document)


class Prompter:
    """Chooses what goes into a prompt and has it laid out. One for the life of a model."""

    def __init__(
        self, settings: Settings, knowledge: Knowledge, layout: PromptLayout, residency: EngineResidency,
        model: str, max_context: int,
    ) -> None:  # fmt: skip
        self._settings, self._knowledge, self._residency = settings, knowledge, residency
        self.layout, self.model, self.max_context = layout, model, max_context

    @classmethod
    def create(cls, settings: Settings, engine: EngineService, knowledge: Knowledge) -> Prompter:
        """Probe the model's chat template; raises `rag.errors.UnstableTemplate`. Blocks."""
        status = engine.status()
        if status.shape is None:
            raise StillWarmingUp("The language model is not loaded yet.")
        return cls(
            settings, knowledge, PromptLayout(engine.tokenizer), EngineResidency(engine), status.model,
            status.shape.max_context,
        )  # fmt: skip

    async def build(
        self,
        *,
        readable: frozenset[str],
        path: Sequence[Message],
        question: str,
        account: str,
        spans: Sequence[Span] | None,
        answer_tokens: int,
        earlier: Sequence[Turn] | None = None,
        within: frozenset[str] | None = None,
    ) -> Built:
        """The prompt for `question` after `path`, over `spans` or, for None, over what search finds `within`
        these collections (None: all readable ones).

        `earlier` replaces the history of `path` (callers of the stateless API bring their own). Where what
        was found does not look as if it held an answer, the result is `refused`. Raises
        `rag.errors.PromptTooLong`, `InvalidQuery`.
        """
        notes: list[Phrase] = []
        texts = await self._texts(readable, [*_spans_of(path), *(spans or ())])
        found: dict[Span, Ranking] = {}
        spare: list[Span] = []
        if spans is None:
            asked = [message.text for message in path if message.role == "user"]
            asked += [turn.text for turn in earlier or () if turn.role == "user"]
            where = readable if within is None else readable & within
            hits = await self._knowledge.search(where, question, self._looked_at, asked)
            if self._settings.refuse_unanswerable and not await self._knowledge.answerable(
                where, question, hits, asked
            ):
                return Built((), _closest(hits), refused=True)
            found = await self._choose(where, hits, texts)
            wanted = self._needed(found)
            kept = [s for s in _last_front(path) if texts.get(s.document_id) and s not in wanted]
            kept = [span for span in kept if span.collection_id in where]
            wanted += kept[: self._settings.kept_passages]
            spare = [span for span in found if span not in wanted]
        else:
            wanted = list(spans)
        for span in wanted:
            document = texts.get(span.document_id)
            if document is None or document.version != span.version:
                raise NotFoundHere(phrase("refused.document_changed"))
        turns, lost = self._history(path, texts)
        if lost:
            notes.append(phrase("note.lost"))
        settled = [_document(s, texts, 0.0) for s in _last_front(path) if s in wanted or s in spare]
        documents = [_document(s, texts, 1.0 / (1 + i)) for i, s in enumerate([*wanted, *spare])]
        prompt: Prompt = await asyncio.to_thread(
            self.layout.build,
            instructions=self._settings.instructions,
            documents=documents[: len(wanted)],
            spare=documents[len(wanted) :],
            places=self._settings.prompt_passages,
            history=turns if earlier is None else earlier,
            question=question,
            account=account,
            budget_tokens=self.max_context - answer_tokens,
            settled=settled,
            residency=self._residency,
        )
        if prompt.dropped_turns:
            notes.append(phrase("note.oldest", n=prompt.dropped_turns))
        if prompt.dropped_documents:
            if spans is not None:
                tokens = sum(len(self.layout.document_tokens(d)) for d in prompt.dropped_documents)
                raise ContextTooLong(tokens, answer_tokens, self.max_context)
            notes.append(phrase("note.passages", n=len(prompt.dropped_documents)))
        if prompt.appended:
            notes.append(phrase("note.appended"))
        by_key = {(s.document_id, s.part): s for s in [*wanted, *spare]}
        standing: list[tuple[Zone, PromptDocument]] = [("front", d) for d in prompt.documents]
        standing += [("appended", d) for d in prompt.appended]
        placed = [
            Placed(
                by_key[d.key], zone, d.text, n, found.get(by_key[d.key]), _headings(by_key[d.key], texts)
            )
            for n, (zone, d) in enumerate(standing)
        ]  # fmt: skip
        return Built(tuple(engine_segment(s) for s in prompt.segments), tuple(placed), tuple(notes))

    def _needed(self, found: dict[Span, Ranking]) -> list[Span]:
        """Those of the spans found that must stand in the prompt; the others may."""
        places = self._settings.prompt_passages
        ranks = [[rank for _, rank in f.ranks] for f in found.values()]
        if any(leg == RERANKED for f in found.values() for leg, _ in f.ranks):
            return list(found)[:places]  # its order is better than what the fused scores say
        spans = list(found)
        leading = [1 in legs for legs in ranks]
        return [spans[i] for i in needed([f.score for f in found.values()], leading, places)]

    @property
    def _looked_at(self) -> int:
        """Passages that search is asked for: with one in the prompt there is nothing to choose among."""
        several = self._settings.prompt_passages > 1
        return max(self._settings.search_results, CANDIDATES if several else 0)

    # -- what goes in ------------------------------------------------------------------------------------

    async def _texts(self, readable: frozenset[str], spans: Sequence[Span]) -> dict[str, DocumentText | None]:
        texts: dict[str, DocumentText | None] = {}
        for id in dict.fromkeys(span.document_id for span in spans):
            try:
                texts[id] = await self._knowledge.document(readable, id)
            except NotFoundHere:
                texts[id] = None
        return texts

    async def _choose(
        self, readable: frozenset[str], hits: Sequence[Hit], texts: dict[str, DocumentText | None]
    ) -> dict[Span, Ranking]:
        """What may go into the prompt: passages, each with its whole section where that is short enough,
        without repetition; best first, each with how its best hit was found."""
        chosen: dict[Span, Ranking] = {}
        for hit in hits:
            if len(chosen) == self._settings.prompt_passages == 1:
                break
            document = texts.get(hit.document_id)
            if document is None:
                try:
                    document = await self._knowledge.document(readable, hit.document_id)
                except NotFoundHere:
                    continue  # deleted since it was found
                texts[hit.document_id] = document
            if document.version != hit.version:
                continue
            section = next((s for s in document.sections if s.index == hit.section), None)
            start, stop = hit.start, hit.end
            if section is not None and section.end - section.start <= self._settings.section_chars:
                start, stop = section.start, section.end
            span = Span(hit.document_id, hit.version, hit.collection_id, start, stop)
            chosen.setdefault(span, Ranking(hit.score, tuple(hit.ranks.items())))
        return chosen

    def _history(
        self, path: Sequence[Message], texts: dict[str, DocumentText | None]
    ) -> tuple[list[Turn], bool]:
        """Earlier turns as generated, without those whose documents are gone, that have no answer, or whose
        answer is not to be relied on. Search still sees their questions."""
        turns: list[Turn] = []
        lost = False
        for question, answer in itertools.pairwise(path):
            if question.role != "user" or answer.role != "assistant" or not answer.text.strip():
                continue
            if is_refusal(answer):
                continue  # the model never saw that question, and would learn to refuse from it
            if _unsupported(answer) or _ended_for_repetition(answer):
                continue
            given = [r for r in answer.references if r.zone]
            documents = [texts.get(r.document_id) for r in given]
            if any(d is None or d.version != r.version for d, r in zip(documents, given, strict=True)):
                lost = True
                continue
            appended = tuple(_document(Span.of(r), texts, 0.0) for r in given if r.zone == "appended")
            ids = answer.tokens if answer.model == self.model else None
            turns.append(Turn("user", question.text, documents=appended))
            turns.append(Turn("assistant", answer.text, token_ids=ids))
        return turns, lost

    # -- what the answer leans on ------------------------------------------------------------------------

    async def attribute(self, answer: str, built: Built, most: int | None = None) -> Cited:
        """What an answer leans on: the references to store with it, first the sources that are shown, best
        support first, then what stood in the prompt; and the verdicts of its sentences. `most`: characters
        of its beginning that are looked at; None for all of them."""
        if most is not None and len(answer) > most:
            spans = sentences(answer[:most])
            # Without the sentence that was cut, unless there is no other.
            answer = answer[: spans[-1][0]] if len(spans) > 1 else answer[:most]
        shown, verdicts = await asyncio.to_thread(self._cited, answer, built.placed)
        if not shown:
            shown = [(placed.span, "unsupported", placed.found) for placed in built.placed]
        references = [
            span.reference(n, "", verdict, found) for n, (span, verdict, found) in enumerate(shown, 1)
        ]
        references += [p.span.reference(len(shown) + n, p.zone) for n, p in enumerate(built.placed, 1)]
        return Cited(tuple(references), dict(verdicts))

    @staticmethod
    def _cited(answer: str, placed: Sequence[Placed]) -> tuple[list[_Shown], Counter[str]]:
        """A place that several sentences lean on is marked as the weakest of them: a mark that is good for
        one of them only would vouch for the others."""
        found: list[_Shown] = []
        compared = attribute(answer, placed)
        for sentence in compared:
            if sentence.source is None:
                continue
            source = placed[sentence.source]
            start, stop = _surroundings(source.text, sentence.source_start, sentence.source_end)
            base = source.span.start
            span = replace(source.span, start=base + start, stop=base + stop)
            for index, (other, verdict, ranking) in enumerate(found):
                same = other.document_id == span.document_id and other.version == span.version
                if same and span.start < other.stop and other.start < span.stop:
                    joined = replace(
                        other, start=min(other.start, span.start), stop=max(other.stop, span.stop)
                    )
                    weakest = min(verdict, sentence.verdict, key=_STRENGTH.index)
                    found[index] = (joined, weakest, ranking)
                    break
            else:
                found.append((span, sentence.verdict, source.found))
        found.sort(key=lambda item: -_STRENGTH.index(item[1]))
        return found[:_MAX_SOURCES], Counter(sentence.verdict for sentence in compared)


def _surroundings(text: str, start: int, stop: int) -> tuple[int, int]:
    """The paragraph around a sentence, cut at word borders where it is long."""
    first = text.rfind("\n\n", 0, start) + 2 if "\n\n" in text[:start] else 0
    last = text.find("\n\n", stop)
    last = len(text) if last < 0 else last
    if start - first > _AROUND:
        first = text.find(" ", start - _AROUND, start) + 1 or start
    if last - stop > _AROUND:
        last = max(text.rfind(" ", stop, stop + _AROUND), stop)
    return first, last


def _closest(hits: Sequence[Hit]) -> tuple[Placed, ...]:
    """What is shown where there is no answer: the passages as they were found, without their sections."""
    return tuple(
        Placed(
            Span(hit.document_id, hit.version, hit.collection_id, hit.start, hit.end), "", hit.text, n,
            Ranking(hit.score, tuple(hit.ranks.items())),
        )
        for n, hit in enumerate(hits[:_CLOSEST])
    )  # fmt: skip


def _document(span: Span, texts: dict[str, DocumentText | None], weight: float) -> PromptDocument:
    document = texts[span.document_id]
    if document is None:
        raise NotFoundHere("This document was deleted or is no longer shared with you.")
    return PromptDocument(
        span.document_id, span.collection_id, document.title or document.name,
        document.text[span.start : span.stop], span.part, weight,
    )  # fmt: skip


def _headings(span: Span, texts: dict[str, DocumentText | None]) -> tuple[tuple[int, str], ...]:
    document = texts.get(span.document_id)
    if document is None:
        return ()
    title = document.title or document.name
    return tuple(
        (max(section.start - span.start, 0), heading_over(title, section.title))
        for section in document.sections
        if section.start < span.stop and span.start < section.end
    )


def _spans_of(path: Sequence[Message]) -> list[Span]:
    return [Span.of(r) for message in path for r in message.references if r.zone]


def _last_front(path: Sequence[Message]) -> list[Span]:
    """What stood in front in the last answered turn, in its order."""
    for message in reversed(path):
        if message.role == "assistant" and not is_refusal(message):
            return [Span.of(r) for r in message.references if r.zone == "front"]
    return []


def _unsupported(answer: Message) -> bool:
    """Whether no passage supports any sentence of a stored answer. With nothing in its prompt there was
    nothing to support it, which says nothing about it."""
    verdicts = {reference.verdict for reference in answer.references if not reference.zone}
    return verdicts == {"unsupported"}


def _ended_for_repetition(answer: Message) -> bool:
    """Such an answer is stored without ids, since its text was cut (`app.turn`); one that was written in part
    when the server stopped still has its loop."""
    return answer.tokens is None or loop_start(answer.text) is not None
