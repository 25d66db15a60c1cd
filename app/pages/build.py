"""The page, laid out: components here, what they do in `handlers`, how they look in `style.css`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components import Navbar

from app.dashboard.page import build_dashboard, feed_script
from app.knowledge import suggested_questions
from app.pages.conversations import HIDDEN, ConversationHandlers
from app.pages.desk import build_desk, say_script
from app.pages.handlers import ChatHandlers
from app.pages.library_page import build_library
from app.pages.library_panel import LibraryHandlers
from app.pages.library_source import SEARCH_ALL
from app.pages.quick import keep_updates_apart, skip_cheaply
from app.pages.words import mark
from app.runtime import Runtime
from app.store import MAX_QUERY, MAX_TITLE

_HERE = Path(__file__).parent
#: Fetches a conversation's file; the route decides whose it is. `download` keeps the page where it is.
_EXPORT = """(id) => {{
  if (!id) return;
  const link = document.createElement("a");
  link.href = new URL(`conversations/${{id}}/export.{ending}`, document.baseURI);
  link.download = "";
  link.click();
}}"""
#: The suggested questions are about all documents: where one is read, the style sheet hides them.
_READ_FROM = f"""(value) => {{
  document.getElementById("cr-main").dataset.crReads = value === {json.dumps(SEARCH_ALL)} ? "all" : "one";
}}"""
#: Enough for every visitor: the engine batches, so Gradio must not hold requests back.
_CONCURRENCY = 1_000
QUEUE_LOOK_S = 0.02


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _brand(elem_id: str) -> gr.HTML:
    """The head of every page: name, an honest note, the switch to the other language."""
    return gr.HTML(
        "", html_template=_read("brand.html"), js_on_load=_read("brand.js"), apply_default_css=False,
        elem_id=elem_id,
    )  # fmt: skip


def _components(outputs: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """What turns a handler's update, keyed by name, into Gradio's, keyed by component. Gradio does not take
    an empty dict for "nothing changes"."""
    return lambda update: {outputs[name]: value for name, value in update.items()} or gr.skip()


def build_demo(runtime: Runtime) -> gr.Blocks:
    """The Gradio page over `runtime`, which need not be open yet. Theme and style go to the mount."""
    talks, library_handlers = ConversationHandlers(runtime), LibraryHandlers(runtime)
    chat_handlers = ChatHandlers(runtime, talks)
    demo: gr.Blocks
    with gr.Blocks(title=mark("page.title"), analytics_enabled=False, fill_width=True) as demo:
        conversation = gr.State(None)
        Navbar(main_page_name=mark("page.chat"))
        with gr.Sidebar(open=False, width=300):
            new = gr.Button(mark("chat.new"), variant="primary", size="md")
            search = gr.Textbox(
                label=mark("chat.search"), show_label=False,
                placeholder=mark("chat.search_hint"),
                elem_id="cr-search", visible=HIDDEN, max_length=MAX_QUERY,
            )  # fmt: skip
            history = gr.Radio([], label=mark("chat.history"), elem_id="cr-history", visible=HIDDEN)
            # Open: what stands in a folded one is not in the page either (see `HIDDEN`).
            with gr.Accordion(mark("chat.opened"), open=True, visible=HIDDEN) as opened:
                title = gr.Textbox(
                    label=mark("chat.title"), max_lines=1, max_length=MAX_TITLE, elem_id="cr-title"
                )
                rename = gr.Button(mark("chat.rename"), size="sm")
                with gr.Row():
                    as_markdown = gr.Button(mark("chat.export_markdown"), size="sm", min_width=110)
                    as_json = gr.Button(mark("chat.export_json"), size="sm", min_width=110)
                delete = gr.Button(mark("chat.delete"), size="sm", variant="stop", elem_id="cr-delete")
            with gr.Accordion(mark("chat.own"), open=False):
                upload = gr.File(
                    label=mark("chat.add"), show_label=False, file_count="multiple",
                    height=130, elem_id="cr-upload",
                )  # fmt: skip
                upload_status = gr.Markdown(
                    mark("chat.kinds"),
                    elem_classes="cr-status",
                )
                gr.Button(mark("library.open_page"), size="sm", link="library", elem_id="cr-library-link")
        _brand("cr-brand")
        with gr.Row(elem_id="cr-main", equal_height=False):
            with gr.Column(scale=7, min_width=320):
                document = gr.Dropdown(
                    [(mark("chat.search_all"), SEARCH_ALL)], value=SEARCH_ALL,
                    label=mark("chat.read_from"),
                    elem_id="cr-document", filterable=True,
                )  # fmt: skip
                chat = gr.Chatbot(
                    elem_id="cr-chat", show_label=False,
                    height="max(360px, calc(100vh - 330px))", layout="bubble",
                    placeholder=mark("chat.empty"),
                    sanitize_html=True, allow_tags=False, latex_delimiters=[], buttons=[],
                    feedback_options=None, autoscroll=True, reasoning_tags=None,
                )  # fmt: skip
                desk = build_desk(runtime)
                question = gr.Textbox(
                    show_label=False, label=mark("chat.question"), lines=1, max_lines=8, autofocus=True,
                    placeholder=mark("chat.question_hint"), submit_btn=mark("chat.ask"), elem_id="cr-ask",
                )  # fmt: skip
                with gr.Row(elem_id="cr-suggest"):
                    asked = suggested_questions(4) if runtime.settings.sample else []
                    suggestions = [gr.Button(text, size="sm") for text in asked]
            with gr.Column(scale=4, min_width=320):
                memory = gr.HTML(
                    "", html_template=_read("memory_map.html"), apply_default_css=False, elem_id="cr-memory",
                    js_on_load=say_script() + feed_script() + _read("memory_map.js"),
                )  # fmt: skip
                invite = gr.Button(mark("chat.invite"), elem_id="cr-invite", variant="primary")
                guest = gr.Markdown(
                    mark("chat.invite_why"),
                    elem_id="cr-guest", sanitize_html=True, latex_delimiters=[],
                )  # fmt: skip
        named: dict[str, Any] = {
            "chat": chat, "question": question, "conversation": conversation, "memory": memory,
            "history": history, "document": document,
            "guest": guest, "invite": invite, "upload": upload,
            "upload_status": upload_status, "search": search, "opened": opened, "title": title,
        }  # fmt: skip
        outputs = list(named.values())
        to_components = _components(named)

        def on(trigger: Any, fn: Callable[..., Any], inputs: list[Any], trigger_mode: str = "once") -> None:
            trigger(
                _streamed(fn, to_components) if _is_stream(fn) else _once(fn, to_components),
                inputs,
                outputs,
                concurrency_limit=_CONCURRENCY,
                concurrency_id=getattr(fn, "__name__", None),
                show_progress="hidden",
                trigger_mode=trigger_mode,
                api_visibility="undocumented",
                api_name=getattr(fn, "__name__", None),
            )

        on(memory.ready, chat_handlers.enter, [conversation])
        on(question.submit, chat_handlers.ask, [question, conversation, document])
        for button in suggestions:
            on(button.click, chat_handlers.ask, [button, conversation, document])
        document.change(None, [document], None, js=_READ_FROM, queue=False)
        on(question.stop, chat_handlers.stop, [conversation])
        on(chat.retry, chat_handlers.regenerate, [conversation])
        on(history.input, chat_handlers.open, [history], trigger_mode="multiple")
        on(search.change, talks.search, [search, conversation], "always_last")
        on(title.submit, talks.rename, [title, conversation])
        on(rename.click, talks.rename, [title, conversation])
        for button, ending in ((as_markdown, "md"), (as_json, "json")):
            button.click(None, [memory], None, js=_EXPORT.format(ending=ending), queue=False)
        on(new.click, talks.new, [])
        on(delete.click, talks.delete, [conversation])
        on(desk.edit, chat_handlers.edit, [])
        on(desk.branch, talks.branch, [])
        on(invite.click, chat_handlers.invite, [conversation, document])
        on(upload.upload, library_handlers.upload, [upload])
    with demo.route(mark("library.name"), "/library"):
        Navbar(main_page_name=mark("page.chat"))
        _brand("cr-brand-library")
        build_library(runtime)
    with demo.route(mark("memory.page"), "/memory"):
        Navbar(main_page_name=mark("page.chat"))
        _brand("cr-brand-memory")
        build_dashboard(runtime)
    demo.queue(api_open=False, default_concurrency_limit=_CONCURRENCY, max_size=10_000)
    # Whatever the limits of its functions are, a mounted page's queue does 40 things at a time. An answer is
    # one of them, from the question to its last word: with 40 on their way nobody could as much as open a
    # conversation.
    demo._queue.max_thread_count = _CONCURRENCY
    # Gradio looks into its queue every millisecond, whether or not anybody is there: 7 % of a core for
    # nothing. A click waits half of this longer on average, which nobody can see.
    demo._queue.sleep_when_free = QUEUE_LOOK_S
    skip_cheaply(demo)
    keep_updates_apart(demo)
    demo._queue.progress_update_sleep_when_free = 1.0  # nothing here reports progress through Gradio
    return demo


def _is_stream(fn: Callable[..., Any]) -> bool:
    import inspect

    return inspect.isasyncgenfunction(fn)


def _once(
    fn: Callable[..., Awaitable[dict[str, Any]]], convert: Callable[[dict[str, Any]], Any]
) -> Callable[..., Awaitable[Any]]:
    @wraps(fn)
    async def handler(*args: Any, **kwargs: Any) -> Any:
        return convert(await fn(*args, **kwargs))

    return handler


def _streamed(
    fn: Callable[..., AsyncGenerator[dict[str, Any], None]], convert: Callable[[dict[str, Any]], Any]
) -> Callable[..., AsyncIterator[Any]]:
    @wraps(fn)
    async def handler(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(fn(*args, **kwargs)) as updates:
            async for update in updates:
                yield convert(update)

    return handler
