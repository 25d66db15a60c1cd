"""Plain text, Markdown and source code: the stored text is the file's own, only the sections differ."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt

from rag.parse.decode import Decoded
from rag.parse.types import Limits, Parsed, TextBuilder, clean, one_line

_FRONT = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S | re.M)
_FIELD = re.compile(r"^([A-Za-z][\w -]{0,40}):[ \t]*(.+?)[ \t]*$", re.M)
_DEFINITION = re.compile(
    r"^(?:export\s+|default\s+|pub(?:\([a-z]+\))?\s+|public\s+|private\s+|protected\s+|static\s+|async\s+|abstract\s+"
    r"|final\s+|unsafe\s+|inline\s+)*"
    r"(?:def|class|func|function|fn|impl|struct|enum|trait|interface|module|namespace|type|package|CREATE\s+\w+)\b.*$",
    re.M,
)


def parse_text(decoded: Decoded, stem: str, limits: Limits) -> Parsed:
    """Plain text: one section, which the splitter cuts into parts if it is long."""
    builder = TextBuilder(limits)
    builder.add(decoded.text)
    return builder.finish(stem, "text", decoded.encoding, decoded.confidence)


def parse_code(decoded: Decoded, stem: str, limits: Limits) -> Parsed:
    """Source code: a section begins at each definition that starts in the first column."""
    builder = TextBuilder(limits)
    builder.add(decoded.text)
    for match in _DEFINITION.finditer(clean(decoded.text)):
        builder.mark(match.start(), match.group().rstrip("{: "), 1)
    return builder.finish(stem, "code", decoded.encoding, decoded.confidence)


def parse_markdown(decoded: Decoded, stem: str, limits: Limits) -> Parsed:
    """Markdown: sections at its headings (not at "#" inside code); front matter is left out.

    The title is the front matter's `title`, else the first heading of level 1, else the file's name.
    """
    text = clean(decoded.text)
    title = ""
    front = _FRONT.match(text)
    if front and _FIELD.search(front.group(1)):
        fields = {key.strip().lower(): value.strip("\"'") for key, value in _FIELD.findall(front.group(1))}
        title = fields.get("title", "")
        text = text[front.end() :]
    text = text.lstrip("\n")
    builder = TextBuilder(limits)
    builder.add(text)
    # The builder's limit comes first: a Markdown parser should never see what would be refused.
    line_starts = [0, *(m.end() for m in re.finditer("\n", text))]
    tokens = MarkdownIt("commonmark", {"maxNesting": 20}).disable("inline", ignoreInvalid=True).parse(text)
    for index, token in enumerate(tokens):
        if token.type == "heading_open" and token.map and token.level == 0:
            heading = one_line(re.sub(r"[*_`]+|\[([^\]]*)\]\([^)]*\)", r"\1", tokens[index + 1].content))
            level = int(token.tag[1])
            builder.mark(line_starts[token.map[0]], heading, level)
            if level == 1 and not title:
                title = heading
    return builder.finish(title or stem, "markdown", decoded.encoding, decoded.confidence)
