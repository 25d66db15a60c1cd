"""Text on its way to a screen. Whatever a document, a file name or a model wrote is shown, never obeyed.

Gradio's chat turns Markdown into HTML in the browser. What we hand it is therefore written so that it can
mean only itself: `plain` allows no mark-up at all, `answer` keeps emphasis, lists, headings and code of a
model's answer but no HTML, no links and no images, so that an answer cannot make a browser fetch anything.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt

_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
_LINKISH = re.compile(r"[\[\]<]|!(?=\[)|(?<=:)//|(?<=www)\.|\\(?=[(\[])", re.IGNORECASE)
_BACKTICKS = re.compile(r"`+")
#: Characters of a passage that are quoted below an answer: a document that was read whole is one passage.
MAX_QUOTED = 6_000


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun, as 1 file or 1,200 files: for sentences outside the catalogues of texts."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _entity(match: re.Match[str]) -> str:
    return "".join(f"&#{ord(c)};" for c in match[0])


def plain(text: str) -> str:
    """`text` for a place that renders Markdown, with every punctuation character as a numeric entity.

    Entities are decoded after Markdown is parsed, so nothing in them is mark-up, a link or a formula.
    Line breaks are kept; control characters other than line feed and tab are dropped.
    """
    kept = "".join(c if c in "\n\t" or c.isprintable() else " " for c in text).replace("\t", "    ")
    # Leading blanks would make a code block of the line.
    return re.sub(r"(?m)^ +", lambda m: "&nbsp;" * len(m[0]), _PUNCTUATION.sub(_entity, kept))


def one_line(text: str, limit: int = 120) -> str:
    """`text` as `plain` text on one line of at most `limit` characters, for names and titles."""
    joined = " ".join(text.split())
    return plain(joined if len(joined) <= limit else joined[: limit - 1].rstrip() + "…")


def answer(text: str) -> str:
    """A model's answer as Markdown without HTML, links, images or formulas (see the module's text)."""
    lines = text.split("\n")
    out: list[str] = []
    at = 0
    for token in MarkdownIt("commonmark", {"html": False}).parse(text):
        if token.type not in ("fence", "code_block") or token.map is None or token.map[0] < at:
            continue
        start, end = token.map
        if token.level:  # a fence inside a list or a quotation: shown without its mark-up
            continue
        out += [_disarm(line) for line in lines[at:start]]
        longest = max((len(run) for run in _BACKTICKS.findall(token.content)), default=0)
        ticks = "`" * max(3, longest + 1)
        out += ["", ticks, *token.content.rstrip("\n").split("\n"), ticks, ""]
        at = end
    out += [_disarm(line) for line in lines[at:]]
    return "\n".join(out)


def _disarm(line: str) -> str:
    return _LINKISH.sub(_entity, re.sub(r"^(\s*)(`{3,}|~{3,})", lambda m: m[1] + plain(m[2]), line))


def quoted(text: str) -> str:
    """A passage as it is quoted: its first `MAX_QUOTED` characters."""
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + " …"


def size(count: float) -> str:
    """Bytes for people: `"0 B"`, `"4.6 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def largest_remainder(parts: list[float], total: int) -> list[int]:
    """`parts` as integers that add up to `total`: each rounded down, the rest to the largest remainders.

    Parts must add up to `total` up to floating-point error; ties go to the earlier part.
    """
    floors = [int(part // 1) for part in parts]
    missing = total - sum(floors)
    order = sorted(range(len(parts)), key=lambda i: (floors[i] - parts[i], i))
    for i in order[: max(0, missing)]:
        floors[i] += 1
    return floors
