"""PDF to plain text, page by page. A scan is reported as such, never indexed as an empty document."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import Any

from pypdf import PdfReader
from pypdf.errors import PyPdfError

from rag.errors import ParseFailed
from rag.parse.types import Limits, Parsed, TextBuilder, one_line

logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def parse_pdf(data: bytes, stem: str, limits: Limits) -> Parsed:
    """Sections follow the outline where there is one, else the pages. Raises `ParseFailed`."""
    try:
        reader = PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise ParseFailed("encrypted", "The PDF is protected by a password.")
        page_count = len(reader.pages)
    except ParseFailed:
        raise
    except Exception as error:  # pypdf raises whatever a damaged file makes it run into
        raise _damaged(error) from error
    if page_count > limits.pages:
        raise ParseFailed(
            "too many pages", f"The PDF has {page_count:,} pages; the limit is {limits.pages:,}."
        )
    builder = TextBuilder(limits)
    outline = _outline(reader)
    unreadable = 0
    with_text = 0
    for number in range(page_count):
        builder.page()
        start = builder.length
        try:
            text = reader.pages[number].extract_text()
        except (
            PyPdfError,
            RecursionError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ):
            unreadable += 1
            text = ""
        with_text += len(re.sub(r"\s", "", text)) >= 20
        builder.block(text)
        written = builder.length - start
        if outline:
            for title, level in outline.get(number, ()):
                builder.mark(start + _find(text, title, written), title, level)
        elif page_count > 1 and written:
            builder.mark(start, f"Page {number + 1}", 1)
    if unreadable and not with_text:
        raise ParseFailed("damaged", f"None of the PDF's {page_count:,} pages can be read.")
    if not with_text and builder.length < 100:
        what = "1 page holds" if page_count == 1 else f"{page_count:,} pages hold"
        raise ParseFailed("no text", f"The PDF's {what} no text: it looks like a scan.")
    return builder.finish(_title(reader) or stem, "pdf")


def _find(text: str, title: str, written: int) -> int:
    """Where on its page a heading stands; the page's beginning where its words are broken up."""
    position = text.find(title)
    return position if 0 < position < written else 0


def _title(reader: PdfReader) -> str:
    try:
        title = one_line((reader.metadata.title if reader.metadata else "") or "")
    except Exception:  # a damaged information dictionary is no reason to refuse the text
        return ""
    return "" if title.lower().startswith(("microsoft word", "untitled", "powerpoint")) else title


def _outline(reader: PdfReader) -> dict[int, list[tuple[str, int]]]:
    """Page index -> headings (title, level)."""
    found: dict[int, list[tuple[str, int]]] = {}
    try:
        for item, level in _flatten(reader.outline, 1):
            page = reader.get_destination_page_number(item)
            title = one_line(str(item.title or ""))
            if page is not None and page >= 0 and title:
                found.setdefault(page, []).append((title, level))
    except Exception:  # an outline is a convenience; a damaged one must not cost the text
        return {}
    return found


def _flatten(items: list[Any], level: int) -> Iterator[tuple[Any, int]]:
    if level > 8:
        return
    for item in items:
        if isinstance(item, list):
            yield from _flatten(item, level + 1)
        else:
            yield item, level


def _damaged(error: Exception) -> ParseFailed:
    return ParseFailed("damaged", f"The PDF can't be read ({type(error).__name__}); the file may be damaged.")
