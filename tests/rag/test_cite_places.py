"""A sentence is verified by one place of a passage: what is put together from several is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rag.cite import attribute, sentences
from rag.split import heading_over


@dataclass(frozen=True)
class Passage:
    passage_id: int
    text: str
    headings: tuple[tuple[int, str], ...] = ()


def verdict(text: str, heading: str, answer: str) -> str:
    (found,) = attribute(answer, [Passage(1, text, ((0, heading),) if heading else ())])
    return found.verdict


PLAIN_TABLE = "Group gasket | 9 months\nSteam tip | brass | 24 months"
TABLE = (
    "| Part | Material | Replace every |\n|---|---|---|\n"
    "| Group gasket | silicone | 9 months |\n| Steam tip | brass | 24 months |"
)
HTML_TABLE = "Part | Replace every |\nGroup gasket | 9 months |\nSteam tip | 24 months |"
CSV = "Part: Group gasket; Interval: 9 months\nPart: Steam tip; Interval: 24 months\n"
LINES = "Weight: 38 kg\nTank: 7.5 l\nWarranty: 24 months"
YEARS = (
    "| Million crowns | 2022 | 2023 |\n|---|---|---|\n| Wages | 12.9 | 13.6 |\n| Fuel and power | 7.9 | 7.2 |"
)
WEIGHT = "The machine weighs 38 kg and its tank holds 7.5 l."
SIZE = "She is 46 metres long and 12 metres wide."
VINEGAR = "Descale with Kalkfrei B tablets. Never use vinegar with Kalkfrei B."
DESCALE = "Descale every 45 days; the programme takes 50 minutes."
VOUCHER = "The voucher is 35 crowns for a bed and 120 crowns for a meal."
ANODES = "On the Petrel 90 there are two anodes, and on the Petrel 260 four."
BEST = "The Kittiwake was the best, with 97.8 percent; the Sprat, with 88.1 percent, was last."
LIST = "- Sea temperature at 0.5 metres below the surface.\n- Its own position, to within 4 metres."
CHINESE_WARRANTY = "產品的保修期為24個月。電池的保修期為12個月。"
CHINESE_DESCALE = "每45天除垢一次，程序需時50分鐘。"


@pytest.mark.parametrize(
    ("text", "heading", "answer"),
    [
        (PLAIN_TABLE, "", "Group gasket: 9 months."),
        (TABLE, "", "The group gasket is replaced every 9 months."),
        (TABLE, "", "The steam tip is made of brass and replaced every 24 months."),
        (HTML_TABLE, "", "The group gasket is replaced every 9 months."),
        (CSV, "", "The interval of the steam tip is 24 months."),
        (LINES, "Brewmaster 900", "The tank of the Brewmaster 900 holds 7.5 l."),
        (YEARS, "Report 2023", "Wages were 13.6 million crowns in 2023."),
        (WEIGHT, "Brewmaster 900", "The Brewmaster 900 weighs 38 kilograms and holds 7.5 litres."),
        (SIZE, "MV Kittiwake", "MV Kittiwake is 12 metres wide and 46 metres long."),
        ("She carries 180 passengers and 32 cars.", "MV Kittiwake", "MV Kittiwake carries 32 cars."),
        ("Guillemot was built in 2009. She carries 180 people.", "", "Guillemot carries 180 people."),
        (
            "The shares raised 1,050 pounds on 3 May 2021.",
            "",
            "On 3 May 2021 the shares raised 1,050 pounds.",
        ),
        (VINEGAR, "", "Never use vinegar with Kalkfrei B."),
        (VINEGAR, "", "Descale with Kalkfrei B tablets."),
        (DESCALE, "", "Descale every 45 days; the programme takes 50 minutes."),
        ("The 24-month warranty covers the boiler.", "", "The warranty covers the boiler for 24 months."),
        ("The ship was emptied of 400 people in 17 minutes.", "", "The ship was emptied in 17 minutes."),
        (VOUCHER, "", "The voucher is 35 crowns for a bed and 120 crowns for a meal."),
        (ANODES, "", "On the Petrel 90 there are two anodes, and on the Petrel 260 four."),
        (BEST, "", "The Sprat, with 88.1 percent, was last."),
        ("Buoy V-31 was lost. The loss of V-31 cost 900 crowns.", "", "V-31 cost 900 crowns."),
        (LIST, "Petrel 90", "The Petrel 90 measures sea temperature at 0.5 metres below the surface."),
        ("Keep the hatch closed at sea and wash it after.", "", "Keep the hatch closed at sea."),
        (CHINESE_WARRANTY, "", "電池的保修期為12個月。"),
        (CHINESE_DESCALE, "", "每45天除垢一次，程序需時50分鐘。"),
        ("請勿使用醋清潔。", "", "請勿使用醋清潔。"),
    ],
)
def test_what_one_place_says_is_verified(text: str, heading: str, answer: str) -> None:
    assert verdict(text, heading, answer) == "verified"


@pytest.mark.parametrize(
    ("text", "heading", "answer"),
    [
        # another row, item, line or sentence has the number
        (PLAIN_TABLE, "", "The group gasket is replaced every 24 months."),
        (TABLE, "", "The group gasket is replaced every 24 months."),
        (TABLE, "", "The steam tip is made of silicone and replaced every 24 months."),
        (HTML_TABLE, "", "The group gasket is replaced every 24 months."),
        (CSV, "", "The interval of the group gasket is 24 months."),
        (LINES, "Brewmaster 900", "The tank of the Brewmaster 900 holds 38 l."),
        (LIST, "Petrel 90", "The Petrel 90 measures sea temperature at 4 metres below the surface."),
        ("A gasket lasts 9 months. A tip lasts 24 months.", "", "A gasket lasts 24 months."),
        ("Guillemot was built in 2009. Kittiwake carries 180.", "", "Guillemot carries 180."),
        # another column has it
        (YEARS, "Report 2023", "Wages were 13.6 million crowns in 2022."),
        (YEARS, "Report 2023", "Wages were 12.9 million crowns in 2023."),
        (YEARS, "Report 2023", "Wages were 7.9 million crowns in 2022."),
        # numbers have changed places
        (WEIGHT, "Brewmaster 900", "It weighs 7.5 kilograms and holds 38 litres."),
        (DESCALE, "", "Descale every 50 days; the programme takes 45 minutes."),
        (DESCALE.replace("; the", ". The"), "", "Descale every 50 days; the programme takes 45 minutes."),
        (SIZE, "MV Kittiwake", "MV Kittiwake is 12 metres long and 46 metres wide."),
        (SIZE, "MV Kittiwake", "MV Kittiwake is 12 metres long."),
        (VOUCHER, "", "The voucher is 120 crowns for a bed and 35 crowns for a meal."),
        (ANODES, "", "On the Petrel 90 there are four anodes, and on the Petrel 260 two."),
        (BEST, "", "The Kittiwake was the best, with 88.1 percent."),
        # the opposite
        (VINEGAR, "", "Use vinegar with Kalkfrei B."),
        ("Descale with Kalkfrei B tablets. Never use vinegar.", "", "Use vinegar with Kalkfrei B."),
        # the right name, of something else
        ("Service is due after 24 months.", "Petrel 90", "The service of the Petrel 24 is due."),
        ("The Pellan branch met in May.", "", "The Pellan branch is responsible for all policies in May."),
        # a number of a heading that this place says nothing about
        ("The Barrel was built in Hollin.", "The first buoy, 1933", "The Barrel was built in 1933."),
        (CHINESE_WARRANTY, "", "電池的保修期為24個月。"),
        (CHINESE_DESCALE, "", "每50天除垢一次，程序需時45分鐘。"),
        ("請勿使用醋清潔。", "", "使用醋清潔。"),
    ],
)
def test_what_is_put_together_from_several_places_is_not(text: str, heading: str, answer: str) -> None:
    # A number that the text has with another measure only ("38 l" of 38 kg) is in no passage at all.
    otherwise = any(wrong in answer for wrong in ("38 l", "38 litres", "50 days"))
    assert verdict(text, heading, answer) == ("unsupported" if otherwise else "similar")


def test_the_title_and_the_headings_over_a_place_stand_there() -> None:
    """A product's name, and its number, often stand only in them."""
    answer = "The boiler of the Brewmaster 900 holds 7.5 litres."
    assert verdict("The boiler holds 7.5 litres.", "", answer) == "unsupported"
    assert verdict("The boiler holds 7.5 litres.", "Brewmaster 900 › Boiler", answer) == "verified"
    assert verdict("The boiler holds 7.5 litres.", "Brewmaster 950 › Boiler", answer) == "unsupported"


def test_a_heading_holds_for_its_own_section() -> None:
    text = "The boiler holds 7.5 litres.\n\nThe boiler holds 9 litres."
    passage = Passage(1, text, ((0, "Machines › Brewmaster 900"), (30, "Machines › Brewmaster 950")))
    right = attribute("The boiler of the Brewmaster 950 holds 9 litres.", [passage])[0]
    assert (right.verdict, text[right.source_start : right.source_end]) == ("verified", text[30:])
    assert attribute("The boiler of the Brewmaster 900 holds 9 litres.", [passage])[0].verdict == "similar"


def test_the_row_that_says_it_is_shown() -> None:
    (found,) = attribute("The steam tip is replaced every 24 months.", [Passage(1, TABLE)])
    assert TABLE[found.source_start : found.source_end] == "| Steam tip | brass | 24 months |"


def test_the_number_of_a_part_is_none_of_the_documents() -> None:
    assert heading_over("Manual", "Manual › Care (part 2)") == "Manual › Care"
    assert heading_over("Manual", "Care (part of it)") == "Manual › Care (part of it)"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Descale with Kalkfrei B. The programme takes 50 minutes.", 2),
        ("The tank holds 7.5 l. The warranty is 2 years.", 2),
        ("The book is by J. Dow. Ask Dr. Quill.", 2),
    ],
)
def test_a_letter_ends_a_sentence_unless_it_is_an_initial(text: str, count: int) -> None:
    assert len(sentences(text)) == count


def test_what_should_or_must_be_done_is_still_done_every_nine_months() -> None:
    assert verdict(TABLE, "", "The group gasket should be replaced every 9 months.") == "verified"
    assert verdict(TABLE, "", "The group gasket should be replaced every 24 months.") == "similar"


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Wheel truing: 24 €, ready in 20 minutes.", "Wheel truing costs 20 €.", "unsupported"),
        ("Wheel truing: 24 €, ready in 20 minutes.", "Wheel truing is ready in 20 minutes.", "verified"),
        ("Chain replacement takes 20 minutes.", "Chain replacement is a 20-day service.", "unsupported"),
        # Another row's price: the measure is right, so that is for the places to tell.
        ("| Work | Price |\n|---|---|\n| Truing | 24 € |\n| Chain | 29 € |", "Truing costs 29 €.", "similar"),
        # The measure stands in the header.
        ("| Work | Price in € |\n|---|---|\n| Truing | 24 |", "Truing costs 24 €.", "similar"),
    ],
)
def test_a_number_that_only_has_another_measure_is_unsupported(text: str, answer: str, expected: str) -> None:
    assert verdict(text, "", answer) == expected


def test_what_claims_nothing_is_no_sentence_and_bears_no_mark() -> None:
    rules = Passage(1, "1. Members clean the wheel within 15 minutes.\n2. Children must not use the kiln.")
    answer = "Nothing here is so:\n\n1.\n2.\n\nMembers clean the wheel within 15 minutes. The"
    found = [(answer[a.start : a.end], a.verdict) for a in attribute(answer, [rules])]
    assert ("Members clean the wheel within 15 minutes.", "verified") in found
    assert [text for text, _ in found if text.strip("12.\n ") in ("", "The")] == []
    assert attribute("1. 2. The", [rules]) == []
