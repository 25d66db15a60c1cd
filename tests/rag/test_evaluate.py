from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag import evaluate, metrics
from rag.errors import RagError
from rag.library import Library
from rag.sample import seed
from tests.rag.conftest import HashEmbedder


def test_measures_on_a_ranking_worked_by_hand() -> None:
    ranked = ["a", "b", "c", "d"]
    assert metrics.recall(ranked, {"b", "z"}, 3) == 0.5
    assert metrics.success(ranked, {"d"}, 3) == 0.0
    assert metrics.success(ranked, {"d"}, 4) == 1.0
    assert metrics.reciprocal_rank(ranked, {"c", "d"}) == pytest.approx(1 / 3)
    # gain 1 at rank 2 (1 / log2 3) and 3 at rank 4 (3 / log2 5) over the best order 3, 1.
    expected = (1 / 1.584962500721156 + 3 / 2.321928094887362) / (3 + 1 / 1.584962500721156)
    assert metrics.ndcg(ranked, {"b": 1.0, "d": 3.0}, 10) == pytest.approx(expected)
    with pytest.raises(ValueError, match="nothing is relevant"):
        metrics.ndcg(ranked, {}, 10)


@given(st.permutations(range(6)), st.dictionaries(st.integers(0, 5), st.floats(0.5, 3), min_size=1))
def test_ndcg_is_one_for_the_best_order_only(ranked: list[int], gains: dict[int, float]) -> None:
    best = sorted(range(6), key=lambda i: -gains.get(i, 0.0))
    assert metrics.ndcg(best, gains, 6) == pytest.approx(1.0)
    assert 0.0 < metrics.ndcg(ranked, gains, 6) <= 1.0 + 1e-9


def test_the_bootstrap_is_reproducible_and_brackets_the_mean() -> None:
    values = [0.0] * 10 + [1.0] * 30
    low, high = metrics.bootstrap(values)
    assert (low, high) == metrics.bootstrap(values)
    assert 0.5 < low < 0.75 < high < 0.95


@dataclass(frozen=True)
class Item:
    name: str
    title: str
    text: str


@dataclass(frozen=True)
class Gold:
    document: str
    start: int
    end: int


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    gold: tuple[Gold, ...]
    kind: str = "single"
    history: tuple[object, ...] = ()


def test_a_question_set_is_measured_leg_by_leg(library: Library) -> None:
    ferry = Item(
        "ferry.md", "Ferry", "# Ferry\n\nThe ferry carries 32 cars.\n\n## Crew\n\nCaptain Quill commands."
    )
    buoy = Item("buoy.md", "Buoy", "# Buoy\n\nThe buoy measures waves.")
    for id in seed(library, [ferry, buoy]):
        library.wait(id, 60)
    start = ferry.text.index("Captain")
    questions = [
        Question("crew", "Who commands as captain?", (Gold("ferry.md", start, start + 22),)),
        Question("none", "Unanswerable?", ()),
        Question("wrong", "The buoy measures waves", (Gold("ferry.md", 9, 30),)),
    ]
    reports = evaluate.retrieval(library, questions)
    assert set(reports) == {"dense", "lexical", "fused"}
    assert reports["lexical"].questions == 2
    assert reports["lexical"].recall_at[1] == 0.5
    assert reports["lexical"].missed == ("wrong",)
    assert 0 < reports["fused"].mrr < 1
    with pytest.raises(RagError, match="no answerable"):
        evaluate.retrieval(library, questions[1:2])


def write_beir(folder: Path) -> None:
    (folder / "qrels").mkdir()
    corpus = [
        {"_id": "1", "title": "Ferry", "text": "The ferry carries cars."},
        {"_id": "2", "title": "", "text": "Buoys measure waves and currents. " * 40},
        {"_id": "3", "title": "Empty", "text": ""},
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(c) + "\n" for c in corpus))
    (folder / "queries.jsonl").write_text(
        '{"_id": "q", "text": "what measures waves"}\n{"_id": "r", "text": "x"}\n'
    )
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t2\t1\nq\t1\t0\n")


def test_a_beir_folder_is_read_and_measured(tmp_path: Path) -> None:
    write_beir(tmp_path)
    beir = evaluate.read_beir(tmp_path)
    assert list(beir.qrels) == ["q"]
    each = evaluate.evaluate_beir(beir, HashEmbedder())
    measured = evaluate.means(each)
    assert measured["lexical"] == {"recall_at_5": 1.0, "recall_at_100": 1.0, "ndcg_at_10": 1.0, "mrr": 1.0}
    assert measured["fused"]["recall_at_5"] == 1.0
    assert set(evaluate.fused_minus_better(each)) == {"recall_at_5", "recall_at_100", "ndcg_at_10", "mrr"}


def test_fusion_is_compared_with_the_better_leg_question_by_question() -> None:
    each = {
        "dense": {"recall_at_5": (1.0, 0.0, 0.0, 0.0)},
        "lexical": {"recall_at_5": (0.0, 1.0, 1.0, 0.0)},
        "fused": {"recall_at_5": (1.0, 1.0, 1.0, 0.0)},
    }
    found = evaluate.fused_minus_better(each)["recall_at_5"]
    assert (found["better"], found["difference"]) == ("lexical", 0.25)
    low, high = found["interval"]
    assert low == 0.0 < high <= 1.0


def test_a_broken_beir_folder_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(RagError, match=r"corpus\.jsonl can't be read"):
        evaluate.read_beir(tmp_path)
    write_beir(tmp_path)
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t2\n")
    with pytest.raises(RagError, match=r"test\.tsv line 2"):
        evaluate.read_beir(tmp_path)
    (tmp_path / "queries.jsonl").write_text("{}\n")
    with pytest.raises(RagError, match=r"queries\.jsonl line 1 has no _id"):
        evaluate.read_beir(tmp_path)
    (tmp_path / "queries.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(RagError, match=r"queries\.jsonl is not UTF-8"):
        evaluate.read_beir(tmp_path)
