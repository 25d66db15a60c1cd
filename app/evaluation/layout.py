"""What the passages of a prompt and their order cost: a question log replayed through the real memory.

Pool, prefix tree, scheduler and eviction are the engine's own; only the model is missing. Documents are
popular by Zipf's law, people talk about one for a few questions, and the pool holds a quarter of the library.
Every prompt holds the same number of sections, whatever the policy:

    relevance   the first sections found, best first, as most systems do
    canonical   the same sections, always in the same order, whoever asks
    reordered   the same sections, what is in memory first
    reuse       Coread's own, by the code that lays out prompts (`rag.order`): sections that score nearly as
                well as the best, or that one of the searches ranks first, must stand there; the other places
                go to those found that need the least computing

The first three hold the same sections, so their recall is equal; that of the fourth is measured beside it.
In a conversation the turn before keeps its place where that is possible. Counted are the prompt tokens that
had to be computed, without the instructions.
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
from rag.order import CANDIDATES, canonical, needed, reuse_aware, staying
from rag.sample import COLLECTION, document_id
from rag.types import DocumentText, Hit

Policy = Literal["relevance", "canonical", "reordered", "reuse"]
POLICIES: tuple[Policy, ...] = ("relevance", "canonical", "reordered", "reuse")
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
    """One line of the log.

    conversation   number of the conversation, whose lines stand in the log in their order
    found          sections that search found for the question, best first
    scores         their fused scores
    leading        which of them one of the searches ranks first
    gold           which of them hold a gold passage; None for a question that has none
    """

    person: int
    conversation: int
    question: tuple[int, ...]
    found: tuple[Part, ...]
    scores: tuple[float, ...]
    leading: tuple[bool, ...]
    gold: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy cost. Tokens are of prompts, without the instructions.

    recalled   one entry an answerable question of the log: a gold passage stood in its prompt
    sections   sections that stood in all prompts together
    """

    policy: str
    questions: int
    prompt_tokens: int
    computed_tokens: int
    recalled: tuple[bool, ...]
    sections: int
    evictions: int

    @property
    def recall(self) -> float | None:
        return sum(self.recalled) / len(self.recalled) if self.recalled else None


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
    count: int = QUESTIONS,
    people: int = PEOPLE,
    seed: int = _SEED,
) -> list[Asked]:
    """`count` questions by `people` people, each of whom talks about a document (by Zipf's law over a
    shuffled list) for 1 to `longest` questions and then about another. Same arguments, same log.

    found   question id -> hits, best first; the sections of the first `CANDIDATES` are kept
    """
    chance = random.Random(seed)
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
    log: list[Asked] = []
    for number in range(count):
        person = chance.randrange(people)
        if not left.get(person):
            topic = list(about[chance.choices(names, cum_weights=weights)[0]])
            chance.shuffle(topic)
            left[person] = topic[: chance.randint(1, longest)]
            talk[person] = number
        question = left[person].pop()
        best: dict[Part, Hit] = {}
        for hit in found[question.id][:CANDIDATES]:
            best.setdefault(section(hit), hit)
        gold = frozenset(n for n, part in enumerate(best) if section.holds(part, question))
        log.append(
            Asked(
                person, talk[person], words(question.question), tuple(best),
                tuple(hit.score for hit in best.values()),
                tuple(1 in hit.ranks.values() for hit in best.values()), gold if question.gold else None,
            )
        )  # fmt: skip
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

    def holds(self, part: Part, question: Question) -> bool:
        """True where the section holds at least half of one of the question's gold passages."""
        section = next(s for s in self._documents[part.document_id].sections if s.index == part.part)
        return any(
            document_id(gold.document, COLLECTION) == part.document_id
            and 2 * (min(section.end, gold.end) - max(section.start, gold.start)) >= gold.end - gold.start
            for gold in question.gold
        )


def pool_blocks(documents: Mapping[str, DocumentText], words: Words, share: float = 0.25) -> int:
    """Blocks that hold this share of all documents' tokens."""
    return round(share * sum(len(words(document.text)) for document in documents.values()) / BLOCK)


def replay(
    log: Sequence[Asked],
    policy: Policy,
    *,
    blocks: int,
    instructions: Sequence[int],
    running: int = 8,
    places: int = PASSAGES,
) -> Replay:
    """Play the log through a fresh memory of `blocks` blocks, `running` questions at a time, `places`
    sections a prompt.

    A question waits until its conversation's question before it is answered.
    """
    memory = KVMemory(blocks, BLOCK)
    scheduler = Scheduler(memory, Limits(max_batch_tokens=512, max_running=running))
    lead = Segment(tuple(instructions), Scope.public(), "instructions")
    history: dict[int, tuple[int, ...]] = {}
    settled: dict[int, list[Part]] = {}
    answering: dict[Running, Asked] = {}
    prompt = computed = sections = 0
    recalled: list[bool] = []
    waiting = deque(log)
    while waiting or answering:
        while waiting and len(answering) < running:
            asked = waiting[0]
            if any(other.conversation == asked.conversation for other in answering.values()):
                break
            waiting.popleft()
            order = _chosen(memory, lead, asked, settled.get(asked.conversation, []), policy, places)
            settled[asked.conversation] = order
            sections += len(order)
            if asked.gold is not None:
                recalled.append(any(asked.found[n] in order for n in asked.gold))
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
    return Replay(policy, len(log), prompt, computed, tuple(recalled), sections, memory.counters.evictions)


def compare(
    log: Sequence[Asked],
    *,
    blocks: int,
    instructions: Sequence[int],
    running: int = 8,
    places: int = PASSAGES,
) -> dict[str, Any]:
    """Each policy's replay, and the ratio to relevance order."""
    played = {
        p: replay(log, p, blocks=blocks, instructions=instructions, running=running, places=places)
        for p in POLICIES
    }
    base = played["relevance"].computed_tokens
    return {
        "tokens_computed": {p: r.computed_tokens for p, r in played.items()},
        "tokens_computed_ratio": {p: r.computed_tokens / base if base else None for p, r in played.items()},
        "layout_recall": {p: r.recall for p, r in played.items()},
        "layout_prompt_tokens": {p: r.prompt_tokens for p, r in played.items()},
        "layout_sections": {p: r.sections for p, r in played.items()},
        "layout_pool_blocks": blocks,
        "layout_questions": len(log),
    }


def _segments(parts: Sequence[Part]) -> list[Segment]:
    return [Segment(p.tokens, Scope.collection(p.collection_id), "document", p.document_id) for p in parts]


def _chosen(
    memory: KVMemory, lead: Segment, asked: Asked, settled: Sequence[Part], policy: Policy, places: int
) -> list[Part]:
    must, spare = list(asked.found[:places]), list[Part]()
    match policy:
        case "relevance":
            return must
        case "canonical":
            return canonical(must)
        case "reuse":
            must = [asked.found[i] for i in needed(asked.scores, asked.leading, places)]
            spare = [part for part in asked.found if part not in must]
    front = staying(settled, must, spare, places)
    new = [part for part in must if part not in front]
    if not new:
        return front
    return front + reuse_aware(
        new,
        lambda chain: memory.resident_tokens([lead, *_segments([*front, *chain])]),
        lambda part: len(part.tokens),
        spare=[part for part in spare if part not in front],
        places=places - len(front),
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
