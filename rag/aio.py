"""The library for coroutines: the same methods, run on threads of its own so that no event loop waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO, ParamSpec, TypeVar

from rag.gate import Answerability
from rag.library import Library
from rag.types import (
    CheckReport,
    CollectionInfo,
    DocumentInfo,
    DocumentText,
    DocumentVersion,
    Hit,
    SectionText,
)

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLibrary:
    """Wraps a `Library`. Errors are the library's own; see its methods for what each one does.

    Searches and changes have threads of their own, so many uploads can't keep a search waiting.
    """

    def __init__(self, library: Library, *, search_threads: int = 8, threads: int = 8) -> None:
        self.library = library
        self._searches = ThreadPoolExecutor(search_threads, thread_name_prefix="rag-search")
        self._others = ThreadPoolExecutor(threads, thread_name_prefix="rag-library")

    async def search(
        self, query: str, readable: Collection[str], k: int = 5, *, history: Sequence[str] = ()
    ) -> list[Hit]:
        work = partial(self.library.search, query, readable, k, history=history)
        return await asyncio.get_running_loop().run_in_executor(self._searches, work)

    async def answerability(
        self, query: str, hits: Sequence[Hit], readable: Collection[str], history: Sequence[str] = ()
    ) -> Answerability:
        work = partial(self.library.answerability, query, hits, readable, history)
        return await asyncio.get_running_loop().run_in_executor(self._searches, work)

    async def create_collection(self, name: str, owner: str, id: str | None = None) -> CollectionInfo:
        return await self._run(self.library.create_collection, name, owner, id)

    async def collections(self, readable: Collection[str] | None) -> list[CollectionInfo]:
        return await self._run(self.library.collections, readable)

    async def rename_collection(self, collection_id: str, name: str) -> None:
        await self._run(self.library.rename_collection, collection_id, name)

    async def delete_collection(self, collection_id: str) -> None:
        await self._run(self.library.delete_collection, collection_id)

    async def add_document(
        self, collection_id: str, name: str, data: bytes, by: str, *, document_id: str | None = None
    ) -> str:
        return await self._run(
            self.library.add_document, collection_id, name, data, by, document_id=document_id
        )

    async def replace_document(self, document_id: str, name: str, data: bytes, by: str) -> None:
        await self._run(self.library.replace_document, document_id, name, data, by)

    async def warm_up(self) -> None:
        await self._run(self.library.warm_up)

    async def retry_document(self, document_id: str) -> None:
        await self._run(self.library.retry_document, document_id)

    async def cancel_document(self, document_id: str) -> None:
        await self._run(self.library.cancel_document, document_id)

    async def delete_document(self, document_id: str) -> None:
        await self._run(self.library.delete_document, document_id)

    async def documents(self, collection_ids: Collection[str]) -> list[DocumentInfo]:
        return await self._run(self.library.documents, collection_ids)

    async def info(self, document_id: str, readable: Collection[str]) -> DocumentInfo:
        return await self._run(self.library.info, document_id, readable)

    async def versions(self, document_id: str, readable: Collection[str]) -> list[DocumentVersion]:
        return await self._run(self.library.versions, document_id, readable)

    async def document(self, document_id: str, readable: Collection[str]) -> DocumentText:
        return await self._run(self.library.document, document_id, readable)

    async def excerpt(
        self, document_id: str, version: int, start: int, end: int, readable: Collection[str]
    ) -> SectionText:
        return await self._run(self.library.excerpt, document_id, version, start, end, readable)

    async def original(self, document_id: str, readable: Collection[str]) -> BinaryIO:
        return await self._run(self.library.original, document_id, readable)

    async def homes(self, document_ids: Iterable[str]) -> dict[str, str]:
        return await self._run(self.library.homes, document_ids)

    async def tell_stale(self, read: Collection[tuple[str, int]]) -> bool:
        """See `Library.tell_stale`. It comes to its end where the caller is cancelled, too."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(
            loop.run_in_executor(self._others, self.library.tell_stale, frozenset(read))
        )

    async def stored_bytes(self, document_id: str) -> int:
        return await self._run(self.library.stored_bytes, document_id)

    async def wait(self, document_id: str) -> DocumentInfo:
        """Wait, without holding a thread, until the document is ready or failed; `NotFound` if deleted."""
        future = await self._run(self.library.when_finished, document_id)
        return await asyncio.wrap_future(future)

    async def check(self) -> CheckReport:
        return await self._run(self.library.check)

    async def reindex(self, *, embeddings: bool = False) -> None:
        await self._run(self.library.reindex, embeddings=embeddings)

    def close(self) -> None:
        """Let running calls end and give the threads back. Does not close the library."""
        self._searches.shutdown(wait=True, cancel_futures=True)
        self._others.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._others, partial(work, *args, **kwargs))
