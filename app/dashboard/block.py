"""What the pointer is on: one block, told to those who may know.

A stranger gets counts only. Whoever may read the document also learns its title, the page or section that the
block's text stands on, and where the block lies in its chain.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
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
    decode = runtime.engine.tokenizer.decode
    # A document may be megabytes of one word: nothing that goes through all of it runs on the event loop.
    return await asyncio.to_thread(lambda: place_of(document, str(decode(list(view.tokens)))))


def place_of(document: DocumentText, text: str) -> tuple[int | None, str]:
    """The page, or else the section, that holds `text`; nothing where it is in none or in several.

    Looks for it once in each section at most, and no further than the second place.
    """
    text = text.strip()
    begins = [section.start for section in document.sections]
    at = document.text.find(text, begins[0]) if begins and len(text) >= _TELLING else -1
    found: tuple[int | None, str] | None = None
    while at >= 0:
        number = bisect_right(begins, at) - 1
        section = document.sections[number]
        place = (section.page, "") if section.page is not None else (None, section.title)
        if found is not None and place != found:
            return None, ""
        found = place
        # Whatever else of it begins in this section is in the same place.
        at = document.text.find(text, begins[number + 1]) if number + 1 < len(begins) else -1
    return found if found is not None else (None, "")
