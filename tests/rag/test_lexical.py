from __future__ import annotations

import math
import sqlite3
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag import lexical
from rag.terms import query_terms, stem, terms


@pytest.fixture
def connection():
    opened = sqlite3.connect(":memory:")
    opened.execute(
        "CREATE TABLE lexical_totals (collection INTEGER PRIMARY KEY, passages INTEGER, terms INTEGER)"
    )
    for key in (1, 2):
        lexical.create(opened, key)
    yield opened
    opened.close()


def fill(connection: sqlite3.Connection, key: int, texts: dict[int, str]) -> None:
    lexical.add(connection, key, [(id, lexical.prepare(text)) for id, text in texts.items()])


def test_terms_of_words_numbers_and_codes() -> None:
    assert terms("The company's CL-450 costs 1,050.50 €") == [
        "the",
        "compani",
        "cl-450",
        "cl",
        "450",
        "cost",
        "1050.50",
    ]
    assert terms("Café") == terms("cafe") == ["cafe"]
    assert terms("charging") == terms("charges") == terms("charged")
    assert stem("buses") != stem("busy")
    assert terms("ＡＢＣ １２") == terms("abc 12")


def test_scripts_without_spaces_are_cut_into_characters_and_pairs() -> None:
    assert terms("保修期") == ["保", "修", "期", "保修", "修期"]
    assert terms("ｶﾞｽ") == ["ガ", "ス", "ガス"]
    assert "정책" in terms("반품 정책에")


@pytest.mark.parametrize(
    ("query", "text", "other"),
    [
        ("保修期是多久？", "产品的保修期为两年。", "本店周一至周五营业。"),
        ("保証期間はどのくらいですか", "保証期間は二年です。", "店は月曜日に開きます。"),
        ("보증 기간은 얼마입니까?", "제품의 보증 기간은 2년입니다.", "가게는 월요일에 엽니다."),
        ("ระยะเวลารับประกัน", "ระยะเวลารับประกันคือสองปี", "ร้านเปิดวันจันทร์"),
    ],
)
def test_questions_in_every_script_find_their_text(
    connection: sqlite3.Connection, query: str, text: str, other: str
) -> None:
    fill(connection, 1, {1: other, 2: text, 3: "English words only."})
    found = lexical.search(connection, [1], query, 5)
    assert found[0][0] == 2
    assert all(score > 0 for _, score in found)
    assert 3 not in [id for id, _ in found]


def test_nothing_in_common_finds_nothing(connection: sqlite3.Connection) -> None:
    fill(connection, 1, {1: "ferry boat", 2: "harbour"})
    assert lexical.search(connection, [1], "quantum chromodynamics", 5) == []
    assert lexical.search(connection, [1], "?!.", 5) == []
    assert lexical.search(connection, [], "ferry", 5) == []


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_is_query_syntax(query: str) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute(
        "CREATE TABLE lexical_totals (collection INTEGER PRIMARY KEY, passages INTEGER, terms INTEGER)"
    )
    lexical.create(connection, 1)
    fill(connection, 1, {1: "ferry NEAR boat OR harbour", 2: query})
    found = {id for id, _ in lexical.search(connection, [1], query, 5)}
    assert (2 in found) == bool(query_terms(query))
    connection.close()


def test_scores_are_bm25_over_the_readable_collections_only(connection: sqlite3.Connection) -> None:
    texts = {1: "ferry ferry cars", 2: "ferry timetable of the north", 3: "cars and lorries"}
    fill(connection, 1, texts)
    fill(connection, 2, dict.fromkeys(range(10, 60), "ferry secret ferry ferry"))
    lengths = {id: len(terms(text)) for id, text in texts.items()}
    average = sum(lengths.values()) / 3

    def bm25(id: int) -> float:
        counts = Counter(terms(texts[id]))
        total = 0.0
        for term in ("ferri", "car"):
            df = sum(term in terms(t) for t in texts.values())
            idf = math.log(1 + (3 - df + 0.5) / (df + 0.5))
            tf = counts[term]
            total += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * lengths[id] / average))
        return total

    found = lexical.search(connection, [1], "ferry cars", 5)
    assert [id for id, _ in found] == sorted(texts, key=lambda id: -bm25(id))
    for id, score in found:
        assert score == pytest.approx(bm25(id))


def test_totals_follow_adding_and_removing(connection: sqlite3.Connection) -> None:
    fill(connection, 1, {1: "one two", 2: "three"})
    lexical.remove(connection, 1, [1, 99])
    assert lexical.ids(connection, 1) == {2}
    assert connection.execute(
        "SELECT passages, terms FROM lexical_totals WHERE collection = 1"
    ).fetchone() == (1, 1)
    lexical.drop(connection, 1)
    lexical.drop(connection, 1)
