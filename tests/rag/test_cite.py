from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag.cite import Attribution, attribute, best_source, facts, sentences


@dataclass(frozen=True)
class Passage:
    passage_id: int
    text: str
    headings: tuple[tuple[int, str], ...] = ()


KITTIWAKE = Passage(
    1,
    "MV Kittiwake was built in 2006 by the Brannock yard in Ardmoor. She is 46.0 metres long and carries "
    "180 passengers and 32 cars. Her master is not the owner. The green shares raised 1,050 pounds on "
    "3 May 2021.",
)
GUILLEMOT = Passage(
    2, "MV Guillemot was built in 2009. She carries 120 passengers. There are three life rafts."
)
BOTH = [KITTIWAKE, GUILLEMOT]


def only(answer: str) -> Attribution:
    (found,) = attribute(answer, BOTH)
    return found


@pytest.mark.parametrize(
    ("answer", "source", "evidence"),
    [
        (
            "MV Kittiwake was built in 2006.",
            0,
            "MV Kittiwake was built in 2006 by the Brannock yard in Ardmoor.",
        ),
        (
            "She carries 180 passengers and 32 cars.",
            0,
            "She is 46.0 metres long and carries 180 passengers and 32 cars.",
        ),
        ("MV Guillemot carries 120 passengers.", 1, "She carries 120 passengers."),
        ("There are 3 life rafts.", 1, "There are three life rafts."),
        ("The shares raised 1050 pounds.", 0, "The green shares raised 1,050 pounds on 3 May 2021."),
    ],
)
def test_what_stands_there_is_verified_and_shown(answer: str, source: int, evidence: str) -> None:
    found = only(answer)
    assert (found.verdict, found.source, found.missing) == ("verified", source, ())
    assert BOTH[source].text[found.source_start : found.source_end] == evidence


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        ("MV Kittiwake was built in 2007 by the Brannock yard.", "2007"),
        ("MV Kittiwake carries 18 passengers and 32 cars.", "18"),
        ("She is 46 metres long and carries 180 passengers.", "46"),
        ("Razorbill carries 180 passengers and 32 cars.", "Razorbill"),
        ("MV Kittiwake was built in 2006 by the Brannock yard in Quern.", "Quern"),
        ("The green shares raised 1,050 pounds on 3 June 2021.", "June"),
        ("Guillemot carries 180 passengers and 32 cars.", "Guillemot"),
        ("There are seven life rafts.", "seven"),
    ],
)
def test_one_wrong_number_name_or_date_is_never_verified(answer: str, missing: str) -> None:
    found = only(answer)
    assert found.verdict != "verified"
    assert missing in found.missing


@pytest.mark.parametrize(
    "answer",
    [
        "The green shares raised £1.25.",
        "The green shares raised 1,060 pounds on 3 May 2021.",
        "The green shares raised 1,050 pounds on 3 June 2021.",
        "The green shares raised 1,050 pounds on Monday.",
        "There are seven life rafts.",
        "Buoy V-18 carries 180 passengers and 32 cars.",
        "She carries 180 passengers, and 32 cars on 3 May 2022.",
        "MV Kittiwake carries 180 passengers and -32 cars.",
        "1. MV Kittiwake was built in 2007 by the Brannock yard.",
    ],
)
def test_no_passage_says_a_number_or_a_date_that_it_does_not_have(answer: str) -> None:
    assert {a.verdict for a in attribute(answer, BOTH)} == {"unsupported"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("She is 46 metres long and carries 180 passengers.", KITTIWAKE.text),
        ("The shares were sold on 3 May 2021.", "The shares were sold on 2021-05-03."),
        ("The shares were sold on 3 January.", "On Jan 03 the shares were sold."),
        (
            "They were sold on Monday, as the money was gone.",
            "They were sold on Mondays; the money was gone.",
        ),
        ("MV Razorbill carries 180 passengers and 32 cars.", KITTIWAKE.text),  # a name, no number
    ],
)
def test_a_number_in_another_form_or_another_name_is_similar(answer: str, text: str) -> None:
    (found,) = attribute(answer, [Passage(1, text)])
    assert found.verdict == "similar"
    assert found.missing


def test_a_word_that_begins_like_a_date_is_none() -> None:
    passage = Passage(1, "In that month the shares of the owner were sold at the market.")
    assert attribute("On Monday the shares of the owner were sold.", [passage])[0].verdict == "unsupported"
    assert attribute("In March the shares of the owner were sold.", [passage])[0].verdict == "unsupported"


def test_numbers_of_lists_and_of_sources_claim_nothing() -> None:
    (found,) = attribute("7) She carries 120 passengers [9]", BOTH)
    assert (found.verdict, found.missing) == ("verified", ())


def test_the_opposite_is_not_verified() -> None:
    assert only("Her master is the owner.").verdict == "similar"
    assert only("Her master is not the owner.").verdict == "verified"


def test_something_else_is_unsupported() -> None:
    found = only("Cheese ripens in cellars.")
    assert (found.verdict, found.source) == ("unsupported", None)
    assert attribute("Anything.", []) == [Attribution(0, 9, "unsupported", None, missing=("Anything",))]


def test_each_sentence_for_itself() -> None:
    answer = "MV Guillemot was built in 2009. It is made of cheese.\n\n- She carries 120 passengers\n"
    answer += "- Dr. Dow eats."
    found = attribute(answer, BOTH)
    assert [answer[a.start : a.end] for a in found] == [
        "MV Guillemot was built in 2009.",
        "It is made of cheese.",
        "- She carries 120 passengers",
        "- Dr. Dow eats.",
    ]
    assert [a.verdict for a in found] == ["verified", "unsupported", "verified", "unsupported"]


def test_chinese_sentences_are_attributed_too() -> None:
    passages = [Passage(1, "本店周一营业。"), Passage(2, "产品的保修期为24个月。可以退货。")]
    (found,) = attribute("产品保修期为24个月。", passages)
    assert (found.verdict, found.source) == ("verified", 1)
    assert passages[1].text[found.source_start : found.source_end] == "产品的保修期为24个月。"
    assert attribute("产品保修期为12个月。", passages)[0].verdict == "unsupported"


def test_while_an_answer_is_written_its_source_shows() -> None:
    assert best_source("", BOTH) is None
    found = best_source("The ship was built in 2006. She carries 180 pass", BOTH)
    assert found is not None
    assert found.source == 0
    half = best_source("MV Kittiwake was built in 20", BOTH)
    assert half is not None, "a number that is half written says nothing yet"
    assert half.source == 0


def test_facts_are_numbers_dates_names_and_codes() -> None:
    assert facts("On 3 May 2021 Captain Quill moored buoy V-17 at 12.5 knots.") == [
        "3", "2021", "V-17", "12.5", "May", "Captain", "Quill",
    ]  # fmt: skip
    assert facts("The 46kWh battery") == ["46"]
    assert "three" in facts("It has three decks.")


@given(st.text(max_size=300))
def test_sentences_cover_everything_but_white_space(text: str) -> None:
    spans = sentences(text)
    assert "".join("".join(text[a:b].split()) for a, b in spans) == "".join(text.split())
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start


@given(st.text(max_size=120), st.text(max_size=200))
def test_attribution_never_fails_and_points_into_the_passage(answer: str, text: str) -> None:
    for found in attribute(answer, [Passage(1, text)]):
        assert 0 <= found.start < found.end <= len(answer)
        assert 0 <= found.source_start <= found.source_end <= len(text)
        assert (found.source is None) == (found.verdict == "unsupported")
