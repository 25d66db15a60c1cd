"""What is no character is found, named and mended; what only looks like it stays."""

from __future__ import annotations

import json

import pytest

from app.gate import _mended
from app.text import broken, may_be_broken, one_line, whole


@pytest.mark.parametrize(
    ("sent", "kept"),
    [(b'{"data":["a \\ud800 b"]}', "a \ufffd b"), (b'{"data":["\xed\xa0\x80"]}', "\ufffd"),
     (b'{"data":["\\ud83d\\ude42 \\udfff"]}', "\U0001f642 \ufffd")],
)  # fmt: skip
def test_an_event_of_the_page_is_mended(sent: bytes, kept: str) -> None:
    assert may_be_broken(sent)
    assert json.loads(_mended(sent)) == {"data": [kept]}


def test_whole_text_is_left_alone() -> None:
    assert not may_be_broken('{"data":["共讀 \\u00e9 🙂"]}'.encode())
    assert whole("共讀 🙂") == "共讀 🙂"
    assert broken({"a": [{"b": "🙂"}, 5, None]}) is None
    assert broken({"a": [{"b": "x"}, {"b": "\udfff"}]}) == "a.1.b"


def test_a_title_turns_no_direction_and_keeps_its_letters() -> None:
    assert one_line("in\u202evoice\u2066 \x00 A\n\tB\ud800") == "invoice A B\ufffd"
    assert one_line("עברית 👩\u200d🔬") == "עברית 👩\u200d🔬"
