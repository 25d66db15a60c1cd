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
    """Keys: `kind`, `readers`, `open_readers`, `documents` (titles), `hidden` (how many others), `known`.

    Where `known` is true also `page` (or None), `section` (its title where there are no pages, or ""),
    `filled`, `first_token`, `copied_slots`, `copied_from`. `own`: a page table of the viewer's names it.
    """
    titled, hidden = document_label(view.documents, titles)
    known = view.documents <= titles.keys() and (own or not view.private)
    out: dict[str, Any] = {
        "kind": "branch" if view.private else "document" if view.documents else "instructions",
        "readers": view.readers,
        "open_readers": view.open_readers,
        "documents": titled,
        "hidden": hidden,
        "known": known,
    }
    if known:
        page, section = await _place(runtime, principal, view)
        out |= {
            "page": page,
            "section": section,
            "filled": view.filled,
            "first_token": view.first_token,
            "copied_slots": view.copied_slots,
            "copied_from": view.copied_from,
        }
    return out


async def _place(runtime: Runtime, principal: Principal | None, view: BlockView) -> tuple[int | None, str]:
    """Where in its one document the block's text stands; nothing where that is not certain."""
    if principal is None or len(view.documents) != 1:
        return None, ""
    readable = await runtime.store.readable(principal)
    try:
        document = await runtime.knowledge.document(readable, next(iter(view.documents)))
    except NotFoundHere:
        return None, ""
    return place_of(document, str(runtime.engine.tokenizer.decode(list(view.tokens))))


def place_of(document: DocumentText, text: str) -> tuple[int | None, str]:
    """The page, or else the section, that holds `text`; nothing where it is in none or in several."""
    text = text.strip()
    starts, at = [], document.text.find(text) if len(text) >= _TELLING else -1
    while at >= 0:
        starts.append(at)
        at = document.text.find(text, at + 1)
    places: set[tuple[int | None, str]] = set()
    for start in starts:
        section = next((s for s in reversed(document.sections) if s.start <= start), None)
        if section is not None:
            places.add((section.page, "") if section.page is not None else (None, section.title))
    return places.pop() if len(places) == 1 else (None, "")
