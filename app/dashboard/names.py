"""What one viewer may see by name, looked up now and then: own conversations and readable documents."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from app.errors import NotFoundHere
from app.principal import Principal

if TYPE_CHECKING:
    from app.runtime import Runtime

#: How long a viewer's list of documents and conversations is good for; longer while nothing is written to the
#: database, because then there is nothing else to find.
NAMES_S, STILL_S = 5.0, 60.0
#: So many conversations that are not the viewer's are looked up in that time, no more.
MAX_FOREIGN = 20
MAX_VIEWERS = 1_000
NOBODY = Principal("anonymous", "nobody")


@dataclass(frozen=True, slots=True)
class Names:
    """`own`: id -> title of the viewer's conversations (and of scripted readers), newest first; `titles`: id
    -> title of the documents that the viewer may read, `homes`: id -> their collections."""

    at: float
    own: Mapping[str, str]
    titles: Mapping[str, str]
    homes: Mapping[str, str]
    #: `Store.commits` before they were looked up.
    commits: int
    #: `Store.rights` before it was last asked what the viewer may read.
    rights: int
    #: Conversations that were asked for and are not the viewer's.
    foreign: set[str] = field(default_factory=set)


class Viewers:
    """The names of those who look."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: OrderedDict[str, Names] = OrderedDict()

    async def names(self, principal: Principal | None, conversation: str = "") -> Names:
        """Nobody in particular may see the scripted readers of a demonstration and what everybody may read.

        `conversation` is looked up by itself where it is not among the viewer's last ones.
        """
        key = principal.id if principal is not None else ""
        found = self._known.get(key)
        age = time.monotonic() - found.at if found is not None else 0.0
        commits = self._runtime.store.commits
        if found is None or age > STILL_S or (age > NAMES_S and commits != found.commits):
            found = await self._look_up(principal, commits)
            self._keep(key, found)
        elif found.rights != self._runtime.store.rights:
            found = await self._still_readable(principal, found)
            self._keep(key, found)
        scripted = self._runtime.demo.conversations(found.titles)
        if (
            principal is not None
            and conversation
            and conversation not in found.own
            and conversation not in scripted
            and conversation not in found.foreign
            and len(found.foreign) < MAX_FOREIGN
        ):
            try:
                talk = await self._runtime.store.conversation(principal, conversation)
            except NotFoundHere:
                found.foreign.add(conversation)
            else:
                found = replace(found, own={talk.id: talk.title or "Untitled", **found.own})
                self._keep(key, found)
        return replace(found, own={**found.own, **scripted}) if scripted else found

    def _keep(self, key: str, names: Names) -> None:
        self._known[key] = names
        self._known.move_to_end(key)
        while len(self._known) > MAX_VIEWERS:
            self._known.popitem(last=False)

    async def _look_up(self, principal: Principal | None, commits: int) -> Names:
        runtime, own = self._runtime, {}
        rights = runtime.store.rights
        if principal is not None:
            talks = await runtime.store.conversations(principal)
            own = {talk.id: talk.title or "Untitled" for talk in talks}
        documents = await runtime.knowledge.documents(principal if principal is not None else NOBODY)
        titles = {view.id: view.title for view in documents}
        homes = {view.id: view.collection_id for view in documents}
        return Names(time.monotonic(), own, titles, homes, commits, rights)

    async def _still_readable(self, principal: Principal | None, names: Names) -> Names:
        """The same without what the viewer may no longer read: a right that was taken is gone at once."""
        rights = self._runtime.store.rights
        readable = await self._runtime.store.readable(principal if principal is not None else NOBODY)
        titles = {id: title for id, title in names.titles.items() if names.homes[id] in readable}
        return replace(names, titles=titles, rights=rights)
