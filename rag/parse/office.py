"""DOCX and XLSX. Both are ZIP archives, so what they unpack to is checked before anything is unpacked."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from typing import Any

from rag.errors import ParseFailed
from rag.parse.tables import write_rows
from rag.parse.types import Limits, Parsed, TextBuilder

_MAX_ENTRIES = 10_000


def archive_kind(data: bytes, limits: Limits) -> str:
    """ "docx" or "xlsx". Raises `ParseFailed` for other archives, damaged ones and bombs."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise ParseFailed(
            "damaged", "The file looks like an Office document, but can't be unpacked."
        ) from error
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limits.unpacked_bytes or len(entries) > _MAX_ENTRIES:
        raise ParseFailed(
            "too long",
            f"The file unpacks to {unpacked:,} bytes in {len(entries):,} parts; "
            f"the limit is {limits.unpacked_bytes:,} bytes in {_MAX_ENTRIES:,}.",
        )
    if any(entry.flag_bits & 1 for entry in entries):
        raise ParseFailed("encrypted", "The file is protected by a password.")
    names = {entry.filename for entry in entries}
    if "word/document.xml" in names:
        return "docx"
    if "xl/workbook.xml" in names:
        return "xlsx"
    raise ParseFailed("not supported", "The file is an archive, but neither a DOCX nor an XLSX document.")


def parse_docx(data: bytes, stem: str, limits: Limits) -> Parsed:
    """Paragraphs and tables in their order; headings by style."""
    import docx

    builder = TextBuilder(limits)
    try:
        document = docx.Document(io.BytesIO(data))
        for block in document.iter_inner_content():
            if hasattr(block, "rows"):
                builder.gap()
                write_rows(builder, _table_rows(block))
                continue
            style = (block.style.name if block.style is not None else "") or ""
            level = re.fullmatch(r"(?:Heading|heading) ([1-9])", style)
            if style == "Title":
                builder.heading(block.text, 1)
            elif level:
                builder.heading(block.text, int(level.group(1)))
            elif style.startswith("List"):
                builder.gap(1)
                if block.text.strip():
                    builder.add(f"- {block.text}\n")
            else:
                builder.block(block.text)
        title = document.core_properties.title or ""
    except ParseFailed:
        raise
    except Exception as error:  # a damaged part surfaces as whatever lxml or python-docx ran into
        raise _damaged(error) from error
    return builder.finish(title or stem, "docx")


def parse_xlsx(data: bytes, stem: str, limits: Limits) -> Parsed:
    """One section a sheet, one line a row, stored values instead of formulas."""
    import openpyxl

    builder = TextBuilder(limits)
    try:
        workbook = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False)
        for sheet in workbook.worksheets:
            builder.heading(sheet.title, 1)
            # A sheet may claim a million empty rows; what it claims is not what it holds.
            sheet.reset_dimensions()
            write_rows(builder, sheet.iter_rows(values_only=True))
        workbook.close()
    except ParseFailed:
        raise
    except Exception as error:
        raise _damaged(error) from error
    return builder.finish(stem, "xlsx")


def _table_rows(table: Any) -> Iterator[list[str]]:
    for row in table.rows:
        cells: list[str] = []
        previous = None
        for cell in row.cells:
            if cell._tc is not previous:  # a merged cell is listed once for each column it spans
                cells.append(cell.text)
            previous = cell._tc
        yield cells


def _damaged(error: Exception) -> ParseFailed:
    return ParseFailed(
        "damaged", f"The document can't be read ({type(error).__name__}); the file may be damaged."
    )
