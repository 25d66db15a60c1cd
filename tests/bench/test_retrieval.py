"""The retrieval figures' machinery on a small scale, with an embedder of hashed words."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import retrieval
from bench.synthetic import Corpus
from bench.word_embedder import WordEmbedder
from rag.errors import QuotaExceeded
from rag.library import Library


@pytest.fixture(autouse=True)
def _few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "Corpus", partial(Corpus, words=2_000))


def test_every_figure_is_there_and_dense_equals_brute_force(tmp_path: Path) -> None:
    result = retrieval.measure(tmp_path, WordEmbedder(), passages=600, questions=8)
    assert result["passages"] == 600
    assert result["dense_equals_brute_force"] is True
    for part in ("search_nine", "search_one", "numpy_brute_force", "bm25s", "beside_uploads"):
        assert 0 < result[part]["p50"] <= result[part]["p95"] <= result[part]["max"]
    assert "| search_nine |" in retrieval.table(result)


def test_the_comparison_sees_a_wrong_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag.vectors.VectorIndex.search", lambda self, query, k: [(1, 0.5)])
    result = retrieval.measure(tmp_path, WordEmbedder(), passages=200, questions=2)
    assert result["dense_equals_brute_force"] is False


def test_an_upload_that_fails_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: Future[Any] = Future()
    ended.set_result(SimpleNamespace(status="failed", reason="internal", message="The log says why."))
    monkeypatch.setattr(Library, "when_finished", lambda *_: ended)
    with pytest.raises(retrieval.MeasureError, match="An upload failed: internal"):
        retrieval.measure(tmp_path, WordEmbedder(), passages=200, questions=2)


def test_an_upload_that_is_refused_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise QuotaExceeded("documents", 11, 10)

    monkeypatch.setattr(Library, "add_document", refuse)
    with pytest.raises(QuotaExceeded, match="11 documents"):
        retrieval.measure(tmp_path, WordEmbedder(), passages=200, questions=2)


def test_a_search_that_finds_nothing_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "search", lambda *_: [])
    with pytest.raises(retrieval.MeasureError, match="found nothing"):
        retrieval.measure(tmp_path, WordEmbedder(), passages=200, questions=2)


def test_a_kept_library_is_used_again_as_it_was(tmp_path: Path) -> None:
    first, again = (retrieval.measure(tmp_path, WordEmbedder(), passages=200, questions=2) for _ in range(2))
    assert first["passages"] == again["passages"] == 200
    assert first["write_s"] == again["write_s"]
    with pytest.raises(retrieval.MeasureError, match="holds 200 passages; 400 are wanted"):
        retrieval.measure(tmp_path, WordEmbedder(), passages=400, questions=2)


def test_what_a_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        retrieval.concurrently(lambda question: 1 // len(question), ["x", ""], 2)


def test_the_same_seed_gives_the_same_library() -> None:
    one, two = ([*Corpus(words=2_000, dimension=16).documents(3, 4)] for _ in range(2))
    assert [d.passages for d in one] == [d.passages for d in two]
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.vectors, b.vectors)
        np.testing.assert_allclose(np.linalg.norm(a.vectors, axis=1), 1.0, atol=1e-5)
    corpus = Corpus(words=2_000, dimension=16)
    assert len(set(corpus.questions(10, 3, 4))) == 10
