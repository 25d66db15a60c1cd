"""`coread eval`: everything that is measured, in one dict. The keys are explained in docs/evaluation.md."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import data
from app.evaluation import layout
from app.evaluation.answers import accuracy, answer_all, citations, interval, share
from app.evaluation.bed import READABLE, EvaluationError, open_bed, open_library, sample_documents
from app.settings import Settings
from data import Question, Split
from rag.embed import SentenceEmbedder
from rag.evaluate import (
    LegReport,
    earlier_questions,
    evaluate_beir,
    fused_minus_better,
    means,
    read_beir,
    retrieval,
)
from rag.library import Library
from rag.order import CANDIDATES
from rag.types import Hit

Say = Callable[[str], None]
#: Hits that the replayed log chooses its sections from.
_DEPTH = CANDIDATES


def evaluate(
    settings: Settings,
    *,
    split: Split = "test",
    limit: int | None = None,
    answers: bool = True,
    folder: Path | None = None,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Measure retrieval, gate, layout and, with `answers`, the model on the sample questions.

    limit    so many questions at most, spread evenly over the split
    folder   keeps the seeded library between runs; None: a temporary one

    Raises `EvaluationError` where there is nothing to measure, and what the parts fail with.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="coread-eval-") as made:
            return evaluate(
                settings, split=split, limit=limit, answers=answers, folder=Path(made) / "data", say=say
            )
    questions = chosen(split, limit)
    result: dict[str, Any] = {
        "split": split,
        "questions": len(questions),
        "answerable": sum(bool(q.gold) for q in questions),
    }
    say("Reading the sample documents")
    with open_library(settings, folder) as library:
        say("Searching")
        reports = retrieval(library, questions)
        result["retrieval"] = _legs(reports)
        result["fused_minus_better"] = fused_minus_better({leg: r.each for leg, r in reports.items()})
        result.update(_gate(library, questions, settings.search_results))
        say("Replaying the question log")
        result.update(_layout(library, questions, settings))
    if answers:
        result.update(asyncio.run(_answers(settings, folder, questions, say)))
    return result


def evaluate_folder(settings: Settings, folder: Path) -> dict[str, Any]:
    """Retrieval on a folder in the BEIR layout. Raises `rag.errors.RagError` naming file and line."""
    beir = read_beir(folder)
    if not beir.qrels:
        raise EvaluationError(f"{folder} has no query with a relevant document.")
    embedder = SentenceEmbedder(settings.embedder)
    try:
        each = evaluate_beir(beir, embedder)
    finally:
        embedder.close()
    return {
        "beir": str(folder),
        "queries": len(beir.qrels),
        "documents": len(beir.corpus),
        "retrieval": means(each),
        "fused_minus_better": fused_minus_better(each),
    }


def chosen(split: Split, limit: int | None) -> list[Question]:
    """The split's questions, or `limit` of them spread evenly, so that every kind is there."""
    questions = data.questions(split)
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def _legs(reports: Mapping[str, LegReport]) -> dict[str, Any]:
    found = {}
    for leg, report in reports.items():
        found[leg] = {
            **{f"recall_at_{k}": value for k, value in report.recall_at.items()},
            "recall_at_5_interval": report.recall_at_5_interval,
            "ndcg_at_10": report.ndcg_at_10,
            "mrr": report.mrr,
        }
    return found


def _hits(library: Library, question: Question, count: int) -> list[Hit]:
    return library.search(question.question, READABLE, count, history=earlier_questions(question))


def _gate(library: Library, questions: Sequence[Question], results: int) -> dict[str, Any]:
    """Refusals by the gate alone; with answers, `accuracy` adds what the model declines."""
    passed = {
        q.id: library.answerability(
            q.question, _hits(library, q, results), READABLE, earlier_questions(q)
        ).answerable
        for q in questions
    }
    without = [not passed[q.id] for q in questions if not q.gold]
    with_answer = [not passed[q.id] for q in questions if q.gold]
    return {
        "gate_refusal_rate": share(without),
        "gate_refusal_rate_interval": interval(without),
        "gate_false_refusal_rate": share(with_answer),
        "gate_false_refusal_rate_interval": interval(with_answer),
        "refusal_rate": share(without),
        "false_refusal_rate": share(with_answer),
    }


def _layout(library: Library, questions: Sequence[Question], settings: Settings) -> dict[str, Any]:
    documents = sample_documents(library)
    # The embedder's word pieces stand for the model's tokens: no language model is needed for this.
    embedder = SentenceEmbedder(settings.embedder)
    try:
        words = layout.Words(embedder.measure.spans)
        found = {q.id: _hits(library, q, _DEPTH) for q in questions}
        log = layout.question_log(questions, found, documents, words)
        blocks = layout.pool_blocks(documents, words)
        return layout.compare(log, blocks=blocks, instructions=words(settings.instructions))
    finally:
        embedder.close()


async def _answers(
    settings: Settings, folder: Path, questions: Sequence[Question], say: Say
) -> dict[str, Any]:
    say("Loading the language model")
    async with open_bed(settings, folder) as bed:

        def progress(what: str) -> Callable[[int, int], None]:
            return lambda done, total: say(f"{what}: {done} of {total}")

        given = await answer_all(bed, bed.prompter, questions, progress=progress("Answering"))
        # Where search found the right section first, the prompt is the same and is not asked again.
        best = await answer_all(
            bed,
            bed.prompter,
            [q for q in questions if q.gold],
            ceiling=True,
            section_chars=settings.section_chars,
            progress=progress("Answering from the right section alone"),
        )
        return {
            **accuracy(given),
            **citations(bed, given),
            "answer_ceiling": share(one.right for one in best),
            "answer_ceiling_interval": interval(one.right for one in best),
            "model": bed.engine.status().model,
            "dtype": bed.engine.status().dtype,
        }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    found = []
    for leg, row in result["retrieval"].items():
        figures = "  ".join(f"{key} {value:.3f}" for key, value in row.items() if isinstance(value, float))
        found.append(f"{leg:8} {figures}")
    for measure, row in result.get("fused_minus_better", {}).items():
        low, high = row["interval"]
        found.append(
            f"fused less {row['better']}, {measure}: {row['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
        )
    for key, value in result.items():
        if isinstance(value, float):
            found.append(f"{key}: {value:.3f}")
        elif key == "tokens_computed":
            figures = ", ".join(f"{policy} {count:,}" for policy, count in value.items())
            found.append(f"tokens computed by layout: {figures}")
        elif key == "layout_recall":
            figures = ", ".join(
                f"{policy} {share:.3f}" for policy, share in value.items() if share is not None
            )
            found.append(f"recall of the prompts by layout: {figures}")
        elif isinstance(value, int | str):
            found.append(f"{key}: {value}")
    return found
