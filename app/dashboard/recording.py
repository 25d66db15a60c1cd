"""Recordings of the memory page's feed: what a visitor would have seen, frame by frame, to be replayed.

A recording is a gzip file of one JSON object::

    {"format": "coread-recording/1", "made": "2026-01-31", "model": "…", "device": "…", "every_s": 1.0,
     "frames": [ … updates as `DashboardFeed.read` returns them for a viewer who is nobody … ]}
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.dashboard.feed import packed
from app.errors import AppError

if TYPE_CHECKING:
    from app.dashboard.feed import DashboardFeed

FORMAT = "coread-recording/1"
MAX_FRAMES = 1_200
MAX_BYTES = 64 << 20
PACKAGED = Path(__file__).parent / "demo_recording.json.gz"


class RecordingRefused(AppError):
    """The file is no recording that this version can play."""

    code = "recording_refused"


class Recorder:
    """Keeps an update of the feed every `every_s` seconds, at most `MAX_FRAMES` of them."""

    def __init__(self, feed: DashboardFeed, every_s: float = 1.0) -> None:
        self._feed, self.every_s = feed, every_s
        self.frames: list[dict[str, Any]] = []
        self._seen: int | None = None
        self._tree = ""

    async def take(self) -> None:
        """Keep the feed as it is now."""
        asked: dict[str, Any] = {"tree": self._tree, "pages": True, "history": True}
        if self._seen is not None:
            asked["after"] = self._seen
        frame = await self._feed.read(None, asked)
        self._seen, self._tree = frame.get("event_number"), frame.get("tree_key", self._tree)
        self.frames.append(frame)

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
        engine = self.frames[-1]["engine"]
        return {
            "format": FORMAT,
            "made": made,
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
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("frames"):
        raise RecordingRefused(f"{path} is not a recording of the format {FORMAT}.")
    return found


def packed_recording(path: Path) -> dict[str, str]:
    """A recording as the page takes it: `packed`, its JSON deflated in base64."""
    return {"packed": packed(json.dumps(load(path), ensure_ascii=False, separators=(",", ":")).encode())}
