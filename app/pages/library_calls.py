"""What the library page's script may ask. Each function resolves the principal from the request, takes one
argument which nobody believes, and answers with plain data; refusals come back as `{"error": sentence}`.

Names and texts of documents pass through as they are: the script shows them as text nodes only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gradio as gr

from app.collections import CollectionView
from app.collections_documents import Weight
from app.collections_warm import Warming
from app.errors import NotFoundHere
from app.pages import words
from app.pages.words import Words, phrase
from app.principal import Principal
from app.runtime import Runtime
from app.text import one_line
from engine.document_memory import DocumentMemory
from rag.types import DocumentInfo, SectionText

Answer = dict[str, Any]
Call = Callable[[Runtime, Principal, Words, Answer], Awaitable[Answer]]
#: Documents that one look lists; the page says how many there are beside them, and filters.
MAX_LISTED = 200
#: Reasons for which a file could not be read that may be gone the next time; its contents stay what they are.
RETRIED = frozenset({"time", "memory", "cancelled", "crashed", "internal"})
#: Characters of a section that are sent at once.
MAX_SECTION_CHARS = 200_000


def text_of(asked: Mapping[str, Any], name: str) -> str:
    """A word of the request; "" where it is none."""
    value = asked.get(name)
    return value if isinstance(value, str) else ""


def served(runtime: Runtime, fn: Call) -> Callable[..., Awaitable[Answer]]:
    """`fn` as Gradio calls it."""

    async def call(asked: Any, request: gr.Request) -> Answer:
        w = words.of(request.headers)
        try:
            principal = runtime.principal(request.headers)
            if not runtime.ready:
                return {"warming_up": runtime.detail}
            return await fn(runtime, principal, w, asked if isinstance(asked, dict) else {})
        except Exception as error:
            return {"error": w.sentence(error)}

    call.__name__ = fn.__name__  # what the script calls it by
    return call


# -- looking -----------------------------------------------------------------------------------------------


async def look(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """The page's state: collections, the documents of the chosen one (`collection`) whose name or title
    contains `filter`, the uploads to `follow` by their ids, what the person uses, what the memory holds."""
    views = await runtime.collections.readable(principal)
    chosen = next((v for v in views if v.id == text_of(asked, "collection")), views[0] if views else None)
    readable = frozenset(view.id for view in views)
    memory = await asyncio.to_thread(runtime.engine.documents)
    homes = await runtime.knowledge.homes(memory)
    out: Answer = {
        "me": {
            "anonymous": principal.kind == "anonymous",
            "can_name": runtime.collections.can_name(principal),
            "can_open": runtime.collections.can_open(principal),
        },
        "collections": [_collection(view) for view in views],
        "chosen": chosen.id if chosen else "",
        "usage": runtime.limits.usage(principal.id, await runtime.knowledge.stored(principal)),
        "max_upload_bytes": runtime.settings.max_upload_bytes,
        "pool": await _pool(runtime),
        "others": _others(memory, {id for id, home in homes.items() if home in readable}),
        "warming": _warming(runtime.warmer.now, readable, w),
        "followed": [
            _document(info, memory, False, w) for info in await _followed(runtime, principal, asked)
        ],
        "documents": [],
        "more": 0,
    }
    if chosen is not None:
        owner = principal.id if chosen.own else ""
        out["may_keep"] = runtime.shelf.may_keep(principal, owner)
        wanted = " ".join(text_of(asked, "filter").split()).casefold()[:200]
        inside = await runtime.knowledge.infos(principal, frozenset({chosen.id}))
        found = [i for i in inside if wanted in f"{i.name}\n{i.title}".casefold()]
        found.sort(
            key=lambda i: (i.status not in ("queued", "parsing", "embedding"), i.title.casefold(), i.id)
        )
        own = chosen.own
        out["documents"] = [_document(i, memory, own or i.created_by == principal.id, w)
                            for i in found[:MAX_LISTED]]  # fmt: skip
        out["more"] = max(0, len(found) - MAX_LISTED)
        out["total"], out["failed"] = len(inside), chosen.failed
    return out


async def _followed(runtime: Runtime, principal: Principal, asked: Answer) -> list[DocumentInfo]:
    ids, found = asked.get("follow"), []
    for id in ids[:MAX_LISTED] if isinstance(ids, list) else ():
        try:
            found.append(await runtime.knowledge.readable_info(principal, str(id)))
        except NotFoundHere:
            continue  # deleted meanwhile, or never this person's
    return found


def _collection(view: CollectionView) -> Answer:
    return {
        "id": view.id, "name": view.name, "own": view.own, "owner": view.owner, "everybody": view.everybody,
        "readers": [{"id": reader.id, "name": reader.name} for reader in view.readers],
        "documents": view.documents, "failed": view.failed, "passages": view.passages, "bytes": view.bytes,
    }  # fmt: skip


def _document(info: DocumentInfo, memory: Mapping[str, DocumentMemory], own: bool, w: Words) -> Answer:
    held = memory.get(info.id, DocumentMemory())
    return {
        "id": info.id, "collection": info.collection_id, "name": info.name, "title": one_line(info.title),
        "status": info.status, "progress": info.progress, "problem": problem(info, w),
        "version": info.version, "size": info.size, "passages": info.passages, "pages": info.pages,
        "characters": info.characters, "format": info.format, "updated": info.updated,
        "created": info.created, "own": own, "retry": info.reason in RETRIED,
        "memory": {
            "blocks": held.blocks, "running": held.running, "open": held.open_readers,
            "pinned": held.pinned, "kept": held.kept,
        },
    }  # fmt: skip


def problem(info: DocumentInfo, w: Words) -> str:
    """Why the last upload cannot be read, as a sentence; "" where nothing is wrong."""
    if info.reason is None:
        return ""
    key = "library.reason." + info.reason.replace(" ", "_")
    said = info.message or ""
    if w.language == "en" and said:
        return said
    return f"{w(key)}（{said}）" if key in words.TEXTS and said else said or info.reason


async def _pool(runtime: Runtime) -> Answer:
    snapshot = await asyncio.to_thread(runtime.engine.memory)
    return {
        "total": snapshot.total_blocks, "block_bytes": snapshot.block_bytes, "pinned": snapshot.pinned,
        "pin_limit": snapshot.total_blocks // 2,
    }  # fmt: skip


def _others(memory: Mapping[str, DocumentMemory], known: set[str]) -> Answer:
    """Documents that this person may not read, as one sum: that there are any shows on the block map too."""
    hidden = [held for id, held in memory.items() if id not in known]
    return {"blocks": sum(h.blocks for h in hidden), "open": sum(h.open_readers for h in hidden)}


def _warming(now: Warming | None, readable: frozenset[str], w: Words) -> Answer | None:
    if now is None or now.collection not in readable:
        return None
    return {
        "collection": now.collection, "state": now.state, "done": now.done, "total": now.total,
        "found": now.found, "skipped": now.skipped, "tokens": now.tokens, "problem": w.tell(now.problem),
    }  # fmt: skip


async def document(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """A document's page: its state, its versions and, once it is ready, its sections without their texts;
    None in place of these where the script knows those of this `version`."""
    info = await runtime.knowledge.readable_info(principal, text_of(asked, "id"))
    views = await runtime.collections.readable(principal)
    home = next((view for view in views if view.id == info.collection_id), None)
    if home is None:
        raise NotFoundHere(phrase("library.no_document"))
    sections: list[Answer] | None = [] if not info.version else None
    if info.version and info.version != asked.get("version"):
        whole = await runtime.knowledge.document(frozenset({home.id}), info.id)
        sections = [_section(section) for section in whole.sections]
    own = home.own or info.created_by == principal.id
    versions = await runtime.knowledge.versions(principal, info.id)
    return {
        "document": _document(info, await asyncio.to_thread(runtime.engine.documents), own, w),
        "collection": _collection(home),
        "may_keep": runtime.shelf.may_keep(principal, principal.id if home.own else ""),
        "sections": sections,
        "versions": [
            {"version": v.version, "name": v.name, "size": v.size, "passages": v.passages, "ready": v.ready}
            for v in versions
        ],
        "pool": await _pool(runtime),
    }


def _section(section: SectionText) -> Answer:
    return {
        "index": section.index, "title": section.title, "level": section.level, "page": section.page,
        "characters": section.end - section.start,
    }  # fmt: skip


async def section(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """The text of the section `index` of the document `id`."""
    info = await runtime.knowledge.readable_info(principal, text_of(asked, "id"))
    whole = await runtime.knowledge.document(frozenset({info.collection_id}), info.id)
    index = asked.get("index")
    found = next((s for s in whole.sections if s.index == index), None)
    if found is None:
        raise NotFoundHere(phrase("library.no_section"))
    return {"text": found.text[:MAX_SECTION_CHARS], "cut": len(found.text) > MAX_SECTION_CHARS}


# -- changing ----------------------------------------------------------------------------------------------


async def create(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    return {"id": await runtime.collections.create(principal, text_of(asked, "name"))}


async def rename(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    await runtime.collections.rename(principal, text_of(asked, "id"), text_of(asked, "name"))
    return {"done": True}


async def share(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """Let the account `name` in, take the reader `out` away again, or set whether `everybody` reads."""
    id, everybody = text_of(asked, "id"), asked.get("everybody")
    if isinstance(everybody, bool):
        await runtime.collections.open_to_everybody(principal, id, everybody)
    elif out := text_of(asked, "out"):
        await runtime.collections.unshare(principal, id, out)
    else:
        await runtime.collections.share(principal, id, text_of(asked, "name"))
    return {"done": True}


async def leave(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    await runtime.collections.leave(principal, text_of(asked, "id"))
    return {"done": True}


async def retry(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    await runtime.shelf.retry(principal, text_of(asked, "id"))
    return {"done": True}


async def cancel(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    await runtime.shelf.cancel(principal, text_of(asked, "id"))
    return {"done": True}


async def weight(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """What deleting the document `id`, or the whole `collection`, would free."""
    collection = text_of(asked, "collection")
    if collection:
        return await _weight(runtime, await runtime.shelf.collection_weight(principal, collection))
    return await _weight(runtime, await runtime.shelf.weight(principal, text_of(asked, "id")))


async def delete(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """Delete the document `id`, or the whole `collection`; what that freed."""
    collection = text_of(asked, "collection")
    if collection:
        return await _weight(runtime, await runtime.shelf.delete_collection(principal, collection))
    return await _weight(runtime, await runtime.shelf.delete(principal, text_of(asked, "id")))


async def _weight(runtime: Runtime, found: Weight) -> Answer:
    block_bytes = (await asyncio.to_thread(runtime.engine.memory)).block_bytes
    return {
        "documents": found.documents, "passages": found.passages, "file_bytes": found.file_bytes,
        "blocks": found.blocks, "held": found.held, "block_bytes": found.blocks * block_bytes,
    }  # fmt: skip


async def pin(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """Keep the document `id` in memory, or (`kept` false) no longer."""
    return {"blocks": await runtime.shelf.pin(principal, text_of(asked, "id"), asked.get("kept") is True)}


async def warm(runtime: Runtime, principal: Principal, w: Words, asked: Answer) -> Answer:
    """Begin to read the collection `id` into memory, or (`stop`) end that."""
    id = text_of(asked, "id")
    await runtime.shelf.keepable(principal, id)
    if asked.get("stop") is True:
        if runtime.warmer.now is not None and runtime.warmer.now.collection == id:
            await runtime.warmer.stop()
    else:
        await runtime.warmer.start(principal, id)
    return {"done": True}


def functions(runtime: Runtime) -> list[Callable[..., Awaitable[Answer]]]:
    """Everything that the script may call."""
    calls = (look, document, section, create, rename, share, leave, retry, cancel, weight, delete, pin, warm)
    return [served(runtime, call) for call in calls]
