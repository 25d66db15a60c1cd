"""Which parser reads a file: by its content first, by its name only where the content leaves it open."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from rag.parse.types import Limits, Parsed

MARKDOWN = {"md", "markdown", "mdown", "mkd", "mdx"}
HTML = {"html", "htm", "xhtml"}
TABLES = {"csv", "tsv"}
CODE = {
    "py", "js", "ts", "jsx", "tsx", "java", "c", "h", "cpp", "hpp", "cc", "cs", "go", "rs", "rb", "php",
    "kt", "swift", "scala", "sh", "sql", "lua", "pl", "r", "jl", "css",
    "json", "yaml", "yml", "toml", "ini", "xml",
}  # fmt: skip
#: Extensions that a page may offer in its file chooser.
ACCEPTED = sorted({"txt", "text", "log", "rst", "pdf", "docx", "xlsx"} | MARKDOWN | HTML | TABLES | CODE)


def stem_and_extension(name: str) -> tuple[str, str]:
    """From a name that a person chose. Purely textual: nothing here touches a file system."""
    last = PurePosixPath(name.replace("\\", "/")).name
    match = re.fullmatch(r"(.+)\.([A-Za-z0-9]{1,8})", last)
    return (match.group(1), match.group(2).lower()) if match else (last or "Untitled", "")


def parse(data: bytes, name: str, limits: Limits) -> Parsed:
    """Parse a file in this process. Raises `ParseFailed`. Use `rag.parse.client` for files of strangers."""
    stem, extension = stem_and_extension(name)
    # Imports wait until a format is met: a Markdown file should not pay for the PDF reader.
    if b"%PDF-" in data[:1024]:
        from rag.parse.pdf import parse_pdf

        return parse_pdf(data, stem, limits)
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        from rag.parse import office

        kind = office.archive_kind(data, limits)
        return (office.parse_docx if kind == "docx" else office.parse_xlsx)(data, stem, limits)
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if extension in HTML or (
        head.startswith((b"<!doctype html", b"<html")) and extension not in MARKDOWN | CODE
    ):
        from rag.parse.html import parse_html

        return parse_html(data, stem, limits)
    from rag.parse.decode import decode

    decoded = decode(data)
    if extension in TABLES:
        from rag.parse.tables import parse_csv

        return parse_csv(decoded, stem, limits)
    from rag.parse import plain

    if extension in MARKDOWN:
        return plain.parse_markdown(decoded, stem, limits)
    if extension in CODE:
        return plain.parse_code(decoded, stem, limits)
    return plain.parse_text(decoded, stem, limits)
