"""The recorded trace is what its description says, and its texts are shared exactly where they should be."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench.policies import RESERVATION
from bench.trace import (
    CHATS,
    DOCUMENTS,
    FIRST_ID,
    LAST_ID,
    LONGEST,
    PATH,
    Text,
    TraceError,
    generate,
    load,
    save,
)


def test_file_is_what_the_generator_makes() -> None:
    assert load() == generate()


def test_saved_trace_is_read_back(tmp_path: Path) -> None:
    trace = generate(seed=7, chats=20, documents=3)
    save(trace, tmp_path / "small.jsonl")
    assert load(tmp_path / "small.jsonl") == trace


def test_another_seed_makes_another_trace() -> None:
    assert generate(seed=2, chats=20) != generate(seed=1, chats=20)


def test_assumptions_hold() -> None:
    trace = load()
    assert len(trace.chats) == CHATS
    assert len(trace.documents) == DOCUMENTS
    assert trace.mean_final_length() >= 2_000
    assert max(map(trace.final_length, trace.chats)) <= LONGEST < RESERVATION
    assert all(a.at <= b.at for a, b in pairwise(trace.chats))
    readers = [sum(chat.document == d for chat in trace.chats) for d in range(DOCUMENTS)]
    assert min(readers) >= 2
    assert readers[0] == max(readers)
    assert PATH.stat().st_size < 1_000_000


def test_longest_prompt_fits_with_either_answer() -> None:
    trace = load()
    for chat in trace.chats:
        for index, turn in enumerate(chat.turns):
            assert trace.prompt_length(chat, index) + max(turn.answer, turn.again) <= RESERVATION


def test_prompts_have_the_lengths_of_the_trace() -> None:
    trace = load()
    text = Text(trace)
    chat = next(c for c in trace.chats if len(c.turns) > 2 and any(t.document is not None for t in c.turns))
    history: list[int] = []
    for index, turn in enumerate(chat.turns):
        question = text.question(chat, index)
        segments = text.segments(chat, index, history, question)
        tokens = [token for segment in segments for token in segment.tokens]
        assert len(tokens) == trace.prompt_length(chat, index)
        assert all(FIRST_ID <= token < LAST_ID for token in tokens)
        history += [*question, *([5] * (turn.again or turn.answer))]
        history[-1] = FIRST_ID
        history = [max(token, FIRST_ID) for token in history]


def test_documents_are_the_same_for_all_and_questions_are_not() -> None:
    trace = load()
    text = Text(trace)
    first, second = [chat for chat in trace.chats if chat.document == 0][:2]
    a, b = (text.segments(c, 0, [], text.question(c, 0)) for c in (first, second))
    assert a[:2] == b[:2]
    assert not a[1].scope.private
    assert a[2].scope.private
    assert a[2].scope != b[2].scope
    assert a[2].tokens != b[2].tokens


def test_a_sample_stays_within_its_documents() -> None:
    sample = load().sample(10, documents=2, max_turns=3)
    assert len(sample.chats) == 10
    assert [chat.number for chat in sample.chats] == list(range(10))
    for chat in sample.chats:
        assert len(chat.turns) <= 3
        assert set(chat.documents(len(chat.turns) - 1)) <= {0, 1}


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="missing"):
        load(tmp_path / "missing.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n[1]\n")
    with pytest.raises(TraceError, match=r"bad\.jsonl"):
        load(tmp_path / "bad.jsonl")
    with pytest.raises(TraceError, match="not 5000"):
        load().sample(5_000, documents=2, max_turns=3)
