"""Runs a command where the data is: in this process, or through the door of the server that holds it."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from app import commands
from app.data_dir import admin_token, resolve_data_dir
from app.errors import AppError, ServerUnreachable, UploadRefused
from app.http_errors import sentence
from app.principal import OWNER
from app.runtime import Runtime
from app.settings import Settings
from rag.errors import DataDirLocked

T = TypeVar("T")
#: Loading and a long answer included.
_TIMEOUT_S = 600.0


class ServerRefused(AppError):
    """The server answered with an error; its own sentence is the message."""

    code = "server_refused"


class Door:
    """The server's HTTP door for commands of the same user on the same machine."""

    def __init__(self, data_dir: Path, url: str) -> None:
        headers = {"X-Coread-Token": admin_token(data_dir)}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._url = url

    def post(self, path: str, body: dict[str, Any], *, patient: bool = False) -> dict[str, Any]:
        """One call; `patient`: its answer is awaited for as long as the server lives. Raises
        `ServerUnreachable` or `ServerRefused`."""
        timeout = httpx.Timeout(_TIMEOUT_S, read=None) if patient else self._http.timeout
        try:
            response = self._http.post(f"/api/admin/{path}", json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"A server holds the data directory, but {self._url} does not answer "
                f"({type(error).__name__})."
            ) from None
        if response.is_success:
            answer: dict[str, Any] = response.json()
            return answer
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"The server at {self._url} answered with status {response.status_code}."
        raise ServerRefused(str(message))


def _run(
    settings: Settings,
    here: Callable[[Runtime], Awaitable[T]],
    there: Callable[[Door], T],
    *,
    answering: bool = True,
) -> T:
    """Call `here` with a ready runtime of our own (see `Runtime.start` for `answering`), or `there` where a
    server holds the data directory."""
    runtime = Runtime(settings)
    try:
        runtime.open()
    except DataDirLocked as locked:
        url = locked.holder.get("url")
        if not isinstance(url, str):
            raise
        return there(Door(resolve_data_dir(settings.data_dir), url))

    async def work() -> T:
        runtime.start(answering=answering)
        try:
            await runtime.wait_seeded()
            return await here(runtime)
        finally:
            await runtime.stop()

    return asyncio.run(work())


def run_ask(settings: Settings, question: str, document: str | None) -> dict[str, Any]:
    """See `commands.ask`."""
    return _run(
        settings,
        lambda runtime: commands.ask(runtime, OWNER, question, document),
        lambda door: door.post("ask", {"question": question, "document": document}),
    )


def run_search(settings: Settings, query: str, limit: int) -> dict[str, Any]:
    """See `commands.search`. Needs no language model."""
    return _run(
        settings,
        lambda runtime: commands.search(runtime, OWNER, query, limit),
        lambda door: door.post("search", {"query": query, "limit": limit}),
        answering=False,
    )


def run_ingest(
    settings: Settings,
    paths: Sequence[Path],
    collection: str,
    private: bool,
    report: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Add files, or all files below folders, one after the other; `report` gets each one's row.

    A file that cannot be taken is a row with status "failed"; the others go on. A document is named after
    the file, with its folders below the one that was given: the name decides what is a new version of what.
    """
    files = _named(list(_files(paths)))
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        report(row)

    async def here(runtime: Runtime) -> None:
        for name, file in files:
            try:
                data = _read(file, settings.max_upload_bytes)
                note(await commands.ingest_bytes(runtime, OWNER, collection, name, data, private))
            except Exception as error:
                note(_failed(name, error))

    def there(door: Door) -> None:
        for name, file in files:
            try:
                data = base64.b64encode(_read(file, settings.max_upload_bytes)).decode()
                body = {"collection": collection, "name": name, "data": data, "private": private}
                note(door.post("ingest", body))
            except ServerUnreachable:
                raise
            except Exception as error:
                note(_failed(name, error))

    _run(settings, here, there)
    return rows


def _failed(name: str, error: Exception) -> dict[str, Any]:
    return {
        "name": name,
        "document": None,
        "version": 0,
        "status": "failed",
        "passages": 0,
        "message": sentence(error),
    }


def _named(files: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Files of one call never replace each other: those of one name are named by their whole path."""
    times = Counter(name for name, _ in files)
    return [(name if times[name] == 1 else file.as_posix(), file) for name, file in files]


def _files(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Each file once, with its document's name."""
    for path in dict.fromkeys(paths):
        if path.is_dir():
            yield from sorted(
                (file.relative_to(path).as_posix(), file)
                for file in path.rglob("*")
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
        elif path.is_file():
            yield path.name, path
        else:
            raise UploadRefused(f"There is no file or folder {path}.")


def _read(file: Path, limit: int) -> bytes:
    try:
        size = file.stat().st_size
        if size > limit:
            raise UploadRefused(f"It has {size:,} bytes; at most {limit:,} are taken.")
        return file.read_bytes()
    except OSError as error:
        raise UploadRefused(f"It cannot be read ({error.strerror}).") from None
