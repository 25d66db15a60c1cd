"""A person's documents: adding and replacing them, what each takes up, deleting it, keeping it in memory.

Whoever owns a collection or added a document may change it; for everybody else it is as good as not there.
What is kept in memory ("pinned") is remembered in the database and pinned again after a restart, or when a
new version has taken a document's place.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.collections import Collections
from app.errors import NotAllowed, NotFoundHere, QuotaRefused
from app.knowledge import Knowledge
from app.limits import Limits, Stored
from app.pages.words import phrase
from app.principal import Principal
from app.store import Store
from engine.document_memory import DocumentMemory
from engine.errors import EngineError, LimitReached
from rag.errors import NotFound

if TYPE_CHECKING:
    from engine.service import EngineService
    from rag.aio import AsyncLibrary
    from rag.types import DocumentInfo

log = logging.getLogger("coread")


@dataclass(frozen=True, slots=True)
class Weight:
    """What goes with a document: its passages, bytes on disk that nothing else of theirs needs, and indexed
    blocks of KV (what was computed behind it included), of which `held` go only with their last reader."""

    documents: int = 0
    passages: int = 0
    file_bytes: int = 0
    blocks: int = 0
    held: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(
            self.documents + other.documents, self.passages + other.passages,
            self.file_bytes + other.file_bytes, self.blocks + other.blocks, self.held + other.held,
        )  # fmt: skip


class Shelf:
    """Changes documents, each call for a principal. `open` takes up what was to be kept in memory."""

    def __init__(
        self,
        knowledge: Knowledge,
        collections: Collections,
        library: AsyncLibrary,
        store: Store,
        engine: EngineService,
        limits: Limits,
    ) -> None:
        self._knowledge, self._collections, self._library = knowledge, collections, library
        self._store, self._engine, self._limits = store, engine, limits
        self._kept: set[str] = set()

    async def open(self) -> None:
        """Pin what is to be kept; what is no longer there is forgotten."""
        everything = [info.id for info in await self._library.collections(None)]
        there = {info.id for info in await self._library.documents(everything)}
        for id in await self._store.pins():
            if id not in there:
                await self._store.set_pin(Principal("local", "server"), id, False)
                continue
            self._kept.add(id)
            await asyncio.to_thread(self._keep, id)
        self._library.library.on_delete(self._replaced)

    async def keep_again(self) -> None:
        """Pin anew what is to be kept: an engine that was started again has an empty memory and no pins."""
        for id in sorted(self._kept):
            await asyncio.to_thread(self._keep, id)

    def _keep(self, id: str) -> None:
        try:
            self._engine.pin_document(id)
        except EngineError as error:  # the pool is smaller than it was: the document is read as any other
            log.warning("the document %s is not kept in memory: %s", id, error)

    def _replaced(self, id: str) -> None:
        """A document's text is gone and its blocks with it. Where there is a new version, that is kept."""
        if id not in self._kept:
            return
        everything = [info.id for info in self._library.library.collections(None)]
        try:
            self._library.library.info(id, everything)
        except NotFound:
            self._kept.discard(id)
        else:
            self._keep(id)

    # -- adding ------------------------------------------------------------------------------------------

    async def add(self, principal: Principal, collection: str | None, name: str, data: bytes) -> str:
        """Queue a file for one of the principal's collections (None: the first one, made if need be); its
        document's id. Refusals are those of `Knowledge.upload`."""
        if collection is not None:
            await self._collections.own(principal, collection)
        return await self._knowledge.upload(principal, name, data, collection)

    async def replace(self, principal: Principal, document: str, name: str, data: bytes) -> None:
        """Queue a new version; the present one stays until that is ready."""
        async with self._knowledge.adding(principal):
            info = await self._knowledge.changeable(principal, document)
            stored = await self._knowledge.stored(principal)
            without = Stored(stored.documents - 1, stored.bytes - info.size, stored.total_bytes - info.size)
            self._limits.check_upload(principal.id, len(data), without)
            await self._library.replace_document(document, name, data, principal.id)

    async def retry(self, principal: Principal, document: str) -> None:
        await self._knowledge.changeable(principal, document)
        await self._library.retry_document(document)

    async def cancel(self, principal: Principal, document: str) -> None:
        """Stop reading an upload. One that was never ready can be tried again or deleted."""
        await self._knowledge.changeable(principal, document)
        await self._library.cancel_document(document)

    # -- deleting ----------------------------------------------------------------------------------------

    async def weight(self, principal: Principal, document: str) -> Weight:
        """What deleting one of the principal's own documents would free, as of now."""
        info = await self._knowledge.changeable(principal, document)
        return await self._weight(info, await self._memory())

    async def _memory(self) -> dict[str, DocumentMemory]:
        return await asyncio.to_thread(self._engine.documents, fresh=True)

    async def _weight(self, info: DocumentInfo, memory: dict[str, DocumentMemory]) -> Weight:
        held = memory.get(info.id, DocumentMemory())
        stored = await self._library.stored_bytes(info.id)
        return Weight(1, info.passages, stored, held.behind, held.held)

    async def delete(self, principal: Principal, document: str) -> Weight:
        """Delete a document with everything made from it; what that freed."""
        info = await self._knowledge.changeable(principal, document)
        return await self._delete(principal, info, await self._memory())

    async def _delete(
        self, principal: Principal, info: DocumentInfo, memory: dict[str, DocumentMemory]
    ) -> Weight:
        before = await self._weight(info, memory)
        blocks = await self._knowledge.delete(principal, info.id)
        self._kept.discard(info.id)
        await self._store.set_pin(principal, info.id, False)
        return replace(before, blocks=blocks, held=min(before.held, blocks))

    async def collection_weight(self, principal: Principal, collection: str) -> Weight:
        """What deleting one of the principal's own collections would free. A block behind two of its
        documents is counted for both."""
        total, memory = Weight(), await self._memory()
        for info in await self._documents_of(principal, collection):
            total += await self._weight(info, memory)
        return total

    async def delete_collection(self, principal: Principal, collection: str) -> Weight:
        """Delete a collection with all its documents; what that freed."""
        total, memory = Weight(), await self._memory()
        for info in await self._documents_of(principal, collection):
            total += await self._delete(principal, info, memory)
        await self._collections.delete(principal, collection)
        return total

    async def _documents_of(self, principal: Principal, collection: str) -> list[DocumentInfo]:
        own = await self._collections.own(principal, collection)
        return await self._library.documents({own.id})

    # -- memory ------------------------------------------------------------------------------------------

    def may_keep(self, principal: Principal, owner: str) -> bool:
        """Whether the principal may decide what of `owner`'s collection stays in everybody's memory: whoever
        runs Coread on their own machine, administrators, and owners who signed in."""
        if principal.kind == "local" or principal.role == "administrator":
            return True
        return principal.kind in ("signed_in", "api_key") and owner == principal.id

    async def keepable(self, principal: Principal, collection: str) -> None:
        """Raises `NotFoundHere` for a collection that the principal may not read, `NotAllowed` for one that
        it may not keep in memory."""
        infos = await self._library.collections({collection} & await self._store.readable(principal))
        if not infos:
            raise NotFoundHere(phrase("library.no_collection"))
        if not self.may_keep(principal, infos[0].owner):
            raise NotAllowed(phrase("library.not_to_keep"))

    async def pin(self, principal: Principal, document: str, kept: bool) -> int:
        """Keep a document in memory, or no longer; how many blocks are kept for it now.

        What is computed of it later is kept as well. Raises `QuotaRefused` where more than half the memory
        would be kept.
        """
        info = await self._knowledge.readable_info(principal, document)
        await self.keepable(principal, info.collection_id)
        if not kept:
            self._kept.discard(document)
            await self._store.set_pin(principal, document, False)
            await asyncio.to_thread(self._engine.unpin_document, document)
            return 0
        try:
            blocks = await asyncio.to_thread(self._engine.pin_document, document)
        except LimitReached as error:
            pinned = (await asyncio.to_thread(self._engine.memory)).pinned
            raise QuotaRefused(phrase("library.pins_full", n=pinned, limit=error.limit)) from None
        self._kept.add(document)
        await self._store.set_pin(principal, document, True)
        return blocks
