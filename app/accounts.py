"""People who sign in: accounts, roles, and sessions that can be revoked at once.

    set-up token (log or environment) ──▶ first administrator ──▶ further accounts
    name + password ──throttle──scrypt──▶ session: random token in a cookie, its hash in the database

Live sessions are also held in memory (this process is the database's only writer): a request is authorised
without a query, and a revocation counts from the same moment.

Checking a password takes a while, and much may happen to its account meanwhile. What was proved is the hash
that was checked, so a session begins, and a person's own change of password counts, only where the account
still has that hash; the transaction that writes them looks.
"""

from __future__ import annotations

import hmac
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from starlette.requests import cookie_parser

from app.errors import NoIdentity, NotAllowed, NotFoundHere, TooMany, ValueRefused
from app.keys import checked_name, hash_secret
from app.passwords import PasswordHasher
from app.principal import Principal, Role
from app.rates import Rate
from rag.database import Database

MAX_SESSIONS = 20
_NAME_CHARS = 60
#: A session ends after so long without a request.
IDLE_S = 30 * 24 * 3600.0
#: The time of a session's last request is written down at most this often.
_SEEN_EVERY_S = 600.0
WRONG = "Name or password is wrong."
_WRONG_PRESENT = "The present password is wrong."


@dataclass(frozen=True, slots=True)
class Account:
    id: str
    name: str
    role: Role
    created: float
    disabled: float | None

    @property
    def principal(self) -> Principal:
        return Principal("signed_in", self.id, self.role)


@dataclass(frozen=True, slots=True)
class Session:
    """`label` says what signed in (a browser's own words), for the person to tell sessions apart."""

    id: str
    account: str
    created: float
    seen: float
    label: str


class Throttle:
    """How often a password may be guessed: for a name from one address, from one address, and for a name.

    The last is wide, since it lets a stranger keep somebody from signing in (sessions go on).
    """

    def __init__(self) -> None:
        self._pair, self._address, self._name = Rate(5, 300.0), Rate(30, 300.0), Rate(60, 3600.0)

    def attempt(self, name: str, address: str) -> None:
        """Count an attempt; raises `TooMany` where there were too many."""
        name = _known_as(name)[:_NAME_CHARS]
        for rate, key in ((self._pair, f"{name}\0{address}"), (self._address, address), (self._name, name)):
            if wait := rate.take(key):
                raise TooMany("There were too many attempts to sign in.", wait)

    def succeeded(self, name: str, address: str) -> None:
        self._pair.clear(f"{_known_as(name)[:_NAME_CHARS]}\0{address}")


class Accounts:
    """All accounts and sessions of one server; for its event loop."""

    def __init__(self, database: Database, cookie_name: str, hasher: PasswordHasher | None = None) -> None:
        self._db, self._cookie = database, cookie_name
        self._hasher = hasher or PasswordHasher()
        self._throttle = Throttle()
        self._accounts: dict[str, Account] = {}
        self._sessions: dict[bytes, Session] = {}
        self._on_lock: list[Callable[[str], None]] = []
        chosen = os.environ.get("COREAD_SETUP_TOKEN")
        self._setup_token = chosen or secrets.token_urlsafe(24)
        #: Whether whoever runs the server chose the token: then no log shows it.
        self.setup_token_chosen = bool(chosen)

    async def open(self) -> None:
        """Read accounts and sessions; sessions that ended meanwhile are removed, and what a lock ends where
        it was locked before that was so."""
        now = time.time()

        def end(c: sqlite3.Connection) -> None:
            locked = "(SELECT id FROM app_accounts WHERE disabled IS NOT NULL)"
            c.execute(f"DELETE FROM app_sessions WHERE seen < ? OR account IN {locked}", (now - IDLE_S,))
            c.execute(f"UPDATE app_keys SET revoked = ? WHERE revoked IS NULL AND owner IN {locked}", (now,))

        await self._db.write(end)
        accounts = await self._db.read(
            lambda c: c.execute("SELECT id, name, role, created, disabled FROM app_accounts").fetchall()
        )
        sessions = await self._db.read(
            lambda c: c.execute(
                "SELECT token_hash, id, account, created, seen, label FROM app_sessions"
            ).fetchall()
        )
        self._accounts = {row[0]: Account(*row) for row in accounts}
        self._sessions = {bytes(row[0]): Session(*row[1:]) for row in sessions}

    def close(self) -> None:
        self._hasher.close()

    def on_lock(self, callback: Callable[[str], None]) -> None:
        """Call `callback(account)` when an account is locked, which ends its keys in the database."""
        self._on_lock.append(callback)

    # -- who is it ---------------------------------------------------------------------------------------

    def principal(self, headers: Mapping[str, str]) -> Principal | None:
        """The signed-in person of a request's `Cookie` header; None where there is none (any more)."""
        session = self._sessions.get(self._presented(headers))
        if session is None or time.time() - session.seen > IDLE_S:
            return None
        account = self._accounts.get(session.account)
        return account.principal if account is not None and account.disabled is None else None

    def session(self, headers: Mapping[str, str]) -> Session | None:
        """The session itself."""
        return self._sessions.get(self._presented(headers))

    def _presented(self, headers: Mapping[str, str]) -> bytes:
        return hash_secret(cookie_parser(headers.get("cookie", "")).get(self._cookie, ""))

    def locked(self, id: str) -> bool:
        """True for an account that was locked; no account is none that was."""
        account = self._accounts.get(id)
        return account is not None and account.disabled is not None

    def role_of(self, id: str) -> Role | None:
        """An account's role; None for one that is disabled or does not exist."""
        account = self._accounts.get(id)
        return account.role if account is not None and account.disabled is None else None

    async def note_seen(self, headers: Mapping[str, str]) -> None:
        """Remember that the session was used just now, to the nearest few minutes."""
        hashed, now = self._presented(headers), time.time()
        session = self._sessions.get(hashed)
        if session is None or now - session.seen < _SEEN_EVERY_S:
            return
        self._sessions[hashed] = replace(session, seen=now)
        sql = "UPDATE app_sessions SET seen = ? WHERE id = ?"
        await self._db.write(lambda c: c.execute(sql, (now, session.id)).rowcount)

    # -- signing in and out ------------------------------------------------------------------------------

    async def sign_in(self, name: str, password: str, address: str, label: str) -> str:
        """A new session's token. Raises `TooMany`, or `NoIdentity` with the same words for every reason."""
        self._throttle.attempt(name, address)
        account = self._named(name)
        stored = await self._stored(account.id) if account is not None else None
        right = await self._hasher.verify(password, stored)
        # Looked up again: the account may have been disabled while the password was being checked.
        account = self._named(name)
        if account is None or stored is None or not right or account.disabled is not None:
            raise NoIdentity(WRONG)
        token = await self._begin(account, stored, label)
        self._throttle.succeeded(name, address)
        return token

    async def _begin(self, account: Account, proved: str, label: str) -> str:
        """A new session's token. Raises `NoIdentity` where `proved` is no longer the account's password hash,
        or the account is locked."""
        token, now = secrets.token_urlsafe(32), time.time()
        made = Session(secrets.token_hex(8), account.id, now, now, _label(label))
        hashed = hash_secret(token)
        row = (made.id, made.account, hashed, now, now, made.label, account.id, proved)
        sql = (
            "INSERT INTO app_sessions (id, account, token_hash, created, seen, label) "
            "SELECT ?, ?, ?, ?, ?, ? FROM app_accounts WHERE id = ? AND password = ? AND disabled IS NULL"
        )
        self._sessions[hashed] = made  # at once, so that whoever ends the account's sessions ends this one
        try:
            begun = await self._db.write(lambda c: c.execute(sql, row).rowcount)
        except BaseException:
            self._sessions.pop(hashed, None)
            raise
        if not begun or hashed not in self._sessions:
            self._sessions.pop(hashed, None)
            raise NoIdentity(WRONG)
        own = self.sessions(account.id)
        await self._end([session for session in own[MAX_SESSIONS:] if session is not made])
        return token

    async def sign_out(self, headers: Mapping[str, str]) -> None:
        """End the request's session; nothing happens where there is none."""
        session = self.session(headers)
        if session is not None:
            await self.revoke_session(session.id, session.account)

    def sessions(self, account: str) -> list[Session]:
        """A person's sessions, last used first."""
        own = [session for session in self._sessions.values() if session.account == account]
        return sorted(own, key=lambda session: (-session.seen, session.id))

    async def revoke_session(self, id: str, account: str) -> None:
        """End one of a person's sessions. Raises `NotFoundHere` where it is not theirs."""
        found = [s for s in self.sessions(account) if s.id == id]
        if not found:
            raise NotFoundHere("There is no such session.")
        await self._end(found)

    async def revoke_sessions(self, account: str, keep: str | None = None) -> None:
        """End all of a person's sessions but `keep`."""
        await self._end([session for session in self.sessions(account) if session.id != keep])

    async def _end(self, sessions: Iterable[Session]) -> None:
        ids = {session.id for session in sessions}
        self._drop(ids)  # first: a refusal must not wait for the disk
        if ids:
            sql, rows = "DELETE FROM app_sessions WHERE id = ?", [(id,) for id in ids]
            await self._db.write(lambda c: c.executemany(sql, rows).rowcount)

    def _drop(self, ids: set[str]) -> None:
        self._sessions = {hashed: s for hashed, s in self._sessions.items() if s.id not in ids}

    # -- accounts ----------------------------------------------------------------------------------------

    @property
    def setup_token(self) -> str | None:
        """What the first administrator is made with; None once there is one."""
        return None if any(a.role == "administrator" for a in self._accounts.values()) else self._setup_token

    async def set_up(self, token: str, name: str, password: str, address: str) -> Account:
        """Make the first administrator. Raises `NotAllowed` for a wrong token or once there is one."""
        self._throttle.attempt("\0set-up", address)
        expected = self.setup_token
        if expected is None or not hmac.compare_digest(token.strip().encode(), expected.encode()):
            raise NotAllowed(
                "The set-up token is wrong; it is COREAD_SETUP_TOKEN's where that is set, else the server's "
                "log shows it at start."
            )
        return await self.create(name, password, "administrator", first=True)

    async def create(self, name: str, password: str, role: Role, *, first: bool = False) -> Account:
        """A new account. Raises `ValueRefused` for a name that is taken or unfit, or an unfit password.

        With `first` it is refused, too, where somebody else has become administrator meanwhile.
        """
        name = checked_name(name, "A name", _NAME_CHARS)
        if self._named(name) is not None:
            raise ValueRefused("There is an account of this name already.")
        hashed = await self._hasher.hash(password)
        if self._named(name) is not None:
            raise ValueRefused("There is an account of this name already.")
        if first and self.setup_token is None:
            raise NotAllowed("The first administrator has been made already.")
        made = Account("a-" + secrets.token_hex(12), name, role, time.time(), None)
        self._accounts[made.id] = made  # at once, so that the two checks above hold for everybody else
        row = (made.id, name, role, hashed, made.created)
        sql = "INSERT INTO app_accounts (id, name, role, password, created) VALUES (?, ?, ?, ?, ?)"
        try:
            await self._db.write(lambda c: c.execute(sql, row).rowcount)
        except BaseException:
            del self._accounts[made.id]
            raise
        return made

    def accounts(self) -> list[Account]:
        return sorted(self._accounts.values(), key=lambda account: account.name.casefold())

    def account(self, id: str) -> Account:
        """One account; raises `NotFoundHere`."""
        if id not in self._accounts:
            raise NotFoundHere("There is no such account.")
        return self._accounts[id]

    async def set_disabled(self, id: str, disabled: bool) -> None:
        """Lock an account, with its sessions and keys, or unlock it. The last administrator stays."""
        account = self.account(id)
        others = [
            a
            for a in self._accounts.values()
            if a.role == "administrator" and a.disabled is None and a.id != id
        ]
        if disabled and account.role == "administrator" and not others:
            raise ValueRefused("This is the last administrator; make another one first.")
        now = time.time()
        self._accounts[id] = replace(account, disabled=now if disabled else None)
        if not disabled:
            sql = "UPDATE app_accounts SET disabled = NULL WHERE id = ?"
            await self._db.write(lambda c: c.execute(sql, (id,)).rowcount)
            return
        # All of this before anything is waited for: what is being written at this moment is known here
        # already, and its row comes before the transaction that removes it.
        self._drop({session.id for session in self.sessions(id)})
        for ended in self._on_lock:
            ended(id)

        def lock(c: sqlite3.Connection) -> None:
            c.execute("UPDATE app_accounts SET disabled = ? WHERE id = ?", (now, id))
            c.execute("DELETE FROM app_sessions WHERE account = ?", (id,))
            c.execute("UPDATE app_keys SET revoked = ? WHERE owner = ? AND revoked IS NULL", (now, id))

        await self._db.write(lock)

    async def set_password(self, id: str, password: str, keep: str | None = None) -> None:
        """Give an account another password; its sessions end, but for the one that asks."""
        self.account(id)
        await self._write_password(id, await self._hasher.hash(password), keep)

    async def change_password(
        self, id: str, present: str, new: str, address: str, keep: str | None = None
    ) -> None:
        """A person changes their own; raises `NoIdentity` where the present one is wrong, or is the present
        one no longer when the new one would be written."""
        self._throttle.attempt(self.account(id).name, address)
        proved = await self._stored(id)
        if proved is None or not await self._hasher.verify(present, proved):
            raise NoIdentity(_WRONG_PRESENT)
        if not await self._write_password(id, await self._hasher.hash(new), keep, proved):
            raise NoIdentity(_WRONG_PRESENT)

    async def _write_password(
        self, id: str, hashed: str, keep: str | None, proved: str | None = None
    ) -> bool:
        """Write a password and end the sessions but `keep`. With `proved`, only where that is the password
        hash still and the account is not locked; False where it is not."""

        def write(c: sqlite3.Connection) -> set[str] | None:
            sql, values = "UPDATE app_accounts SET password = ? WHERE id = ?", [hashed, id]
            if proved is not None:
                sql, values = sql + " AND password = ? AND disabled IS NULL", [*values, proved]
            if not c.execute(sql, values).rowcount:
                return None
            ended = c.execute("SELECT id FROM app_sessions WHERE account = ? AND id IS NOT ?", (id, keep))
            ids = {str(row[0]) for row in ended}
            c.execute("DELETE FROM app_sessions WHERE account = ? AND id IS NOT ?", (id, keep))
            return ids

        ended = await self._db.write(write)
        if ended is not None:
            # Those that the transaction saw: a session that begins behind it has proved the new password.
            self._drop(ended)
        return ended is not None

    def _named(self, name: str) -> Account | None:
        wanted = _known_as(name)
        return next((a for a in self._accounts.values() if a.name.casefold() == wanted), None)

    async def _stored(self, id: str) -> str | None:
        sql = "SELECT password FROM app_accounts WHERE id = ?"
        row = await self._db.read(lambda c: c.execute(sql, (id,)).fetchone())
        return str(row[0]) if row is not None else None


def _known_as(name: str) -> str:
    """What two spellings of one account's name have in common. Guesses are counted by it, too: a blank more
    must not be a name that nobody has tried yet."""
    return " ".join(name.split()).casefold()


def _label(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split())[:120]
