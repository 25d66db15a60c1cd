"""Somebody who comes when it is over: is everything as it was before?"""

from __future__ import annotations

from typing import Any

from bench.load_page import Measured, Page, PageError, attempt

QUESTION = "What is this document about?"


def answers_in(exported: dict[str, Any]) -> int:
    """Answers of an exported conversation that a person can read again: below a question, and with words,
    except where the person stopped them before the first one."""
    messages = exported["messages"]
    questions = {m["id"] for m in messages if m["role"] == "user" and m["text"].strip()}
    answers = [m for m in messages if m["role"] == "assistant" and m["parent"] in questions]
    return sum(m["status"] == "stopped" or (m["status"] == "complete" and m["text"] != "") for m in answers)


async def newcomer(url: str) -> dict[str, Any]:
    """Load the page, ask about a document and look whether the model's answer is stored."""
    measured = Measured()
    page = Page(url, measured)

    async def ask() -> None:
        if not page.documents:
            raise PageError("the page offers no document to ask about")
        await page.ask(QUESTION, page.documents[0])
        messages = (await page.export())["messages"]
        answers = [m for m in messages if m["role"] == "assistant" and m["status"] == "complete"]
        if not any(m["model"] and m["text"].strip() for m in answers):
            raise PageError("no answer of the model's is stored")

    try:
        loaded = await attempt(measured, "page load", page.load)
        answered = loaded and await attempt(measured, "ask", ask)
    finally:
        await page.close()
    loads = measured.times["page load"]
    return {
        "answered": answered,
        "errors": measured.errors,
        "refusals": dict(measured.refusals),
        "page_load_s": round(loads[0], 3) if loads else None,
    }
