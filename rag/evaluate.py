"""How well passages are found, leg by leg: the sample questions, or a folder in the BEIR layout."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rag import lexical
from rag.embed import Embedder
from rag.errors import RagError
from rag.fuse import WEIGHTS, fuse
from rag.library import Library
from rag.metrics import bootstrap, ndcg, paired, recall, reciprocal_rank, success
from rag.parse.types import Limits, Parsed, TextBuilder
from rag.sample import COLLECTION, document_id
from rag.split import split_passages, split_sections
from rag.types import Hit
from rag.vectors import VectorIndex

LEGS: dict[str, tuple[str, ...]] = {
    "dense": ("dense",),
    "lexical": ("lexical",),
    "fused": ("dense", "lexical"),
}


class Gold(Protocol):
    """A span of a document that holds the answer; `document` is its file name."""

    @property
    def document(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class HistoryTurn(Protocol):
    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


class Question(Protocol):
    """A question of `data.questions`."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def history(self) -> Sequence[HistoryTurn]: ...
    @property
    def gold(self) -> Sequence[Gold]: ...


@dataclass(frozen=True, slots=True)
class LegReport:
    """Means over questions. `recall_at[k]`: a gold passage is among the first k; the interval is of 95 %.
    `each`: "recall_at_5" and "ndcg_at_10" of each question, in the order asked."""

    questions: int
    recall_at: dict[int, float]
    ndcg_at_10: float
    mrr: float
    recall_at_5_interval: tuple[float, float]
    missed: tuple[str, ...]
    each: Mapping[str, tuple[float, ...]]


def holds(hit: Hit, gold: Gold, collection: str = COLLECTION) -> bool:
    """True where a passage holds at least half of a gold span."""
    if hit.document_id != document_id(gold.document, collection):
        return False
    common = min(hit.end, gold.end) - max(hit.start, gold.start)
    return common * 2 >= gold.end - gold.start


def earlier_questions(question: Question) -> list[str]:
    return [turn.content for turn in question.history if turn.role == "user"]


def retrieval(
    library: Library,
    questions: Sequence[Question],
    *,
    collection: str = COLLECTION,
    kinds: Sequence[str] = (),
) -> dict[str, LegReport]:
    """Leg -> report over the answerable questions (of these kinds, if given)."""
    chosen = [q for q in questions if q.gold and (not kinds or q.kind in kinds)]
    if not chosen:
        raise RagError("There is no answerable question among those given.")
    reports: dict[str, LegReport] = {}
    for leg, searches in LEGS.items():
        found: list[list[bool]] = []
        gains: list[float] = []
        for question in chosen:
            hits = library.searcher.search(
                question.question, {collection}, 10, history=earlier_questions(question), legs=searches
            )
            right = [any(holds(hit, gold, collection) for gold in question.gold) for hit in hits]
            found.append(right)
            # Any of several gold spans answers the question, so one relevant item is the ideal.
            first = right.index(True) if True in right else None
            gains.append(0.0 if first is None else ndcg(list(range(10)), {first: 1.0}, 10))
        at = {
            k: float(np.mean([success(list(range(10)), {i for i, r in enumerate(f) if r}, k) for f in found]))
            for k in (1, 3, 5, 10)
        }
        reports[leg] = LegReport(
            len(chosen),
            at,
            float(np.mean(gains)),
            float(np.mean([reciprocal_rank(f, {True}) for f in found])),
            bootstrap([float(any(f[:5])) for f in found]),
            tuple(q.id for q, f in zip(chosen, found, strict=True) if not any(f[:5])),
            {"recall_at_5": tuple(float(any(f[:5])) for f in found), "ndcg_at_10": tuple(gains)},
        )
    return reports


def fused_minus_better(each: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """Measure -> how much fusion is better than the better of the two legs, with a paired bootstrap interval.

    each   leg -> measure -> one value a question, the same questions in the same order for every leg
    """
    found: dict[str, dict[str, Any]] = {}
    for measure, fused in each["fused"].items():
        better = max((leg for leg in each if leg != "fused"), key=lambda leg: sum(each[leg][measure]))
        difference, low, high = paired(fused, each[better][measure])
        found[measure] = {"better": better, "difference": difference, "interval": (low, high)}
    return found


# BEIR


@dataclass(frozen=True, slots=True)
class Beir:
    """A public retrieval set: documents (title, text), queries, and gains by query and document."""

    corpus: dict[str, tuple[str, str]]
    queries: dict[str, str]
    qrels: dict[str, dict[str, float]]


def read_beir(folder: Path, split: str = "test") -> Beir:
    """Read `corpus.jsonl`, `queries.jsonl` and `qrels/<split>.tsv`. Raises RagError naming file and line."""
    corpus = {
        str(r["_id"]): (str(r.get("title", "")), str(r["text"])) for r in _jsonl(folder / "corpus.jsonl")
    }
    queries = {str(r["_id"]): str(r["text"]) for r in _jsonl(folder / "queries.jsonl")}
    qrels: dict[str, dict[str, float]] = {}
    path = folder / "qrels" / f"{split}.tsv"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.reader(file, delimiter="\t"), 1):
                if number == 1 and row and row[0] == "query-id":
                    continue
                try:
                    qrels.setdefault(row[0], {})[row[1]] = float(row[2])
                except (IndexError, ValueError) as error:
                    raise RagError(f"{path} line {number} is not 'query, document, gain'.") from error
    except OSError as error:
        raise RagError(f"{path} can't be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise RagError(f"{path} is no table of tab-separated UTF-8 text: {error}.") from error
    judged = {q: d for q, d in qrels.items() if q in queries and any(g > 0 for g in d.values())}
    return Beir(corpus, queries, judged)


def evaluate_beir(
    beir: Beir, embedder: Embedder, *, depth: int = 200
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Leg -> recall_at_5, recall_at_100, ndcg_at_10, mrr of each judged query; a document ranks by its best
    passage. `means` makes one number of each."""
    texts: list[str] = []
    owner: list[str] = []
    for id, (title, text) in beir.corpus.items():
        if not text.strip():
            continue
        parsed = _parsed(title, text)
        for passage in split_passages(parsed, split_sections(parsed), embedder.measure, embedder.max_tokens):
            texts.append(passage.embedding_text)
            owner.append(id)
    index = VectorIndex.build(embedder.dimension, range(len(texts)), embedder.embed(texts))
    counted = lexical.LexicalIndex.build(range(len(texts)), [lexical.prepare(text) for text in texts])
    runs: dict[str, dict[str, list[str]]] = {leg: {} for leg in LEGS}
    for id in beir.qrels:
        query = beir.queries[id]
        dense = [i for i, _ in index.search(embedder.embed([query], query=True)[0], depth)]
        words = [i for i, _ in lexical.search([counted], query, depth)]
        fused = [f.id for f in fuse({"dense": dense, "lexical": words}, WEIGHTS)]
        for leg, ranked in (("dense", dense), ("lexical", words), ("fused", fused)):
            runs[leg][id] = list(dict.fromkeys(owner[i] for i in ranked))
    return {leg: _measures(run, beir.qrels) for leg, run in runs.items()}


def means(each: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Leg -> measure -> mean over the queries."""
    return {leg: {m: float(np.mean(values)) for m, values in row.items()} for leg, row in each.items()}


def _measures(
    run: Mapping[str, list[str]], qrels: Mapping[str, Mapping[str, float]]
) -> dict[str, tuple[float, ...]]:
    relevant = {q: {d for d, g in gains.items() if g > 0} for q, gains in qrels.items()}
    return {
        "recall_at_5": tuple(recall(run[q], relevant[q], 5) for q in qrels),
        "recall_at_100": tuple(recall(run[q], relevant[q], 100) for q in qrels),
        "ndcg_at_10": tuple(ndcg(run[q], dict(gains), 10) for q, gains in qrels.items()),
        "mrr": tuple(reciprocal_rank(run[q], relevant[q]) for q in qrels),
    }


def _parsed(title: str, text: str) -> Parsed:
    builder = TextBuilder(Limits())
    builder.add(text)
    return builder.finish(title or " ", "text")


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict) or "_id" not in record or "text" not in record:
                    raise RagError(f"{path} line {number} has no _id or no text.")
                yield record
    except OSError as error:
        raise RagError(f"{path} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RagError(f"{path} is not UTF-8 text: {error}.") from error
    except ValueError as error:
        raise RagError(f"{path} line {number} is not JSON: {error}.") from error
