"""Small files of every format, made in memory."""

from __future__ import annotations

import io
import zipfile


def pdf(pages: list[str], title: str = "") -> bytes:
    """A PDF of Helvetica text; an empty string gives a page without text, as a scan has."""
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>")
    for index, text in enumerate(pages):
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in text.split("\n")) if text else ""
        stream = f"BT /F1 12 Tf 72 720 Td {lines}ET".encode("cp1252")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * index} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    if title:
        objects.append(f"<< /Title ({title}) >>".encode())
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for offset in offsets:
        out += b"%010d 00000 n \n" % offset
    info = b" /Info %d 0 R" % len(objects) if title else b""
    out += b"trailer\n<< /Size %d /Root 1 0 R%s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        info,
        start,
    )
    return bytes(out)


def docx() -> bytes:
    """A heading, a paragraph, a table, a list."""
    import docx as python_docx

    document = python_docx.Document()
    document.core_properties.title = "Pump manual"
    document.add_heading("Service", 1)
    document.add_paragraph("Oil the pump every 40 hours.")
    table = document.add_table(rows=2, cols=2)
    for row, cells in enumerate([("Part", "Price"), ("Valve", "12 euros")]):
        for column, text in enumerate(cells):
            table.cell(row, column).text = text
    document.add_heading("Storage", 2)
    document.add_paragraph("Keep dry.", style="List Bullet")
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def xlsx() -> bytes:
    """Two sheets; the first has a header row."""
    import openpyxl

    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Ferries"
    for row in (["Ship", "Cars"], ["Kittiwake", 32], ["Guillemot", 28]):
        sheet.append(row)
    book.create_sheet("Empty")
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def bomb(unpacked: int = 600 * 1024 * 1024) -> bytes:
    """A small archive that calls itself DOCX and unpacks to `unpacked` zeros."""
    buffer = io.BytesIO()
    block = bytes(1024 * 1024)
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        archive.open("word/document.xml", "w") as part,
    ):
        for _ in range(unpacked // len(block)):
            part.write(block)
    return buffer.getvalue()
