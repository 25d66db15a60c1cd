"""Rows with headers: CSV and XLSX. Each row becomes one line "header: value; header: value", so that a
passage cut out of the middle of a table still says what its numbers mean."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from rag.errors import ParseFailed
from rag.parse.decode import Decoded
from rag.parse.types import Limits, Parsed, TextBuilder, one_line


def parse_csv(decoded: Decoded, stem: str, limits: Limits) -> Parsed:
    """Comma, semicolon, tab or bar separated, found from the first lines."""
    sample = decoded.text[:16_384]
    try:
        dialect: type[csv.Dialect] = csv.Sniffer().sniff(sample, delimiters=",;\t|")
    except csv.Error:
        dialect = csv.excel
    builder = TextBuilder(limits)
    csv.field_size_limit(1_000_000)
    try:
        write_rows(builder, csv.reader(io.StringIO(decoded.text, newline=""), dialect))
    except csv.Error as error:
        raise ParseFailed("damaged", f"The table can't be read: {error}.") from error
    return builder.finish(stem, "csv", decoded.encoding, decoded.confidence)


def write_rows(builder: TextBuilder, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as lines. The first row is the header if it has two cells or more, all texts."""
    header: list[str] | None = None
    first = True
    for row in rows:
        cells = [one_line("" if cell is None else str(cell), 5_000) for cell in row]
        if not any(cells):
            continue
        if first:
            first = False
            if len(cells) > 1 and all(c and not _number(c) for c in cells):
                header = cells
                continue
        if header is None:
            builder.add("; ".join(c for c in cells if c) + "\n")
            continue
        named = [
            f"{header[i] if i < len(header) else f'column {i + 1}'}: {cell}"
            for i, cell in enumerate(cells)
            if cell
        ]
        builder.add("; ".join(named) + "\n")
    if header is not None and builder.length == 0:
        builder.add("; ".join(header) + "\n")


def _number(text: str) -> bool:
    try:
        float(text.replace(",", "").replace("%", "").strip())
    except ValueError:
        return False
    return True
