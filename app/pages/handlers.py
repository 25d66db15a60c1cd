"""Turns on the chat page: each handler resolves the principal from the request and asks the server's own
store. Nothing that the browser sends back (its copy of the chat, a title, a stage) is believed."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from app import receipts, render
from app.errors import AppError, NotFoundHere
from app.pages import library_source, transcript, words
from app.pages.conversations import ConversationHandlers, asked_of, busy, idle, tell
from app.pages.words import phrase
from app.principal import Principal
from app.runtime import Runtime
from app.updates import Best, Finished, Found, Source, Stage, Text, Update

log = logging.getLogger("coread")
_UPDATE_EVERY_S = 0.1


class ChatHandlers:
    """Handlers return or yield `dict`s keyed by the component names below; `build` maps them."""

    def __init__(self, runtime: Runtime, conversations: ConversationHandlers) -> None:
        self._runtime, self._conversations = runtime, conversations

    def _principal(self, request: gr.Request) -> Principal:
        return self._runtime.principal(request.headers)

    # -- what is on screen -------------------------------------------------------------------------------

    async def enter(
        self, conversation: str | None, request: gr.Request, event: gr.EventData
    ) -> AsyncIterator[dict[str, Any]]:
        """Fill the lists once the models are there. After a reload the script names what was on screen: it is
        put back, and an answer that is still being written goes on. Who comes from the library to ask about
        something finds that chosen."""
        yield await self._conversations.load(conversation, request)
        if read := asked_of(event, "read"):
            yield {"document": read}
            return
        wanted = asked_of(event, "conversation")
        if conversation or not wanted:
            return
        try:
            await self._runtime.store.conversation(self._principal(request), wanted)
        except AppError:
            return  # deleted meanwhile, or somebody else's browser now
        async with aclosing(self.open(wanted, request)) as outputs:
            async for output in outputs:
                yield output

    async def open(self, chosen: str | None, request: gr.Request) -> AsyncGenerator[dict[str, Any], None]:
        """Show a conversation of the principal's own; where an answer is being written, watch it."""
        if not chosen:
            return
        try:
            principal, w = self._principal(request), words.of(request.headers)
            live = await self._runtime.chat.watch(principal, chosen)
            shown = await self._conversations.open(chosen, request)
            if live is None or live.done:
                yield shown
                return
            before: list[transcript.Entry] = []
            if live.parent is not None:
                before = await self._conversations.entries(principal, chosen, w, live.parent)
            before.append(transcript.user_entry(live.question, w))
            yield {**shown, **busy(w), "chat": before}
        except Exception as error:
            tell(error, request)
            return
        outputs = self._stream(request, chosen, before, live.view(), None, not shown.get("title"))
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    # -- turns -------------------------------------------------------------------------------------------

    async def ask(
        self, question: str, conversation: str | None, document: str | None, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer a question, streaming. A refused question goes back into its box."""
        try:
            principal, w = self._principal(request), words.of(request.headers)
            question = self._runtime.chat.check_question(question)
            if conversation is None:
                conversation = (await self._runtime.store.create(principal)).id
            await self._runtime.store.set_document(principal, conversation, *library_source.chosen(document))
            before = await self._conversations.entries(principal, conversation, w)
            untitled = not (await self._runtime.store.conversation(principal, conversation)).title
            updates = self._runtime.chat.ask(principal, conversation, question)
        except Exception as error:
            tell(error, request)
            yield idle(words.of(request.headers), question)
            return
        before.append(transcript.user_entry(question, w))
        yield {**busy(w, ""), "conversation": conversation, "memory": conversation}
        async with aclosing(
            self._stream(request, conversation, before, updates, question, untitled)
        ) as outputs:
            async for output in outputs:
                yield output

    async def regenerate(
        self, conversation: str | None, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer the last question again: a new branch that shares everything up to there."""
        if not conversation:
            return
        try:
            principal, w = self._principal(request), words.of(request.headers)
            path = await self._runtime.store.path(principal, conversation)
            last = next((m for m in reversed(path) if m.role == "user"), None)
            if last is None:
                raise NotFoundHere(phrase("refused.no_question"))
            updates = self._runtime.chat.regenerate(principal, conversation, last.id)
            entries = await self._conversations.entries(principal, conversation, w)
            cut = max(i for i, entry in enumerate(entries) if entry["role"] == "user") + 1
        except Exception as error:
            tell(error, request)
            return
        yield busy(w)
        async with aclosing(self._stream(request, conversation, entries[:cut], updates, None)) as outputs:
            async for output in outputs:
                yield output

    async def edit(self, request: gr.Request, event: gr.EventData) -> AsyncIterator[dict[str, Any]]:
        """Ask an earlier question in other words, as a branch beside it; the script names both."""
        try:
            principal, w = self._principal(request), words.of(request.headers)
            question = self._runtime.chat.check_question(asked_of(event, "text"))
            talk, asked = await self._runtime.store.find(principal, asked_of(event, "message"))
            before: list[transcript.Entry] = []
            if asked.parent_id is not None:
                before = await self._conversations.entries(principal, talk.id, w, asked.parent_id)
            updates = self._runtime.chat.edit(principal, talk.id, asked.id, question)
        except Exception as error:
            tell(error, request)
            return
        before.append(transcript.user_entry(question, w))
        yield {**busy(w), "conversation": talk.id, "memory": talk.id}
        async with aclosing(self._stream(request, talk.id, before, updates, None)) as outputs:
            async for output in outputs:
                yield output

    async def _stream(
        self,
        request: gr.Request,
        conversation: str,
        before: list[transcript.Entry],
        updates: AsyncGenerator[Update, None],
        question: str | None,
        untitled: bool = False,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Show a running turn until it ends or the page shows something else. A refused `question` goes back
        into its box; a conversation that was `untitled` has a title afterwards."""
        principal, on_screen = self._principal(request), self._conversations.take(request)
        w = words.of(request.headers)
        text, stage, shown = "", w("stage.searching"), 0.0
        found: tuple[Source, ...] = ()
        best: Best | None = None
        yield {"chat": [*before, *transcript.draft_entries(text, stage, found, w)]}
        try:
            async for update in updates:
                if not on_screen():
                    return
                match update:
                    case Stage():
                        changed, stage = update.text != stage, update.text
                        if not changed or text:
                            yield {}  # a sign of life: a closed page is noticed at a yield
                            continue
                    case Found():
                        found = update.sources
                        continue
                    case Best():
                        best = update
                        if text:
                            continue  # with the next piece of it
                    case Text():
                        text += update.delta
                        stage = w("stage.writing")
                        if time.monotonic() - shown < _UPDATE_EVERY_S:
                            continue
                        shown = time.monotonic()
                    case Finished():
                        # As it is stored, with its links, and this once what was left out and why.
                        entries = await self._conversations.entries(principal, conversation, w)
                        entries += transcript.notes_entries(update.notes, w)
                        ended = await self._conversations.after_turn(request, conversation, untitled)
                        if on_screen():
                            # All at once: until its stream has ended the page takes no other question.
                            yield {**idle(w), "chat": entries, **ended}
                        return
                yield {"chat": [*before, *transcript.draft_entries(text, stage, found, w, best)]}
            if on_screen():
                # It ended without a result: where the conversation was deleted meanwhile, this says so.
                yield {**idle(w), "chat": await self._conversations.entries(principal, conversation, w)}
        except Exception as error:
            if not on_screen() or self._runtime.state == "stopped":  # then no store can be asked any more
                return
            tell(error, request)
            try:
                entries = await self._conversations.entries(principal, conversation, w)
            except Exception as trouble:  # the store it failed on: what is on screen stays
                log.warning("a conversation could not be read after its answer failed: %s", trouble)
                entries = [
                    *before,
                    *([{"role": "assistant", "content": render.answer(text)}] if text else []),
                ]
                untitled = False
            lists: dict[str, Any] = {}
            if untitled and entries:  # one whose first question was refused is no conversation yet
                try:
                    lists = await self._conversations.after_turn(request, conversation, untitled)
                except Exception as trouble:  # told already
                    log.warning("the list could not be made after an answer failed: %s", trouble)
            entries += transcript.notes_entries([w.sentence(error)], w)  # stays when the notice has gone
            if on_screen():
                yield {**idle(w, question if not text else None), "chat": entries, **lists}
        finally:
            await updates.aclose()  # takes this viewer away

    async def stop(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """End the running answer; what was written so far is kept."""
        if conversation:
            try:
                await self._runtime.chat.stop(self._principal(request), conversation)
            except AppError as error:
                tell(error, request)
        return {}

    # -- the second reader -------------------------------------------------------------------------------

    async def invite(
        self, conversation: str | None, document: str | None, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Let a scripted reader read what this person reads, on the real engine."""
        try:
            principal, w = self._principal(request), words.of(request.headers)
            document_id, _ = library_source.chosen(document)
            invitation = await self._runtime.chat.invite(principal, conversation, document_id)
        except Exception as error:
            tell(error, request)
            return
        head = w("guest.head", title=render.one_line(invitation.title, 80))
        head += f"\n\n> {render.plain(invitation.question)}"
        text, shown = "", 0.0
        yield {"guest": f"{head}\n\n*{w('guest.starting')}*", "invite": gr.update(interactive=False)}
        try:
            async for update in invitation.updates:
                match update:
                    case Stage():
                        yield {} if text else {"guest": f"{head}\n\n*{render.plain(w.tell(update.text))}…*"}
                    case Text():
                        text += update.delta
                        if time.monotonic() - shown >= _UPDATE_EVERY_S:
                            shown = time.monotonic()
                            yield {"guest": f"{head}\n\n{render.answer(text)}"}
                    case Finished() if update.message.receipt is not None:
                        receipt = update.message.receipt
                        note = w(
                            "guest.came", reused=receipt["reused_tokens"], prompt=receipt["prompt_tokens"],
                            copied=receipts.copied(receipt, w),
                        )  # fmt: skip
                        text = update.message.text
                        marks = transcript.marks_line(update.sources, w)
                        line = transcript.sentences_line(receipt.get("sentences"), w)
                        parts = [head, render.answer(text), line, marks, note]
                        yield {"guest": "\n\n".join(part for part in parts if part)}
        except Exception as error:
            tell(error, request)
        finally:
            await invitation.updates.aclose()
        yield {"invite": gr.update(interactive=True)}
