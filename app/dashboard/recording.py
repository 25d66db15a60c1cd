"""Recordings of the memory page's feed: what a visitor would have seen, frame by frame, to be replayed.

A recording is a gzip file of one JSON object::

    {"format": "coread-recording/2", "made": "2026-01-31", "kind": "engine", "model": "…", "device": "…",
     "every_s": 1.0, "frames": [ … updates as they come to a viewer who is nobody … ]}

`kind` says what was recorded: an `engine` that served, or a `simulation` with a runner that computes nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.dashboard.feed import Asked
from app.dashboard.shared import packed
from app.dashboard.wire import merged
from app.errors import AppError

if TYPE_CHECKING:
    from app.dashboard.feed import DashboardFeed

FORMAT = "coread-recording/2"
MAX_FRAMES = 1_200
MAX_BYTES = 64 << 20
KINDS = ("engine", "simulation")


def packaged_path(kind: str) -> Path:
    """Where the recording of a kind lies in the package."""
    return Path(__file__).parent / f"{kind}_recording.json.gz"


def packaged() -> dict[str, Path]:
    """The recordings that come with the page, by kind."""
    return {kind: path for kind in KINDS if (path := packaged_path(kind)).is_file()}


class RecordingRefused(AppError):
    """The file is no recording that this version can play."""

    code = "recording_refused"


class Recorder:
    """Keeps an update of the feed every `every_s` seconds, at most `MAX_FRAMES` of them; of the tree every
    `tree_every`th (it is the largest part by far)."""

    def __init__(
        self, feed: DashboardFeed, every_s: float = 1.0, kind: str = "engine", tree_every: int = 1
    ) -> None:
        self._feed, self.every_s, self.kind, self._tree_every = feed, every_s, kind, tree_every
        self.frames: list[dict[str, Any]] = []
        self._have: dict[str, str] = {}

    async def take(self) -> None:
        """Keep what is new since the last time."""
        have = frozenset(self._have.values())
        tree = len(self.frames) % self._tree_every == 0
        parts = await self._feed.answer(None, Asked(have=have, tree=tree, pages=True, history=True))
        keys = [part.key for part in parts]
        self._have |= {key[0]: key for key in keys}
        self.frames.append(merged(parts) | {"keys": keys})

    async def run(self) -> None:
        """Take frames until cancelled or full."""
        begun = time.monotonic()
        while len(self.frames) < MAX_FRAMES:
            await self.take()
            await asyncio.sleep(max(0.0, begun + len(self.frames) * self.every_s - time.monotonic()))

    def recording(self, made: str) -> dict[str, Any]:
        """The recording; `made` is its date. Raises `RecordingRefused` where nothing was recorded."""
        if not self.frames:
            raise RecordingRefused("Nothing was recorded.")
        engine = next(frame["engine"] for frame in reversed(self.frames) if "engine" in frame)
        return {
            "format": FORMAT,
            "made": made,
            "kind": self.kind,
            "model": engine.get("model", ""),
            "device": engine.get("device", ""),
            "every_s": self.every_s,
            "frames": self.frames,
        }


def save(recording: dict[str, Any], path: Path) -> None:
    """Write a recording. Raises `RecordingRefused` where the file cannot be written."""
    text = json.dumps(recording, ensure_ascii=False, separators=(",", ":"))
    try:
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    except OSError as error:
        raise RecordingRefused(f"{path} cannot be written ({error.strerror}).") from None


def load(path: Path) -> dict[str, Any]:
    """Read a recording. Raises `RecordingRefused` where it is none."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        found: Any = json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise RecordingRefused(f"{path} cannot be read as a recording ({type(error).__name__}).") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("kind") not in KINDS:
        raise RecordingRefused(f"{path} is not a recording of the format {FORMAT}.")
    if not found.get("frames"):
        raise RecordingRefused(f"{path} is not a recording of anything: it has no frames.")
    return found


def packed_recording(path: Path) -> dict[str, str]:
    """A recording as the page takes it: `packed`, its JSON deflated in base64."""
    return {"packed": packed(json.dumps(load(path), ensure_ascii=False, separators=(",", ":")).encode())}
