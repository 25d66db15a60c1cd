"""Backup of a data directory while its server runs, and restoring one.

    backup    database  ── SQLite's backup API, a consistent copy while others write
              files     ── copies of those that the copy's rows name (files never change)
              secrets   ── the cookie key, so that people stay who they are
              manifest  ── every file's SHA-256, written last: without it, it is no backup

    restore   check the manifest, then lay all of it in an empty directory that no server uses

A backup may have come from anywhere, so only names that a backup has are taken from its manifest, and nothing
that is reached through a link: a name alone never says where something is read from or written to.

Files are stored under their content's hash and are deleted only after the database has forgotten them, so a
file that the copied database names is there, unless its document was deleted meanwhile; then it is left out,
and the restored server finds the document without its original, which `rag`'s check reports.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import AppError
from rag.datadir import DataDir

_FORMAT = 1
_MANIFEST = "backup.json"
_DATABASE = "coread.sqlite"
_SECRETS = ("cookie.key",)
_HASH = re.compile(r"[0-9a-f]{64}")
#: An uploaded file, as `rag.datadir` lays it.
_FILE = re.compile(r"files/([0-9a-f]{2})/(\1[0-9a-f]{62})")
#: Pages copied at a time; writers go on in between.
_PAGES = 2_000


class BackupFailed(AppError):
    """A backup could not be made, is damaged or incomplete, or has nowhere to go."""

    code = "backup_failed"
    status = 409


@dataclass(frozen=True, slots=True)
class BackupReport:
    """`missing` counts files whose documents were deleted while the backup was made."""

    path: str
    files: int
    bytes: int
    missing: int

    def json(self) -> dict[str, Any]:
        return {"path": self.path, "files": self.files, "bytes": self.bytes, "missing": self.missing}


def make_backup(data_dir: Path, target: Path) -> BackupReport:
    """Copy the data directory into `target`, which must not exist yet or be empty. Blocks.

    Raises `BackupFailed`; what was half written is then removed.
    """
    source = data_dir / _DATABASE
    if not source.is_file():
        raise BackupFailed(f"There is no database in {data_dir}.")
    if target.resolve().is_relative_to(data_dir.resolve()):
        raise BackupFailed("A backup inside the data directory would be lost with it; choose another place.")
    _claim(target)
    try:
        _copy_database(source, target / _DATABASE)
        missing = _copy_files(data_dir, target)
        for name in _SECRETS:
            if (data_dir / name).is_file():
                _copy(data_dir / name, target / name)
        hashes = {path.relative_to(target).as_posix(): _sha256(path) for path in _files(target)}
        size = sum((target / name).stat().st_size for name in hashes)
        manifest = {"format": _FORMAT, "made": time.time(), "missing": missing, "files": hashes}
        _write(target / _MANIFEST, json.dumps(manifest, indent=1).encode())
        return BackupReport(str(target), len(hashes), size, missing)
    except BackupFailed:
        shutil.rmtree(target, ignore_errors=True)
        raise
    except (OSError, sqlite3.Error) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise BackupFailed(f"The backup could not be made ({error}).") from error


def restore_backup(backup: Path, data_dir: Path) -> BackupReport:
    """Lay a backup in `data_dir`, which must be absent or hold nothing of a server's. Blocks.

    Raises `BackupFailed` where the backup is damaged or the directory is not empty, and
    `rag.errors.DataDirLocked` where a server runs on it.
    """
    manifest = check_backup(backup)
    if (data_dir / _DATABASE).exists():
        raise BackupFailed(
            f"{data_dir} holds a database already; move it away first, nothing is overwritten."
        )
    with DataDir(data_dir) as owned:
        names = sorted(manifest["files"], key=lambda name: name == _DATABASE)  # the database last of all
        try:
            for name in names:
                _copy(backup / name, owned.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                (owned.path / _DATABASE).unlink(missing_ok=True)
            raise BackupFailed(f"The backup could not be restored ({error}).") from error
        size = sum((owned.path / name).stat().st_size for name in names)
        return BackupReport(str(owned.path), len(names), size, int(manifest["missing"]))


def check_backup(backup: Path) -> dict[str, Any]:
    """The manifest of a whole, undamaged backup; raises `BackupFailed` otherwise."""
    _refuse_links(backup, _MANIFEST)
    try:
        manifest: Any = json.loads((backup / _MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BackupFailed(f"{backup} is no complete backup: {_MANIFEST} cannot be read.") from error
    if not isinstance(manifest, dict):
        raise BackupFailed(f"{backup} is no complete backup: {_MANIFEST} holds something else.")
    files, missing = manifest.get("files"), manifest.get("missing")
    if not isinstance(files, dict) or manifest.get("format") != _FORMAT or _DATABASE not in files:
        raise BackupFailed(f"{backup} is no backup of format {_FORMAT}.")
    if not isinstance(missing, int):
        raise BackupFailed(f"{backup} is no complete backup: {_MANIFEST} does not say what is missing.")
    for name, expected in files.items():
        stored = _FILE.fullmatch(name)
        if stored is None and name not in (_DATABASE, *_SECRETS):
            raise BackupFailed(
                f"{backup} is no backup: it names {name[:200]!r}; a backup has {_DATABASE}, "
                f"{', '.join(_SECRETS)} and files/xx/ with files named by their SHA-256."
            )
        _refuse_links(backup, name)
        if not (backup / name).is_file() or _sha256(backup / name) != expected:
            raise BackupFailed(f"The backup {backup} is damaged: {name[:200]!r} is missing or was changed.")
        if stored is not None and stored[2] != expected:
            raise BackupFailed(f"The backup {backup} is damaged: {name!r} is not named by its SHA-256.")
    with contextlib.closing(sqlite3.connect(f"file:{backup / _DATABASE}?mode=ro&immutable=1", uri=True)) as c:
        try:
            found = c.execute("PRAGMA quick_check").fetchone()[0]
        except sqlite3.Error as error:
            found = str(error)
    if found != "ok":
        raise BackupFailed(f"The backup's database is damaged: {found[:200]}.")
    return manifest


def _refuse_links(backup: Path, name: str) -> None:
    """Raises `BackupFailed` where `name` or a folder on the way to it is a link or a device."""
    path = backup
    for part in name.split("/"):
        path /= part
        try:
            mode = path.lstat().st_mode
        except OSError:
            return  # it is missing, which is said of the whole name
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            link = path.relative_to(backup)
            raise BackupFailed(f"{backup} is no backup: {link} is neither a file nor a folder of its own.")


def _claim(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(target.iterdir()):
            raise BackupFailed(f"{target} is not empty.")
        os.chmod(target, 0o700)
    except OSError as error:
        raise BackupFailed(f"{target} cannot be written ({error.strerror}).") from error


def _copy_database(source: Path, target: Path) -> None:
    """A copy as of one moment: one read transaction stays open for as long as copying takes."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True, timeout=30.0)) as origin,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        # In WAL mode this snapshot keeps writers' pages out of the copy without keeping writers waiting;
        # without it the backup would begin anew with each of their commits.
        origin.execute("BEGIN")
        origin.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        origin.backup(copy, pages=_PAGES)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, no log beside it
    os.chmod(target, 0o600)
    _sync(target)


def _named_files(database: Path) -> set[str]:
    """The hashes of the files that documents and waiting uploads name."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as c:
        tables = {row[0] for row in c.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        found: set[str] = set()
        for table in tables & {"documents", "jobs"}:
            rows = c.execute(f"SELECT content_hash FROM {table} WHERE content_hash IS NOT NULL")
            found |= {str(row[0]) for row in rows}
    for content in found:
        if not _HASH.fullmatch(content):  # it would be taken for a path
            raise BackupFailed(f"The database names the file {content[:200]!r}, which is no SHA-256.")
    return found


def _copy_files(data_dir: Path, target: Path) -> int:
    missing = 0
    for content in sorted(_named_files(target / _DATABASE)):
        try:
            _copy(data_dir / "files" / content[:2] / content, target / "files" / content[:2] / content)
        except FileNotFoundError:
            missing += 1
    return missing


def _copy(source: Path, target: Path) -> None:
    for folder in (target.parent.parent, target.parent):
        folder.mkdir(exist_ok=True, mode=0o700)
    shutil.copyfile(source, target)
    os.chmod(target, 0o600)
    _sync(target)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.chmod(path, 0o600)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _MANIFEST:
            yield path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
