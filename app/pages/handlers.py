"""What the chat page does: each handler resolves the principal from the request and asks the server's own
store. Nothing that the browser sends back (its copy of the chat, a title, a stage) is believed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from app import receipts, render
from app.errors import AppError, NotFoundHere
from app.http_errors import sentence
from app.pages import transcript
from app.principal import Principal
from app.runtime import Runtime
from app.updates import Finished, Found, Source, Stage, Text, Update

SEARCH_ALL = ""
_UPDATE_EVERY_S = 0.1


def choices_of(documents: Any) -> list[tuple[str, str]]:
    """The document picker's choices: searching first, then every readable document."""
    listed = [(f"Only: {document.title}", document.id) for document in documents]
    return [("Search all documents", SEARCH_ALL), *listed]


def tell(error: Exception) -> None:
    """Show an error as one sentence beside the page's content."""
    gr.Warning(render.plain(sentence(error)), title="That did not work")


class ChatHandlers:
    """Handlers return or yield `dict`s keyed by the component names below; `build` maps them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _principal(self, request: gr.Request) -> Principal:
        return self._runtime.principal(request.headers)

    # -- lists -------------------------------------------------------------------------------------------

    async def load(self, request: gr.Request) -> dict[str, Any]:
        """Fill the lists once the models are there."""
        try:
            principal = self._principal(request)
            documents = await self._runtime.knowledge.documents(principal)
            return {
                "document": gr.update(choices=choices_of(documents), value=SEARCH_ALL),
                "history": await self._history(principal, None),
            }
        except AppError as error:
            tell(error)
            return {}

    async def _history(self, principal: Principal, current: str | None) -> Any:
        listed = await self._runtime.store.conversations(principal)
        choices = [(talk.title or "Untitled", talk.id) for talk in listed]
        ids = {talk.id for talk in listed}
        return gr.update(choices=choices, value=current if current in ids else None, visible=bool(choices))

    # -- conversations -----------------------------------------------------------------------------------

    async def open(self, chosen: str | None, request: gr.Request) -> dict[str, Any]:
        """Show a conversation of the principal's own."""
        if not chosen:
            return {}
        try:
            principal = self._principal(request)
            talk = await self._runtime.store.conversation(principal, chosen)
            return {
                "chat": await self._entries(principal, chosen),
                "conversation": chosen,
                "memory": chosen,
                "document": talk.document_id or SEARCH_ALL,
                **await self._branches(principal, chosen),
            }
        except Exception as error:
            tell(error)
            return {}

    async def new(self) -> dict[str, Any]:
        return {
            "chat": [],
            "conversation": None,
            "memory": "",
            "history": gr.update(value=None),
            "question": "",
            "branches": gr.update(visible=False),
        }

    async def delete(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        if not conversation:
            return {}
        try:
            principal = self._principal(request)
            await self._runtime.chat.delete(principal, conversation)
            return {**await self.new(), "history": await self._history(principal, None)}
        except Exception as error:
            tell(error)
            return {}

    async def _entries(self, principal: Principal, conversation: str) -> list[transcript.Entry]:
        entries: list[transcript.Entry] = []
        for message in await self._runtime.store.path(principal, conversation):
            if message.role == "user":
                entries.append(transcript.user_entry(message.text))
            else:
                sources = await self._runtime.knowledge.sources(principal, message.references)
                entries += transcript.answer_entries(message, sources)
        return entries

    # -- branches ----------------------------------------------------------------------------------------

    async def _branches(self, principal: Principal, conversation: str) -> dict[str, Any]:
        path = await self._runtime.store.path(principal, conversation)
        hidden = {"branches": gr.update(visible=False)}
        if not path or path[-1].role != "assistant":
            return hidden
        among = await self._runtime.store.siblings(principal, conversation, path[-1].id)
        if len(among) < 2:
            return hidden
        at = among.index(path[-1].id) + 1
        return {"branches": gr.update(visible=True), "branch_note": f"Answer {at} of {len(among)}"}

    async def previous(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """Put the answer before this one on screen."""
        return await self._switch(conversation, -1, request)

    async def following(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """Put the answer after this one on screen."""
        return await self._switch(conversation, 1, request)

    async def _switch(self, conversation: str | None, step: int, request: gr.Request) -> dict[str, Any]:
        if not conversation:
            return {}
        try:
            principal = self._principal(request)
            path = await self._runtime.store.path(principal, conversation)
            if not path:
                return {}
            among = await self._runtime.store.siblings(principal, conversation, path[-1].id)
            target = among[(among.index(path[-1].id) + step) % len(among)]
            await self._runtime.store.set_head(principal, conversation, target)
            return {
                "chat": await self._entries(principal, conversation),
                **await self._branches(principal, conversation),
            }
        except Exception as error:
            tell(error)
            return {}

    # -- turns -------------------------------------------------------------------------------------------

    async def ask(
        self, question: str, conversation: str | None, document: str | None, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer a question, streaming. A refused question goes back into its box."""
        try:
            principal = self._principal(request)
            question = self._runtime.chat.check_question(question)
            if conversation is None:
                conversation = (await self._runtime.store.create(principal)).id
            await self._runtime.store.set_document(principal, conversation, document or None)
            before = await self._entries(principal, conversation)
            updates = self._runtime.chat.ask(principal, conversation, question)
        except Exception as error:
            tell(error)
            yield _idle(question)
            return
        before.append(transcript.user_entry(question))
        yield {**_busy(""), "conversation": conversation, "memory": conversation}
        async with aclosing(self._stream(principal, conversation, before, updates, question)) as outputs:
            async for output in outputs:
                yield output

    async def regenerate(
        self, conversation: str | None, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer the last question again: a new branch that shares everything up to there."""
        if not conversation:
            return
        try:
            principal = self._principal(request)
            path = await self._runtime.store.path(principal, conversation)
            last = next((m for m in reversed(path) if m.role == "user"), None)
            if last is None:
                raise NotFoundHere("There is no question to answer again.")
            updates = self._runtime.chat.regenerate(principal, conversation, last.id)
            entries = await self._entries(principal, conversation)
            cut = max(i for i, entry in enumerate(entries) if entry["role"] == "user") + 1
        except Exception as error:
            tell(error)
            return
        yield _busy()
        async with aclosing(self._stream(principal, conversation, entries[:cut], updates, None)) as outputs:
            async for output in outputs:
                yield output

    async def _stream(
        self,
        principal: Principal,
        conversation: str,
        before: list[transcript.Entry],
        updates: AsyncGenerator[Update, None],
        question: str | None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        text, stage, shown = "", "Searching the documents", 0.0
        found: tuple[Source, ...] = ()
        yield {"chat": [*before, *transcript.draft_entries(text, stage, found)]}
        try:
            async for update in updates:
                match update:
                    case Stage():
                        changed, stage = update.text != stage, update.text
                        if not changed or text:
                            yield {}  # a sign of life: a closed page is noticed at a yield
                            continue
                    case Found():
                        found = update.sources
                        continue
                    case Text():
                        text += update.delta
                        if time.monotonic() - shown < _UPDATE_EVERY_S:
                            continue
                        shown = time.monotonic()
                    case Finished():
                        entries = transcript.answer_entries(update.message, update.sources, update.notes)
                        yield {
                            **_idle(),
                            "chat": [*before, *entries],
                            "history": await self._history(principal, conversation),
                            **await self._branches(principal, conversation),
                        }
                        return
                yield {"chat": [*before, *transcript.draft_entries(text, stage, found)]}
        except Exception as error:
            tell(error)
            again = question if not text else None
            yield {**_idle(again), "chat": await self._entries(principal, conversation)}
        finally:
            await updates.aclose()  # ends the engine's request too

    async def stop(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """End the running answer; what was written so far is kept."""
        if conversation:
            try:
                await self._runtime.chat.stop(self._principal(request), conversation)
            except AppError as error:
                tell(error)
        return {}

    # -- the second reader -------------------------------------------------------------------------------

    async def invite(
        self, conversation: str | None, document: str | None, request: gr.Request
    ) -> AsyncIterator[dict[str, Any]]:
        """Let a scripted reader read what this person reads, on the real engine."""
        try:
            principal = self._principal(request)
            invitation = await self._runtime.chat.invite(principal, conversation, document or None)
        except Exception as error:
            tell(error)
            return
        head = (
            f"**The second reader** reads *{render.one_line(invitation.title, 80)}* too and asks:\n\n"
            f"> {render.plain(invitation.question)}"
        )
        text, shown = "", 0.0
        yield {"guest": f"{head}\n\n*Starting…*", "invite": gr.update(interactive=False)}
        try:
            async for update in invitation.updates:
                match update:
                    case Stage():
                        yield {} if text else {"guest": f"{head}\n\n*{render.plain(update.text)}…*"}
                    case Text():
                        text += update.delta
                        if time.monotonic() - shown >= _UPDATE_EVERY_S:
                            shown = time.monotonic()
                            yield {"guest": f"{head}\n\n{render.answer(text)}"}
                    case Finished() if update.message.receipt is not None:
                        receipt = update.message.receipt
                        note = (
                            f"**{receipt['reused_tokens']:,} of {receipt['prompt_tokens']:,} prompt tokens "
                            f"came from memory** that was already there; {receipts.copied(receipt)}."
                        )
                        text = update.message.text
                        yield {"guest": f"{head}\n\n{render.answer(text)}\n\n{note}"}
        except Exception as error:
            tell(error)
        finally:
            await invitation.updates.aclose()
        yield {"invite": gr.update(interactive=True)}


def _busy(value: str | None = None) -> dict[str, Any]:
    """The question box while an answer runs; `value` replaces what stands in it."""
    return {
        "question": _box(value, submit_btn=False, stop_btn="Stop"),
        "branches": gr.update(visible=False),
    }


def _idle(value: str | None = None) -> dict[str, Any]:
    """The question box when nothing runs; `value` puts a refused question back."""
    return {"question": _box(value, submit_btn="Ask", stop_btn=False)}


def _box(value: str | None, **changes: Any) -> Any:
    return gr.update(**changes) if value is None else gr.update(value=value, **changes)
