"""Search in a large library, measured: `python -m bench.retrieval [--passages 100000] [--json] [--out FILE]`.

The library, its search and the embedding of the question are the ones that serve. Passages and their vectors
are synthetic (`bench/synthetic.py`) and are written straight into the tables that an upload would write:
embedding 100,000 passages takes hours on two cores and nothing of a search. They lie in ten collections, and
whoever asks may read nine of them, or one.

Beside it: the same questions against all vectors with numpy alone, and against bm25s alone; and the same
searches again while uploads with the real embedder go on, which are deleted afterwards. docs/figures.md says
what came out. Exit status 1 where the dense leg does not find what numpy finds; `MeasureError` for an upload
that fails, a search that finds nothing, a kept library with too few passages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.synthetic import Corpus, SyntheticDocument
from rag import lexical, records
from rag.embed import Courtesy, Embedder, SentenceEmbedder, Vectors
from rag.library import Library
from rag.parse.types import Parsed, Section
from rag.search import DEPTH
from rag.split import Passage
from rag.terms import query_terms, terms
from rag.types import Hit

COLLECTIONS = 10
_PASSAGES = 20
_WARM = 10
#: Until the first upload must have been taken in.
_UPLOAD_S = 60.0


class MeasureError(Exception):
    """What was to be measured did not happen; the message says what did."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the library; used again if it is there")
    parser.add_argument("--fill-only", action="store_true", help="make the library of --keep, measure later")
    options = parser.parse_args()
    if options.passages < COLLECTIONS * _PASSAGES:
        parser.error(f"--passages must be at least {COLLECTIONS * _PASSAGES}")
    if options.questions < 1:
        parser.error("--questions must be at least 1")

    def save(result: dict[str, Any]) -> None:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    embedder = SentenceEmbedder()
    embedder.load().result()
    if options.fill_only:
        if options.keep is None:
            parser.error("--fill-only needs --keep")
        library = Library.open(options.keep, embedder)
        fill(
            library, Corpus(dimension=embedder.dimension).documents(options.passages // _PASSAGES, _PASSAGES)
        )
        library.close(all=True)
        embedder.close()
        return
    try:
        with _folder(options.keep) as folder:
            result = measure(folder, embedder, options.passages, options.questions, note=save)
    finally:
        embedder.close()
    print(json.dumps(result, indent=1) if options.json else table(result))
    if not result["dense_equals_brute_force"]:
        sys.exit("The dense leg does not find what numpy finds.")


def measure(
    folder: Path,
    embedder: Embedder,
    passages: int,
    questions: int,
    *,
    upload_pause_s: float = 0.0,
    note: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Everything that docs/figures.md shows of search, as plain numbers: times in ms unless named "_s",
    memory in MiB. `note` is given what there is after each part. Raises `MeasureError`."""
    documents = passages // _PASSAGES
    corpus = Corpus(dimension=embedder.dimension)
    asked = corpus.questions(questions + _WARM, documents, _PASSAGES)
    before = _resident()
    started = time.perf_counter()
    library = Library.open(folder, embedder, courtesy=Courtesy())
    opened = time.perf_counter() - started
    try:
        written = fill(library, corpus.documents(documents, _PASSAGES))
        everything = [f"c{n}" for n in range(COLLECTIONS)]
        nine, one = frozenset(everything[1:]), frozenset(everything[:1])
        keys = collection_keys(library, everything)
        held = library.database.read_sync(
            lambda c: int(c.execute("SELECT COUNT(*) FROM passages").fetchone()[0])
        )
        if held < documents * _PASSAGES:
            raise MeasureError(f"The library holds {held:,} passages; {documents * _PASSAGES:,} are wanted.")
        vectors_s, vectors_mib = _cost(lambda: [library.indexes.vectors(key) for key in keys])
        words_s, words_mib = _cost(lambda: [library.indexes.words(key) for key in keys])
        for question in asked[:_WARM]:
            library.search(question, nine)
        asked = asked[_WARM:]
        searcher = library.searcher
        result: dict[str, Any] = {
            "conditions": conditions(),
            "passages": held,
            "collections": COLLECTIONS,
            "questions": questions,
            "write_s": written,
            "open_s": opened,
            "vector_index_s": vectors_s,
            "lexical_index_s": words_s,
            "database_mib": (folder / "coread.sqlite").stat().st_size / 2**20,
            "vector_index_mib": vectors_mib,
            "lexical_index_mib": words_mib,
            "resident_mib": _resident() - before,
        }
        vectors, owner = all_vectors(library)
        readable = np.isin(owner, collection_keys(library, nine))

        def brute(question: str) -> None:
            brute_force(vectors, readable, embedder.embed([question], query=True)[0])

        parts: dict[str, Callable[[], Any]] = {
            "search_nine": lambda: quantiles(timed(lambda q: found(library.search(q, nine)), asked)),
            "embed_question": lambda: quantiles(timed(lambda q: embedder.embed([q], query=True), asked)),
            "dense": lambda: quantiles(timed(lambda q: searcher.search(q, nine, legs=("dense",)), asked)),
            "lexical": lambda: quantiles(
                timed(lambda q: found(searcher.search(q, nine, legs=("lexical",))), asked)
            ),
            "search_one": lambda: quantiles(timed(lambda q: found(library.search(q, one)), asked)),
            "search_two_at_once": lambda: quantiles(
                concurrently(lambda q: found(library.search(q, nine)), asked, 2)
            ),
            "numpy_brute_force": lambda: quantiles(timed(brute, asked)),
            "dense_equals_brute_force": lambda: same_as_brute_force(
                library, embedder, vectors, owner, nine, asked[:50]
            ),
            "beside_uploads": lambda: beside_uploads(library, corpus, nine, asked, upload_pause_s),
            "bm25s": lambda: bm25s_alone(library, len(owner), readable, asked),
        }
        for name, part in parts.items():
            result[name] = part()
            note(result)
        return result
    finally:
        library.close(all=True)


def collection_keys(library: Library, ids: Iterable[str]) -> list[int]:
    """The integer keys of these collections. Raises `NotFound`."""
    return library.database.read_sync(lambda c: [records.collection_key(c, id) for id in ids])


def found(hits: list[Hit]) -> list[Hit]:
    """The hits of a search, of which there must be some: the words of the questions are the library's."""
    if not hits:
        raise MeasureError("A search found nothing.")
    return hits


def fill(library: Library, documents: Iterator[SyntheticDocument]) -> float:
    """Write documents into the collections in turn, a transaction each; seconds in the library, not in the
    generator. A library that is already filled is left as it is."""
    noted = library.data_dir.path / "write_s"
    if noted.exists():
        return float(noted.read_text(encoding="utf-8"))
    for n in range(COLLECTIONS):
        library.create_collection(f"Collection {n}", "bench", f"c{n}")
    keys = collection_keys(library, [f"c{n}" for n in range(COLLECTIONS)])
    spent = 0.0
    for document in documents:
        started = time.perf_counter()
        write_document(library, keys[document.number % COLLECTIONS], document)
        spent += time.perf_counter() - started
    noted.write_text(str(spent), encoding="utf-8")
    return spent


def write_document(library: Library, collection: int, document: SyntheticDocument) -> None:
    """What an upload writes once it is parsed and embedded."""
    text = "\n\n".join(document.passages)
    parsed = Parsed(text, document.title, "text", [Section(0, len(text), document.title, 0)])
    passages: list[Passage] = []
    start = 0
    for passage in document.passages:
        end = start + len(passage)
        passages.append(Passage(start, end, passage, 0, None, f"{document.title}\n{passage}", 0))
        start = end + 2
    prepared = [lexical.prepare(p.embedding_text) for p in passages]

    def write(connection: Any) -> None:
        cursor = connection.execute(
            "INSERT INTO documents(id, collection, name, version, title, format, characters, passages, "
            "created_by, created, updated) VALUES (?, ?, ?, 1, ?, 'text', ?, ?, 'bench', 0, 0)",
            (f"d-{document.number}", collection, document.title, document.title, len(text), len(passages)),
        )
        records.write_content(
            connection, cursor.lastrowid, collection, parsed, parsed.sections, passages,
            document.vectors, prepared,
        )  # fmt: skip

    library.database.write_sync(write)


def all_vectors(library: Library) -> tuple[Vectors, np.ndarray[Any, Any]]:
    """Every vector `[n, dimension]` in the order of ids, and its collection's key `[n]`."""
    rows = library.database.read_sync(
        lambda c: c.execute(
            "SELECT e.vector, p.collection FROM passages p JOIN embeddings e ON e.passage = p.id "
            "ORDER BY p.id"
        ).fetchall()
    )
    matrix = np.frombuffer(b"".join(r[0] for r in rows), dtype="<f4").reshape(len(rows), -1)
    return np.ascontiguousarray(matrix), np.array([r[1] for r in rows])


def brute_force(vectors: Vectors, readable: np.ndarray[Any, Any], query: Vectors) -> np.ndarray[Any, Any]:
    """Positions of the readable vectors nearest to the query, best first: one product, one selection."""
    similar = np.where(readable, vectors @ query, -np.inf)
    best = np.argpartition(-similar, DEPTH)[:DEPTH]
    return best[np.argsort(-similar[best])]


def same_as_brute_force(
    library: Library,
    embedder: Embedder,
    vectors: Vectors,
    owner: np.ndarray[Any, Any],
    readable: frozenset[str],
    questions: Sequence[str],
) -> bool:
    """Whether the dense leg alone finds what brute force finds: the same cosines, to rounding."""
    allowed = np.isin(owner, collection_keys(library, readable))
    for question in questions:
        query = embedder.embed([question], query=True)[0]
        best = vectors[brute_force(vectors, allowed, query)] @ query
        hits = library.searcher.search(question, readable, DEPTH, legs=("dense",))
        found = np.array([hit.cosine for hit in hits])
        if len(found) != len(best) or not np.allclose(found, best, atol=1e-5):
            return False
    return True


def bm25s_alone(
    library: Library, passages: int, readable: np.ndarray[Any, Any], questions: Sequence[str]
) -> dict[str, Any]:
    """bm25s over the same terms: its build time and the time of a filtered search, no embedding."""
    import bm25s

    rows = library.database.read_sync(
        lambda c: c.execute(
            "SELECT substr(t.text, p.start + 1, p.stop - p.start) FROM passages p "
            "JOIN texts t ON t.document = p.document ORDER BY p.id LIMIT ?",
            (passages,),
        ).fetchall()
    )
    started = time.perf_counter()
    index = bm25s.BM25(method="lucene", k1=lexical.K1, b=lexical.B)
    index.index([terms(row[0]) for row in rows], show_progress=False)
    built = time.perf_counter() - started
    mask = readable.astype(np.float32)

    def ask(question: str) -> None:
        words = [t for t in query_terms(question) if t in index.vocab_dict]
        index.retrieve([words], k=DEPTH, weight_mask=mask, show_progress=False)

    return {"build_s": built, **quantiles(timed(ask, questions))}


def beside_uploads(
    library: Library,
    corpus: Corpus,
    readable: frozenset[str],
    questions: Sequence[str],
    pause_s: float,
) -> dict[str, Any]:
    """The same searches while one upload follows another into a collection that is searched.

    What was uploaded is deleted in the end: a kept library stays as large as it was.
    """
    done, begun = threading.Event(), threading.Event()
    added: list[str] = []
    passages: list[int] = []

    def upload() -> None:
        try:
            present = sum(info.documents for info in library.collections(None))
            for document in corpus.documents(500, _PASSAGES, first=present):
                data = "\n\n".join([f"# {document.title}", *document.passages]).encode()
                added.append(library.add_document("c1", f"{document.number}.md", data, "bench"))
                begun.set()
                future = library.when_finished(added[-1])
                while not future.done():
                    if done.wait(0.05):
                        return
                info = future.result()
                if info.status != "ready":
                    raise MeasureError(f"An upload failed: {info.reason}, {info.message}")
                passages.append(info.passages)
                if done.wait(pause_s):
                    return
        finally:
            begun.set()

    with ThreadPoolExecutor(1, thread_name_prefix="bench-upload") as uploader:
        uploads = uploader.submit(upload)
        try:
            if not begun.wait(_UPLOAD_S):
                raise MeasureError(f"No upload was taken in within {_UPLOAD_S:g} s.")
            started = time.perf_counter()
            times = timed(lambda q: found(library.search(q, readable)), questions)
            spent = time.perf_counter() - started
            ended_early = uploads.done()
        finally:
            done.set()
    uploads.result()  # what went wrong there
    if ended_early:
        raise MeasureError(f"All {len(passages)} uploads ended before the searches did.")
    for id in added:
        library.delete_document(id)
    return {"documents": len(passages), "passages": sum(passages), "seconds": spent, **quantiles(times)}


def timed(work: Callable[[str], object], questions: Sequence[str]) -> list[float]:
    """Milliseconds of each call, one after another."""
    times: list[float] = []
    for question in questions:
        started = time.perf_counter()
        work(question)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def concurrently(work: Callable[[str], object], questions: Sequence[str], threads: int) -> list[float]:
    """Milliseconds of each call, asked by several threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        parts = [pool.submit(timed, work, questions[n::threads]) for n in range(threads)]
    return [t for part in parts for t in part.result()]


def quantiles(times: Sequence[float]) -> dict[str, float]:
    return {
        "p50": float(np.percentile(times, 50)),
        "p95": float(np.percentile(times, 95)),
        "max": float(max(times)),
    }


def conditions() -> dict[str, Any]:
    """Where and beside what it was measured."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    """The result for people, as a Markdown table."""
    lines = ["| | p50 | p95 | slowest |", "|---|---|---|---|"]
    for key, value in result.items():
        if isinstance(value, dict) and "p95" in value:
            lines.append(f"| {key} | {value['p50']:.1f} ms | {value['p95']:.1f} ms | {value['max']:.1f} ms |")
    lines.append("")
    for key, value in result.items():
        if isinstance(value, int | float):
            lines.append(f"{key}: {value:,.2f}" if isinstance(value, float) else f"{key}: {value:,}")
    return "\n".join(lines)


def _cost(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and MiB that stay."""
    held, started = _resident(), time.perf_counter()
    work()
    return time.perf_counter() - started, _resident() - held


def _resident() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="coread-retrieval-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
