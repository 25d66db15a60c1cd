"""A conversation as a file to keep: JSON with every branch, Markdown with the branch on screen; both with
citations. Served by our own route, to the conversation's owner only; nothing passes through a shared cache.

What a person may no longer read is left out of the file as it is left out of the page. A passage is quoted as
far as the page quotes it; `start` and `end` say where all of it stands.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from app import render
from app.knowledge import shown_of
from app.one_at_a_time import OneAtATime
from app.principal import Principal
from app.receipts import notes
from app.runtime import Runtime
from app.store import Message
from app.updates import Source

FORMAT = "coread-conversation-1"


def exports_router(runtime: Runtime) -> APIRouter:
    router = APIRouter(prefix="/conversations")
    # A conversation may hold a thousand answers: one person's files are made one after the other, and written
    # off the event loop.
    making = OneAtATime()

    async def made(request: Request, id: str, write: Callable[[dict[str, Any]], str]) -> tuple[str, str]:
        principal = runtime.identify("page", request)
        async with making.of(principal.id):
            exported = await export(runtime, principal, id)
            return await asyncio.to_thread(write, exported), exported["title"]

    @router.get("/{id}/export.json")
    async def as_json(id: str, request: Request) -> Response:
        text, title = await made(request, id, partial(json.dumps, ensure_ascii=False, indent=2))
        return _file(text, "application/json", title, "json")

    @router.get("/{id}/export.md")
    async def as_markdown(id: str, request: Request) -> Response:
        text, title = await made(request, id, markdown)
        return _file(text, "text/markdown", title, "md")

    return router


async def export(runtime: Runtime, principal: Principal, id: str) -> dict[str, Any]:
    """The principal's conversation; raises `NotFoundHere` for any other.

    Keys: `format`, `title`, `created`, `updated`, `branch` (ids of the messages on screen, oldest first) and
    `messages` (id, parent, role, text, status, created, model, receipt, rating, comment, sources).
    """
    conversation = await runtime.store.conversation(principal, id)
    branch = await runtime.store.path(principal, id)
    messages = await runtime.store.messages(principal, id)
    return {
        "format": FORMAT,
        "title": conversation.title,
        "created": _when(conversation.created),
        "updated": _when(conversation.updated),
        "branch": [message.id for message in branch],
        "messages": [await _message(runtime, principal, message) for message in messages],
    }


async def _message(runtime: Runtime, principal: Principal, message: Message) -> dict[str, Any]:
    references = shown_of(message.references)
    sources = await runtime.knowledge.sources(principal, message.references)
    return {
        "id": message.id,
        "parent": message.parent_id,
        "role": message.role,
        "text": message.text,
        "status": message.status,
        "created": _when(message.created),
        "model": message.model,
        "receipt": message.receipt,
        "rating": message.feedback.rating if message.feedback else None,
        "comment": message.feedback.comment if message.feedback else None,
        "sources": [
            _source(source, r.version, r.start, r.stop) for source, r in zip(sources, references, strict=True)
        ],
    }


def _source(source: Source, version: int, start: int, stop: int) -> dict[str, Any]:
    out: dict[str, Any] = {"number": source.number, "available": source.available}
    if source.replaced:
        return {**out, "replaced": True}
    if not source.available:
        return out
    return out | {
        "document": source.document_id,
        "version": version,
        "title": source.title,
        "section": source.section,
        "page": source.page,
        "start": start,
        "end": stop,
        "verdict": source.verdict,
        "score": source.found.score if source.found else None,
        "ranks": dict(source.found.ranks) if source.found else None,
        "text": render.quoted(source.text),
    }


def markdown(exported: dict[str, Any]) -> str:
    """The branch on screen of an exported conversation. Links and pictures in it are disarmed, so that
    reading the file makes nobody's viewer fetch anything."""
    by_id = {message["id"]: message for message in exported["messages"]}
    parts = [f"# {_line(exported['title'] or 'Untitled')}", f"Coread, {exported['created']}"]
    for id in exported["branch"]:
        message = by_id[id]
        who = "Question" if message["role"] == "user" else "Answer"
        parts += [f"## {who}", render.answer(message["text"].strip())]
        if message["status"] != "complete":
            parts.append(f"*({message['status']})*")
        if limit := (message["receipt"] or {}).get("length_limit"):
            parts.append(f"*(ended at the length limit of {limit:,} tokens)*")
        parts += [f"*({note})*" for note in notes(message["receipt"])]
        counts = (message["receipt"] or {}).get("sentences") or {}
        if sum(counts.values()) > 1:
            told = ", ".join(f"{n:,} {verdict}" for verdict, n in counts.items())
            parts.append(f"*(sentences: {told})*")
        parts += [_citation(source) for source in message["sources"]]
    return "\n\n".join(parts) + "\n"


def _citation(source: dict[str, Any]) -> str:
    if source.get("replaced"):
        return f"> **[{source['number']}]** An earlier version of a document that was replaced."
    if not source["available"]:
        return f"> **[{source['number']}]** A document that was deleted or is no longer shared with you."
    where = [f"**{_line(source['title'])}**"]
    where += [_line(source["section"])] if source["section"] else []
    where += [f"page {source['page']}"] if source["page"] else []
    where += [f"characters {source['start']:,} to {source['end']:,}", source["verdict"] or "not compared"]
    quoted = render.answer(source["text"].strip()).replace("\n", "\n> ")
    return f"> **[{source['number']}]** {' · '.join(where)}\n>\n> {quoted}"


def _line(text: str) -> str:
    return render.answer(" ".join(text.split()))


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _file(text: str, kind: str, title: str, ending: str) -> Response:
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower())[:60].strip("-") or "conversation"
    name = f"coread-{slug}-{time.strftime('%Y-%m-%d', time.gmtime())}.{ending}"
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Response(text, media_type=f"{kind}; charset=utf-8", headers=headers)
