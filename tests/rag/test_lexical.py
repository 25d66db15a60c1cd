from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rag import lexical
from rag.lexical import LexicalIndex
from rag.terms import query_terms, stem, terms


def index_of(texts: dict[int, str]) -> LexicalIndex:
    return LexicalIndex.build(list(texts), [lexical.prepare(text) for text in texts.values()])


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
def test_questions_in_every_script_find_their_text(query: str, text: str, other: str) -> None:
    index = index_of({1: other, 2: text, 3: "English words only."})
    found = lexical.search([index], query, 5)
    assert found[0][0] == 2
    assert all(score > 0 for _, score in found)
    assert 3 not in [id for id, _ in found]


def test_nothing_in_common_finds_nothing() -> None:
    index = index_of({1: "ferry boat", 2: "harbour"})
    assert lexical.search([index], "quantum chromodynamics", 5) == []
    assert lexical.search([index], "?!.", 5) == []
    assert lexical.search([], "ferry", 5) == []
    assert lexical.search([index], "ferry", 0) == []


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_is_query_syntax(query: str) -> None:
    index = index_of({1: "ferry NEAR boat OR harbour", 2: query})
    found = {id for id, _ in lexical.search([index], query, 5)}
    assert (2 in found) == bool(query_terms(query))


TEXTS = {1: "ferry ferry cars", 2: "ferry timetable of the north", 3: "cars and lorries"}


def bm25(texts: dict[int, str], id: int, wanted: list[str]) -> float:
    """The formula, by counting."""
    cut = {i: terms(text) for i, text in texts.items()}
    average = sum(map(len, cut.values())) / len(cut)
    total = 0.0
    for term in wanted:
        df = sum(term in words for words in cut.values())
        tf = cut[id].count(term)
        idf = math.log(1 + (len(cut) - df + 0.5) / (df + 0.5))
        total += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(cut[id]) / average))
    return total


def test_scores_are_bm25_over_the_readable_collections_only() -> None:
    public = index_of(TEXTS)
    private = index_of(dict.fromkeys(range(10, 110), "ferry secret ferry ferry"))
    found = lexical.search([public], "ferry cars", 5)
    wanted = ["ferri", "car"]
    assert [id for id, _ in found] == sorted(TEXTS, key=lambda id: -bm25(TEXTS, id, wanted))
    for id, score in found:
        assert score == pytest.approx(bm25(TEXTS, id, wanted))
    # Both together count as one library.
    both = TEXTS | dict.fromkeys(range(10, 110), "ferry secret ferry ferry")
    found = lexical.search([public, private], "cars secret", 3)
    for id, score in found:
        assert score == pytest.approx(bm25(both, id, ["car"]))  # "secret" is in too many to tell anything


def test_ties_go_to_the_smaller_id_wherever_it_lies() -> None:
    one = index_of(dict.fromkeys(range(50, 60), "the same ferry"))
    two = index_of(dict.fromkeys(range(10), "the same ferry"))
    assert [id for id, _ in lexical.search([one, two], "ferry", 12)] == [*range(10), 50, 51]


def telling(texts: dict[int, str], wanted: list[str]) -> list[str]:
    """Without the words that stand in more than two fifths of a library that is not tiny."""
    counts = {t: sum(t in terms(text) for text in texts.values()) for t in wanted}
    present = [t for t in wanted if counts[t]]
    return [t for t in present if len(texts) <= 64 or counts[t] <= 0.4 * len(texts)] or present


WORDS = ["ferry", "car", "north", "timetable", "lorry", "保修期", "quay"]


class AgainstCounting(RuleBasedStateMachine):
    """Any sequence of adds and removals, in whatever segments they end up, scores like plain counting."""

    def __init__(self) -> None:
        super().__init__()
        self.index = LexicalIndex()
        self.plain: dict[int, str] = {}
        self.next = 0

    @rule(passages=st.lists(st.lists(st.sampled_from(WORDS), max_size=6), min_size=1, max_size=8))
    def add(self, passages: list[list[str]]) -> None:
        ids = list(range(self.next, self.next + len(passages)))
        texts = [" ".join(words) for words in passages]
        self.next += len(ids)
        self.index.add(ids, [lexical.prepare(text) for text in texts])
        self.plain.update(zip(ids, texts, strict=True))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.integers(0, self.next), max_size=12))
        assert self.index.remove(ids) == len(ids & self.plain.keys())
        for id in ids:
            self.plain.pop(id, None)

    @rule(query=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), k=st.integers(1, 20))
    def search(self, query: list[str], k: int) -> None:
        wanted = telling(self.plain, query_terms(" ".join(query)))
        scores = {id: bm25(self.plain, id, wanted) for id in self.plain}
        best = sorted((-score, id) for id, score in scores.items() if score > 0)[:k]
        found = lexical.search([self.index], " ".join(query), k)
        assert [score for _, score in found] == pytest.approx([-score for score, _ in best])
        for id, score in found:
            assert score == pytest.approx(scores[id])

    @invariant()
    def ids_agree(self) -> None:
        assert self.index.ids() == set(self.plain)
        assert len(self.index) == len(self.plain)
        assert len(self.index.segments) <= 2 + max(1, self.next).bit_length()


AgainstCounting.TestCase.settings = settings(max_examples=60, deadline=None)
TestAgainstCounting = AgainstCounting.TestCase


def test_many_small_uploads_become_few_segments_and_the_removed_leave_memory() -> None:
    index = LexicalIndex()
    for id in range(300):
        index.add([id], [lexical.prepare(f"note {id} about ferry")])
    assert len(index.segments) <= 9
    index.remove(range(200))
    assert sum(len(s.ids) for s in index.segments) < 200
    assert {id for id, _ in lexical.search([index], "ferry", 500)} == set(range(200, 300))


def test_wrong_input_is_refused_and_changes_nothing() -> None:
    index = index_of(TEXTS)
    good = lexical.prepare("ferry")
    for ids, prepared in (([1], [good]), ([7, 7], [good, good]), ([7, 8], [good]), ([7], [good[:-1]])):
        with pytest.raises(ValueError):
            index.add(ids, prepared)
    assert index.ids() == set(TEXTS)


def test_searches_beside_changes_see_a_state_before_or_after() -> None:
    index = index_of({id: f"pinned buoy{id}" for id in range(40)})
    errors: list[BaseException] = []
    done = threading.Event()

    def write(writer: int) -> None:
        try:
            for step in range(60):
                ids = [1000 + writer * 10_000 + 5 * step + n for n in range(5)]
                index.add(ids, [lexical.prepare("harbour crane")] * 5)
                if step % 3:
                    index.remove(ids)
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                for id in range(0, 40, 7):
                    assert [i for i, _ in lexical.search([index], f"buoy{id}", 3)] == [id]
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    writers = [threading.Thread(target=write, args=(n,)) for n in range(3)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert len(index) == 40 + 3 * 5 * 20
