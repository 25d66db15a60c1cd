from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag.parse.formats import parse
from rag.parse.types import Limits
from rag.split import MAX_PASSAGE_CHARACTERS, Passage, below, lead, split_passages, split_sections
from tests.rag.conftest import WordMeasure

MEASURE = WordMeasure()


def passages_of(text: str, name: str = "a.md", max_tokens: int = 80) -> tuple[str, list[Passage]]:
    parsed = parse(text.encode("utf-8"), name, Limits())
    return parsed.text, split_passages(parsed, split_sections(parsed), MEASURE, max_tokens)


blocks = st.one_of(
    st.text(st.sampled_from("ab c.\n! "), min_size=1, max_size=400),
    st.sampled_from(
        ["# Head\n\n", "## Sub\n\n", "\n\n", "保修期为两年。" * 20, "x" * 900, "| a | b |\n" * 12]
    ),
    st.just("```\ncode line\n\nmore code\n```\n"),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(blocks, min_size=1, max_size=12).map("".join).filter(lambda t: t.strip("# \n\t")))
def test_passages_are_exact_fit_and_lose_nothing(text: str) -> None:
    stored, passages = passages_of(text)
    covered = [False] * len(stored)
    for passage in passages:
        assert stored[passage.start : passage.end] == passage.text
        assert passage.text == passage.text.strip() != ""
        assert passage.tokens == len(MEASURE.spans(passage.embedding_text)) + 2 <= 80
        assert passage.end - passage.start <= MAX_PASSAGE_CHARACTERS
        assert passage.embedding_text.endswith(passage.text)
        covered[passage.start : passage.end] = [True] * (passage.end - passage.start)
    starts = [p.start for p in passages]
    assert starts == sorted(starts)
    # All that may be left out is white space, and headings that sections below have in their titles.
    lost = "".join(c for c, kept in zip(stored, covered, strict=True) if not kept)
    assert set(lost) <= set("# \n\tHeadSub") or not passages


def test_a_heading_without_text_is_left_out_only_where_sections_below_name_it() -> None:
    _, passages = passages_of("# Ferry\n\n## Crew\n\nQuill.\n\n## Lost and found: ask Ines\n\n# Call 4711\n")
    assert [p.text for p in passages] == ["## Crew\n\nQuill.", "## Lost and found: ask Ines", "# Call 4711"]
    assert passages[0].embedding_text.startswith("Ferry › Crew")


def test_cuts_fall_between_paragraphs_then_sentences() -> None:
    paragraph = "One two three four five six. " * 6
    _, passages = passages_of(f"{paragraph}\n\n{paragraph}\n\n{paragraph}")
    assert all(p.text.endswith("six.") and p.text.startswith("One") for p in passages)
    _, passages = passages_of("Alpha beta gamma delta. " * 60)
    assert all(p.text.endswith("delta.") and p.text.startswith("Alpha") for p in passages)
    assert all(a.end <= b.start for a, b in itertools.pairwise(passages))


def test_overlap_only_where_the_text_has_no_joint() -> None:
    _, passages = passages_of("word " * 300)
    assert len(passages) > 3
    assert all(b.start < a.end for a, b in itertools.pairwise(passages))


def test_code_and_tables_stay_whole_where_they_fit() -> None:
    code = "```\n" + "x = 1\n\n" * 8 + "```"
    filler = "Some words stand here in a row. " * 7
    _, passages = passages_of(f"{filler}\n\n{code}\n\n{filler}")
    assert any(code in p.text for p in passages)


def test_a_passage_knows_its_section_and_says_so_to_the_embedder() -> None:
    text = "# Ferry\n\nIntro words.\n\n## Crew\n\nThe master is Quill."
    _stored, passages = passages_of(text)
    assert passages[-1].embedding_text == "Ferry › Crew\n## Crew\n\nThe master is Quill."
    assert passages[-1].section == 1
    assert passages[0].text == "# Ferry\n\nIntro words."


def test_long_sections_become_parts_without_gaps() -> None:
    parsed = parse(("A sentence of some words. " * 40 + "\n\n").encode() * 30, "a.txt", Limits())
    sections = split_sections(parsed)
    assert len(sections) > 3
    assert sections[0].start == 0
    assert sections[-1].end == len(parsed.text)
    assert all(a.end == b.start for a, b in itertools.pairwise(sections))
    assert max(s.end - s.start for s in sections) <= 8_000
    assert sections[1].title.endswith("(part 2)")


def test_an_embedder_too_short_for_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        passages_of("Text.", max_tokens=40)


def test_a_place_names_the_title_once() -> None:
    for title, section, path in (
        ("Sheet", "Sheet", ""), ("Sheet", "Sheet › Handling", "Handling"), ("Sheet", "Handling", "Handling"),
        ("Sheet", "Sheets › Handling", "Sheets › Handling"), ("Sheet", "", ""),
        ("Sheet", "Sheet (part 2)", "(part 2)"), ("Sheet", "Sheet › Handling (part 2)", "Handling (part 2)"),
    ):  # fmt: skip
        assert below(title, section) == path
        if path:
            assert lead(title, path) == f"{title} › {path}"
