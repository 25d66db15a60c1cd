"""What the order of the documents in a prompt costs: a question log replayed through the real memory.

Pool, prefix tree, scheduler and eviction are the engine's own; only the model is missing. Documents are
popular by Zipf's law, people talk about one for a few questions, and the pool holds a quarter of the library.
A prompt holds the sections found for its question, and in a conversation those of the turn before as well.
Every policy gets the same questions with the same sections, so that recall is equal; only the order differs:

    relevance   best section first, as most systems do; what is kept from before comes last
    canonical   always in the same order, whoever asks
    reuse       what stood in front stays, then what is in memory (`rag.order.reuse_aware`): Coread's own

Counted are the prompt tokens that had to be computed, without the instructions.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from data import Question
from engine.memory import KVMemory
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence as Running
from engine.types import Scope, Segment
from rag.evaluate import holds
from rag.order import canonical, reuse_aware
from rag.types import DocumentText, Hit

Policy = Literal["relevance", "canonical", "reuse"]
POLICIES: tuple[Policy, ...] = ("relevance", "canonical", "reuse")
QUESTIONS, PEOPLE = 1_000, 50
#: Passages in a prompt, each with its section: with one alone there would be nothing to order.
PASSAGES = 3
BLOCK = 16
#: An answer is so many times this id, which no word has: only its own conversation meets it again.
ANSWER, ANSWER_TOKENS = 0, 32
#: Most questions of a conversation; with one, nothing of an earlier turn is kept.
LONGEST = 1
_SEED = 20_240_501
_ZIPF = 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a document, as a prompt holds it."""

    collection_id: str
    document_id: str
    part: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One line of the log: the question's own sections, best first, then those kept from the turn before.

    conversation   number of the conversation, whose lines stand in the log in their order
    recalled       None for a question that has no gold passage
    """

    person: int
    conversation: int
    question: tuple[int, ...]
    parts: tuple[Part, ...]
    recalled: bool | None


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy cost. Tokens are of prompts, without the instructions.

    recall   share of the answerable questions with a gold passage among the passages of the prompt
    """

    policy: str
    questions: int
    prompt_tokens: int
    computed_tokens: int
    recall: float
    evictions: int


class Words:
    """Texts as ids: the same word pieces, the same ids. No tokenizer of a language model is needed."""

    def __init__(self, spans: Callable[[str], Sequence[tuple[int, int]]]) -> None:
        self._spans = spans
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        return tuple(self._ids.setdefault(text[a:b], len(self._ids) + 1) for a, b in self._spans(text))


def question_log(
    questions: Sequence[Question],
    found: Mapping[str, Sequence[Hit]],
    documents: Mapping[str, DocumentText],
    words: Words,
    *,
    longest: int = LONGEST,
    passages: int = PASSAGES,
    count: int = QUESTIONS,
    people: int = PEOPLE,
) -> list[Asked]:
    """`count` questions by `people` people, each of whom talks about a document (by Zipf's law over a
    shuffled list) for 1 to `longest` questions and then about another. Same arguments, same log.

    found   question id -> hits, best first
    """
    chance = random.Random(_SEED)
    about: dict[str, list[Question]] = {}
    for question in questions:
        if found[question.id]:
            about.setdefault(found[question.id][0].document_id, []).append(question)
    if not about:
        raise ValueError("a log needs at least one question for which something was found")
    names = sorted(about)
    chance.shuffle(names)
    weights = list(accumulate(1.0 / (rank + 1) ** _ZIPF for rank in range(len(names))))
    section = _Sections(documents, words)
    left: dict[int, list[Question]] = {}
    talk: dict[int, int] = {}
    kept: dict[int, list[Part]] = {}
    log: list[Asked] = []
    for number in range(count):
        person = chance.randrange(people)
        if not left.get(person):
            topic = list(about[chance.choices(names, cum_weights=weights)[0]])
            chance.shuffle(topic)
            left[person] = topic[: chance.randint(1, longest)]
            talk[person], kept[person] = number, []
        question = left[person].pop()
        own: list[Part] = []
        used: list[Hit] = []
        for hit in found[question.id]:
            if section(hit) not in own and len(own) < passages:
                own.append(section(hit))
                used.append(hit)
        right = any(holds(hit, gold) for hit in used for gold in question.gold) if question.gold else None
        parts = own + [part for part in kept[person] if part not in own]
        log.append(Asked(person, talk[person], words(question.question), tuple(parts), right))
        kept[person] = own
    return log


class _Sections:
    """A hit's whole section, tokenised once."""

    def __init__(self, documents: Mapping[str, DocumentText], words: Words) -> None:
        self._documents, self._words = documents, words
        self._made: dict[tuple[str, int], Part] = {}

    def __call__(self, hit: Hit) -> Part:
        key = (hit.document_id, hit.section)
        if key not in self._made:
            document = self._documents[hit.document_id]
            text = next(s.text for s in document.sections if s.index == hit.section)
            tokens = self._words(f"# {document.title}\n\n{text.strip()}\n\n")
            self._made[key] = Part(hit.collection_id, hit.document_id, hit.section, tokens)
        return self._made[key]


def pool_blocks(documents: Mapping[str, DocumentText], words: Words, share: float = 0.25) -> int:
    """Blocks that hold this share of all documents' tokens."""
    return round(share * sum(len(words(document.text)) for document in documents.values()) / BLOCK)


def replay(
    log: Sequence[Asked], policy: Policy, *, blocks: int, instructions: Sequence[int], running: int = 8
) -> Replay:
    """Play the log through a fresh memory of `blocks` blocks, `running` questions at a time.

    A question waits until its conversation's question before it is answered.
    """
    memory = KVMemory(blocks, BLOCK)
    scheduler = Scheduler(memory, Limits(max_batch_tokens=512, max_running=running))
    lead = Segment(tuple(instructions), Scope.public(), "instructions")
    history: dict[int, tuple[int, ...]] = {}
    settled: dict[int, list[Part]] = {}
    answering: dict[Running, Asked] = {}
    prompt = computed = 0
    waiting = deque(log)
    while waiting or answering:
        while waiting and len(answering) < running:
            asked = waiting[0]
            if any(other.conversation == asked.conversation for other in answering.values()):
                break
            waiting.popleft()
            order = _ordered(memory, lead, asked.parts, settled.get(asked.conversation, []), policy)
            settled[asked.conversation] = order
            sequence = _sequence(memory, lead, asked, order, history.get(asked.conversation, ()))
            scheduler.add(sequence)
            answering[sequence] = asked
        step = scheduler.schedule(float(len(waiting)))
        if step.failed:
            raise step.failed[0][1]
        for sequence, reused in step.admitted:
            if not sequence.generated:  # not one that was preempted: it was counted when it first ran
                prompt += sequence.prompt_len - len(lead.tokens)
            computed += max(0, sequence.prompt_len - max(reused, len(lead.tokens)))
        memory.finish_copies()
        for chunk in step.chunks:
            scheduler.accept(chunk)
            if chunk.sample:
                sequence = chunk.sequence
                sequence.append(ANSWER, memory.scopes)
                if sequence.generated >= sequence.max_tokens:
                    scheduler.remove(sequence)
                    asked = answering.pop(sequence)
                    history[asked.conversation] = (
                        *history.get(asked.conversation, ()), *asked.question, *[ANSWER] * ANSWER_TOKENS
                    )  # fmt: skip
    judged = [asked.recalled for asked in log if asked.recalled is not None]
    recall = sum(judged) / len(judged) if judged else 0.0
    return Replay(policy, len(log), prompt, computed, recall, memory.counters.evictions)


def compare(
    log: Sequence[Asked], *, blocks: int, instructions: Sequence[int], running: int = 8
) -> dict[str, Any]:
    """Each policy's replay, and the ratio to relevance order."""
    played = {p: replay(log, p, blocks=blocks, instructions=instructions, running=running) for p in POLICIES}
    base = played["relevance"].computed_tokens
    return {
        "tokens_computed": {p: r.computed_tokens for p, r in played.items()},
        "tokens_computed_ratio": {p: r.computed_tokens / base if base else None for p, r in played.items()},
        "layout_prompt_tokens": played["relevance"].prompt_tokens,
        "layout_recall": played["relevance"].recall,
        "layout_pool_blocks": blocks,
        "layout_questions": len(log),
    }


def _segments(parts: Sequence[Part]) -> list[Segment]:
    return [Segment(p.tokens, Scope.collection(p.collection_id), "document", p.document_id) for p in parts]


def _ordered(
    memory: KVMemory, lead: Segment, parts: Sequence[Part], settled: Sequence[Part], policy: Policy
) -> list[Part]:
    match policy:
        case "relevance":
            return list(parts)
        case "canonical":
            return canonical(parts)
        case "reuse":
            front = [part for part in settled if part in parts]
            new = [part for part in parts if part not in front]
            return front + reuse_aware(
                new, lambda chain: memory.resident_tokens([lead, *_segments([*front, *chain])])
            )


def _sequence(
    memory: KVMemory, lead: Segment, asked: Asked, order: Sequence[Part], history: Sequence[int]
) -> Running:
    account = Scope.account(f"person-{asked.person}")
    segments = [lead, *_segments(order), Segment((*history, *asked.question), account, "question")]
    return Running(
        segments,
        memory.scopes,
        output_scope=account,
        principal=account.id,
        conversation=f"conversation-{asked.conversation}",
        max_tokens=ANSWER_TOKENS,
    )
