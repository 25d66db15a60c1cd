"""Files for `bench.fuzz_files`: sound ones of every format, and ones that are made to do harm.

Everything is built here, byte by byte where a library would not write what is wanted. Nothing depends on
anything but the code.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise

#: The hostile kinds that would have the text of a file of the server's behind `IN_FRONT`.
NAME_A_FILE, IN_FRONT = ("entity that names a file", "entity in a workbook that names a file"), "words"
_OUTSIDE = '<!DOCTYPE d [<!ENTITY f SYSTEM "file:///etc/hostname">]>'
_WORDS = "The ferry Kittiwake leaves the north quay at seven, calls at the lighthouse and carries 32 cars. "


def sound() -> list[tuple[str, bytes]]:
    """(name, content) of one file a format and encoding; all of them can be read."""
    page = f"<!doctype html><html><head><title>Fares</title></head><body><h1>Fares</h1><p>{_WORDS}</p>"
    page += (
        "<table><tr><th>Age</th><th>Price</th></tr><tr><td>Child</td><td>3</td></tr></table></body></html>"
    )
    marked = f"---\ntitle: Ferry\n---\n# Ferry\n\n{_WORDS}\n\n## Fares\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    return [
        ("note.md", (marked + "```py\nx = 1\n```\n").encode()),
        ("page.html", page.encode()),
        ("plain.txt", (_WORDS * 5).encode()),
        ("german.txt", ("Die Fähre fährt täglich über den Fluß; Müllers zahlen 12 €. " * 5).encode("cp1252")),
        ("chinese.txt", ("渡轮每天早上七点从北码头出发，可以运载三十二辆汽车。" * 8).encode("gb18030")),
        (
            "japanese.txt",
            ("フェリーは毎朝七時に北埠頭を出発します。車を三十二台運べます。" * 8).encode("shift_jis"),
        ),
        ("korean.txt", ("여객선은 매일 아침 일곱 시에 북쪽 부두에서 출발합니다. " * 8).encode("euc-kr")),
        ("wide.txt", (_WORDS * 3).encode("utf-16")),
        ("table.csv", b"Ship,Cars\nKittiwake,32\nGuillemot,28\n"),
        ("table.tsv", b"Ship\tCars\nKittiwake\t32\nGuillemot\t28\n"),
        ("code.py", b"import os\n\n\ndef ferry():\n    return 32\n\n\nclass Quay:\n    pass\n"),
        ("data.json", b'{"ferry": {"name": "Kittiwake", "cars": 32}}\n'),
        ("log.pdf", pdf([_WORDS, "The second page names the crew of the boat."])),
        ("manual.docx", docx(_paragraph(_WORDS) * 5)),
        ("ships.xlsx", xlsx([["Ship", "Cars"], ["Kittiwake", "32"], ["Guillemot", "28"]])),
    ]


def harmful() -> Mapping[str, Callable[[], tuple[str, bytes]]]:
    """What it is -> a function that builds (name, content). Each is small to store and expensive to read, or
    has no end."""
    cell = f"<w:tc>{_paragraph('7')}</w:tc>"
    return {
        "zip bomb in a DOCX": lambda: ("bomb.docx", archive({"word/document.xml": bytes(300 * 2**20)})),
        "zip bomb in an XLSX": lambda: (
            "bomb.xlsx",
            archive({"xl/workbook.xml": b"<workbook/>", "xl/sharedStrings.xml": bytes(300 * 2**20)}),
        ),
        "archive that lies about its size": lambda: ("liar.docx", _lying_archive()),
        "archive of 20,000 parts": lambda: (
            "parts.docx",
            archive({"word/document.xml": b"<x/>"} | {f"p{n}": b"" for n in range(20_000)}),
        ),
        "entities that expand": lambda: ("laughs.docx", docx(_paragraph("&i;"), prolog=_laughs())),
        "entities in a workbook": lambda: ("laughs.xlsx", xlsx([["&i;"]], prolog=_laughs())),
        NAME_A_FILE[0]: lambda: ("outside.docx", docx(_paragraph(f"{IN_FRONT} &f;"), prolog=_OUTSIDE)),
        NAME_A_FILE[1]: lambda: ("outside.xlsx", xlsx([[f"{IN_FRONT} &f;"]], prolog=_OUTSIDE)),
        "DOCX nested 50,000 deep": lambda: (
            "deep.docx",
            docx("<w:sdt><w:sdtContent>" * 50_000 + _paragraph("x") + "</w:sdtContent></w:sdt>" * 50_000),
        ),
        "DOCX of 200,000 empty paragraphs": lambda: ("empty.docx", docx("<w:p/>" * 200_000)),
        "DOCX with a table of 2,000 by 60": lambda: (
            "table.docx",
            docx(f"<w:tbl>{f'<w:tr>{cell * 60}</w:tr>' * 2_000}</w:tbl>"),
        ),
        "XLSX that claims all cells": lambda: ("claims.xlsx", xlsx([["x"]], dimension="A1:XFD1048576")),
        "XLSX with a cell at the far corner": lambda: (
            "corner.xlsx",
            xlsx([], rows='<row r="1048576"><c r="XFD1048576" t="inlineStr"><is><t>far</t></is></c></row>'),
        ),
        "XLSX of 300,000 cells": lambda: ("many.xlsx", xlsx([["word 7"] * 30] * 10_000)),
        "HTML nested 300,000 deep": lambda: ("deep.html", b"<div>" * 300_000 + b"deep words here"),
        "HTML of open tables": lambda: ("open.html", b"<table><tr><td>words" * 60_000),
        "HTML with 200,000 attributes": lambda: (
            "attributes.html",
            b"<p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">words to be read</p>",
        ),
        "HTML of formatting that never closes": lambda: ("format.html", b"<b><i><u><a>words" * 4_000),
        "HTML headings in headings": lambda: ("headings.html", b"<h1>word" * 20_000),
        "Markdown quoted 100,000 deep": lambda: ("quote.md", b">" * 100_000 + b" words"),
        "Markdown lists in lists": lambda: (
            "lists.md",
            b"".join(b" " * (2 * n) + b"- w\n" for n in range(1500)),
        ),
        "Markdown of brackets": lambda: ("brackets.md", b"# x\n\n" + b"[" * 200_000 + b"](" * 50_000),
        "Markdown of 50,000 headings": lambda: ("titles.md", b"# word\n\n" * 50_000),
        "Markdown of 50,000 tables": lambda: ("tables.md", b"| a |\n| b |\n\nword\n\n" * 50_000),
        "Markdown of 50,000 fences": lambda: ("fences.md", b"```\nx\n```\n\nword\n\n" * 50_000),
        "Markdown of open fences": lambda: ("fence.md", b"```\nword\n\n~~~\n" * 50_000),
        "Markdown of references": lambda: ("refs.md", b"".join(b"[%d]: /x\n" % n for n in range(50_000))),
        "one word of four million letters": lambda: ("word.txt", b"a" * 4_000_000),
        "four million letters without a full stop": lambda: ("line.txt", b"word " * 800_000),
        "three million line ends and a word": lambda: ("lines.txt", b"\n" * 3_000_000 + b"word\n" * 5),
        "blank lines of blanks": lambda: ("blanks.txt", (b"word\n" + b" \t" * 5_000) * 300),
        "seven million characters": lambda: ("long.txt", b"seven " * 1_200_000),
        "text of combining marks": lambda: ("marks.txt", ("e" + "\u0301" * 200_000 + " word").encode()),
        "two million Chinese characters": lambda: ("han.txt", ("渡轮" * 1_000_000).encode()),
        "CSV of two million commas": lambda: ("commas.csv", b"a" + b"," * 2_000_000 + b"b\n"),
        "CSV with an open quote": lambda: ("quote.csv", b'a,b\n"' + b"x,\n" * 700_000),
        "CSV of 100,000 columns twice": lambda: (
            "wide.csv",
            b"head,word," * 50_000 + b"\n" + b"7,8," * 50_000,
        ),
        "code of one line": lambda: ("line.js", b"function f(){return 1};" * 150_000),
        "NULs alone": lambda: ("nul.txt", bytes(100_000)),
        "NULs in a text": lambda: ("nuls.md", b"# word\n\nsome words\0and\0more\n" * 50),
        "NULs in a CSV": lambda: ("nuls.csv", b"a,b\n1,\0\n" * 50),
        "half a UTF-16 character": lambda: ("half.txt", "words to be read".encode("utf-16") + b"\xd8"),
        "byte-order mark alone": lambda: ("bom.txt", b"\xff\xfe"),
        "escape sequences": lambda: ("esc.txt", b"\x1b[2J\x1b]0;x\x07 words to be read " * 200),
        **_harmful_pdfs(),
    }


def _harmful_pdfs() -> dict[str, Callable[[], tuple[str, bytes]]]:
    def one(
        body: bytes, *, kids: bytes = b"[4 0 R]", count: int = 1, more: bytes = b"", root: bytes = b""
    ) -> bytes:
        page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 5 0 R "
        page += b"/Resources << /Font << /F1 3 0 R >> >> >>"
        return _pdf_file([
            b"<< /Type /Catalog /Pages 2 0 R " + root + b">>",
            b"<< /Type /Pages /Kids " + kids + b" /Count %d >>" % count,
            b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
            page, body, *([more] if more else []),
        ])  # fmt: skip

    text = b"BT /F1 12 Tf (Some words that stand on this page.) Tj ET"
    return {
        "PDF whose pages contain themselves": lambda: ("loop.pdf", one(_stream(text), kids=b"[2 0 R 4 0 R]")),
        "PDF with 10^9 pages by its own count": lambda: ("count.pdf", one(_stream(text), count=10**9)),
        "PDF that names its page 200,000 times": lambda: (
            "again.pdf",
            one(_stream(text), kids=b"[" + b"4 0 R " * 200_000 + b"]", count=200_000),
        ),
        "PDF whose outline follows itself": lambda: (
            "outline.pdf",
            one(
                _stream(text),
                root=b"/Outlines 6 0 R ",
                more=b"<< /Title (a) /Dest [4 0 R /Fit] /First 6 0 R /Last 6 0 R /Next 6 0 R >>",
            ),
        ),
        "PDF whose stream unpacks to 264 MB": lambda: (
            "stream.pdf",
            one(_stream(zlib.compress(b"BT /F1 9 Tf (x) Tj ET\n" * 12_000_000), b"/Filter /FlateDecode ")),
        ),
        "PDF packed 30 times": lambda: ("packed.pdf", one(_packed(text, 30))),
        "PDF with an inline image that has no end": lambda: (
            "image.pdf",
            one(_stream(b"BI /W 9 /H 9 /BPC 8 /CS /G ID " + b"\x01" * 100_000)),
        ),
        "PDF of arrays in arrays": lambda: ("arrays.pdf", one(_stream(b"[" * 200_000))),
        "PDF of saved states": lambda: ("states.pdf", one(_stream(b"q " * 500_000 + text))),
        "PDF whose length is itself": lambda: (
            "length.pdf",
            one(b"<< /Length 5 0 R >>\nstream\n" + text + b"\nendstream"),
        ),
        "PDF whose table follows itself": lambda: ("xref.pdf", _endless_xref(pdf([_WORDS]))),
        "PDF form that draws itself": lambda: (
            "form.pdf",
            one(
                _stream(
                    b"/X Do " + text,
                    b"/Type /XObject /Subtype /Form /Resources << /XObject << /X 5 0 R >> >> ",
                )
            ),
        ),
        "PDF header and nothing else": lambda: ("header.pdf", b"%PDF-1.7\n" + b"\0" * 5_000),
    }


# Sound containers


def pdf(pages: list[str]) -> bytes:
    """A PDF of Helvetica text."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for index, text in enumerate(pages):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * index)
        )
        objects.append(_stream(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("cp1252")))
    return _pdf_file(objects)


def _pdf_file(objects: list[bytes]) -> bytes:
    out = bytearray(b"%PDF-1.4\n")
    offsets: list[int] = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for offset in offsets:
        out += b"%010d 00000 n \n" % offset
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)


def _stream(data: bytes, entries: bytes = b"") -> bytes:
    return b"<< %s/Length %d >>\nstream\n%s\nendstream" % (entries, len(data), data)


def _packed(data: bytes, times: int) -> bytes:
    for _ in range(times):
        data = zlib.compress(data)
    return _stream(data, b"/Filter [" + b"/FlateDecode " * times + b"] ")


def _endless_xref(data: bytes) -> bytes:
    start = data.rindex(b"startxref")
    table = int(data[start + 9 :].split()[0])
    return data.replace(b"/Root 1 0 R", b"/Root 1 0 R /Prev %d" % table)


def archive(parts: Mapping[str, bytes]) -> bytes:
    """A ZIP archive, deflated."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in parts.items():
            # A date of its own, so that the same parts are always the same bytes.
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            file.writestr(entry, data, zipfile.ZIP_DEFLATED, 1)
    return buffer.getvalue()


def _lying_archive() -> bytes:
    """Its directory gives each part 100 bytes; the stream behind it holds 300 MB."""
    data = bytearray(archive({"word/document.xml": bytes(300 * 2**20)}))
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<I", 100)
    data[22:26] = struct.pack("<I", 100)
    return bytes(data)


_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_R = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "application/vnd.openxmlformats-officedocument"


def _paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def docx(body: str, *, prolog: str = "") -> bytes:
    """The smallest DOCX around this body."""
    return archive({
        "[Content_Types].xml": _types("/word/document.xml", f"{_OFFICE}.wordprocessingml.document.main+xml"),
        "_rels/.rels": _relations(("officeDocument", "word/document.xml")),
        "word/document.xml":
            f'{prolog}<w:document xmlns:w="{_W}"><w:body>{body}</w:body></w:document>'.encode(),
    })  # fmt: skip


def xlsx(cells: list[list[str]], *, rows: str = "", dimension: str = "A1", prolog: str = "") -> bytes:
    """The smallest XLSX of one sheet with these cells, or with these rows as they are."""
    for number, row in enumerate(cells, 1):
        made = "".join(f'<c t="inlineStr"><is><t>{cell}</t></is></c>' for cell in row)
        rows += f'<row r="{number}">{made}</row>'
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    return archive({
        "[Content_Types].xml": _types(
            "/xl/workbook.xml", f"{_OFFICE}.spreadsheetml.sheet.main+xml",
            ("/xl/worksheets/sheet1.xml", f"{_OFFICE}.spreadsheetml.worksheet+xml"),
        ),
        "_rels/.rels": _relations(("officeDocument", "xl/workbook.xml")),
        "xl/workbook.xml":
            f'<workbook xmlns="{main}" xmlns:r="{_R}"><sheets><sheet name="Ships" sheetId="1" r:id="r0"/>'
            "</sheets></workbook>".encode(),
        "xl/_rels/workbook.xml.rels": _relations(("worksheet", "worksheets/sheet1.xml")),
        "xl/worksheets/sheet1.xml":
            f'{prolog}<worksheet xmlns="{main}"><dimension ref="{dimension}"/><sheetData>{rows}</sheetData>'
            "</worksheet>".encode(),
    })  # fmt: skip


def _types(part: str, kind: str, *others: tuple[str, str]) -> bytes:
    parts = "".join(f'<Override PartName="{p}" ContentType="{k}"/>' for p, k in ((part, kind), *others))
    default = "application/vnd.openxmlformats-package.relationships+xml"
    return (
        f'<Types xmlns="{_TYPES}"><Default Extension="rels" ContentType="{default}"/>'
        f'<Default Extension="xml" ContentType="application/xml"/>{parts}</Types>'
    ).encode()


def _relations(*targets: tuple[str, str]) -> bytes:
    each = "".join(
        f'<Relationship Id="r{n}" Type="{_R}/{kind}" Target="{target}"/>'
        for n, (kind, target) in enumerate(targets)
    )
    return f'<Relationships xmlns="{_RELATIONS}">{each}</Relationships>'.encode()


def _laughs() -> str:
    """Nine entities, each ten of the one before: 10^9 words from a kilobyte."""
    names = "abcdefghi"
    lines = ['<!ENTITY a "word ">']
    lines += [f'<!ENTITY {n} "{f"&{p};" * 10}">' for p, n in pairwise(names)]
    return f"<!DOCTYPE d [{''.join(lines)}]>"
