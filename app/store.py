"""Conversations and who may read what, in the one SQLite database.

A conversation is a tree of messages owned by one principal; `head` is the leaf that is on screen. An
answer keeps references (document, version, offsets), never a document's text: what a person may no
longer read, or what was deleted, is then gone from every conversation too.

A conversation that is not the caller's is reported exactly as one that does not exist.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from app.errors import CommentRefused, NotFoundHere, QuotaRefused, TitleRefused, ValueRefused
from app.one_at_a_time import OneAtATime
from app.pages.words import phrase
from app.principal import Principal
from app.text import one_line
from rag.database import Database, Migration

T = TypeVar("T")
Role = Literal["user", "assistant"]
Status = Literal["complete", "stopped", "failed"]
Rating = Literal["good", "bad"]
Zone = Literal["", "front", "appended"]
#: Reader of a grant that stands for everybody who can open this server.
EVERYBODY = "*"
MAX_TITLE = 120
MAX_COMMENT = 2_000
#: Messages of one conversation, and of one person: what is asked lies in the database, and a disk that one
#: visitor filled would be full for everybody.
MAX_MESSAGES, MAX_MESSAGES_EACH = 1_000, 20_000
MAX_CONVERSATIONS = 5_000
#: A conversation whose first question was refused stays empty, and for so long where nothing comes of it.
EMPTY_S = 3600.0
#: Characters of what may be searched for among conversations: looking for a longer text costs more, and no
#: word or sentence is.
MAX_QUERY = 100
#: Bytes of messages that one search goes through, the newest conversations first, and after how many the
#: database's readers are free for others in between. Each message counts as `_LEAST_BYTES` at least.
SEARCHED_BYTES, _SLICE_BYTES, _LEAST_BYTES = 32 * 2**20, 2**20, 500

_SCHEMA = """
CREATE TABLE app_grants (
  collection_id TEXT NOT NULL, reader TEXT NOT NULL, PRIMARY KEY (collection_id, reader)
) WITHOUT ROWID;
CREATE TABLE app_conversations (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, title TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL,
  document_id TEXT, head TEXT
);
CREATE INDEX app_conversations_owner ON app_conversations (owner, updated DESC);
CREATE TABLE app_messages (
  id TEXT PRIMARY KEY,
  conversation_id TEXT NOT NULL REFERENCES app_conversations (id) ON DELETE CASCADE,
  parent_id TEXT REFERENCES app_messages (id) ON DELETE CASCADE,
  role TEXT NOT NULL CHECK (role IN ('user', 'assistant')), text TEXT NOT NULL, tokens BLOB, model TEXT,
  status TEXT NOT NULL, created REAL NOT NULL, receipt TEXT
);
CREATE INDEX app_messages_conversation ON app_messages (conversation_id, created);
CREATE TABLE app_references (
  message_id TEXT NOT NULL REFERENCES app_messages (id) ON DELETE CASCADE, number INTEGER NOT NULL,
  document_id TEXT NOT NULL, version INTEGER NOT NULL, collection_id TEXT NOT NULL, passage_id INTEGER,
  start INTEGER NOT NULL, stop INTEGER NOT NULL, zone TEXT NOT NULL, verdict TEXT,
  PRIMARY KEY (message_id, number)
) WITHOUT ROWID;
CREATE INDEX app_references_document ON app_references (document_id);
"""

_FEEDBACK = """
CREATE TABLE app_feedback (
  message_id TEXT PRIMARY KEY REFERENCES app_messages (id) ON DELETE CASCADE,
  rating TEXT NOT NULL CHECK (rating IN ('good', 'bad')), comment TEXT NOT NULL, created REAL NOT NULL
) WITHOUT ROWID;
"""
_RANKS = "ALTER TABLE app_references ADD COLUMN found TEXT"
_LIBRARY = """
ALTER TABLE app_conversations ADD COLUMN collection_id TEXT;
CREATE TABLE app_pins (
  document_id TEXT PRIMARY KEY, pinned_by TEXT NOT NULL, created REAL NOT NULL
) WITHOUT ROWID;
"""

_TALKS = (
    "SELECT id, title, created, updated, document_id, head, collection_id FROM app_conversations "
    "WHERE owner = ? AND head IS NOT NULL"
)

#: A version, once released, is never edited.
MIGRATIONS: tuple[Migration, ...] = (
    Migration("app", 1, _SCHEMA),
    Migration("app", 2, _RANKS),
    Migration("app", 3, _FEEDBACK),
    Migration("app", 4, _LIBRARY),
)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the owner of a conversation thinks of an answer."""

    rating: Rating
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How search found a passage: its fused score and each leg's rank from 1 ("dense", "lexical")."""

    score: float
    ranks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Reference:
    """A span of one version of a document.

    `zone` says where the model was given it: "front" (shared, before the history), "appended" (private,
    before the question); "" marks a passage that is shown as a source. `verdict` is `rag.cite`'s word for how
    the answer leans on it. `found` is None where the passage was not searched for (chosen, or kept from an
    earlier turn).
    """

    number: int
    document_id: str
    version: int
    collection_id: str
    start: int
    stop: int
    passage_id: int | None = None
    zone: Zone = ""
    verdict: str | None = None
    found: Ranking | None = None


@dataclass(frozen=True, slots=True)
class Message:
    id: str
    parent_id: str | None
    role: Role
    text: str
    status: Status
    created: float
    tokens: tuple[int, ...] | None = None
    model: str | None = None
    receipt: dict[str, Any] | None = None
    references: tuple[Reference, ...] = ()
    feedback: Feedback | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """`document_id`: it reads this document whole. Else it searches: all that its owner may read, or only
    `collection_id`."""

    id: str
    title: str
    created: float
    updated: float
    document_id: str | None
    head: str | None
    collection_id: str | None = None


class Store:
    """All reads and writes take the principal first and see nothing of anybody else's."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._searching = OneAtATime()
        #: How often a right was given or taken: what was looked up while it was the same may still be read.
        self.rights = 0

    # -- who may read what ------------------------------------------------------------------------------

    @property
    def commits(self) -> int:
        """How many writes to the database there were, of any kind (see `Database.commits`)."""
        return self._db.commits

    async def readable(self, principal: Principal) -> frozenset[str]:
        """Ids of the collections that the principal may read, as of now."""
        sql = "SELECT collection_id FROM app_grants WHERE reader IN (?, ?)"
        rows = await self._read(lambda c: c.execute(sql, (principal.id, EVERYBODY)).fetchall())
        return frozenset(row[0] for row in rows)

    async def grant(self, collection_id: str, reader: str) -> None:
        """Let `reader` (a principal's id or `EVERYBODY`) read the collection."""
        await self._change_rights("INSERT OR IGNORE INTO app_grants VALUES (?, ?)", collection_id, reader)

    async def revoke(self, collection_id: str, reader: str) -> None:
        """Take the right to read away again; the next turn of every conversation sees it."""
        sql = "DELETE FROM app_grants WHERE collection_id = ? AND reader = ?"
        await self._change_rights(sql, collection_id, reader)

    async def readers(self, collection_id: str) -> frozenset[str]:
        """Who may read the collection: principals' ids and `EVERYBODY`. For its owner only."""
        sql = "SELECT reader FROM app_grants WHERE collection_id = ?"
        rows = await self._read(lambda c: c.execute(sql, (collection_id,)).fetchall())
        return frozenset(row[0] for row in rows)

    async def forget_collection(self, collection_id: str) -> None:
        """The collection is gone: so are the rights to read it."""
        await self._change_rights("DELETE FROM app_grants WHERE collection_id = ?", collection_id)

    async def _change_rights(self, sql: str, *values: str) -> None:
        def changed(_: object) -> None:
            self.rights += 1

        written = asyncio.ensure_future(self._db.write(lambda c: c.execute(sql, values).rowcount))
        written.add_done_callback(changed)
        await asyncio.shield(written)  # counted once it is so, even where nobody waits for it any longer

    # -- documents that are kept in memory ----------------------------------------------------------------

    async def pins(self) -> frozenset[str]:
        """Ids of the documents that somebody wants kept in memory."""
        rows = await self._read(lambda c: c.execute("SELECT document_id FROM app_pins").fetchall())
        return frozenset(row[0] for row in rows)

    async def set_pin(self, principal: Principal, document_id: str, kept: bool) -> None:
        """Remember that a document is to be kept in memory, or no longer."""

        def write(c: sqlite3.Connection) -> None:
            if kept:
                row = (document_id, principal.id, time.time())
                c.execute("INSERT OR REPLACE INTO app_pins VALUES (?, ?, ?)", row)
            else:
                c.execute("DELETE FROM app_pins WHERE document_id = ?", (document_id,))

        await self._db.write(write)

    # -- conversations -----------------------------------------------------------------------------------

    async def create(
        self, principal: Principal, title: str = "", document_id: str | None = None
    ) -> Conversation:
        """A new one; raises `QuotaRefused` where the principal has `MAX_CONVERSATIONS`."""
        now = time.time()
        made = Conversation(_new_id(), title, now, now, document_id, None)
        sql = (
            "INSERT INTO app_conversations (id, owner, title, created, updated, document_id) "
            "VALUES (?, ?, ?, ?, ?, ?)"
        )
        row = (made.id, principal.id, title, now, now, document_id)

        def write(c: sqlite3.Connection) -> None:
            empty = "DELETE FROM app_conversations WHERE owner = ? AND head IS NULL AND updated < ?"
            c.execute(empty, (principal.id, now - EMPTY_S))
            count = "SELECT COUNT(*) FROM app_conversations WHERE owner = ?"
            held = int(c.execute(count, (principal.id,)).fetchone()[0])
            if held >= MAX_CONVERSATIONS:
                raise QuotaRefused(f"You keep {held:,} conversations, which is the limit; delete some first.")
            c.execute(sql, row)

        await self._db.write(write)
        return made

    async def conversations(
        self, principal: Principal, limit: int = 50, query: str = ""
    ) -> list[Conversation]:
        """The principal's conversations that have messages, last used first; with a `query` those whose title
        or messages contain it (letters A to Z in either case).

        A search looks at the newest `SEARCHED_BYTES` of messages and at all titles; one of a person's runs at
        a time. Raises `ValueRefused` for a query over `MAX_QUERY` characters.
        """
        wanted = " ".join(query.split())
        if len(wanted) > MAX_QUERY:
            raise ValueRefused(phrase("refused.search_long", n=len(wanted), limit=MAX_QUERY))
        if wanted:
            async with self._searching.of(principal.id):
                return await self._search(principal, wanted, limit)
        sql = f"{_TALKS} ORDER BY updated DESC LIMIT ?"
        rows = await self._read(lambda c: c.execute(sql, (principal.id, limit)).fetchall())
        return [Conversation(*row) for row in rows]

    async def _search(self, principal: Principal, query: str, limit: int) -> list[Conversation]:
        """A LIKE would try the whole query at every character of every message, and hold one of the few
        readers of the database meanwhile."""

        def list_all(c: sqlite3.Connection) -> tuple[list[Conversation], set[str], list[tuple[int, str]]]:
            talks = [
                Conversation(*row) for row in c.execute(f"{_TALKS} ORDER BY updated DESC", (principal.id,))
            ]
            titled = f"SELECT id FROM ({_TALKS}) WHERE instr(lower(title), lower(?))"
            found = {row[0] for row in c.execute(titled, (principal.id, query))}
            messages = (
                "SELECT m.rowid, talk.id FROM app_conversations AS talk "
                "JOIN app_messages AS m ON m.conversation_id = talk.id "
                "WHERE talk.owner = ? ORDER BY talk.updated DESC, m.created DESC"
            )
            return talks, found, c.execute(messages, (principal.id,)).fetchall()

        def look(c: sqlite3.Connection) -> int:
            """Go through a slice of the messages; how many bytes that was."""
            sql = "SELECT length(CAST(text AS BLOB)), instr(lower(text), lower(?)) FROM app_messages "
            seen = 0
            while rows and seen < _SLICE_BYTES:
                rowid, talk = rows.pop()
                if talk in found:
                    continue
                # None where it was deleted in between.
                size, at = c.execute(f"{sql} WHERE rowid = ?", (query, rowid)).fetchone() or (0, 0)
                seen += max(size, _LEAST_BYTES)
                if at:
                    found.add(talk)
            return seen

        talks, found, rows = await self._read(list_all)
        rows.reverse()
        seen = 0
        while rows and seen < SEARCHED_BYTES and len(found) < len(talks):
            seen += await self._read(look)
        return [talk for talk in talks if talk.id in found][:limit]

    async def rename(self, principal: Principal, id: str, title: str) -> str:
        """Give a conversation a title; what was stored. Raises `TitleRefused` for an empty or long one."""
        # Each character is looked at to make it one line: not those of what is a book and no title.
        line = one_line(title) if len(title) <= 10 * MAX_TITLE else title
        if not 0 < len(line) <= MAX_TITLE:
            raise TitleRefused(
                f"The title has {len(line):,} characters; it needs at least 1 and at most {MAX_TITLE}."
            )

        def write(c: sqlite3.Connection) -> None:
            _owned(c, principal, id)
            c.execute("UPDATE app_conversations SET title = ? WHERE id = ?", (line, id))

        await self._db.write(write)
        return line

    async def conversation(self, principal: Principal, id: str) -> Conversation:
        """One conversation; raises `NotFoundHere` unless the principal owns it."""
        return await self._read(lambda c: _owned(c, principal, id))

    async def set_document(
        self, principal: Principal, id: str, document_id: str | None, collection_id: str | None = None
    ) -> None:
        """Choose the document that the conversation reads whole (None: search instead), or the one
        collection that is searched (None: all that its owner may read)."""

        def write(c: sqlite3.Connection) -> None:
            _owned(c, principal, id)
            c.execute(
                "UPDATE app_conversations SET document_id = ?, collection_id = ? WHERE id = ?",
                (document_id, collection_id, id),
            )

        await self._db.write(write)

    async def set_head(self, principal: Principal, id: str, message_id: str) -> None:
        """Put the branch that ends in `message_id` on screen."""

        def write(c: sqlite3.Connection) -> None:
            _owned(c, principal, id)
            _message_row(c, id, message_id)
            c.execute("UPDATE app_conversations SET head = ? WHERE id = ?", (message_id, id))

        await self._db.write(write)

    async def delete(self, principal: Principal, id: str) -> None:
        def write(c: sqlite3.Connection) -> None:
            _owned(c, principal, id)
            c.execute("DELETE FROM app_messages WHERE conversation_id = ?", (id,))
            c.execute("DELETE FROM app_conversations WHERE id = ?", (id,))

        await self._db.write(write)

    # -- messages ----------------------------------------------------------------------------------------

    async def add_message(
        self,
        principal: Principal,
        conversation_id: str,
        parent_id: str | None,
        role: Role,
        text: str,
        *,
        status: Status = "complete",
        tokens: Sequence[int] | None = None,
        model: str | None = None,
        receipt: dict[str, Any] | None = None,
        references: Sequence[Reference] = (),
    ) -> Message:
        """Append a message under `parent_id` and make it the conversation's head.

        Raises `QuotaRefused` for a question where there are `MAX_MESSAGES` or `MAX_MESSAGES_EACH` (an answer
        that is written already is kept up to twice as many).
        """
        now = time.time()
        made = Message(
            _new_id(),
            parent_id,
            role,
            text,
            status,
            now,
            tuple(tokens) if tokens is not None else None,
            model,
            receipt,
            tuple(references),
        )

        def write(c: sqlite3.Connection) -> None:
            conversation = _owned(c, principal, conversation_id)
            _room(c, principal, conversation_id, 1 if role == "user" else 2)
            if parent_id is not None:
                _message_row(c, conversation_id, parent_id)
            c.execute(
                "INSERT INTO app_messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    made.id,
                    conversation_id,
                    parent_id,
                    role,
                    text,
                    array("i", made.tokens).tobytes() if made.tokens is not None else None,
                    model,
                    status,
                    now,
                    json.dumps(receipt) if receipt is not None else None,
                ),
            )
            c.executemany(
                "INSERT INTO app_references VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        made.id,
                        r.number,
                        r.document_id,
                        r.version,
                        r.collection_id,
                        r.passage_id,
                        r.start,
                        r.stop,
                        r.zone,
                        r.verdict,
                        _pack(r.found),
                    )
                    for r in references
                ],
            )
            title = conversation.title or _title(text)
            c.execute(
                "UPDATE app_conversations SET head = ?, updated = ?, title = ? WHERE id = ?",
                (made.id, now, title, conversation_id),
            )

        await self._db.write(write)
        return made

    async def path(
        self, principal: Principal, conversation_id: str, head: str | None = None
    ) -> list[Message]:
        """The branch from the root to `head` (None: the conversation's own head), oldest first."""

        def read(c: sqlite3.Connection) -> list[Message]:
            conversation = _owned(c, principal, conversation_id)
            at = head if head is not None else conversation.head
            branch: list[Message] = []
            while at is not None:
                branch.append(_load(c, _message_row(c, conversation_id, at)))
                at = branch[-1].parent_id
            return branch[::-1]

        return await self._read(read)

    async def messages(self, principal: Principal, conversation_id: str) -> list[Message]:
        """Every message of a conversation, all branches, oldest first."""

        def read(c: sqlite3.Connection) -> list[Message]:
            _owned(c, principal, conversation_id)
            sql = "SELECT id FROM app_messages WHERE conversation_id = ? ORDER BY created, rowid"
            ids = [row[0] for row in c.execute(sql, (conversation_id,))]
            return [_load(c, _message_row(c, conversation_id, id)) for id in ids]

        return await self._read(read)

    async def find(self, principal: Principal, message_id: str) -> tuple[Conversation, Message]:
        """One of the principal's messages with its conversation; raises `NotFoundHere` for any other."""

        def read(c: sqlite3.Connection) -> tuple[Conversation, Message]:
            sql = "SELECT conversation_id FROM app_messages WHERE id = ?"
            row = c.execute(sql, (message_id,)).fetchone()
            conversation = _owned(c, principal, row[0] if row else "")
            return conversation, _load(c, _message_row(c, conversation.id, message_id))

        return await self._read(read)

    async def rate(self, principal: Principal, message_id: str, feedback: Feedback) -> None:
        """Store what the conversation's owner thinks of an answer, in place of what was thought before.

        Raises `NotFoundHere` for anything but an answer of the principal's own, `CommentRefused` for a
        comment over `MAX_COMMENT` characters.
        """
        if len(feedback.comment) > MAX_COMMENT:
            raise CommentRefused(
                f"The comment has {len(feedback.comment):,} characters; at most {MAX_COMMENT:,} are taken."
            )

        def write(c: sqlite3.Connection) -> None:
            sql = "SELECT conversation_id FROM app_messages WHERE id = ? AND role = 'assistant'"
            row = c.execute(sql, (message_id,)).fetchone()
            _owned(c, principal, row[0] if row else "")
            c.execute(
                "INSERT OR REPLACE INTO app_feedback VALUES (?, ?, ?, ?)",
                (message_id, feedback.rating, feedback.comment, time.time()),
            )

        await self._db.write(write)

    async def siblings(self, principal: Principal, conversation_id: str, message_id: str) -> list[str]:
        """Ids of the messages under the same parent, oldest first: the alternatives of a branch point."""

        def read(c: sqlite3.Connection) -> list[str]:
            _owned(c, principal, conversation_id)
            return _children(c, conversation_id, _message_row(c, conversation_id, message_id)[1])

        return await self._read(read)

    async def alternatives(self, principal: Principal, conversation_id: str) -> dict[str | None, list[str]]:
        """Ids of the messages under each parent (None: the first messages), oldest first."""

        def read(c: sqlite3.Connection) -> dict[str | None, list[str]]:
            _owned(c, principal, conversation_id)
            sql = "SELECT parent_id, id FROM app_messages WHERE conversation_id = ? ORDER BY created, rowid"
            out: dict[str | None, list[str]] = {}
            for parent, id in c.execute(sql, (conversation_id,)):
                out.setdefault(parent, []).append(id)
            return out

        return await self._read(read)

    async def show_branch(self, principal: Principal, message_id: str) -> str:
        """Put the branch through a message on screen, down to its newest end; the conversation's id."""

        def write(c: sqlite3.Connection) -> str:
            sql = "SELECT conversation_id FROM app_messages WHERE id = ?"
            row = c.execute(sql, (message_id,)).fetchone()
            id = _owned(c, principal, row[0] if row else "").id
            leaf = message_id
            while below := _children(c, id, leaf):
                leaf = below[-1]
            c.execute("UPDATE app_conversations SET head = ? WHERE id = ?", (leaf, id))
            return id

        return await self._db.write(write)

    async def _read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        return await self._db.read(fn)


def _new_id() -> str:
    return secrets.token_hex(12)


def _pack(found: Ranking | None) -> str | None:
    return None if found is None else json.dumps([found.score, found.ranks])


def _unpack(packed: str | None) -> Ranking | None:
    if packed is None:
        return None
    score, ranks = json.loads(packed)
    return Ranking(score, tuple((leg, rank) for leg, rank in ranks))


def _title(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= 60 else line[:59].rstrip() + "…"


def _owned(c: sqlite3.Connection, principal: Principal, id: str) -> Conversation:
    sql = (
        "SELECT id, title, created, updated, document_id, head, collection_id FROM app_conversations "
        "WHERE id = ? AND owner = ?"
    )
    row = c.execute(sql, (id, principal.id)).fetchone()
    if row is None:
        raise NotFoundHere(phrase("refused.no_conversation"))
    return Conversation(*row)


def _room(c: sqlite3.Connection, principal: Principal, conversation_id: str, times: int) -> None:
    here = "SELECT COUNT(*) FROM app_messages WHERE conversation_id = ?"
    held = int(c.execute(here, (conversation_id,)).fetchone()[0])
    if held >= times * MAX_MESSAGES:
        raise QuotaRefused(f"This conversation has {held:,} messages, which is the limit; start a new one.")
    all_of = (
        "SELECT COUNT(*) FROM app_messages WHERE conversation_id IN "
        "(SELECT id FROM app_conversations WHERE owner = ?)"
    )
    held = int(c.execute(all_of, (principal.id,)).fetchone()[0])
    if held >= times * MAX_MESSAGES_EACH:
        raise QuotaRefused(
            f"Your conversations have {held:,} messages, which is the limit; delete some of them first."
        )


def _message_row(c: sqlite3.Connection, conversation_id: str, id: str) -> tuple[Any, ...]:
    sql = (
        "SELECT id, parent_id, role, text, tokens, model, status, created, receipt FROM app_messages "
        "WHERE id = ? AND conversation_id = ?"
    )
    row = c.execute(sql, (id, conversation_id)).fetchone()
    if row is None:
        raise NotFoundHere(phrase("refused.no_message"))
    return tuple(row)


def _children(c: sqlite3.Connection, conversation_id: str, parent: str | None) -> list[str]:
    sql = "SELECT id FROM app_messages WHERE conversation_id = ? AND parent_id IS ? ORDER BY created, rowid"
    return [row[0] for row in c.execute(sql, (conversation_id, parent))]


def _load(c: sqlite3.Connection, row: tuple[Any, ...]) -> Message:
    id, parent_id, role, text, tokens, model, status, created, receipt = row
    sql = (
        "SELECT number, document_id, version, collection_id, start, stop, passage_id, zone, verdict, "
        "found FROM app_references WHERE message_id = ? ORDER BY number"
    )
    references = tuple(
        Reference(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], _unpack(r[9]))
        for r in c.execute(sql, (id,))
    )
    rated = c.execute("SELECT rating, comment FROM app_feedback WHERE message_id = ?", (id,)).fetchone()
    ids: tuple[int, ...] | None = None
    if tokens is not None:
        packed = array("i")
        packed.frombytes(tokens)
        ids = tuple(packed)
    return Message(
        id,
        parent_id,
        role,
        text,
        status,
        created,
        ids,
        model,
        json.loads(receipt) if receipt else None,
        references,
        Feedback(*rated) if rated is not None else None,
    )
