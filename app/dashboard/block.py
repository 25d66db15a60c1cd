"""What the pointer is on: one block, told to those who may know.

A stranger gets counts only. Whoever may read the document also learns its title, the page or section that the
block's text stands on, and where the block lies in its chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.dashboard.tables import document_label
from app.errors import NotFoundHere
from app.principal import Principal

if TYPE_CHECKING:
    from app.runtime import Runtime
    from engine.service import BlockView
    from rag.types import DocumentText

#: A shorter text than this could stand anywhere.
_TELLING = 12


async def block_json(
    runtime: Runtime, principal: Principal | None, view: BlockView, titles: Mapping[str, str], own: bool
) -> dict[str, Any]:
    """Keys: `kind`, `readers`, `open_readers`, `documents` (titles, or how many others) and `known`.

    Where `known` is true also `place` ("page 3", a section's title, or ""), `filled`, `first_token`,
    `copied_slots`, `copied_from`. `own`: a page table of the viewer's names the block.
    """
    known = view.documents <= titles.keys() and (own or not view.private)
    out: dict[str, Any] = {
        "kind": "branch" if view.private else "document" if view.documents else "instructions",
        "readers": view.readers,
        "open_readers": view.open_readers,
        "documents": document_label(view.documents, titles),
        "known": known,
    }
    if known:
        out |= {
            "place": await _place(runtime, principal, view),
            "filled": view.filled,
            "first_token": view.first_token,
            "copied_slots": view.copied_slots,
            "copied_from": view.copied_from,
        }
    return out


async def _place(runtime: Runtime, principal: Principal | None, view: BlockView) -> str:
    """Where in its one document the block's text stands; empty where that is not certain."""
    if principal is None or len(view.documents) != 1:
        return ""
    readable = await runtime.store.readable(principal)
    try:
        document = await runtime.knowledge.document(readable, next(iter(view.documents)))
    except NotFoundHere:
        return ""
    return place_of(document, str(runtime.engine.tokenizer.decode(list(view.tokens))))


def place_of(document: DocumentText, text: str) -> str:
    """The page, or else the section, that holds `text`; empty where it is in none or in several."""
    text = text.strip()
    starts, at = [], document.text.find(text) if len(text) >= _TELLING else -1
    while at >= 0:
        starts.append(at)
        at = document.text.find(text, at + 1)
    places = set()
    for start in starts:
        section = next((s for s in reversed(document.sections) if s.start <= start), None)
        if section is not None:
            places.add(f"page {section.page}" if section.page is not None else section.title)
    return places.pop() if len(places) == 1 else ""
