"""What the links in messages open: the document behind a source, a question to edit.

`desk.js` is the browser's side. What it calls goes past the queue; each function here resolves the principal
from the request and believes nothing else that the browser sends. Errors come back as `{"error": sentence}`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradio as gr

from app.errors import CommentRefused, NotFoundHere
from app.pages import transcript, words
from app.pages.words import ENGLISH, Words, phrase
from app.principal import Principal
from app.runtime import Runtime
from app.store import Feedback

_HERE = Path(__file__).parent
#: Characters of the document that are sent on either side of a passage.
AROUND_CHARS = 200_000

Answer = dict[str, Any]


def say_script() -> str:
    """`say(text, values)`, which scripts of pages begin with."""
    return (_HERE / "say.js").read_text(encoding="utf-8")


def build_desk(runtime: Runtime) -> gr.HTML:
    """The component, inside the Blocks that are being built."""
    return gr.HTML(
        "",
        html_template=(_HERE / "desk.html").read_text(encoding="utf-8"),
        js_on_load=say_script() + (_HERE / "desk.js").read_text(encoding="utf-8"),
        server_functions=[_served(runtime, fn) for fn in (source, question, feedback)],
        apply_default_css=False,
        elem_id="cr-desk",
    )


def _served(
    runtime: Runtime, fn: Callable[[Runtime, Principal, Answer, Words], Awaitable[Answer]]
) -> Callable[..., Awaitable[Answer]]:
    async def served(asked: Any, request: gr.Request) -> Answer:
        try:
            if not isinstance(asked, dict):
                raise NotFoundHere(phrase("refused.nothing"))
            return await fn(runtime, runtime.principal(request.headers), asked, words.of(request.headers))
        except Exception as error:
            return {"error": words.of(request.headers).sentence(error)}

    served.__name__ = fn.__name__  # what the script calls it by
    return served


async def source(runtime: Runtime, principal: Principal, asked: Answer, w: Words = ENGLISH) -> Answer:
    """The document behind source `number` of the answer `message`.

    Keys: `title`, `where` (section, page, how search found it), `verdict`, and the text in three parts, of
    which `text` is the passage: `before`, `text`, `after`.
    """
    message, number = asked.get("message"), asked.get("number")
    _, answer = await runtime.store.find(principal, message if isinstance(message, str) else "")
    reference = next((r for r in answer.references if not r.zone and r.number == number), None)
    if reference is None:
        raise NotFoundHere(phrase("refused.no_source"))
    shown, document = await runtime.knowledge.passage(principal, reference)
    start, stop = max(0, reference.start - AROUND_CHARS), reference.stop + AROUND_CHARS
    before = document.text[start : reference.start]
    after = document.text[reference.stop : stop]
    where = [shown.section] if shown.section else []
    where += [w("source.page", page=shown.page)] if shown.page else []
    where += [transcript.how_found(shown.found, w)] if shown.found is not None else []
    return {
        "title": shown.title,
        "where": " · ".join(where),
        "verdict": transcript.verdict_words(shown.verdict, w),
        "before": f"…{before}" if start else before,
        "text": shown.text,
        "after": f"{after}…" if stop < len(document.text) else after,
    }


async def question(runtime: Runtime, principal: Principal, asked: Answer, w: Words = ENGLISH) -> Answer:
    """The `text` of one of the principal's questions or answers, as it was written."""
    message = asked.get("message")
    _, found = await runtime.store.find(principal, message if isinstance(message, str) else "")
    return {"text": found.text}


async def feedback(runtime: Runtime, principal: Principal, asked: Answer, w: Words = ENGLISH) -> Answer:
    """Store a `rating` ("good" or "bad") and a `comment` for one of the principal's answers."""
    message, rating, comment = asked.get("message"), asked.get("rating"), asked.get("comment", "")
    if rating not in ("good", "bad") or not isinstance(comment, str):
        raise CommentRefused(phrase("refused.rating"))
    known = Feedback("good" if rating == "good" else "bad", comment.strip())
    await runtime.store.rate(principal, message if isinstance(message, str) else "", known)
    return {"stored": True}
