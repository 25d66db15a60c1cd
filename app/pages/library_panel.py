"""A person's own documents: adding them, seeing how far each has come, deleting them."""

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
from app.pages.conversations import choices_of, tell
from app.pages.words import Words, phrase
from app.principal import Principal
from app.runtime import Runtime

#: How often an upload's progress is looked at; also the sign of life towards Gradio.
_LOOK_EVERY_S = 0.4


class LibraryHandlers:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def show(self, request: gr.Request) -> dict[str, Any]:
        """Fill the list of the person's own documents."""
        try:
            return await self._lists(self._runtime.principal(request.headers), None)
        except Exception as error:
            tell(error, request)
            return {}

    async def _lists(self, principal: Principal, picker: Words | None) -> dict[str, Any]:
        documents = await self._runtime.knowledge.documents(principal)
        own = [(document.title, document.id) for document in documents if document.own]
        out: dict[str, Any] = {
            "own": gr.update(choices=own, value=own[-1][1] if own else None, visible=bool(own)),
            "remove": gr.update(visible=bool(own)),
        }
        if picker is not None:
            out["document"] = gr.update(choices=choices_of(documents, picker))
        return out

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
            yield {**status(), "upload": None, **await self._lists(principal, w)}
        except Exception as error:
            tell(error, request)
            yield {"upload": None}
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    async def remove(self, document: str | None, request: gr.Request) -> dict[str, Any]:
        """Delete one of the person's own documents with everything made from it."""
        if not document:
            return {}
        try:
            principal = self._runtime.principal(request.headers)
            freed = await self._runtime.knowledge.delete(principal, document)
            w = words.of(request.headers)
            note = w("upload.deleted", n=freed) if freed else w("upload.deleted_only")
            return {**await self._lists(principal, w), "upload_status": note}
        except Exception as error:
            tell(error, request)
            return {}


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
