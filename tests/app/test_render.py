"""Hostile text on its way to a screen: it is shown, never obeyed."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.render import answer, largest_remainder, one_line, plain, size

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "![pixel](https://example.org/p.png)",
    "[click](javascript:alert(1))",
    "[a]: https://example.org\n[a]",
    "${alert(1)} {{constructor}} `x`",
    "<https://example.org> www.example.org https://example.org/a",
    "$$\\href{javascript:alert(1)}{x}$$ \\(x\\)",
    "<|im_end|>\n<|im_start|>system",
    "```\n</code></pre><img src=x onerror=alert(1)>\n```",
    "- ```\n  <img src=x>\n  ```\n<b>",
    "~~~~ \n``` \n<img src=x>",
    "&lt;img src=x onerror=alert(1)&gt;",
)


def rendered(markdown: str) -> str:
    """What a lenient Markdown renderer that lets HTML through makes of it."""
    return MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(markdown)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("escape", [plain, answer, one_line])
def test_no_hostile_text_becomes_a_tag_that_acts(text: str, escape: object) -> None:
    out = rendered(escape(text))  # type: ignore[operator]
    assert not re.search(r"<(img|script|a|iframe|svg|input|form)\b", out, re.IGNORECASE)


@pytest.mark.parametrize("text", HOSTILE)
def test_plain_text_reads_as_it_was_written(text: str) -> None:
    shown = re.sub(r"</?(p|br)\s*/?>", "", rendered(plain(text)))
    assert html.unescape(shown).replace("\xa0", " ").split() == text.split()


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=80))
def test_plain_text_never_yields_mark_up(text: str) -> None:
    tags = set(re.findall(r"</?([a-zA-Z][a-zA-Z0-9]*)", rendered(plain(text))))
    assert tags <= {"p", "br"}


@given(st.text(alphabet="<>![]()`~\\\n -abw.:/\"'&#x0123", max_size=120))
def test_answers_never_yield_links_images_or_raw_html(text: str) -> None:
    tags = {tag.lower() for tag in re.findall(r"<([a-zA-Z][a-zA-Z0-9]*)", rendered(answer(text)))}
    allowed = "p br em strong ul ol li code pre blockquote h1 h2 h3 h4 h5 h6 hr del s"
    assert tags <= set(allowed.split())


def test_an_answers_own_formatting_survives() -> None:
    out = rendered(answer("**Bold** and\n\n- one\n- two\n\n```\nif a < b: pass\n```\n"))
    assert "<strong>Bold</strong>" in out
    assert out.count("<li>") == 2
    assert "if a &lt; b: pass" in out


def test_one_line_is_one_short_line() -> None:
    assert "\n" not in one_line("a\n\nb\r\nc")
    assert len(html.unescape(one_line("x" * 500, 50))) == 50


@given(st.lists(st.fractions(0, 10**6), max_size=8))
def test_rounded_parts_add_up_and_stay_within_one(parts: list[object]) -> None:
    values = [float(p) for p in parts]  # type: ignore[arg-type]
    total = round(sum(values))
    out = largest_remainder(values, total)
    if values and abs(sum(values) - total) < 1e-6:
        assert sum(out) == total
        assert all(abs(a - b) < 1 for a, b in zip(out, values, strict=True))


def test_sizes_for_people() -> None:
    assert [size(0), size(1023), size(1536), size(3 * 2**30)] == ["0 B", "1,023 B", "1.5 KiB", "3.0 GiB"]
