"""Sections and passages: the section is the unit of sharing, the passage the unit of search.

A passage lies inside one section. It is cut where the text itself has a joint: between paragraphs, else
lines, else sentences, else words, else anywhere; fenced code and tables are kept whole where they fit.
Only the last two kinds of cut overlap, since structure gives no joint there. For every passage
`text[passage.start:passage.end] == passage.text`, exactly.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rag.parse.types import Parsed, Section
from rag.tokenize import Measure, Ruler

#: Sections without inner headings are cut into parts of about this many characters.
MAX_SECTION_CHARACTERS = 8_000
#: A single "word" of megabytes is one unknown token to a word-piece model; characters need a limit too.
MAX_PASSAGE_CHARACTERS = 2_000
_OVERLAP_TOKENS = 24
_SPECIAL_TOKENS = 2
_MAX_PREFIX_TOKENS = 48

_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_LINE = re.compile(r"\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？｡])[」』”’）]*\s*")
_WORD = re.compile(r"\s+")
_FENCE = re.compile(r"^(```|~~~)[^\n]*\n.*?(?:^\1[ \t]*$|\Z)", re.M | re.S)
#: What `split_sections` puts behind a title.
_PART = re.compile(r" \(part \d+\)\Z")
_TABLE = re.compile(r"(?:^[ \t]*\|[^\n]*\|[ \t]*(?:\n|\Z)){2,}", re.M)


@dataclass(frozen=True, slots=True)
class Passage:
    """`section` is its index; `tokens` counts `embedding_text`, special tokens included."""

    start: int
    end: int
    text: str
    section: int
    page: int | None
    embedding_text: str
    tokens: int


def split_sections(parsed: Parsed, limit: int = MAX_SECTION_CHARACTERS) -> list[Section]:
    """The parsed sections, long ones cut into parts at paragraphs. They still cover the text without gaps."""
    sections: list[Section] = []
    for section in parsed.sections:
        if section.end - section.start <= limit:
            sections.append(section)
            continue
        cuts = _section_cuts(parsed.text, section, limit)
        for part, (start, end) in enumerate(zip(cuts, [*cuts[1:], section.end], strict=True), 1):
            title = section.title if part == 1 else f"{section.title} (part {part})"
            sections.append(Section(start, end, title, section.level))
    return sections


def split_passages(
    parsed: Parsed, sections: Sequence[Section], measure: Measure, max_tokens: int
) -> list[Passage]:
    """Passages of at most `max_tokens` tokens, title prefix and special tokens counted, in document order.

    `sections` as `split_sections` returns them. Raises ValueError where `max_tokens` leaves no room for text.
    """
    if max_tokens < _MAX_PREFIX_TOKENS + 16:
        raise ValueError(
            f"an embedder that reads {max_tokens} tokens is too short; {_MAX_PREFIX_TOKENS + 16} are needed"
        )
    ruler = Ruler(parsed.text, measure)
    passages: list[Passage] = []
    for index, section in enumerate(sections):
        prefix = _prefix(parsed.title, section.title, measure)
        budget = max_tokens - _SPECIAL_TOKENS - len(measure.spans(prefix))
        if _heading_only(parsed.text, section) and _has_below(sections, index):
            continue  # its words stand before every passage of the sections below it
        for cut in _cut(parsed.text, section, ruler, budget):
            for start, end in _fit(parsed.text, *cut, measure, budget):
                text = parsed.text[start:end]
                embedding_text = prefix + text
                tokens = len(measure.spans(embedding_text)) + _SPECIAL_TOKENS
                passages.append(
                    Passage(start, end, text, index, parsed.page_at(start), embedding_text, tokens)
                )
    return passages


def _prefix(title: str, section: str, measure: Measure) -> str:
    """What stands before a passage when it is embedded: where it is from. At most a fifth of the room."""
    place = lead(title, section)
    spans = measure.spans(place)
    if len(spans) > _MAX_PREFIX_TOKENS - 4:
        place = place[: spans[_MAX_PREFIX_TOKENS - 5][1]]
    return f"{place}\n"


def lead(title: str, section: str) -> str:
    """A section's place in words: the document's title and the path of headings, nothing twice."""
    return section if section == title or section.startswith(f"{title} › ") else f"{title} › {section}"


def below(title: str, section: str) -> str:
    """The path of headings below the document's title, for a place where the title stands already; "" where
    there is none."""
    rest = section.removeprefix(title)
    if rest != section and (not rest or _PART.fullmatch(rest)):
        return rest.strip()
    return section.removeprefix(f"{title} › ")


def heading_over(title: str, section: str) -> str:
    """`lead` in the document's own words: without the number of a part that a long section was cut into."""
    return lead(title, _PART.sub("", section))


def _cut(text: str, section: Section, ruler: Ruler, budget: int) -> Iterator[tuple[int, int]]:
    """Ranges of about equal size that hold at most `budget` tokens, cut at the best joints."""
    start, end = _strip(text, section.start, section.end)
    joints = _joints(text, start, end)
    while start < end:
        total = ruler.tokens(start, end)
        if total <= budget and end - start <= MAX_PASSAGE_CHARACTERS:
            yield start, end
            return
        # A rest of a little more than one passage is halved, rather than leaving a crumb.
        target = budget if total > 1.6 * budget else total // 2 + 1
        reach = min(ruler.reach(start, budget, end), start + MAX_PASSAGE_CHARACTERS)
        wanted = min(ruler.reach(start, target, end), reach)
        position, overlap = _best_joint(text, joints, start, wanted, reach)
        cut_start, cut_end = _strip(text, start, position)
        if cut_start < cut_end:
            yield cut_start, cut_end
        following = position
        if overlap:
            back = position
            while back > start and ruler.tokens(back, position) < min(_OVERLAP_TOKENS, budget // 4):
                back = max(start, back - 16)
            word = _WORD.search(text, back, position)
            following = max(word.end() if word else back, start + (position - start) // 2)
        start = max(_strip(text, following, end)[0], start + 1)


def _best_joint(text: str, joints: list[list[int]], start: int, wanted: int, reach: int) -> tuple[int, bool]:
    """The position to cut at and whether the next passage should overlap. `start` < position <= `reach`."""
    least = start + max(1, int(0.4 * (wanted - start)))
    for level, positions in enumerate(joints):
        index = _last_at_most(positions, wanted)
        candidates = [positions[i] for i in (index, index + 1) if 0 <= i < len(positions)]
        fitting = [p for p in candidates if least <= p <= reach]
        if fitting:
            return min(fitting, key=lambda p: abs(p - wanted)), level == 3
    return max(start + 1, min(wanted, reach)), True


def _joints(text: str, start: int, end: int) -> list[list[int]]:
    """Positions where a passage may begin, best kind first: paragraphs, lines, sentences, words."""
    whole = [m.span() for pattern in (_FENCE, _TABLE) for m in pattern.finditer(text, start, end)]
    whole.sort()
    begins = [s for s, _ in whole]

    def inside(position: int) -> bool:
        index = _last_at_most(begins, position)
        return index >= 0 and whole[index][0] < position < whole[index][1]

    levels = [
        [m.end() for m in pattern.finditer(text, start, end)]
        for pattern in (_PARAGRAPH, _LINE, _SENTENCE, _WORD)
    ]
    if whole:
        outside = [p for p in levels[0] if not inside(p)] + [
            s for s, e in whole if e - s <= MAX_PASSAGE_CHARACTERS
        ]
        levels[0] = sorted(set(outside))
    return levels


def _last_at_most(positions: list[int], value: int) -> int:
    return bisect_right(positions, value) - 1


def _fit(text: str, start: int, end: int, measure: Measure, budget: int) -> Iterator[tuple[int, int]]:
    """Cut a range that was measured inside a word and is a token or two too long after all."""
    while start < end:
        spans = measure.spans(text[start:end])
        if len(spans) <= budget:
            yield start, end
            return
        middle = start + max(1, spans[budget - 1][0])
        yield from _fit(text, *_strip(text, start, middle), measure, budget)
        start = _strip(text, middle, end)[0]


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def _heading_only(text: str, section: Section) -> bool:
    """True for a heading with no text of its own."""
    return re.fullmatch(r"#{1,6}[^\n]*", text[section.start : section.end].strip()) is not None


def _has_below(sections: Sequence[Section], index: int) -> bool:
    """True where sections follow that have this one's heading in their titles."""
    return index + 1 < len(sections) and sections[index + 1].level > sections[index].level


def _section_cuts(text: str, section: Section, limit: int) -> list[int]:
    """Where the parts of a long section begin; the first is its own beginning."""
    cuts = [section.start]
    joints = _joints(text, section.start, section.end)
    while section.end - cuts[-1] > limit:
        rest = section.end - cuts[-1]
        wanted = cuts[-1] + (limit if rest > 1.6 * limit else rest // 2 + 1)
        cuts.append(_best_joint(text, joints, cuts[-1], wanted, min(cuts[-1] + limit, section.end))[0])
    return cuts
