"""The retrieval figures' machinery on a small scale, with an embedder of hashed words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import retrieval
from bench.synthetic import Corpus
from bench.word_embedder import WordEmbedder


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


def test_the_same_seed_gives_the_same_library() -> None:
    one, two = ([*Corpus(words=2_000, dimension=16).documents(3, 4)] for _ in range(2))
    assert [d.passages for d in one] == [d.passages for d in two]
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.vectors, b.vectors)
        np.testing.assert_allclose(np.linalg.norm(a.vectors, axis=1), 1.0, atol=1e-5)
    corpus = Corpus(words=2_000, dimension=16)
    assert len(set(corpus.questions(10, 3, 4))) == 10
