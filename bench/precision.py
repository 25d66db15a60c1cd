"""What the engine's precisions cost, against the model itself: `python -m bench.precision [--json]`.

    reference   transformers: float32, its own eager attention, its own cache, one question at a time
    engine      paged, all questions of a group at once, greedy: float32, bfloat16, and what is chosen at load

Each question is asked over the sample document that answers it. An answer is *the same* if every token is.
Of an answer that is not, the margin tells whether it had to be: the distance of the reference's two best
logits where the two part. Beside it the mean negative log-likelihood of the fixed text of `engine.accuracy`.
How many of the sample questions are answered rightly is what `coread eval` tells, at any precision
(COREAD_DTYPE).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import data
from app.prompting import engine_segment
from engine.accuracy import likelihood, token_ids
from engine.loading import load
from engine.packaged import load_gguf, packaged_gguf
from engine.service import EngineService
from engine.types import Done, EngineConfig, Failed, GenerationRequest, SamplingParams, Scope, Segment
from kernels.api import get_backend
from rag.prompt import PromptDocument, PromptLayout

INSTRUCTIONS = "Answer the question from the document. Be brief."
#: Float32 in another order of summation moves logits by some 1e-5 of their size: below this nobody is wrong.
NEAR_TIE = 1e-3
#: Questions that the engine is asked at once.
GROUP = 8
POOL_BYTES = 1 << 30
#: Tokens of the fixed text that the likelihood is of.
TEXT_TOKENS = 1_000
CONFIGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "extra": {"decoder": "transformers"}},
    "chosen": {},
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt, the model's own greedy answer, and how far its two best logits lie apart at each token."""

    question: str
    segments: tuple[Segment, ...]
    answer: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Precision:
    """One precision. `margins`: of the answers that differ, where they part, in logits of the reference."""

    name: str
    decoder: str
    nats_a_token: float
    cost: float
    questions: int
    same: int
    same_tokens: float
    margins: tuple[float, ...]

    @property
    def explained(self) -> bool:
        """Whether every difference is a near-tie."""
        return all(margin < NEAR_TIE for margin in self.margins)


def parting(answer: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first place at which two answers differ (one that ends there included), None where they do not."""
    for place, (one, other) in enumerate(zip(answer, reference, strict=False)):
        if one != other:
            return place
    return None if len(answer) == len(reference) else min(len(answer), len(reference))


def compare(
    name: str, decoder: str, nats: tuple[float, float], answers: Sequence[Sequence[int]],
    references: Sequence[Reference],
) -> Precision:  # fmt: skip
    """`nats`: a token of the fixed text costs this much here, and in the reference."""
    places = [parting(a, r.answer) for a, r in zip(answers, references, strict=True)]
    kept = [len(r.answer) if p is None else p for p, r in zip(places, references, strict=True)]
    margins = [
        r.margins[min(p, len(r.margins) - 1)]
        for p, r in zip(places, references, strict=True)
        if p is not None
    ]
    return Precision(
        name, decoder, nats[0], nats[0] / nats[1] - 1, len(references), places.count(None),
        sum(kept) / sum(len(r.answer) for r in references), tuple(sorted(margins)),
    )  # fmt: skip


def questions(count: int) -> list[data.Question]:
    """`count` of the answerable sample questions, evenly over all of them."""
    found = [q for q in data.questions("test") if q.gold and not q.history]
    return [found[i * len(found) // count] for i in range(min(count, len(found)))]


def references(count: int, tokens: int) -> tuple[list[Reference], float]:
    """The model's own answers, and what a token of the fixed text costs it in nats."""
    model, tokenizer = load_gguf(packaged_gguf(), torch.float32, None)
    model.set_attn_implementation("eager")
    layout = PromptLayout(tokenizer)
    documents = {document.name: document for document in data.documents()}
    made: list[Reference] = []
    with torch.inference_mode():
        text = torch.tensor([token_ids(tokenizer, TEXT_TOKENS)])
        table = model(input_ids=text, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        nats = -float(table.gather(1, text[0, 1:, None]).mean())
        for number, question in enumerate(questions(count)):
            document = documents[question.gold[0].document]
            prompt = layout.build(
                instructions=INSTRUCTIONS,
                documents=[PromptDocument(document.name, "sample", document.title, document.text)],
                history=[], question=question.question, account=f"reader-{number}", budget_tokens=7_000,
            )  # fmt: skip
            segments = tuple(engine_segment(segment) for segment in prompt.segments)
            ids = torch.tensor([[t for segment in segments for t in segment.tokens]])
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                temperature=None, top_p=None, top_k=None, use_cache=True, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            best = torch.cat(out.logits).float().topk(2).values
            answer = tuple(int(t) for t in out.sequences[0, ids.shape[1] :])
            made.append(
                Reference(
                    question.question, segments, answer, tuple(float(m) for m in best[:, 0] - best[:, 1])
                )
            )
    return made, nats


async def _answers(service: EngineService, asked: Sequence[Reference], tokens: int) -> list[tuple[int, ...]]:
    async def one(number: int, reference: Reference) -> tuple[int, ...]:
        generation = await service.submit(
            GenerationRequest(
                reference.segments, SamplingParams(max_tokens=tokens), principal=f"reader-{number}",
                conversation=f"c-{number}", output_scope=Scope.account(f"reader-{number}"),
            )
        )  # fmt: skip
        async for event in generation:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                return event.tokens
        raise RuntimeError("the answer ended without an end")

    given: list[tuple[int, ...]] = []
    for first in range(0, len(asked), GROUP):
        group = list(enumerate(asked))[first : first + GROUP]
        given += await asyncio.gather(*(one(number, reference) for number, reference in group))
    return given


def _ended(answer: tuple[int, ...], end: frozenset[int]) -> tuple[int, ...]:
    """Without the token that ends it: transformers keeps it and the engine does not."""
    return answer[:-1] if answer and answer[-1] in end else answer


def measure(name: str, asked: Sequence[Reference], nats: float, tokens: int) -> Precision:
    """The engine at one precision, against the references.

    Raises `ValueError` where two starts chose different decoders: the columns would be of two.
    """
    config = EngineConfig(model="packaged", device="cpu", kv_pool_bytes=POOL_BYTES, **CONFIGS[name])
    service = EngineService(config)
    service.start()
    service.wait_ready_sync()
    try:
        end = frozenset(int(t) for t in [service.tokenizer.eos_token_id] if t is not None)
        answers = asyncio.run(_answers(service, asked, tokens))
        served = service.status().detail
    finally:
        service.stop()
    alone = load(replace(config, kv_pool_bytes=64 << 20))
    if alone.model.description.rstrip(".") not in served:
        raise ValueError(f"one start chose {served!r}, the next {alone.model.description!r}")
    backend = get_backend(alone.backend_name, "cpu")
    mine = likelihood(alone.model, backend, 16, token_ids(alone.model.tokenizer, TEXT_TOKENS))
    ended = [
        Reference(r.question, r.segments, _ended(r.answer, end), r.margins) for r in asked
    ]  # fmt: skip
    return compare(name, alone.model.decoder.name, (mine, nats), [_ended(a, end) for a in answers], ended)


def table(found: Sequence[Precision]) -> str:
    """Markdown."""
    head = (
        "| precision | decoder | nats a token | cost | same answers | tokens before they part | "
        "median margin there |\n|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(
        f"| {p.name} | {p.decoder} | {p.nats_a_token:.4f} | {p.cost:+.2%} | {p.same} of {p.questions} | "
        f"{p.same_tokens:.1%} | {f'{statistics.median(p.margins):.3f}' if p.margins else 'none'} |"
        for p in found
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit status 1 where float32 gives another answer than the model itself."""
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description="What precision costs.")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="at most, of an answer")
    parser.add_argument("--only", action="append", choices=list(CONFIGS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if min(given.questions, given.tokens) < 1:
        parser.error("--questions and --tokens must be 1 or more")
    asked, nats = references(given.questions, given.tokens)
    found = [measure(name, asked, nats, given.tokens) for name in given.only or CONFIGS]
    if given.json:
        print(json.dumps({"reference_nats": nats, "precisions": [asdict(p) for p in found]}, indent=1))
    else:
        print(f"The model itself (transformers, float32): {nats:.4f} nats a token.\n\n{table(found)}")
    return 0 if all(p.explained for p in found if p.name == "float32") else 1


if __name__ == "__main__":
    raise SystemExit(main())
