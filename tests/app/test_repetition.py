"""A model that loops is noticed; one that lists or counts is not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.repetition import loop_start


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("It is a bus." + " It is a school bus." * 6, "It is a bus. It is a school bus."),
        ("Founded by the British" + "-Croatian" * 20, "Founded by the British-Croatian"),
        ("One line.\n\nThe soup.\n\nThe soup.\n\nThe soup.\n\nThe soup.\n\n", "One line.\n\nThe soup.\n\n"),
    ],
)
def test_a_loop_is_cut_after_its_first_round(text: str, kept: str) -> None:
    cut = loop_start(text)
    assert cut is not None
    assert text[:cut].strip() == kept.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The Petrel 90 weighs 84 kilograms.",
        "no, no, no",
        "| a | b |\n|---|---|---|---|---|\n",
        "1. Ann\n2. Bob\n3. Cid\n4. Dan\n5. Eve\n",
        "--------------------------------",
        "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n",
    ],
)
def test_other_texts_are_left_alone(text: str) -> None:
    assert loop_start(text) is None


@given(st.text(alphabet="ab .", max_size=60), st.text(alphabet="xyz ", min_size=4, max_size=30))
def test_any_loop_with_letters_is_found(start: str, stretch: str) -> None:
    if any(c.isalnum() for c in stretch):
        assert loop_start(start + stretch * 4) is not None


def test_long_texts_cost_no_time() -> None:
    text = "".join(chr(97 + (i * i) % 26) for i in range(200_000))
    began = time.process_time()
    loop_start(text)
    assert time.process_time() - began < 1.0
