"""Passwords: scrypt (RFC 7914), off the event loop, with a bounded line in front of it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
import unicodedata
from concurrent.futures import ThreadPoolExecutor

from app.errors import TooMany, ValueRefused

MIN_CHARS, MAX_CHARS = 10, 256
#: 32 MiB and some 0.1 s a guess (OWASP's recommendation of 2024 for scrypt is N = 2^15, r = 8, p = 3 or more
#: memory; the throttle in front makes up for the lower p on machines with two cores).
_N, _R, _P = 2**15, 8, 1
_MEMORY = 64 * 2**20
#: Each waiting guess holds little, each running one 32 MiB.
_MAX_WAITING = 32


def checked_password(password: str) -> str:
    """The password in normal form; raises `ValueRefused` where it is too short or too long."""
    normal = unicodedata.normalize("NFC", password)
    if not MIN_CHARS <= len(normal) <= MAX_CHARS:
        raise ValueRefused(
            f"A password needs between {MIN_CHARS} and {MAX_CHARS} characters; this one has {len(normal):,}."
        )
    return normal


def hash_password(password: str) -> str:
    """`scrypt$N$r$p$salt$hash`. Blocks for a while."""
    salt = secrets.token_bytes(16)
    return _encode(_N, _R, _P, salt, _derive(password, salt, _N, _R, _P))


def verify_password(password: str, stored: str) -> bool:
    """True where `password` is the one that was hashed. Blocks for a while; False for a damaged record."""
    try:
        kind, n, r, p, salt, expected = stored.split("$")
        if kind != "scrypt":
            return False
        found = _derive(password, base64.b64decode(salt), int(n), int(r), int(p))
        return hmac.compare_digest(found, base64.b64decode(expected))
    except (ValueError, binascii.Error):
        return False


def _derive(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    data = unicodedata.normalize("NFC", password).encode("utf-8", "surrogatepass")
    return hashlib.scrypt(data, salt=salt, n=n, r=r, p=p, maxmem=_MEMORY, dklen=32)


def _encode(n: int, r: int, p: int, salt: bytes, digest: bytes) -> str:
    return f"scrypt${n}${r}${p}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


class PasswordHasher:
    """Hashes and checks in one thread of its own, so that guessing can't take the machine from answers."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coread-passwords")
        self._waiting = 0
        # Checked for names that do not exist, so that they take as long as those that do, the first one too.
        self._decoy = _encode(_N, _R, _P, secrets.token_bytes(16), secrets.token_bytes(32))

    async def hash(self, password: str) -> str:
        """Hash a new password; raises `ValueRefused` for one that is too short or too long."""
        normal = checked_password(password)
        return str(await self._run(hash_password, normal))

    async def verify(self, password: str, stored: str | None) -> bool:
        """Check a password; with `stored` None the answer is False, after the same time."""
        # As it was counted when it was set; taken apart, a character is at most some four.
        if len(password) > 4 * MAX_CHARS or len(unicodedata.normalize("NFC", password)) > MAX_CHARS:
            return False
        if stored is None:
            await self._run(verify_password, password, self._decoy)
            return False
        return bool(await self._run(verify_password, password, stored))

    async def _run(self, work: object, *arguments: str) -> object:
        if self._waiting >= _MAX_WAITING:
            raise TooMany("Too many people are signing in at this moment.", 5.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)  # type: ignore[arg-type]
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
