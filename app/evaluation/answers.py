"""Answers through the product's own path: search, prompt layout, engine, attribution; many at once, greedy.

The ceiling asks the same questions with the right section alone in the prompt, so that what is lost to
search can be told from what is lost to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.evaluation.bed import READABLE, Bed, EvaluationError
from app.evaluation.match import declines, facts_stand_in, holds_answer
from app.prompting import Built, Prompter, Span
from data import GoldSpan, Question
from engine.types import Done, Failed, GenerationRequest, SamplingParams, Scope
from rag.cite import attribute
from rag.metrics import bootstrap
from rag.prompt import Turn
from rag.sample import document_id

#: Answers to the sample questions are short; a model that goes on does not become right by it.
ANSWER_TOKENS = 48
CONCURRENT = 12


@dataclass(frozen=True, slots=True)
class Given:
    """What a question got. `gated`: refused before the model was asked; `declined`: in either way."""

    question: Question
    text: str
    gated: bool
    built: Built | None
    prompt_tokens: int = 0

    @property
    def declined(self) -> bool:
        return self.gated or declines(self.text)

    @property
    def right(self) -> bool:
        """An answerable question's answer holds a gold answer; an unanswerable one is declined."""
        if not self.question.gold:
            return self.declined
        return not self.gated and holds_answer(self.text, self.question.answers)


Progress = Callable[[int, int], None]


async def answer_all(
    bed: Bed,
    prompter: Prompter,
    questions: Sequence[Question],
    *,
    ceiling: bool = False,
    section_chars: int = 2_500,
    answer_tokens: int = ANSWER_TOKENS,
    progress: Progress | None = None,
) -> list[Given]:
    """Ask every question, `CONCURRENT` at a time, each as a person of its own, and keep their order."""
    places = asyncio.Semaphore(CONCURRENT)
    done = 0

    async def one(number: int, question: Question) -> Given:
        nonlocal done
        async with places:
            spans = None
            if ceiling:
                spans = [enclosing(bed, question.gold[0], section_chars)]
            given = await _ask(bed, prompter, number, question, spans, answer_tokens)
            done += 1
            if progress is not None:
                progress(done, len(questions))
            return given

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(n, question)) for n, question in enumerate(questions)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the command tells one sentence, and all fail for one reason
    return [task.result() for task in tasks]


async def _ask(
    bed: Bed,
    prompter: Prompter,
    number: int,
    question: Question,
    spans: Sequence[Span] | None,
    answer_tokens: int,
) -> Given:
    account = f"evaluation-{number}"
    built = await prompter.build(
        readable=READABLE,
        path=(),
        question=question.question,
        account=account,
        spans=spans,
        answer_tokens=answer_tokens,
        earlier=[Turn(turn.role, turn.content) for turn in question.history],
    )
    if built.refused:
        return Given(question, "", True, None)
    prompt = tuple(token for segment in built.segments for token in segment.tokens)
    if (prompt, answer_tokens) in bed.answered:
        return Given(question, bed.answered[prompt, answer_tokens], False, built, len(prompt))
    generation = await bed.engine.submit(
        GenerationRequest(
            segments=built.segments,
            sampling=SamplingParams(max_tokens=answer_tokens),
            principal=account,
            conversation=account,
            output_scope=Scope.account(account),
        )
    )
    try:
        async for event in generation:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                bed.answered[prompt, answer_tokens] = event.text
                return Given(question, event.text, False, built, len(prompt))
    finally:
        generation.abort()
        bed.engine.close_conversation(account)
    raise EvaluationError(f"The answer to {question.id} ended without a result.")


def enclosing(bed: Bed, gold: GoldSpan, section_chars: int) -> Span:
    """The section around a gold passage where that is short enough, else the paragraphs that hold it."""
    document = bed.documents[document_id(gold.document)]
    section = next(s for s in document.sections if s.start <= gold.start < s.end)
    start, stop = section.start, max(section.end, gold.end)
    if stop - start > section_chars:
        start = (
            document.text.rfind("\n\n", start, gold.start) + 2
            if "\n\n" in document.text[start : gold.start]
            else start
        )
        stop = document.text.find("\n\n", gold.end)
        stop = len(document.text) if stop < 0 else stop
    return Span(document.id, document.version, document.collection_id, start, stop)


# -- figures -------------------------------------------------------------------------------------------------


def share(values: Iterable[bool]) -> float | None:
    """The share that is true; None of nothing."""
    counted = [float(value) for value in values]
    return sum(counted) / len(counted) if counted else None


def interval(values: Iterable[bool]) -> tuple[float, float] | None:
    """A 95 % bootstrap interval of `share`."""
    counted = [float(value) for value in values]
    return bootstrap(counted) if counted else None


def accuracy(given: Sequence[Given]) -> dict[str, Any]:
    """Shares over the questions that were asked; the keys are explained in docs/evaluation.md."""
    with_answer = [g for g in given if g.question.gold]
    without = [g for g in given if not g.question.gold]
    return {
        "answer_accuracy": share(g.right for g in given),
        "answer_accuracy_interval": interval(g.right for g in given),
        "answer_accuracy_answerable": share(g.right for g in with_answer),
        "refusal_rate": share(g.declined for g in without),
        "false_refusal_rate": share(g.declined and not g.right for g in with_answer),
        "gate_refusal_rate": share(g.gated for g in without),
        "gate_false_refusal_rate": share(g.gated for g in with_answer),
        "prompt_tokens_mean": _mean([g.prompt_tokens for g in given if not g.gated]),
    }


def citations(bed: Bed, given: Sequence[Given]) -> dict[str, Any]:
    """How far "verified" can be trusted, sentence by sentence.

    citation_precision      share of the verified sentences of which every number, date and name stands in the
                            cited section, its headings and the document's title, or in a gold passage: found
                            again by whole words, not by the rule that gave the verdict
    citation_right_source   share of those verified sentences of answerable questions whose shown source
                            overlaps a gold passage
    """
    verified = literal = sentences = sourced = right_source = 0
    for one in given:
        if one.built is None or one.declined:
            continue
        golds = [_gold_text(bed, gold) for gold in one.question.gold]
        for sentence in attribute(one.text, one.built.placed):
            sentences += 1
            if sentence.verdict != "verified" or sentence.source is None:
                continue
            verified += 1
            placed = one.built.placed[sentence.source]
            text = one.text[sentence.start : sentence.end]
            headings = (heading for _, heading in placed.headings)
            literal += facts_stand_in(text, ["\n".join([*headings, placed.text]), *golds])
            if one.question.gold:
                sourced += 1
                start = placed.span.start + sentence.source_start
                stop = placed.span.start + sentence.source_end
                right_source += any(
                    document_id(gold.document) == placed.span.document_id
                    and start < gold.end
                    and gold.start < stop
                    for gold in one.question.gold
                )
    return {
        "citation_precision": literal / verified if verified else None,
        "citation_verified_sentences": verified,
        "citation_sentences": sentences,
        "citation_right_source": right_source / sourced if sourced else None,
    }


def _gold_text(bed: Bed, gold: GoldSpan) -> str:
    return bed.documents[document_id(gold.document)].text[gold.start : gold.end]


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
