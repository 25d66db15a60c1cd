"""A question's way from a person to the engine and back.

    question ─▶ search (readable collections) or one whole document ─▶ prompt layout ─▶ segments with scopes
             ─▶ engine ─▶ stages, text ─▶ sources and receipt, stored with the answer

Scopes are derived here, by the server, from what a segment is: nobody outside chooses one. One turn runs
in a conversation at a time. It belongs to the conversation, not to the call that began it: a page that was
reloaded joins it again (`watch`), and `GRACE_S` seconds without a viewer end it (`app.live`): the engine's
request is aborted and the part that was written is kept, marked as stopped. Python does not close a
generator that another one iterates over, hence `aclosing` wherever one passes on another.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.errors import NotFoundHere, QuestionRefused, SignedOut, TurnRunning
from app.knowledge import Knowledge, questions_about, shown_of
from app.limits import Limits
from app.live import HEARTBEAT_S, LiveTurn
from app.looks import Look, Looks
from app.pages.words import Phrase, phrase
from app.principal import Principal
from app.prompting import Built, Prompter, Span
from app.receipts import PrefillRate, receipt_json
from app.refusal import CLOSEST, refusal
from app.settings import Settings
from app.store import Conversation, Message, Reference, Store
from app.text import whole
from app.turn import Turn, beats, reading_words, waiting_words
from app.updates import Best, Finished, Found, Source, Stage, Text, Update
from engine.types import Delta, Done, Failed, GenerationRequest, Reading, SamplingParams, Scope, Waiting

if TYPE_CHECKING:
    from engine.service import EngineService

log = logging.getLogger("coread")
#: Seconds without a viewer after which a turn is ended.
GRACE_S = 5.0
#: Seconds that a running turn has to end when the server stops.
_CLOSE_S = 3.0
#: Characters of a question for which the passage is looked for that it is nearest to.
_LOOKED_AT = 1_000
_PLAIN_QUESTIONS = ("What is this document about?", "Which numbers does this document name?")


@dataclass(frozen=True, slots=True)
class Invitation:
    """A scripted second reader: what it reads, what it asks, and its turn."""

    title: str
    question: str
    updates: AsyncGenerator[Update, None]


class Chat:
    """Asks, answers again, stops, and invites; for any number of people at once."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineService,
        knowledge: Knowledge,
        store: Store,
        prompter: Prompter,
        limits: Limits,
        may_act: Callable[[Principal], bool],
    ) -> None:
        """`may_act(principal)`: False once a person's account was locked."""
        self._settings, self._engine, self._store = settings, engine, store
        self._knowledge, self._prompter, self._limits = knowledge, prompter, limits
        self._may_act = may_act
        self._turns: dict[str, Turn] = {}
        self._live: dict[str, LiveTurn] = {}
        self.grace_s = GRACE_S
        #: Whose second reader is on its way or reads, and by which invitation.
        self._inviting: dict[str, object] = {}
        self._prefill = PrefillRate()
        self._looks = Looks()
        #: Answers that are being stored and second readers that leave: neither hangs on whoever began it.
        self._saving: set[asyncio.Task[Message]] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    # -- what people do ----------------------------------------------------------------------------------

    def check_question(self, question: str) -> str:
        """The question without surrounding blanks; raises `QuestionRefused` for an empty or over-long one."""
        stripped = whole(question).strip() if isinstance(question, str) else ""
        if not stripped:
            raise QuestionRefused(phrase("refused.empty"))
        limit = self._settings.max_question_chars
        if len(stripped) > limit:
            raise QuestionRefused(phrase("refused.long", n=len(stripped), limit=limit))
        return stripped

    async def ask(
        self, principal: Principal, conversation_id: str, question: str
    ) -> AsyncGenerator[Update, None]:
        """Answer `question` at the end of the conversation's branch on screen."""
        question = self.check_question(question)
        conversation = await self._store.conversation(principal, conversation_id)
        path = await self._store.path(principal, conversation_id)
        turn = Turn(
            principal, principal, conversation, path, question, self._sampling(),
            await self._store.readable(principal), path[-1].id if path else None,
        )  # fmt: skip
        async with aclosing(self._begin(turn).view()) as updates:
            async for update in updates:
                yield update

    async def regenerate(
        self, principal: Principal, conversation_id: str, question_id: str
    ) -> AsyncGenerator[Update, None]:
        """Answer a question again, beside the answers it has: same prompt, fresh sampling."""
        conversation = await self._store.conversation(principal, conversation_id)
        path = await self._store.path(principal, conversation_id, question_id)
        if not path or path[-1].role != "user":
            raise NotFoundHere(phrase("refused.no_question"))
        asked = path[-1]
        sampling = replace(
            self._sampling(),
            temperature=self._settings.regenerate_temperature,
            top_p=0.95,
            seed=secrets.randbits(31),
        )
        turn = Turn(
            principal, principal, conversation, path[:-1], asked.text, sampling,
            await self._store.readable(principal), asked.parent_id, asked.id,
        )  # fmt: skip
        async with aclosing(self._begin(turn).view()) as updates:
            async for update in updates:
                yield update

    async def edit(
        self, principal: Principal, conversation_id: str, question_id: str, question: str
    ) -> AsyncGenerator[Update, None]:
        """Ask an earlier question in other words: a branch beside it, which shares everything before it."""
        question = self.check_question(question)
        conversation = await self._store.conversation(principal, conversation_id)
        path = await self._store.path(principal, conversation_id, question_id)
        if not path or path[-1].role != "user":
            raise NotFoundHere(phrase("refused.no_edit"))
        turn = Turn(
            principal, principal, conversation, path[:-1], question, self._sampling(),
            await self._store.readable(principal), path[-1].parent_id,
        )  # fmt: skip
        async with aclosing(self._begin(turn).view()) as updates:
            async for update in updates:
                yield update

    async def watch(self, principal: Principal, conversation_id: str) -> LiveTurn | None:
        """The turn that runs in the principal's conversation, None where none does."""
        await self._store.conversation(principal, conversation_id)
        return self._live.get(conversation_id)

    async def stop(self, principal: Principal, conversation_id: str) -> None:
        """End the running turn; its viewer gets the part that was written as a finished answer."""
        await self._store.conversation(principal, conversation_id)
        turn = self._turns.get(conversation_id)
        if turn is not None:
            turn.stop()

    def end_turns_of(self, account: str) -> None:
        """End what a locked account has running, its second reader too; what was written is kept. A turn that
        has not come to the engine yet sees for itself (`_require`)."""
        for turn in list(self._turns.values()):
            if turn.payer.id == account:
                turn.stop()

    def _require(self, turn: Turn) -> None:
        """Raises `SignedOut` where the account that asks was locked meanwhile."""
        if not self._may_act(turn.payer):
            raise SignedOut("Sign in first: your account was locked.")

    async def delete(self, principal: Principal, conversation_id: str) -> None:
        """Delete a conversation, ending its turn and giving its place in memory up."""
        await self._store.conversation(principal, conversation_id)
        turn, live = self._turns.get(conversation_id), self._live.get(conversation_id)
        if turn is not None:
            turn.forgotten = True
            if turn.generation is not None:
                turn.generation.abort()
        if live is not None:
            await live.cancel()
        await self._store.delete(principal, conversation_id)
        if self._engine.status().state == "ready":  # one that is down keeps nothing open
            self._engine.close_conversation(conversation_id)

    async def invite(
        self, principal: Principal, conversation_id: str | None, document_id: str | None
    ) -> Invitation:
        """A scripted reader with a principal and a conversation of its own, over what this person reads.

        It may read exactly those documents, by the inviter's right, and counts against the inviter's limits.
        """
        if principal.id in self._inviting:
            raise TurnRunning(phrase("refused.reader_running"))
        place = self._inviting[principal.id] = object()
        try:
            readable = await self._store.readable(principal)
            spans, asked = await self._shared_spans(principal, readable, conversation_id, document_id)
            document = await self._knowledge.document(readable, spans[0].document_id)
        except BaseException:
            self._uninvite(principal.id, place)
            raise
        candidates = [*questions_about(document.name), *_PLAIN_QUESTIONS]
        question = next((q for q in candidates if q not in asked), candidates[-1])
        # A page that is closed before it looks at the first update never begins the reader's turn.
        unbegun = asyncio.get_running_loop().call_later(self.grace_s, self._uninvite, principal.id, place)
        guest = self._guest(principal, place, unbegun, question, spans)
        return Invitation(document.title or document.name, question, guest)

    async def close(self) -> None:
        """End every turn and wait until what was written is stored."""
        for turn in list(self._turns.values()):
            turn.stop()
        live = list(self._live.values())
        for running in live:
            running.unless_done_within(_CLOSE_S)
        await asyncio.gather(*(running.wait() for running in live))
        await asyncio.gather(*self._saving, *self._leaving, return_exceptions=True)

    # -- a turn ------------------------------------------------------------------------------------------

    def _begin(self, turn: Turn) -> LiveTurn:
        """Run a turn in a task of its own; raises `TurnRunning` where one runs already."""
        id = turn.conversation.id
        if id in self._live or id in self._turns:
            raise TurnRunning(phrase("refused.running"))

        def abandoned() -> None:
            turn.stop()
            if turn.generation is None and not turn.submitted:
                live.kill()

        def ended() -> None:
            if self._live.get(id) is live:
                del self._live[id]

        live = LiveTurn(
            self._run(turn), question=turn.question, parent=turn.parent, grace_s=self.grace_s,
            abandoned=abandoned, ended=ended,
        )  # fmt: skip
        self._live[id] = live
        return live

    async def _run(self, turn: Turn) -> AsyncGenerator[Update, None]:
        id = turn.conversation.id
        if id in self._turns:
            raise TurnRunning(phrase("refused.running"))
        place = self._limits.place(self._engine, turn.payer.id)
        self._turns[id] = turn
        built: Built | None = None
        look: Look | None = None
        preparing = asyncio.ensure_future(self._prepare(turn))
        try:
            self._require(turn)
            yield Stage("searching", phrase("stage.searching"))
            while not (await asyncio.wait({preparing}, timeout=HEARTBEAT_S))[0]:
                yield Stage("searching", phrase("stage.searching"))
            built = preparing.result()
            self._require(turn)
            yield Found(
                await self._sources(
                    turn,
                    [
                        p.span.reference(n, p.zone, CLOSEST if built.refused else None)
                        for n, p in enumerate(built.placed, 1)
                    ],
                )
            )
            if built.refused:
                async with aclosing(self._refuse(turn, built)) as updates:
                    async for update in updates:
                        yield update
                return
            look = self._looks.of(built.placed)
            look.at(turn.question[:_LOOKED_AT])
            turn.submitted = True
            turn.generation = await self._limits.submit(self._engine, self._request(turn, built))
            place.leave()
            if turn.stopped:
                turn.generation.abort()
            if await self._knowledge.forget_stale(built.read):
                raise NotFoundHere(phrase("refused.document_changed"))
            await self._keep_question(turn)
            async with aclosing(self._stream(turn, built, look)) as updates:
                async for update in updates:
                    yield update
            message = await asyncio.shield(self._save(turn, built))
            sources = await self._sources(turn, shown_of(message.references))
            yield Finished(message, sources, self._notes(turn, built))
        finally:
            self._turns.pop(id, None)
            place.leave()
            preparing.cancel()
            if look is not None:
                look.close()
            if turn.generation is not None:
                turn.generation.abort()  # nothing happens where it has ended
            unsaved = turn.asked is not None and not turn.saved and not turn.forgotten
            if unsaved and built is not None and turn.text.strip():
                self._save(turn, built)

    async def _keep_question(self, turn: Turn) -> None:
        if turn.asked is None:
            question = await self._store.add_message(
                turn.principal, turn.conversation.id, turn.parent, "user", turn.question
            )
            turn.asked = question.id

    async def _refuse(self, turn: Turn, built: Built) -> AsyncGenerator[Update, None]:
        """Say that the documents do not say, with the closest passages; the model is not asked."""
        turn.submitted = True  # being stored: a turn that nobody watches is ended no more
        yield Text(refusal())
        await self._keep_question(turn)
        references = tuple(
            p.span.reference(n, p.zone, CLOSEST, p.found) for n, p in enumerate(built.placed, 1)
        )
        message = await self._store.add_message(
            turn.principal, turn.conversation.id, turn.asked, "assistant", refusal(), references=references
        )
        yield Finished(message, await self._sources(turn, references), built.notes)

    async def _sources(self, turn: Turn, references: Sequence[Reference]) -> tuple[Source, ...]:
        return await self._knowledge.sources_in(turn.readable, references)

    async def _best(self, turn: Turn, built: Built, look: Look) -> Best | None:
        """The sentence of the prompt's passages that the answer's end is nearest to, once it is found."""
        found = look.found()
        if found is None or found.source is None:
            return None
        placed = built.placed[found.source]
        source = (await self._sources(turn, [placed.span.reference(1, placed.zone)]))[0]
        return Best(source, placed.text[found.source_start : found.source_end])

    async def _prepare(self, turn: Turn) -> Built:
        spans = turn.spans
        if spans is None and turn.conversation.document_id is not None:
            document = await self._knowledge.document(turn.readable, turn.conversation.document_id)
            spans = (Span.whole(document),)
        within = turn.readable
        if (only := turn.conversation.collection_id) is not None:
            within &= {only}
            if not within:
                raise NotFoundHere(phrase("refused.collection_gone"))
        return await self._prompter.build(
            readable=turn.readable, path=turn.path, question=turn.question, account=turn.principal.id,
            spans=spans, answer_tokens=turn.sampling.max_tokens, within=within,
        )  # fmt: skip

    def _request(self, turn: Turn, built: Built) -> GenerationRequest:
        return GenerationRequest(
            segments=built.segments,
            sampling=turn.sampling,
            principal=turn.payer.id,
            conversation=turn.conversation.id,
            output_scope=Scope.account(turn.principal.id),
        )

    async def _stream(self, turn: Turn, built: Built, look: Look) -> AsyncGenerator[Update, None]:
        generation = turn.generation
        if generation is None:
            return
        stage = Stage("waiting", phrase("stage.engine"))
        yield stage
        async with aclosing(beats(generation, HEARTBEAT_S)) as events:
            async for event in events:
                match event:
                    case None:
                        yield stage  # a sign of life
                    case Waiting():
                        stage = Stage("waiting", waiting_words(event))
                        yield stage
                    case Reading():
                        stage = Stage("reading", reading_words(event))
                        yield stage
                    case Delta():
                        stage = Stage("writing", phrase("stage.writing"))
                        if turn.add(event):
                            yield Text(event.text)
                        if turn.due():
                            look.at(turn.text)
                        if turn.loops():
                            generation.abort()
                    case Done():
                        turn.end(event, receipt_json(event.receipt, self._prefill))
                    case Failed():
                        turn.status = "failed"
                        raise event.error
                if (best := await self._best(turn, built, look)) is not None:
                    yield best

    @staticmethod
    def _notes(turn: Turn, built: Built) -> tuple[Phrase, ...]:
        return built.notes if turn.cut is None else (*built.notes, phrase("note.looped"))

    def _save(self, turn: Turn, built: Built) -> asyncio.Task[Message]:
        """Store the answer, or the part there is of it, in a task of its own: once begun it comes to its end,
        whoever is cancelled or gone meanwhile, and no answer is stored twice."""

        async def save() -> Message:
            cited = await self._prompter.attribute(turn.text, built)
            receipt = turn.receipt
            if receipt is not None:
                receipt = {**receipt, "sentences": cited.sentences}
                if notes := self._notes(turn, built):
                    receipt["notes"] = [note.stored() for note in notes]
            return await self._store.add_message(
                turn.principal, turn.conversation.id, turn.asked, "assistant", turn.text,
                status=turn.status, tokens=turn.tokens or None, model=self._engine.status().model,
                receipt=receipt, references=cited.references,
            )  # fmt: skip

        def done(finished: asyncio.Task[Message]) -> None:
            self._saving.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) and not turn.forgotten:
                log.warning("an answer could not be kept: %s", error)

        turn.saved = True
        task = asyncio.ensure_future(save())
        self._saving.add(task)
        task.add_done_callback(done)
        return task

    # -- the second reader -------------------------------------------------------------------------------

    async def _guest(
        self,
        payer: Principal,
        place: object,
        unbegun: asyncio.TimerHandle,
        question: str,
        spans: tuple[Span, ...],
    ) -> AsyncGenerator[Update, None]:
        """The reader's turn. It has a conversation only from here on to its end."""
        unbegun.cancel()
        if self._inviting.setdefault(payer.id, place) is not place:
            raise TurnRunning(phrase("refused.reader_running"))
        reader = Principal(payer.kind, "r-" + secrets.token_hex(16))
        opening = asyncio.ensure_future(self._store.create(reader, "Second reader"))
        try:
            turn = Turn(
                reader, payer, await asyncio.shield(opening), (), question, self._sampling(),
                frozenset(span.collection_id for span in spans), None, spans=spans,
            )  # fmt: skip
            async with aclosing(self._run(turn)) as updates:
                async for update in updates:
                    yield update
        finally:
            self._uninvite(payer.id, place)
            task = asyncio.ensure_future(self._leave(reader, opening))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, reader: Principal, opening: asyncio.Future[Conversation]) -> None:
        """Delete a second reader's conversation: what it wrote is on the inviter's screen. Its page table
        stays open for the memory panel."""
        try:
            await self._store.delete(reader, (await opening).id)
        except Exception as error:
            log.warning("the conversation of a second reader could not be deleted: %s", error)

    def _uninvite(self, payer: str, place: object) -> None:
        if self._inviting.get(payer) is place:
            del self._inviting[payer]

    async def _shared_spans(
        self,
        principal: Principal,
        readable: frozenset[str],
        conversation_id: str | None,
        document_id: str | None,
    ) -> tuple[tuple[Span, ...], set[str]]:
        path: list[Message] = []
        if conversation_id is not None:
            conversation = await self._store.conversation(principal, conversation_id)
            path = await self._store.path(principal, conversation_id)
            document_id = conversation.document_id or document_id
        asked = {message.text for message in path if message.role == "user"}
        for message in reversed(path):
            placed = tuple(Span.of(r) for r in message.references if r.zone)
            if placed and all(span.collection_id in readable for span in placed):
                return placed, asked
        if document_id is None:
            raise NotFoundHere(phrase("refused.nothing_read"))
        document = await self._knowledge.document(readable, document_id)
        return (Span.whole(document),), asked

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self._settings.temperature,
            repetition_penalty=self._settings.repetition_penalty,
            max_tokens=self._settings.answer_tokens,
        )
