"""Drafts change how many steps an answer takes, never the answer, and leave nothing unaccepted behind."""

from __future__ import annotations

import random

import pytest

from engine.drafting import PromptLookup
from engine.errors import IntegrityError
from engine.model import LoadedModel
from engine.runner import Row, Runner
from engine.sampler import SamplerState
from engine.types import SamplingParams, Scope, Segment
from kernels.api import get_backend
from tests.engine.real import RealEngine
from tests.engine.tiny import tiny_model

#: Few different tokens, so that even a random model says again what was said before.
VOCAB = 6
DOCUMENT = [5, 0, 2, 4, 4, 3, 1, 2] * 5


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model("llama", vocab_size=VOCAB, pad_token_id=None, bos_token_id=None)


def engine(model: LoadedModel, draft_rows: int, **options: object) -> RealEngine:
    made = RealEngine(model, max_draft_rows=draft_rows, **options)  # type: ignore[arg-type]
    made.core.runner = Runner(model, made.pool, get_backend("torch_cpu", "cpu"))
    return made


def prompt(question: list[int], account: str = "a") -> list[Segment]:
    return [
        Segment(DOCUMENT, Scope.collection("c"), "document", "d"),
        Segment(question, Scope.account(account), "question"),
    ]


def test_what_followed_the_same_words_is_proposed() -> None:
    lookup = PromptLookup()
    assert lookup.propose([1, 2, 3, 4, 5, 6, 9, 9, 1, 2], 3) == [3, 4, 5]
    assert lookup.propose([1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 8], 3) == [], "2 8 has not occurred before"


def test_the_longer_context_decides_and_the_latest_occurrence_counts() -> None:
    tokens = [1, 2, 3, 4, 50, 0, 9, 9, 3, 4, 60, 0, 1, 2, 3, 4]
    assert PromptLookup().propose(tokens, 1) == [50]
    assert PromptLookup().propose([*tokens[:-4], 7, 7, 3, 4], 1) == [60]


def test_right_drafts_grow_and_wrong_ones_pause() -> None:
    tokens = list(range(20)) * 2
    lookup = PromptLookup()
    assert len(lookup.propose(tokens, 16)) == 4
    lookup.learn(4, 4, len(tokens))
    assert len(lookup.propose(tokens, 16)) == 8
    lookup.learn(8, 0, len(tokens))
    assert lookup.propose(tokens, 16) == []
    later = tokens + tokens[:3]
    assert len(lookup.propose(later, 16)) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("n", [1, 3])
def test_answers_with_drafts_are_those_without(model: LoadedModel, temperature: float, n: int) -> None:
    plain, drafting = engine(model, 0), engine(model, 40)
    accepted = steps = saved = 0
    for i in range(6):
        ids = []
        for one in (plain, drafting):
            before = one.core.scheduler.counters.steps
            ids.append(
                one.run(prompt([i, 4, (i + 1) % VOCAB]), max_tokens=40, temperature=temperature, seed=i, n=n)
            )
            steps = one.core.scheduler.counters.steps - before
            saved += steps if one is plain else -steps
        for choice in range(n):
            assert drafting.tokens(ids[1], choice) == plain.tokens(ids[0], choice)
            assert len(drafting.tokens(ids[1], choice)) == 40
            receipt = drafting.done(ids[1], choice).receipt
            assert receipt.accepted_tokens <= receipt.drafted_tokens
            assert receipt.output_tokens == 40
            accepted += receipt.accepted_tokens
    assert accepted > 0, "no draft was ever right: nothing was tested"
    assert saved > 0, "accepted drafts saved no step"
    drafting.core.check_integrity()


def test_many_at_once_with_aborts_on_a_small_pool_equal_runs_alone(model: LoadedModel) -> None:
    rng = random.Random(3)
    crowd = engine(model, 30, blocks=40)
    questions = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))] for _ in range(14)]
    ids = [crowd.submit(prompt(q, f"u{i}"), max_tokens=24) for i, q in enumerate(questions)]
    dropped = set(ids[::5])
    for _ in range(4000):
        if not crowd.core.busy:
            break
        crowd.step()
        if dropped and rng.random() < 0.2:
            crowd.core.abort(dropped.pop())
    assert not crowd.core.busy
    kept = [i for i in range(len(ids)) if crowd.done(ids[i]).reason == "length"]
    assert len(kept) >= 10
    for i in kept:
        alone = engine(model, 0, sharing=False)
        expected = alone.tokens(alone.run(prompt(questions[i], f"u{i}"), max_tokens=24))
        assert crowd.tokens(ids[i]) == expected


def test_a_draft_never_takes_anybodys_place_and_is_never_published(model: LoadedModel) -> None:
    small = engine(model, 40, blocks=18)  # 43 prompt tokens and 27 generated fill it exactly: 69 slots of 72
    id = small.submit(prompt([1, 4, 2]), max_tokens=27)
    while small.core.busy:
        small.step()
        for sequence in small.core.scheduler.running:
            assert len(sequence.nodes) * 4 <= sequence.computed <= len(sequence)
    assert len(small.tokens(id)) == 27


def test_only_as_many_tokens_as_asked_for(model: LoadedModel) -> None:
    one = engine(model, 64)
    for most in (1, 2, 3, 5):
        assert len(one.tokens(one.run(prompt([1, 4, 2]), max_tokens=most))) == most


def test_rows_with_impossible_drafts_are_refused(model: LoadedModel) -> None:
    made = engine(model, 8)
    state = SamplerState(SamplingParams())
    with pytest.raises(IntegrityError, match="drafts"):
        made.core.runner.step([Row(1, [3, 4], 0, [0], 0, True, state, drafts=2)])
    with pytest.raises(IntegrityError, match="drafts"):
        made.core.runner.step([Row(1, [3, 4], 0, [0], 0, False, None, drafts=1)])
