"""The knowledge base as one principal sees it: every call asks anew what the principal may read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from app.errors import NotFoundHere
from app.limits import Limits, Stored
from app.one_at_a_time import OneAtATime
from app.pages.words import phrase
from app.principal import Principal
from app.settings import Settings
from app.store import EVERYBODY, Reference, Store
from app.updates import Source
from rag.errors import NotFound
from rag.records import clean_name
from rag.split import below

if TYPE_CHECKING:
    from engine.service import EngineService
    from rag.aio import AsyncLibrary
    from rag.types import CheckReport, DocumentInfo, DocumentText, DocumentVersion, Hit

log = logging.getLogger("coread")
OWN_COLLECTION = "Own documents"


@dataclass(frozen=True, slots=True)
class DocumentView:
    """A ready document in a list. `own`: this principal added it and may delete it."""

    id: str
    title: str
    name: str
    collection_id: str
    version: int
    own: bool


def suggested_questions(count: int) -> list[str]:
    """Questions of the sample knowledge base, for the page's first moments."""
    import data

    return data.suggested_questions()[:count]


def questions_about(name: str) -> list[str]:
    """Sample questions that the sample document of this file name answers, in a fixed order."""
    import data

    return [
        item.question
        for item in data.questions("dev")
        if item.kind == "single" and any(gold.document == name for gold in item.gold)
    ]


def shown_of(references: Iterable[Reference]) -> list[Reference]:
    """The references that are listed as sources; the others say what stood in the prompt."""
    return [reference for reference in references if not reference.zone]


class Knowledge:
    """Search, documents, uploads and deletion, each for a principal."""

    def __init__(
        self,
        settings: Settings,
        library: AsyncLibrary,
        store: Store,
        engine: EngineService,
        limits: Limits,
    ) -> None:
        self._settings, self._library, self._store, self._engine = settings, library, store, engine
        self._limits = limits
        self._making = asyncio.Lock()  # two first uploads at once make one collection
        self._persons, self._adding = OneAtATime(), asyncio.Lock()

    async def seed_suggested(self) -> list[str]:
        """Queue the sample documents behind the suggested questions, ahead of all others (see `seed`); the
        ids of those that are not read yet."""
        from rag.sample import COLLECTION, seed_suggested

        unread = await asyncio.to_thread(seed_suggested, self._library.library)
        await self._store.grant(COLLECTION, EVERYBODY)
        return unread

    async def seed(self) -> list[str]:
        """Bring the sample collection in line with the packaged documents and let everybody read it; the ids
        of the documents that are now queued."""
        from rag.sample import COLLECTION, seed

        queued = await asyncio.to_thread(seed, self._library.library)
        await self._store.grant(COLLECTION, EVERYBODY)
        return queued

    async def wait_seeded(self, document: str) -> None:
        """Wait for a queued sample document; one that cannot be read is logged and left out."""
        try:
            info = await self._library.wait(document)
        except NotFound:
            return
        if info.status == "failed":
            log.warning("the sample document %s could not be read: %s", info.name, info.message)

    # -- reading -----------------------------------------------------------------------------------------

    async def documents(self, principal: Principal) -> list[DocumentView]:
        """The ready documents that the principal may read, by title."""
        infos = await self._library.documents(await self._store.readable(principal))
        views = [
            DocumentView(
                i.id, i.title or i.name, i.name, i.collection_id, i.version, i.created_by == principal.id
            )
            for i in infos
            if i.version > 0
        ]
        return sorted(views, key=lambda view: (view.title.casefold(), view.id))

    async def document(self, readable: frozenset[str], id: str) -> DocumentText:
        """A whole document; raises `NotFoundHere` where it is not among the readable ones."""
        try:
            return await self._library.document(id, readable)
        except NotFound:
            raise NotFoundHere(phrase("refused.document_gone")) from None

    async def search(
        self, readable: frozenset[str], query: str, limit: int, history: Sequence[str] = ()
    ) -> list[Hit]:
        return await self._library.search(query, readable, limit, history=history)

    async def answerable(
        self, readable: frozenset[str], query: str, hits: Sequence[Hit], history: Sequence[str] = ()
    ) -> bool:
        """Whether the hits look as if they held the answer (see `rag.gate`)."""
        return (await self._library.answerability(query, hits, readable, history)).answerable

    async def passage(self, principal: Principal, reference: Reference) -> tuple[Source, DocumentText]:
        """A reference with the whole document that it points into, authorised anew.

        Raises `NotFoundHere` where the document is gone, was replaced or may no longer be read.
        """
        document = await self.document(await self._store.readable(principal), reference.document_id)
        if document.version != reference.version:
            raise NotFoundHere(phrase("refused.document_replaced"))
        return self._source(reference, document), document

    async def sources(self, principal: Principal, references: Iterable[Reference]) -> tuple[Source, ...]:
        """The shown ones of a stored answer's references, authorised anew (see `sources_in`)."""
        return await self.sources_in(await self._store.readable(principal), shown_of(references))

    async def sources_in(
        self, readable: frozenset[str], references: Iterable[Reference]
    ) -> tuple[Source, ...]:
        """References as they are shown; what is gone or not readable becomes a tombstone."""
        wanted = list(references)
        texts: dict[str, DocumentText | None] = {}
        for id in {reference.document_id for reference in wanted}:
            try:
                texts[id] = await self.document(readable, id)
            except NotFoundHere:
                texts[id] = None
        return tuple(self._source(reference, texts[reference.document_id]) for reference in wanted)

    @staticmethod
    def _source(reference: Reference, document: DocumentText | None) -> Source:
        if document is not None and document.version != reference.version:
            named = document.title or document.name
            return Source(reference.number, reference.document_id, named, "", available=False, replaced=True)
        if document is None:
            return Source(reference.number, reference.document_id, "A document that is gone", "",
                          available=False)  # fmt: skip
        section = next(
            (s for s in reversed(document.sections) if s.start <= reference.start), document.sections[0]
        )
        title = document.title or document.name
        return Source(
            reference.number,
            reference.document_id,
            title,
            document.text[reference.start : reference.stop],
            page=section.page,
            section=below(title, section.title) or None,
            verdict=reference.verdict,
            found=reference.found,
        )

    # -- changing ----------------------------------------------------------------------------------------

    async def collection(self, principal: Principal, name: str, reader: str) -> str:
        """The principal's collection of this name, made at the first use and readable by `reader`."""
        async with self._making:
            for info in await self._library.collections(await self._store.readable(principal)):
                if info.owner == principal.id and info.name == name:
                    return info.id
            made = await self._library.create_collection(name, principal.id)
            await self._store.grant(made.id, principal.id)
            if reader != principal.id:
                await self._store.grant(made.id, reader)
            return made.id

    async def upload(
        self, principal: Principal, name: str, data: bytes, collection: str | None = None
    ) -> str:
        """Queue a file for `collection`, which the caller has found to be the principal's own (None: one that
        nobody else can read, made at the first use); its document's id.

        Raises `UploadRefused` over the size limit or the person's quota, `TooMany` over the hourly one, and
        `rag`'s own refusals.
        """
        async with self.adding(principal):
            self._limits.check_upload(principal.id, len(data), await self.stored(principal))
            if collection is None:
                collection = await self.collection(principal, OWN_COLLECTION, principal.id)
            return await self._library.add_document(collection, name, data, principal.id)

    @asynccontextmanager
    async def adding(self, principal: Principal) -> AsyncIterator[None]:
        """Between what is stored being counted and a file being added to it nobody adds another one.

        A person's uploads wait for each other first, so many of one person delay anybody else's by one.
        """
        async with self._persons.of(principal.id), self._adding:
            yield

    async def stored(self, principal: Principal) -> Stored:
        """What the principal keeps, failed uploads included, and what everybody does."""
        everything = await self._library.collections(None)
        own = {info.id for info in everything if info.owner == principal.id}
        documents = [d for d in await self._library.documents(own) if d.created_by == principal.id]
        total = sum(info.bytes for info in everything)
        failed = sum(not document.version and document.status == "failed" for document in documents)
        return Stored(len(documents), sum(document.size for document in documents), total, failed)

    async def ingest(self, collection: str, name: str, data: bytes, by: Principal) -> DocumentInfo:
        """Add a document, or a new version of the newest one of this name that `by` added to the collection,
        and wait until it is ready or has failed (see `DocumentInfo` for a new version that failed)."""
        async with self._making:  # a name that comes twice at once is one document
            named = [
                info
                for info in await self._library.documents({collection})
                if info.name == clean_name(name) and info.created_by == by.id
            ]
            if named:
                id = max(named, key=lambda info: info.created).id
                await self._library.replace_document(id, name, data, by.id)
            else:
                id = await self._library.add_document(collection, name, data, by.id)
        return await self._library.wait(id)

    async def reindex(self, embeddings: bool) -> None:
        """Count every passage's terms anew, and embed it anew if wanted; searches go on meanwhile."""
        await self._library.reindex(embeddings=embeddings)

    async def check(self) -> CheckReport:
        """Whether every store of documents agrees with the others."""
        return await self._library.check()

    async def progress(
        self, principal: Principal, document: str, every_s: float
    ) -> AsyncIterator[DocumentInfo]:
        """How far an upload has come, at least every `every_s` seconds, until it is ready or has failed.

        Raises `NotFoundHere` for a document that the principal may not read.
        """
        await self.readable_info(principal, document)
        readable = await self._store.readable(principal)
        waiting = asyncio.ensure_future(self._library.wait(document))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=every_s)
                if not waiting.done():
                    yield await self._library.info(document, readable)
            yield waiting.result()
        finally:
            waiting.cancel()

    async def infos(self, principal: Principal, collections: frozenset[str]) -> list[DocumentInfo]:
        """The documents of these collections that the principal may read, in whatever state, by name."""
        return await self._library.documents(collections & await self._store.readable(principal))

    async def homes(self, documents: Iterable[str]) -> dict[str, str]:
        """The collection of each of these documents that exists. Tells nobody's rights: ask those too."""
        return await self._library.homes(documents)

    async def versions(self, principal: Principal, document: str) -> list[DocumentVersion]:
        """The versions that a document has had, newest first; raises `NotFoundHere`."""
        try:
            return await self._library.versions(document, await self._store.readable(principal))
        except NotFound:
            raise NotFoundHere(phrase("library.no_document")) from None

    async def original(self, principal: Principal, document: str) -> tuple[DocumentInfo, BinaryIO]:
        """The uploaded file of a document's ready version, open to be read; the caller closes it. Raises
        `NotFoundHere`."""
        info = await self.readable_info(principal, document)
        try:
            return info, await self._library.original(document, frozenset({info.collection_id}))
        except NotFound:
            raise NotFoundHere(phrase("library.no_original")) from None

    async def readable_info(self, principal: Principal, document: str) -> DocumentInfo:
        """A document that the principal may read, in whatever state; raises `NotFoundHere` for any other."""
        try:
            return await self._library.info(document, await self._store.readable(principal))
        except NotFound:
            raise NotFoundHere(phrase("library.no_document")) from None

    async def changeable(self, principal: Principal, document: str) -> DocumentInfo:
        """A document that the principal added, or that lies in a collection of its own.

        Raises `NotFoundHere` for anybody else's, exactly as for one that does not exist.
        """
        try:
            info = await self.readable_info(principal, document)
        except NotFoundHere:
            raise NotFoundHere(phrase("library.not_yours")) from None
        owners = {c.owner for c in await self._library.collections({info.collection_id})}
        if principal.id not in owners | {info.created_by}:
            raise NotFoundHere(phrase("library.not_yours"))
        return info

    async def forget_stale(self, read: Collection[tuple[str, int]]) -> bool:
        """To be called as soon as the engine has a prompt that was made of these documents, each with its
        version: whether one was deleted or replaced after it had been read. The engine then keeps no more of
        it; what is deleted later concerns the prompt by itself."""
        return await self._library.tell_stale(read)

    async def delete(self, principal: Principal, document: str) -> int:
        """Delete a document that is `changeable`; how many blocks of its KV lost their document.

        An engine that is down keeps nothing of it and must not keep anybody from deleting.
        """
        await self.changeable(principal, document)
        freed = 0
        if self._engine.status().state == "ready":
            freed = await asyncio.to_thread(self._engine.unlink_document, document)
        await self._library.delete_document(document)
        return freed
