"""The folder that holds everything: database, uploaded files, and the lock that gives it one owner.

    DATA_DIR/
      lock               held (flock) by the running server; names its process and address
      coread.sqlite      the truth
      files/ab/abcd…     uploaded files under the SHA-256 of their content, never under their names
      tmp/               half-written files; emptied at start

A name that a person chose never becomes part of a path. All of it is readable by its user alone: made so,
and made so again at every start, since the folder may be one that was there before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rag.errors import DataDirLocked, DataDirUnwritable

log = logging.getLogger("coread.rag")
DATABASE = "coread.sqlite"
_HASH = re.compile(r"[0-9a-f]{64}")


class DataDir:
    """Owns a data folder until `close`.

    Raises `DataDirUnwritable` where it can't be made or written and `DataDirLocked` where another
    process owns it. Where others may read what is there and that cannot be changed, the log says so.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        try:
            for folder in (self.path, self.files, self.tmp):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.tmp):
                pass
            # "a+" creates the file without truncating what a present owner wrote into it.
            self._lock: IO[str] = open(  # noqa: SIM115
                self.path / "lock", "a+", encoding="utf-8", opener=_private
            )
        except OSError as error:
            raise DataDirUnwritable(
                f"The data folder {self.path} can't be written ({error.strerror or error}); "
                "choose another one or change its permissions."
            ) from error
        if not _try_lock(self._lock):
            self._lock.seek(0)
            holder = _parse_holder(self._lock.read())
            self._lock.close()
            raise DataDirLocked(str(self.path), holder)
        self._tighten()
        self.announce()
        self._empty_tmp()

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    def announce(self, url: str | None = None) -> None:
        """Write who owns the folder into the lock file, so that a command beside the server finds it."""
        self._lock.seek(0)
        self._lock.truncate()
        json.dump({"pid": os.getpid(), **({"url": url} if url else {})}, self._lock)
        self._lock.flush()

    def file(self, content_hash: str) -> Path:
        """Where the file with this SHA-256 (64 hex digits) lies. Raises ValueError for anything else."""
        if not _HASH.fullmatch(content_hash):
            raise ValueError(f"not a content hash: {content_hash[:80]!r}")
        return self.files / content_hash[:2] / content_hash

    def store(self, data: bytes) -> str:
        """Store bytes durably under their SHA-256 and return it. Storing them again changes nothing."""
        content_hash = hashlib.sha256(data).hexdigest()
        target = self.file(content_hash)
        if target.exists() and target.stat().st_size == len(data):
            return content_hash
        target.parent.mkdir(exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=self.tmp)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise DataDirUnwritable(
                f"The upload of {len(data):,} bytes could not be stored ({error.strerror})."
            ) from error
        _fsync_folder(target.parent)
        return content_hash

    def remove(self, content_hash: str) -> None:
        """Remove a stored file; it may already be gone."""
        self.file(content_hash).unlink(missing_ok=True)

    def stored(self) -> Iterator[str]:
        """The content hashes of all stored files."""
        return stored_files(self.path)

    def close(self) -> None:
        """Give the folder up. Calling it again does nothing."""
        if not self._lock.closed:
            self._lock.seek(0)
            self._lock.truncate()
            self._lock.close()  # closing the descriptor releases the lock

    def __enter__(self) -> DataDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tighten(self) -> None:
        """Take from everybody else what the folder's modes give them (where files have modes at all)."""
        if os.name != "posix":
            return
        own = [e for e in self.path.iterdir() if e.suffix == ".key" or e.name.startswith(DATABASE)]
        loose = [p for p in (self.path, self.files, self.tmp, self.path / "lock", *own) if not _tightened(p)]
        if loose:
            log.warning(
                "others on this machine may read %s, and that cannot be changed from here; keep the data in "
                "a folder that belongs to the server's own user",
                ", ".join(map(str, loose)),
            )

    def _empty_tmp(self) -> None:
        for entry in self.tmp.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tightened(path: Path) -> bool:
    """Whether only its user may read `path`, changed to be so where it was not. A folder in which everybody
    may put things (the system's own for temporary files) stays as it is: it is not ours."""
    try:
        mode = path.stat().st_mode
        if not mode & 0o077:
            return True
        if mode & stat.S_ISVTX:
            return False
        path.chmod(stat.S_IMODE(mode) & 0o700)
        return not path.stat().st_mode & 0o077  # some file systems take the call and keep the mode
    except OSError:
        return False


def stored_files(path: Path) -> Iterator[str]:
    """The content hashes of all files that are stored in a data folder, whoever owns it."""
    for folder in sorted((path / "files").iterdir()):
        if folder.is_dir():
            yield from sorted(f.name for f in folder.iterdir() if _HASH.fullmatch(f.name))


def read_holder(path: str | os.PathLike[str]) -> dict[str, object]:
    """What the owner of a data folder wrote about itself; empty where nobody owns it."""
    try:
        return _parse_holder((Path(path) / "lock").read_text(encoding="utf-8"))
    except OSError:
        return {}


def _parse_holder(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _fsync_folder(folder: Path) -> None:
    """Make a rename durable; some file systems can't open a folder, and then there is nothing to do."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
