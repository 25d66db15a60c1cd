from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rag.errors import RerankerUnavailable
from rag.library import Library
from rag.rerank import CrossReranker, rerank
from tests.rag.conftest import HashEmbedder

ALL = frozenset({"shared"})
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ferry", "cars", "battery", "buoy", "the", "a", "."]


class Longest:
    """Prefers long passages; says what it was asked."""

    name = "longest"

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        self.asked.append((query, len(texts)))
        return [float(len(text)) for text in texts]


def tiny(folder: Path, *, labels: int = 1, classifier: bool = True) -> str:
    """A BERT of a few thousand random weights with a vocabulary of its own."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    torch.manual_seed(5)
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    BertTokenizerFast(vocab=vocabulary, model_max_length=64).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, num_labels=labels, initializer_range=0.4,
    )  # fmt: skip
    model = BertForSequenceClassification(config) if classifier else BertModel(config)
    model.save_pretrained(folder)
    return str(folder)


def test_the_fused_candidates_are_ordered_anew_and_every_rank_is_kept(
    tmp_path: Path, embedder: HashEmbedder
) -> None:
    longest = Longest()
    library = Library.open(tmp_path / "d", embedder, reranker=longest)
    library.create_collection("c", "me", "c")
    notes = [f"# Note {n}\n\nferry and cars. {'The quay is long. ' * (n % 7)}" for n in range(30)]
    library.wait(library.add_document("c", "notes.md", "\n\n".join(notes).encode(), "me"), 60)
    hits = library.search("ferry and cars", {"c"}, 4)
    assert len(hits) == 4
    assert [hit.ranks["rerank"] for hit in hits] == [1, 2, 3, 4]
    assert [len(hit.text) for hit in hits] == sorted((len(hit.text) for hit in hits), reverse=True)
    assert all("lexical" in hit.ranks or "dense" in hit.ranks for hit in hits)
    assert longest.asked == [("ferry and cars", 20)]  # of 30 that were found
    assert library.search("zzz", set(), 4) == []
    library.searcher.search("ferry", {"c"}, 4, legs=("lexical",))
    assert len(longest.asked) == 1  # a single leg shows what that leg finds
    library.close(all=True)


def test_without_one_there_is_no_such_rank(library: Library, add: Callable[..., str]) -> None:
    add("# Ferry\n\nThe ferry carries 32 cars.")
    assert "rerank" not in library.search("ferry cars", ALL, 1)[0].ranks


def test_equal_scores_keep_the_fused_order(library: Library, add: Callable[..., str]) -> None:
    class Indifferent(Longest):
        def scores(self, query: str, texts: Sequence[str]) -> list[float]:
            return [0.5] * len(texts)

    for n in range(5):
        add(f"# Note {n}\n\nThe ferry {n} carries cars.")
    hits = library.search("ferry 3 cars", ALL, 5)
    assert [h.passage_id for h in rerank(Indifferent(), "x", hits)] == [h.passage_id for h in hits]


def test_a_cross_encoder_from_a_folder(tmp_path: Path, library: Library, add: Callable[..., str]) -> None:
    reranker = CrossReranker(tiny(tmp_path / "cross"))
    texts = ["the ferry cars .", "a buoy .", "battery battery battery", "the ferry cars ."]
    scores = reranker.scores("the battery", texts)
    assert len(set(scores[:3])) == 3
    assert scores[0] == pytest.approx(scores[3], abs=1e-5)
    assert reranker.scores("the battery", texts) == pytest.approx(scores, abs=1e-5)
    add("# Ferry\n\nThe ferry carries cars.")
    hits = library.search("ferry", ALL, 5)
    assert [hit.ranks["rerank"] for hit in rerank(reranker, "ferry", hits)] == [1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: "no such model", "neither a folder nor a hub id"),
        (str, "can't be loaded"),
        (lambda folder: tiny(folder / "m", classifier=False), "is no cross-encoder: it is BertModel"),
        (lambda folder: tiny(folder / "m", labels=3), "gives 3 scores to a passage; 1 is needed"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_sentence(
    tmp_path: Path, make: Callable[[Path], str], said: str
) -> None:
    reranker = CrossReranker(make(tmp_path))
    with pytest.raises(RerankerUnavailable, match=said):
        reranker.load().result(60)
    with pytest.raises(RerankerUnavailable, match=said):
        reranker.scores("a question", ["a passage"])
