"""A person's conversations: the list, what is on screen, titles, branches. Nothing that the browser sends
back is believed; each handler resolves the principal from the request and asks the server's own store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import gradio as gr

from app import render
from app.errors import AppError
from app.pages import transcript, words
from app.pages.library_source import choices_of, value_of
from app.pages.words import Words
from app.principal import Principal
from app.runtime import Runtime
from app.store import Conversation
from app.text import one_line

T = TypeVar("T")
#: In the page, not on screen. What is not there at all (`False`) is made when it is first shown; Gradio
#: (6.31, `register_component`) keeps updates for it until then and applies them late, over a newer one.
HIDDEN: Literal["hidden"] = "hidden"
#: Times that the list is made for a page whose search changes meanwhile.
_ATTEMPTS = 3
#: Pages whose state is remembered; the ones that were used longest ago are forgotten.
_MAX_SCREENS = 10_000


def tell(error: Exception, request: gr.Request) -> None:
    """Show an error as one sentence beside the page's content."""
    w = words.of(request.headers)
    gr.Warning(render.plain(w.sentence(error)), title=w("chat.failed"))


def asked_of(event: gr.EventData, name: str) -> str:
    """A word that a script sent with its event; "" where it sent none."""
    sent = event._data
    value = sent.get(name) if isinstance(sent, dict) else None
    return value if isinstance(value, str) else ""


class ConversationHandlers:
    """Handlers return `dict`s keyed by the component names of `build`, which maps them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._screens: OrderedDict[str, object] = OrderedDict()
        self._searched: OrderedDict[str, str] = OrderedDict()

    def _principal(self, request: gr.Request) -> Principal:
        return self._runtime.principal(request.headers)

    # -- lists -------------------------------------------------------------------------------------------

    def take(self, request: gr.Request) -> Callable[[], bool]:
        """Take a page's chat for what is shown next; the function says whether it still shows that. Streams
        that were there before end, so that two never write on one page. (A page is known by its session
        hash, which decides nothing else.)"""
        page, mine = _page(request), object()
        _remember(self._screens, page, mine)
        return lambda: self._screens.get(page) is mine

    async def load(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """Fill the lists, with `conversation` on screen."""
        try:
            principal = self._principal(request)
            documents = await self._runtime.knowledge.documents(principal)
            collections = await self._runtime.collections.readable(principal)
            listed = await self.listed(request, conversation)
            return {
                "document": gr.update(choices=choices_of(documents, collections, words.of(request.headers))),
                **listed,
                **_searchable(listed),
            }
        except AppError as error:
            tell(error, request)
            return {}

    async def listed(self, request: gr.Request, current: str | None) -> dict[str, Any]:
        """The list: all of it, or what matches the page's search. It is made anew whenever an answer ends, so
        what stands in the boxes for a search and for a title is left alone: somebody may be typing there."""
        w, page = words.of(request.headers), _page(request)
        for _ in range(_ATTEMPTS):
            query = self._searched.get(page, "")
            listed = await self._runtime.store.conversations(self._principal(request), query=query)
            if self._searched.get(page, "") == query:
                break  # else another search began meanwhile
        choices = [(one_line(talk.title) or w("chat.untitled"), talk.id) for talk in listed]
        return {
            "history": gr.update(
                choices=choices,
                value=current if any(talk.id == current for talk in listed) else None,
                visible=_shown(bool(choices or query)),
                label=w("chat.none_found" if query and not choices else "chat.history"),
            )
        }

    async def after_turn(self, request: gr.Request, conversation: str, untitled: bool) -> dict[str, Any]:
        """The sidebar when a turn has ended. A conversation that was `untitled` before it has a title now, of
        its first question."""
        listed = await self.listed(request, conversation)
        if not untitled:
            return listed
        talk = await self._runtime.store.conversation(self._principal(request), conversation)
        return {**listed, **_searchable(listed), **_opened(talk)}

    async def search(self, query: str, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """List the conversations whose title or messages contain `query`."""
        page, wanted = _page(request), " ".join(str(query).split())
        before = self._searched.pop(page, "")
        if wanted:
            _remember(self._searched, page, wanted)
        try:
            listed = await self.listed(request, conversation)
        except AppError as error:
            self._searched.pop(page, None)
            if before:
                _remember(self._searched, page, before)
            tell(error, request)
            return {}
        return listed if wanted else {**listed, **_searchable(listed)}

    async def rename(self, title: str, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        """Give the conversation on screen another title."""
        if not conversation:
            return {}
        try:
            principal = self._principal(request)
            stored = await self._runtime.store.rename(principal, conversation, str(title))
            listed = await self.listed(request, conversation)
            # Where it is stored as it was sent, nothing is written over what is typed meanwhile.
            return listed if stored == title else {**listed, "title": stored}
        except AppError as error:
            tell(error, request)
            return {}

    # -- conversations -----------------------------------------------------------------------------------

    async def open(self, chosen: str | None, request: gr.Request) -> dict[str, Any]:
        """Show a conversation of the principal's own."""
        if not chosen:
            return {}
        try:
            principal = self._principal(request)
            talk = await self._runtime.store.conversation(principal, chosen)
            self.take(request)
            w = words.of(request.headers)
            return {
                **idle(w),
                "history": gr.update(value=chosen),
                "chat": await self.entries(principal, chosen, w),
                "conversation": chosen,
                "memory": chosen,
                "document": value_of(talk),
                **_opened(talk),
            }
        except Exception as error:
            tell(error, request)
            return {}

    async def new(self, request: gr.Request) -> dict[str, Any]:
        """An empty page."""
        self.take(request)
        return {
            **idle(words.of(request.headers), ""),
            "chat": [],
            "conversation": None,
            "memory": "",
            "history": gr.update(value=None),
            **_opened(None),
        }

    async def delete(self, conversation: str | None, request: gr.Request) -> dict[str, Any]:
        if not conversation:
            return {}
        try:
            principal = self._principal(request)
            await self._runtime.chat.delete(principal, conversation)
            listed = await self.listed(request, None)
            return {**await self.new(request), **listed, **_searchable(listed)}
        except Exception as error:
            tell(error, request)
            return {}

    async def entries(
        self, principal: Principal, conversation: str, w: Words, head: str | None = None
    ) -> list[transcript.Entry]:
        """The branch on screen, or the one that ends in `head`."""
        store, knowledge = self._runtime.store, self._runtime.knowledge
        # First the path: an answer may be stored meanwhile, and all on it has to be among the alternatives.
        path = await store.path(principal, conversation, head)
        alternatives = await store.alternatives(principal, conversation)
        cost: dict[str, int] = {}
        if any(len(ids) > 1 for ids in alternatives.values()):
            block_size = self._runtime.engine.status().block_size
            cost = transcript.costs(await store.messages(principal, conversation), block_size)
        entries: list[transcript.Entry] = []
        for message in path:
            among = alternatives[message.parent_id]
            blocks = tuple(cost.get(id, 0) for id in among)
            branch = transcript.Branch(tuple(among), among.index(message.id), blocks)
            if message.role == "user":
                entries.append(transcript.user_entry(message.text, w, message.id, branch))
            else:
                sources = await knowledge.sources(principal, message.references)
                appended = [reference for reference in message.references if reference.zone == "appended"]
                private = (
                    await knowledge.sources_in(await store.readable(principal), appended) if appended else ()
                )
                entries += transcript.answer_entries(message, sources, w, branch, private)
        return entries

    async def branch(self, request: gr.Request, event: gr.EventData) -> dict[str, Any]:
        """Put the branch through a message on screen; the script names it."""
        try:
            principal = self._principal(request)
            conversation = await self._runtime.store.show_branch(principal, asked_of(event, "message"))
            self.take(request)
            w = words.of(request.headers)
            return {**idle(w), "chat": await self.entries(principal, conversation, w)}
        except Exception as error:
            tell(error, request)
            return {}


def _page(request: gr.Request) -> str:
    return str(getattr(request, "session_hash", ""))


def _remember(pages: OrderedDict[str, T], page: str, value: T) -> None:
    pages[page] = value
    pages.move_to_end(page)
    if len(pages) > _MAX_SCREENS:
        pages.popitem(last=False)


def _searchable(listed: dict[str, Any]) -> dict[str, Any]:
    """The search box is there where the list is. Sent only where that may have changed."""
    return {"search": gr.update(visible=listed["history"]["visible"])}


def _shown(there: bool) -> bool | Literal["hidden"]:
    """Not shown is `HIDDEN`."""
    return True if there else HIDDEN


def _opened(talk: Conversation | None) -> dict[str, Any]:
    """The part of the sidebar that is about the conversation on screen."""
    title = talk.title if talk is not None else ""
    return {"opened": gr.update(visible=_shown(talk is not None)), "title": title}


def busy(w: Words, value: str | None = None) -> dict[str, Any]:
    """The question box while an answer runs; `value` replaces what stands in it."""
    return {"question": _box(value, submit_btn=False, stop_btn=w("chat.stop"))}


def idle(w: Words, value: str | None = None) -> dict[str, Any]:
    """The question box when nothing runs; `value` puts a refused question back."""
    return {"question": _box(value, submit_btn=w("chat.ask"), stop_btn=False)}


def _box(value: str | None, **changes: Any) -> Any:
    return gr.update(**changes) if value is None else gr.update(value=value, **changes)
