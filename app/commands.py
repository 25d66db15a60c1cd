"""What `coread ask`, `search` and `ingest` do, in this process or through a server's door: same code, same
answers. Results are dicts with the documented keys of `--json`."""

from __future__ import annotations

from typing import Any

from app.errors import StillWarmingUp
from app.principal import Principal
from app.runtime import Runtime
from app.store import EVERYBODY
from app.updates import Finished, Source
from rag.errors import DuplicateDocument
from rag.split import below


def source_json(source: Source) -> dict[str, Any]:
    """A source for programs."""
    return {
        "number": source.number,
        "document": source.document_id,
        "title": source.title,
        "section": source.section,
        "page": source.page,
        "verdict": source.verdict,
        "text": source.text,
    }


async def ask(
    runtime: Runtime, principal: Principal, question: str, document: str | None = None
) -> dict[str, Any]:
    """Ask once, without keeping the conversation.

    Keys: `answer`, `status` ("complete" or "stopped"), `sources` (number, document, title, section, page,
    verdict, text), `receipt` (see `app.receipts.receipt_json`), `notes`.
    """
    chat, store = runtime.chat, runtime.store
    chat.check_question(question)
    conversation = await store.create(principal, document_id=document)
    updates = chat.ask(principal, conversation.id, question)
    try:
        async for update in updates:
            if isinstance(update, Finished):
                return {
                    "answer": update.message.text,
                    "status": update.message.status,
                    "sources": [source_json(source) for source in update.sources],
                    "receipt": update.message.receipt,
                    "notes": list(update.notes),
                }
        raise StillWarmingUp("The answer ended without a result; try again.")
    finally:
        await updates.aclose()
        await chat.delete(principal, conversation.id)


async def search(runtime: Runtime, principal: Principal, query: str, limit: int) -> dict[str, Any]:
    """Search the collections that the principal may read.

    Keys: `query`, `hits` (document, title, section, page, start, end, score, ranks, text).
    """
    readable = await runtime.store.readable(principal)
    hits = await runtime.knowledge.search(readable, query, limit)
    return {
        "query": query,
        "hits": [
            {
                "document": hit.document_id,
                "title": hit.title or hit.name,
                "section": below(hit.title or hit.name, hit.section_title) or None,
                "page": hit.page,
                "start": hit.start,
                "end": hit.end,
                "score": hit.score,
                "ranks": hit.ranks,
                "text": hit.text,
            }
            for hit in hits
        ],
    }


async def ingest_bytes(
    runtime: Runtime, principal: Principal, collection: str, name: str, data: bytes, private: bool
) -> dict[str, Any]:
    """Add one file to the principal's collection of that name, as a new version where it has a document of
    the file's name, and wait until it can be found.

    Keys: `name`, `document`, `version` (0: none was ever ready), `status` ("ready", "failed", or "unchanged"
    where the collection holds the same content already), `passages`, `message`. Where a new version failed,
    the one before it stays.
    """
    reader = principal.id if private else EVERYBODY
    id = await runtime.knowledge.collection(principal, collection, reader)
    unchanged = False
    try:
        info = await runtime.knowledge.ingest(id, name, data, principal)
    except DuplicateDocument as error:
        info, unchanged = await runtime.knowledge.readable_info(principal, error.existing), True
    status = "unchanged" if unchanged and info.status == "ready" else info.status
    return {
        "name": name if unchanged else info.name,
        "document": info.id,
        "version": info.version,
        "status": "failed" if info.reason is not None else status,
        "passages": info.passages,
        "message": info.message,
    }
