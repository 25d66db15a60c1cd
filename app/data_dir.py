"""Where the data directory is, and the small secrets kept in it. (Its lock is `rag.datadir.DataDir`.)"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from pathlib import Path

from app.errors import DataDirUnusable

log = logging.getLogger("coread")


def resolve_data_dir(configured: Path | None) -> Path:
    """Create and return the data directory.

    A directory that was asked for must be usable (`DataDirUnusable` otherwise). Without one, the user's
    data folder serves; where HOME is missing or read-only, as on some hosts, a folder under the system's
    temporary directory does, with a warning that it will not outlive the machine.
    """
    if configured is not None:
        return _usable(configured.expanduser())
    base = os.environ.get("XDG_DATA_HOME") or (
        str(Path(home) / ".local" / "share") if (home := os.environ.get("HOME")) else ""
    )
    if base:
        try:
            return _usable(Path(base) / "coread")
        except DataDirUnusable as error:
            reason = str(error)
    else:
        reason = "HOME is not set."
    fallback = _usable(Path(tempfile.gettempdir()) / f"coread-{os.getuid()}")
    log.warning(
        "%s Data goes to %s and may be lost at a restart; set COREAD_DATA_DIR to keep it.", reason, fallback
    )
    return fallback


def _usable(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".write-test-"):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataDirUnusable(
            f"The data directory {path} cannot be written ({reason}); "
            "point COREAD_DATA_DIR at a folder that can."
        ) from error
    return path.resolve()


def read_or_create_secret(data_dir: Path, name: str, size: int = 32) -> bytes:
    """Return the secret kept in `data_dir/name`, creating it (mode 0600) the first time.

    The file appears complete or not at all, so two processes that start together agree on one value.
    """
    path = data_dir / name
    for _ in range(2):
        try:
            value = path.read_bytes()
        except FileNotFoundError:
            handle, temporary = tempfile.mkstemp(dir=data_dir, prefix=f".{name}-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(secrets.token_bytes(size))
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                os.unlink(temporary)
            continue
        if len(value) != size:
            raise DataDirUnusable(
                f"{path} is damaged: it has {len(value)} bytes instead of {size}; "
                "remove it to start with new identities."
            )
        return value
    raise DataDirUnusable(f"{path} could not be created.")


def admin_token(data_dir: Path) -> str:
    """The token that proves to the server that a command runs as the user who owns the data directory."""
    return read_or_create_secret(data_dir, "admin.key").hex()
