"""The quick way to add documents, beside the chat; the library page does everything else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from app import render
from app.errors import UploadRefused
from app.pages import words
from app.pages.conversations import tell
from app.pages.library_source import choices_of
from app.pages.words import phrase
from app.runtime import Runtime

#: How often an upload's progress is looked at; also the sign of life towards Gradio.
_LOOK_EVERY_S = 0.4


class LibraryHandlers:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def upload(self, files: Sequence[str] | None, request: gr.Request) -> AsyncIterator[dict[str, Any]]:
        """Take the files into the person's own collection, one status line each, and drop Gradio's copies
        (everybody could fetch those by their URL)."""
        paths = [Path(file) for file in files or ()]
        w = words.of(request.headers)
        lines: dict[int, str] = {}

        def status() -> dict[str, Any]:
            return {"upload_status": "\n\n".join(lines[i] for i in sorted(lines))}

        try:
            principal = self._runtime.principal(request.headers)
            knowledge = self._runtime.knowledge
            for number, path in enumerate(paths):
                name = render.one_line(path.name, 60)
                lines[number] = f"… {name}: {w('upload.reading')}"
                yield status()
                try:
                    data = await asyncio.to_thread(_take, path, self._runtime.settings.max_upload_bytes)
                    document = await knowledge.upload(principal, path.name, data)
                    async for info in knowledge.progress(principal, document, _LOOK_EVERY_S):
                        if info.status == "failed":
                            why = info.message or w("upload.failed")
                            lines[number] = f"✗ {name}: {render.plain(why)}"
                        elif info.status == "ready":
                            lines[number] = f"✓ {name}: {w('upload.ready', n=info.passages)}"
                        else:
                            lines[number] = f"… {name}: {w('upload.' + info.status)}"
                        yield status()
                except Exception as error:
                    lines[number] = f"✗ {name}: {render.plain(w.sentence(error))}"
                    yield status()
            documents = await knowledge.documents(principal)
            collections = await self._runtime.collections.readable(principal)
            choices = choices_of(documents, collections, w)
            yield {**status(), "upload": None, "document": gr.update(choices=choices)}
        except Exception as error:
            tell(error, request)
            yield {"upload": None}
        finally:
            for path in paths:
                path.unlink(missing_ok=True)


def _take(path: Path, limit: int) -> bytes:
    """Read and remove one of Gradio's temporary files."""
    try:
        size = os.stat(path).st_size
        if size > limit:
            raise UploadRefused(
                phrase("refused.file_large", size=render.size(size), limit=render.size(limit))
            )
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)
