"""Collections as people own and share them.

An owner adds documents, says who reads along and sees who does. A reader sees the collection and who owns it,
nothing of other readers. Where people sign in, an owner names accounts; where nobody does, there is nobody to
name, and a collection is its browser's own. Opening one to everybody puts it into everybody's searches: that
is for administrators, and for whoever runs Coread on their own machine.

A collection that may not be read is reported exactly as one that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.accounts import Accounts
from app.errors import NotAllowed, NotFoundHere, QuotaRefused, ValueRefused
from app.keys import checked_name
from app.one_at_a_time import OneAtATime
from app.pages.words import phrase
from app.principal import Principal
from app.settings import Settings
from app.store import EVERYBODY, Store
from rag.errors import NotFound

if TYPE_CHECKING:
    from rag.aio import AsyncLibrary
    from rag.types import CollectionInfo

MAX_COLLECTIONS = 50
MAX_READERS = 200
_NAME_CHARS = 80


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody whom the owner let in, by the name that the owner sees."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CollectionView:
    """A collection as one person sees it. `readers` is empty for everybody but its owner; `owner` is the
    owner's name, "" where that is nobody who signed in."""

    id: str
    name: str
    own: bool
    owner: str
    everybody: bool
    readers: tuple[Reader, ...]
    documents: int
    passages: int
    bytes: int
    failed: int


class Collections:
    """Every call asks anew what the principal may. `accounts` gives the people who can be named."""

    def __init__(
        self, settings: Settings, library: AsyncLibrary, store: Store, accounts: Callable[[], Accounts]
    ) -> None:
        self._settings, self._library, self._store, self._accounts = settings, library, store, accounts
        self._persons = OneAtATime()

    # -- what is there -----------------------------------------------------------------------------------

    async def readable(self, principal: Principal) -> list[CollectionView]:
        """The principal's own ones first, then what others share, each by name."""
        infos = await self._library.collections(await self._store.readable(principal))
        views = [await self._view(principal, info) for info in infos]
        return sorted(views, key=lambda v: (not v.own, v.name.casefold(), v.id))

    async def own(self, principal: Principal, id: str) -> CollectionInfo:
        """One of the principal's own collections; raises `NotFoundHere` for any other."""
        infos = await self._library.collections({id} & await self._store.readable(principal))
        if not infos or infos[0].owner != principal.id:
            raise NotFoundHere(phrase("library.no_collection"))
        return infos[0]

    async def _view(self, principal: Principal, info: CollectionInfo) -> CollectionView:
        own = info.owner == principal.id
        readers = await self._store.readers(info.id)
        named = self._readers(readers - {EVERYBODY, info.owner}) if own else ()
        owner = "" if own else self._name(info.owner)
        return CollectionView(
            info.id, info.name, own, owner, EVERYBODY in readers, named, info.documents, info.passages,
            info.bytes, info.failed,
        )  # fmt: skip

    def _readers(self, ids: Iterable[str]) -> tuple[Reader, ...]:
        readers = [Reader(id, self._name(id) or id) for id in ids]
        return tuple(sorted(readers, key=lambda reader: (reader.name.casefold(), reader.id)))

    def _name(self, id: str) -> str:
        try:
            return self._accounts().account(id).name
        except NotFoundHere:
            return ""

    # -- what its owner does -----------------------------------------------------------------------------

    async def create(self, principal: Principal, name: str) -> str:
        """A new, empty collection that only the principal reads; its id."""
        async with self._persons.of(principal.id):
            name = await self._free_name(principal, name)
            made = await self._library.create_collection(name, principal.id)
            await self._store.grant(made.id, principal.id)
        return made.id

    async def rename(self, principal: Principal, id: str, name: str) -> None:
        await self.own(principal, id)
        async with self._persons.of(principal.id):
            await self._library.rename_collection(id, await self._free_name(principal, name, but=id))

    async def _free_name(self, principal: Principal, name: str, but: str = "") -> str:
        name = checked_name(name, "A collection's name", _NAME_CHARS)
        own = [view for view in await self.readable(principal) if view.own]
        if any(view.name.casefold() == name.casefold() and view.id != but for view in own):
            raise ValueRefused(phrase("library.name_taken", name=name))
        if not but and len(own) >= MAX_COLLECTIONS:
            raise QuotaRefused(phrase("library.many_collections", n=len(own), limit=MAX_COLLECTIONS))
        return name

    async def share(self, principal: Principal, id: str, name: str) -> Reader:
        """Let the account of this name read along. Raises `NotFoundHere` for a collection that is not the
        principal's own, `ValueRefused` for a name that nobody has."""
        await self.own(principal, id)
        if not self.can_name(principal):
            raise NotAllowed(phrase("library.nobody_to_name"))
        wanted = " ".join(name.split()).casefold()
        found = [a for a in self._accounts().accounts() if a.name.casefold() == wanted and a.disabled is None]
        if not found:
            raise ValueRefused(phrase("library.no_account", name=" ".join(name.split())[:_NAME_CHARS]))
        async with self._persons.of(principal.id):
            readers = await self._store.readers(id)
            if found[0].id not in readers and len(readers) > MAX_READERS:
                raise QuotaRefused(phrase("library.many_readers", limit=MAX_READERS))
            await self._store.grant(id, found[0].id)
        return Reader(found[0].id, found[0].name)

    async def unshare(self, principal: Principal, id: str, reader: str) -> None:
        """Take a reader's right away again; their next question no longer finds anything of it."""
        info = await self.own(principal, id)
        if reader == info.owner:
            raise ValueRefused(phrase("library.owner_reads"))
        await self._store.revoke(id, reader)

    async def open_to_everybody(self, principal: Principal, id: str, opened: bool) -> None:
        await self.own(principal, id)
        if opened and not self.can_open(principal):
            raise NotAllowed(phrase("library.not_to_everybody"))
        change = self._store.grant if opened else self._store.revoke
        await change(id, EVERYBODY)

    async def leave(self, principal: Principal, id: str) -> None:
        """Stop reading what somebody else shared; raises `NotFoundHere` where there is no such right."""
        infos = await self._library.collections({id} & await self._store.readable(principal))
        if not infos or infos[0].owner == principal.id or principal.id not in await self._store.readers(id):
            raise NotFoundHere(phrase("library.no_collection"))
        await self._store.revoke(id, principal.id)

    async def delete(self, principal: Principal, id: str) -> None:
        """Delete an empty collection; what is in it is deleted first, by `Shelf.delete_collection`."""
        await self.own(principal, id)
        try:
            await self._library.delete_collection(id)
        except NotFound:
            raise NotFoundHere(phrase("library.no_collection")) from None
        await self._store.forget_collection(id)

    # -- what one may ------------------------------------------------------------------------------------

    def can_name(self, principal: Principal) -> bool:
        """Whether there are people to share with by name."""
        return not self._settings.open_to_all and principal.kind in ("signed_in", "api_key")

    def can_open(self, principal: Principal) -> bool:
        """Whether the principal may let everybody read a collection."""
        return principal.kind == "local" or principal.role == "administrator"
