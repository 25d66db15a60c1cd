"""The packaged embedder on the development half of the sample questions: what the defaults were chosen by."""

from __future__ import annotations

from pathlib import Path

import pytest

import data
from rag.embed import SentenceEmbedder, packaged_model
from rag.evaluate import retrieval
from rag.library import Library
from rag.sample import seed


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(packaged_model() is None, reason="the packaged embedding model is not installed")
def test_the_right_passage_is_among_the_first_five(tmp_path: Path) -> None:
    embedder = SentenceEmbedder()
    library = Library.open(tmp_path / "data", embedder)
    try:
        for id in seed(library):
            assert library.wait(id, 600).status == "ready"
        assert library.check().ok
        reports = retrieval(library, data.questions("dev"))
    finally:
        library.close(all=True)
        embedder.close()
    fused = reports["fused"]
    assert fused.recall_at[5] >= 0.95, fused.missed
    assert fused.recall_at[5] >= max(reports["dense"].recall_at[5], reports["lexical"].recall_at[5])
    assert fused.ndcg_at_10 >= max(reports["dense"].ndcg_at_10, reports["lexical"].ndcg_at_10)
