"""API keys for `/v1`: shown once, kept as a hash, revocable at once.

A key's secret is 32 random bytes, so one round of SHA-256 is enough: there is nothing to guess. Live keys
are also held in memory (this process is the database's only writer), so that a request is authorised
without a query and a revocation counts from the same moment.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.errors import NotFoundHere, QuotaRefused, ValueRefused
from app.principal import Principal, Role
from rag.database import Database

PREFIX = "coread_"
MAX_KEYS = 20
_NAME_CHARS = 80
#: A key's last use is written down at most this often.
_USED_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`owner` is the principal that the key acts as: an account's id, or the key's own where it has none."""

    id: str
    owner: str
    name: str
    created: float
    used: float | None
    revoked: float | None


def hash_secret(secret: str) -> bytes:
    """What is stored of a high-entropy secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def checked_name(name: str, what: str, limit: int = _NAME_CHARS) -> str:
    """`name` on one line without control characters; raises `ValueRefused` where nothing is left of it."""
    # Each character is looked at: not those of what is a book and no name.
    cut = name if len(name) > 10 * limit else "".join(c if c.isprintable() else " " for c in name)
    stripped = " ".join(cut.split())
    if not stripped or len(stripped) > limit:
        raise ValueRefused(f"{what} needs between 1 and {limit} characters; it has {len(stripped):,}.")
    return stripped


class ApiKeys:
    """All keys of one server. `open` reads them; every method is for the event loop."""

    def __init__(self, database: Database, role_of: Callable[[str], Role | None]) -> None:
        """`role_of(account)` is an account's role, None where it may not act (any more)."""
        self._db, self._role_of = database, role_of
        self._by_hash: dict[bytes, ApiKey] = {}
        self._watching: set[Callable[[], None]] = set()

    async def open(self) -> None:
        sql = (
            "SELECT secret_hash, id, owner, name, created, used, revoked FROM app_keys WHERE revoked IS NULL"
        )
        rows = await self._db.read(lambda c: c.execute(sql).fetchall())
        self._by_hash = {bytes(row[0]): ApiKey(*row[1:]) for row in rows}

    def principal(self, presented: str) -> Principal | None:
        """Who a presented key acts for; None for one that is unknown, revoked or whose account may not act.

        The table is looked up by the hash, so timing tells nothing about how much of a guess was right.
        """
        key = self._by_hash.get(hash_secret(presented))
        if key is None:
            return None
        own = key.owner == _own_id(key.id)
        role = "reader" if own else self._role_of(key.owner)
        if role is None:
            return None
        return Principal("api_key", key.owner, role)

    async def note_use(self, presented: str) -> None:
        """Remember that the key was used just now, to the nearest few minutes."""
        hashed, now = hash_secret(presented), time.time()
        key = self._by_hash.get(hashed)
        if key is None or (key.used is not None and now - key.used < _USED_EVERY_S):
            return
        self._by_hash[hashed] = replace(key, used=now)
        sql = "UPDATE app_keys SET used = ? WHERE id = ?"
        await self._db.write(lambda c: c.execute(sql, (now, key.id)).rowcount)

    async def create(self, name: str, owner: str | None = None) -> tuple[ApiKey, str]:
        """A new key and its secret, which nothing can show again.

        `owner` is an account's id; without one the key is a principal of its own, as programs want that share
        nothing with a person. Raises `ValueRefused` for a name that is none, `QuotaRefused` over `MAX_KEYS`.
        """
        name = checked_name(name, "The key's name")
        id, secret = secrets.token_hex(8), PREFIX + secrets.token_urlsafe(32)
        made = ApiKey(id, owner or _own_id(id), name, time.time(), None, None)
        if owner is not None and sum(key.owner == owner for key in self._by_hash.values()) >= MAX_KEYS:
            raise QuotaRefused(f"An account keeps at most {MAX_KEYS} keys; revoke one first.")
        hashed = hash_secret(secret)
        row = (made.id, made.owner, made.name, hashed, made.created)
        sql = "INSERT INTO app_keys (id, owner, name, secret_hash, created) VALUES (?, ?, ?, ?, ?)"
        self._by_hash[hashed] = made  # at once, so that the count above holds for everybody else
        try:
            await self._db.write(lambda c: c.execute(sql, row).rowcount)
        except BaseException:
            self._by_hash.pop(hashed, None)
            raise
        return made, secret

    def live(self, owner: str | None = None) -> list[ApiKey]:
        """The live keys of one owner, or of everybody, oldest first."""
        listed = [key for key in self._by_hash.values() if owner is None or key.owner == owner]
        return sorted(listed, key=lambda key: (key.created, key.id))

    async def revoke(self, id: str, owner: str | None = None) -> None:
        """End a key; `owner` restricts it to that owner's. Raises `NotFoundHere` where there is none."""
        found = [h for h, k in self._by_hash.items() if k.id == id and owner in (None, k.owner)]
        if not found:
            raise NotFoundHere("There is no such key.")
        del self._by_hash[found[0]]  # first: a refusal must not wait for the disk
        self._tell()
        sql = "UPDATE app_keys SET revoked = ? WHERE id = ?"
        await self._db.write(lambda c: c.execute(sql, (time.time(), id)).rowcount)

    def forget(self, owner: str) -> None:
        """Drop the keys of an account whose lock ends them in the database (see `Accounts.set_disabled`)."""
        self._by_hash = {hashed: key for hashed, key in self._by_hash.items() if key.owner != owner}
        self._tell()

    def watch(self, ended: Callable[[], None]) -> Callable[[], None]:
        """Have `ended` called whenever a key has ended, until what is returned is called."""
        self._watching.add(ended)
        return lambda: self._watching.discard(ended)

    def _tell(self) -> None:
        for ended in list(self._watching):
            ended()


def _own_id(key_id: str) -> str:
    return f"k-{key_id}"
