"""A recorded trace of chats over shared documents, and the tokens that its lengths stand for.

`python -m bench.trace` writes `bench/traces/chats.jsonl` anew; the same seed gives the same file. The file
holds lengths only; `Text` turns them into token ids, always the same ones.

What the trace assumes, and why:

    960 chats, each of a user of its own, none of whom may read another's text
    32 documents of one collection, log-normal around 1,350 tokens (400 to 4,800): reports and manuals
    which document a chat is about: Zipf with exponent 0.9, as popularity among many readers mostly is
    instructions of 180 tokens in front of everything, the same for all
    1 + geometric turns, 4 in the mean, at most 10; a question has about 45 tokens, an answer about 115
    every eighth chat turns to a second document later on; it then stands with the first one, in front of
    the history, the more popular one first (the order does not depend on the chat)
    6 % of the answers are asked for once more (the same prompt, another answer, which replaces the first)
    chats arrive at 4 a second, and people think for 25 s in the mean before they ask again
    a chat ends before it would exceed 8,000 tokens, so that a reservation of 8,192 suffices for each
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine.types import Scope, Segment

PATH = Path(__file__).parent / "traces" / "chats.jsonl"
COLLECTION = "reports"
#: Token ids of the texts: inside every vocabulary the trace is played with, outside its special ids.
FIRST_ID, LAST_ID = 100, 32_000

CHATS = 960
DOCUMENTS = 32
INSTRUCTIONS = 180
LONGEST = 8_000


class TraceError(Exception):
    """The trace file is missing or malformed; the message names it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. Lengths in tokens, `think` in seconds since the answer before.

    again      length of a second answer that was asked for in place of the first; 0: none was
    document   a document that joins the chat with this question; None: the same ones as before
    """

    think: float
    question: int
    answer: int
    again: int = 0
    document: int | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """`at`: seconds after the start of the trace when the first question is asked."""

    number: int
    at: float
    document: int
    turns: tuple[Turn, ...]

    def documents(self, turn: int) -> list[int]:
        """The documents in the prompt of that turn, in the order that all chats keep."""
        joined = [t.document for t in self.turns[: turn + 1] if t.document is not None]
        return sorted({self.document, *joined})


@dataclass(frozen=True, slots=True)
class Trace:
    """`documents[i]` is the length of document `i` in tokens; 0 is the most popular one."""

    seed: int
    instructions: int
    documents: tuple[int, ...]
    chats: tuple[Chat, ...]

    def prompt_length(self, chat: Chat, turn: int) -> int:
        """Tokens of the prompt of that turn."""
        front = self.instructions + sum(self.documents[d] for d in chat.documents(turn))
        history = sum(t.question + (t.again or t.answer) for t in chat.turns[:turn])
        return front + history + chat.turns[turn].question

    def final_length(self, chat: Chat) -> int:
        """Tokens of the whole chat at its end, the last answer included."""
        last = chat.turns[-1]
        return self.prompt_length(chat, len(chat.turns) - 1) + (last.again or last.answer)

    def requests(self) -> int:
        """Answers asked for, second ones included."""
        return sum(1 + (turn.again > 0) for chat in self.chats for turn in chat.turns)

    def mean_final_length(self) -> float:
        """Mean over the chats."""
        return sum(map(self.final_length, self.chats)) / len(self.chats)

    def sample(self, chats: int, *, documents: int, max_turns: int) -> Trace:
        """The first `chats` chats about one of the `documents` most popular documents and no other,
        each cut off after `max_turns` turns. Raises `TraceError` where there are fewer."""
        chosen: list[Chat] = []
        for chat in self.chats:
            cut = Chat(len(chosen), chat.at, chat.document, chat.turns[:max_turns])
            if max(cut.documents(max_turns)) < documents:
                chosen.append(cut)
            if len(chosen) == chats:
                return Trace(self.seed, self.instructions, self.documents[:documents], tuple(chosen))
        raise TraceError(
            f"The trace has {len(chosen)} chats about its first {documents} documents, not {chats}."
        )


class Text:
    """The token ids that a trace's lengths stand for, and the segments of its prompts."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._document = lru_cache(maxsize=None)(self._document_segment)
        self._instructions = Segment(
            self._ids("instructions", trace.instructions), Scope.public(), "instructions"
        )

    def _ids(self, name: str, length: int) -> tuple[int, ...]:
        generator = random.Random(f"coread trace {self.trace.seed}: {name}")
        return tuple(generator.choices(range(FIRST_ID, LAST_ID), k=length))

    def _document_segment(self, number: int) -> Segment:
        ids = self._ids(f"document {number}", self.trace.documents[number])
        return Segment(ids, Scope.collection(COLLECTION), "document", f"document-{number}")

    def question(self, chat: Chat, turn: int) -> tuple[int, ...]:
        """Token ids of one question."""
        return self._ids(f"question {chat.number}/{turn}", chat.turns[turn].question)

    def segments(
        self, chat: Chat, turn: int, history: Sequence[int], question: Sequence[int]
    ) -> list[Segment]:
        """The prompt: instructions, documents, what was said before, the question."""
        account = Scope.account(f"user-{chat.number}")
        out = [self._instructions, *(self._document(d) for d in chat.documents(turn))]
        if history:
            out.append(Segment(tuple(history), account, "history"))
        return [*out, Segment(tuple(question), account, "question")]


def _clipped(generator: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(high, max(low, round(median * generator.lognormvariate(0.0, sigma))))


def generate(seed: int = 1, chats: int = CHATS, documents: int = DOCUMENTS) -> Trace:
    """Make a trace by the assumptions at the top of this file."""
    generator = random.Random(seed)
    lengths = tuple(_clipped(generator, 1_350, 0.45, 400, 4_800) for _ in range(documents))
    popularity = [1 / (rank + 1) ** 0.9 for rank in range(documents)]
    made: list[Chat] = []
    at = 0.0
    for number in range(chats):
        at += generator.expovariate(4.0)
        [document] = generator.choices(range(documents), popularity)
        count = 1
        while count < 10 and generator.random() < 0.76:
            count += 1
        second = generator.randrange(1, count) if count > 1 and generator.random() < 0.16 else None
        turns: list[Turn] = []
        for index in range(count):
            joins = generator.choices(range(documents), popularity)[0] if index == second else document
            turns.append(
                Turn(
                    think=round(generator.expovariate(1 / 25), 1) if index else 0.0,
                    question=_clipped(generator, 38, 0.6, 8, 200),
                    answer=_clipped(generator, 98, 0.6, 16, 400),
                    again=_clipped(generator, 98, 0.6, 16, 400) if generator.random() < 0.06 else 0,
                    document=joins if joins != document else None,
                )
            )
        made.append(
            _fitting(
                Trace(seed, INSTRUCTIONS, lengths, ()), Chat(number, round(at, 2), document, tuple(turns))
            )
        )
    return Trace(seed, INSTRUCTIONS, lengths, tuple(made))


def _fitting(trace: Trace, chat: Chat) -> Chat:
    """The chat without the turns that would exceed `LONGEST`."""
    for end in range(len(chat.turns), 1, -1):
        cut = Chat(chat.number, chat.at, chat.document, chat.turns[:end])
        longest = max(t.answer for t in cut.turns)
        if max(trace.final_length(cut), trace.prompt_length(cut, end - 1) + longest) <= LONGEST:
            return cut
    return Chat(chat.number, chat.at, chat.document, chat.turns[:1])


def save(trace: Trace, path: Path = PATH) -> None:
    """One line for the documents, then one line a chat: `[at, document, [think, question, answer, again,
    joining document or -1], ...]`."""
    lines = [
        json.dumps({"seed": trace.seed, "instructions": trace.instructions, "documents": trace.documents})
    ]
    for chat in trace.chats:
        turns = [
            [t.think, t.question, t.answer, t.again, -1 if t.document is None else t.document]
            for t in chat.turns
        ]
        lines.append(json.dumps([chat.at, chat.document, *turns], separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(path: Path = PATH) -> Trace:
    """Read a saved trace. Raises `TraceError`."""
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        chats = tuple(
            Chat(
                number,
                at,
                document,
                tuple(Turn(k, q, a, again, None if joins < 0 else joins) for k, q, a, again, joins in turns),
            )
            for number, (at, document, *turns) in enumerate(rows)
        )
        return Trace(head["seed"], head["instructions"], tuple(head["documents"]), chats)
    except FileNotFoundError as error:
        raise TraceError(f"There is no trace at {path}; `python -m bench.trace` writes one.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace: {error}") from error


def main() -> None:
    """Write the trace and say what is in it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    trace = generate(arguments.seed)
    save(trace)
    turns = sum(len(chat.turns) for chat in trace.chats)
    print(
        f"{len(trace.chats)} chats, {turns} turns, {trace.requests()} answers, "
        f"mean final length {trace.mean_final_length():,.0f} tokens, "
        f"documents {sum(trace.documents):,} tokens in all"
    )


if __name__ == "__main__":
    main()
