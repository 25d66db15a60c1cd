"""HTML to plain text: headings, paragraphs, lists, tables and preformatted blocks; nothing that is hidden.

Scripts, styles, forms' fields and invisible elements are left out: text that a person can't see on the
page must not speak to the model.
"""

from __future__ import annotations

import re

from selectolax.lexbor import LexborHTMLParser, LexborNode

from rag.errors import ParseFailed
from rag.parse.decode import decode
from rag.parse.types import Limits, Parsed, TextBuilder

_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{2,40})", re.I)
_SKIP = {
    "script", "style", "noscript", "template", "svg", "math", "iframe", "object", "embed", "canvas", "audio",
    "video", "select", "input", "textarea", "button", "head", "link", "meta",
}  # fmt: skip
_BLOCK = {
    "address", "article", "aside", "blockquote", "body", "dd", "details", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "footer", "form", "header", "hr", "html", "li", "main", "nav", "ol", "p",
    "section", "summary", "table", "tbody", "tfoot", "thead", "tr", "ul", "caption",
}  # fmt: skip
_HIDDEN = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?:px|pt|em|%)?\s*(?:;|$)", re.I
)
_MAX_NODES = 500_000


def parse_html(data: bytes, stem: str, limits: Limits) -> Parsed:
    """Raises `ParseFailed` for undecodable, empty or excessively nested pages."""
    declared = _META.search(data[:4096])
    decoded = decode(data, declared.group(1).decode("ascii") if declared else None)
    tree = LexborHTMLParser(decoded.text)
    builder = TextBuilder(limits)
    title_node = tree.css_first("title")
    title = title_node.text() if title_node else ""
    if tree.body is not None:
        _walk(tree.body, builder)
    if not title.strip():
        first = tree.css_first("h1")
        title = first.text() if first else stem
    return builder.finish(title, "html", decoded.encoding, decoded.confidence)


def _walk(root: LexborNode, builder: TextBuilder) -> None:
    """Depth first without recursion: pages may be nested deeper than Python's stack."""
    stack: list[tuple[LexborNode | None, str]] = [(root, "")]
    visited = 0
    inline: list[str] = []

    def flush(lines: int = 1) -> None:
        text = re.sub(r"[ \t\r\n\f]+", " ", "".join(inline)).strip()
        inline.clear()
        if text:
            builder.add(text)
        builder.gap(lines)

    while stack:
        node, closing = stack.pop()
        visited += 1
        if visited > _MAX_NODES:
            raise ParseFailed("too long", f"The page has more than {_MAX_NODES:,} elements.")
        if node is None:
            if closing in ("td", "th"):
                inline.append(" | ")
            elif closing == "br":
                flush()
            else:
                flush(1 if closing in ("tr", "li", "dt", "dd") else 2)
            continue
        tag = node.tag or ""
        if tag == "-text":
            inline.append(node.text_content or "")
            continue
        if tag in _SKIP or not tag.isalnum() or _hidden(node):
            continue
        if re.fullmatch(r"h[1-6]", tag):
            flush(2)
            builder.heading(node.text(), int(tag[1]))
            continue
        if tag == "pre":
            flush(2)
            builder.block(node.text())
            builder.gap(2)
            continue
        if tag == "br":
            flush()
            continue
        if tag in _BLOCK:
            flush(1 if tag in ("tr", "li", "dt", "dd") else 2)
            if tag == "li":
                inline.append("- ")
        if tag in _BLOCK or tag in ("td", "th"):
            stack.append((None, tag))
        children: list[LexborNode] = []
        child = node.first_child
        while child is not None:
            children.append(child)
            child = child.next
        stack.extend((c, "") for c in reversed(children))
    flush()


def _hidden(node: LexborNode) -> bool:
    attributes = node.attributes
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or bool(_HIDDEN.search(attributes.get("style") or ""))
    )
