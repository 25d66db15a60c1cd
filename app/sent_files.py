"""Files that a page's event names: only those that were uploaded before it.

Gradio's file data is a path (or an address) that the client writes, and Gradio copies what is there into
its cache before any handler of ours runs; mounted in another app, as here, it does not check where the path
leads.
So the gate looks at every event first, whatever component it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.errors import NotAllowed

#: Containers within containers that an event may have; Gradio's own have three.
MAX_DEPTH = 20


def check_files(sent: Any, uploads: Path) -> None:
    """Refuse an event with a file that was not uploaded.

    Args:
        sent: an event's JSON.
        uploads: the folder into which uploads are put.

    Raises `NotAllowed` where an object at any depth has a `path` or `url`, or calls itself file data, and its
    path is no file within `uploads`; and where containers are nested deeper than `MAX_DEPTH`.
    """
    folder = uploads.resolve()
    level: list[Any] = [sent]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if _is_file_data(value) and not _was_uploaded(value.get("path"), folder):
                    raise NotAllowed("An event may name only files that were uploaded.")
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        if not below:
            return
        level = below
    raise NotAllowed(f"An event's data are nested deeper than the limit of {MAX_DEPTH} levels.")


def _is_file_data(value: dict[str, Any]) -> bool:
    meta = value.get("meta")
    return "path" in value or "url" in value or (isinstance(meta, dict) and "_type" in meta)


def _was_uploaded(path: object, folder: Path) -> bool:
    """Whether `path` is a file within `folder` once links and `..` are followed."""
    if not isinstance(path, str):
        return False
    try:
        real = Path(path).resolve(strict=True)
        return Path(path).is_absolute() and real.is_relative_to(folder) and real.is_file()
    except (OSError, ValueError, RuntimeError):  # none there, a NUL in it, a ring of links
        return False
