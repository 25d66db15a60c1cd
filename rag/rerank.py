"""A cross-encoder that orders the fused candidates anew, where somebody has set one (none by default).

It reads question and passage together, which finds what neither leg of the search sees, and costs one pass of
a model for each candidate and search: on two cores some tens of milliseconds each with a small one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rag.errors import RerankerUnavailable
from rag.types import Hit

#: Candidates that are read again: more cost as much again and seldom change the first five.
CANDIDATES = 20
#: The leg's name in `Hit.ranks`.
LEG = "rerank"


class Reranker(Protocol):
    """What a search needs of it."""

    @property
    def name(self) -> str: ...
    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """How well each text answers the query; only their order means something."""
        ...


def rerank(reranker: Reranker, query: str, hits: Sequence[Hit]) -> list[Hit]:
    """The hits in the reranker's order, its rank beside the others; equal scores keep the fused order."""
    scores = reranker.scores(query, [f"{hit.section_title or hit.title}\n{hit.text}" for hit in hits])
    order = sorted(range(len(hits)), key=lambda i: (-scores[i], i))
    return [replace(hits[i], ranks={**hits[i].ranks, LEG: rank}) for rank, i in enumerate(order, 1)]


class CrossReranker:
    """A sentence-transformers CrossEncoder: a local folder or a hub id ("owner/name").

    The model is loaded in the background by `load`; `scores` waits for it, and is called from any thread.
    """

    def __init__(self, model: str, *, device: str = "cpu") -> None:
        self.name = model
        self._device = device
        self._lock = threading.Lock()  # a tokenizer can't be used by two threads at once
        self._loaded: Future[Any] = Future()
        self._thread: threading.Thread | None = None

    def load(self) -> Future[Any]:
        """Begin to load, if nobody has; done when it is ready. Its exception is `RerankerUnavailable`."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="rag-reranker", daemon=True)
                self._thread.start()
        return self._loaded

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        from torch.nn import Identity

        model = self.load().result()
        with self._lock:
            # Raw logits: a sigmoid makes the bad ones, or the good ones, all the same number.
            found = model.predict(
                [(query, text) for text in texts], activation_fn=Identity(), show_progress_bar=False
            )
        return [float(score) for score in found]

    def _load(self) -> None:
        try:
            self._loaded.set_result(_load(self.name, self._device))
        except RerankerUnavailable as error:
            self._loaded.set_exception(error)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            self._loaded.set_exception(
                RerankerUnavailable(f"The reranker {self.name!r} can't be loaded: {reason}")
            )


def _load(name: str, device: str) -> Any:
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise RerankerUnavailable(f"The reranker {name!r} is neither a folder nor a hub id (owner/name).")
    source = str(folder) if folder.is_dir() else name
    from sentence_transformers import CrossEncoder
    from transformers import AutoConfig

    kinds = list(AutoConfig.from_pretrained(source).architectures or [])
    # Any other model would get a head of random numbers, and order passages by them without a word.
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise RerankerUnavailable(
            f"The reranker {name!r} is no cross-encoder: it is {', '.join(kinds) or 'of no known kind'}, "
            "and a sequence classification model with one label is needed."
        )
    model = CrossEncoder(source, device=device)
    if model.num_labels != 1:
        raise RerankerUnavailable(
            f"The reranker {name!r} gives {model.num_labels} scores to a passage; 1 is needed."
        )
    return model
