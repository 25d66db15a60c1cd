"""Sampling in batch against a plain one-row, one-token-at-a-time oracle."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import Sampler, SamplerState
from engine.types import SamplingParams

SAMPLER = Sampler()


def _candidates(logits: list[float], params: SamplingParams, seen: set[int]) -> dict[int, float]:
    """What may be drawn, with its probability: the filters one after the other, in plain Python."""
    values = list(logits)
    for token in seen:
        value = values[token]
        penalty = params.repetition_penalty
        values[token] = value / penalty if value > 0 else value * penalty
    best = max(values)
    weights = {i: math.exp((v - best) / params.temperature) for i, v in enumerate(values)}
    order = sorted(weights, key=lambda i: -weights[i])
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[i] for i in order)
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if kept and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def _draw(
    logits: torch.Tensor, params: SamplingParams, count: int, prompt: tuple[int, ...] = ()
) -> Counter[int]:
    states = [SamplerState(params, choice, prompt) for choice in range(count)]
    result = SAMPLER.sample(logits.expand(count, -1).contiguous(), states)
    return Counter(token for token in result.tokens if token is not None)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=2, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 17, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    penalty=st.sampled_from([1.0, 1.5, 0.7]),
)
def test_only_candidates_of_the_oracle_are_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=5
    )
    # Float32 logits, so that the oracle sees the same numbers.
    row = torch.tensor(logits, dtype=torch.float32)
    seen = {0, len(logits) - 1} if penalty != 1.0 else set()
    want = _candidates([float(v) for v in row], params, seen)
    drawn = _draw(row[None], params, 64, tuple(seen))
    # A candidate right on a threshold may fall on either side by rounding.
    lowest = min(want.values())
    values = _candidates(
        [float(v) for v in row], SamplingParams(temperature, repetition_penalty=penalty), seen
    )
    for token in drawn:
        assert token in want or values[token] == pytest.approx(lowest, rel=1e-3) or _tied(values, want, token)


def _tied(values: dict[int, float], want: dict[int, float], token: int) -> bool:
    return any(values[token] == pytest.approx(values[kept], rel=1e-4) for kept in want)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=5, seed=1),
        SamplingParams(temperature=1.3, top_p=0.8, seed=1),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3, seed=1),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 30) * 2
    seen = (1, 2, 3) if params.repetition_penalty != 1.0 else ()
    want = _candidates([float(v) for v in logits[0]], params, set(seen))
    count = 4000
    drawn = _draw(logits, params, count, seen)
    assert set(drawn) <= set(want)
    for token, probability in want.items():
        spread = 5 * math.sqrt(probability * (1 - probability) / count)
        assert abs(drawn[token] / count - probability) <= spread + 1e-3


def test_greedy_is_the_first_best_whatever_the_other_values_are() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [9.0, 3.0, 1.0, 3.0]])
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, seed=3)
    assert SAMPLER.sample(logits, [SamplerState(params), SamplerState(params)]).tokens == [1, 0]


def test_top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() -> None:
    """A flat distribution over more tokens than are looked at first: all within top-p must be reachable."""
    logits = torch.zeros(1, 2000)
    drawn = _draw(logits, SamplingParams(temperature=1.0, top_p=0.9, seed=2), 3000)
    assert len(drawn) > 1200
    # Beside rows that need no second look, with its log-probabilities.
    flat = SamplingParams(temperature=1.0, top_p=0.9, seed=2, logprobs=1)
    steep = SamplingParams(temperature=1e-3, top_p=0.5, seed=2, logprobs=3)
    both = torch.cat([torch.linspace(0, 9, 2000)[None], logits])
    result = SAMPLER.sample(both, [SamplerState(steep), SamplerState(flat)])
    assert result.tokens[0] == 1999
    entry = result.logprobs[1]
    assert entry is not None
    assert entry.token == result.tokens[1]
    assert entry.logprob == pytest.approx(-math.log(2000), abs=1e-6)
    assert len(entry.top) == 1


def test_choices_of_one_seed_differ_and_are_reproducible() -> None:
    logits = torch.zeros(3, 1000)
    params = SamplingParams(temperature=1.0, seed=11)

    def run() -> list[list[int | None]]:
        states = [SamplerState(params, choice) for choice in range(3)]
        return [SAMPLER.sample(logits, states).tokens for _ in range(6)]

    first = run()
    assert first == run()
    assert len({tuple(column) for column in zip(*first, strict=True)}) == 3
    unseeded = [SamplerState(SamplingParams(temperature=1.0)) for _ in range(2)]
    draws = [SAMPLER.sample(logits[:2], unseeded).tokens for _ in range(6)]
    assert len({tuple(column) for column in zip(*draws, strict=True)}) == 2


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(6)), seed=st.integers(0, 1000))
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(order: list[int], seed: int) -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=seed),
        SamplingParams(temperature=0.8, top_k=3, seed=seed),
        SamplingParams(temperature=1.2, top_p=0.7, seed=seed),
        SamplingParams(temperature=1.0, top_k=400, top_p=0.99, seed=seed),
        SamplingParams(temperature=1.0, min_p=0.2, repetition_penalty=1.2, seed=seed),
    ]
    torch.manual_seed(seed)
    logits = torch.randn(6, 500)
    alone = [
        SAMPLER.sample(logits[i : i + 1], [SamplerState(p, i, (i,))]).tokens[0] for i, p in enumerate(kinds)
    ]
    states = [SamplerState(kinds[i], i, (i,)) for i in order]
    assert SAMPLER.sample(logits[order], states).tokens == [alone[i] for i in order]


def test_rows_that_are_not_finite_are_reported_and_draw_nothing() -> None:
    logits = torch.zeros(5, 8)
    logits[0, 3] = float("nan")
    logits[1, 3] = float("inf")
    logits[2, :] = float("-inf")
    logits[3, 3] = float("-inf")  # one impossible token is legitimate
    params = SamplingParams(temperature=1.0, seed=4, logprobs=2)
    states = [SamplerState(params, choice) for choice in range(5)]
    result = SAMPLER.sample(logits, states)
    assert result.finite == [False, False, False, True, True]
    assert [token is None for token in result.tokens] == [True, True, True, False, False]
    assert [entry is None for entry in result.logprobs] == [True, True, True, False, False]
    assert states[0].uniform() == SamplerState(params, 0).uniform()
    assert SAMPLER.sample(logits[4:], [SamplerState(params, 4)]).tokens == result.tokens[4:]


def test_repetition_penalty_counts_the_prompt_and_the_answer() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    state = SamplerState(SamplingParams(temperature=0.0, repetition_penalty=2.0), 0, prompt=(0,))
    assert [SAMPLER.sample(logits, [state]).tokens[0] for _ in range(4)] == [1, 2, 0, 0]
    assert logits.tolist() == [[2.0, pytest.approx(1.9), pytest.approx(1.8), -1.0]]


def test_logprobs_are_the_models_own() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 50)
    states = [
        SamplerState(
            SamplingParams(temperature=0.5, top_k=2, repetition_penalty=1.8, seed=1, logprobs=4), 0, (3,)
        ),
        SamplerState(SamplingParams(temperature=0.0, logprobs=0)),
    ]
    result = SAMPLER.sample(logits, states)
    want = logits.log_softmax(-1)
    for row in range(2):
        entry = result.logprobs[row]
        assert entry is not None
        assert entry.token == result.tokens[row]
        assert entry.logprob == pytest.approx(float(want[row, entry.token]), abs=1e-5)
    first, second = result.logprobs
    assert first is not None
    assert second is not None
    assert [token for token, _ in first.top] == want[0].topk(4).indices.tolist()
    assert second.top == ()


def test_nothing_to_sample_and_a_wrong_number_of_rows() -> None:
    assert SAMPLER.sample(torch.zeros(0, 8), []).tokens == []
    with pytest.raises(ValueError, match="rows"):
        SAMPLER.sample(torch.zeros(2, 8), [SamplerState(SamplingParams())])


def test_work_is_enqueued_and_comes_back_in_one_table() -> None:
    """No value of a tensor is looked at before `result`: on a GPU each look would wait for the device."""
    looks: list[str] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = getattr(func, "__name__", str(func))
            if name in ("tolist", "item", "__bool__", "nonzero", "__int__", "__float__", "cpu", "numpy"):
                looks.append(name)
            # Indexing by a list or a mask copies from the host and waits, or counts and waits.
            if name in ("__getitem__", "__setitem__") and isinstance(args[1], list | torch.Tensor):
                looks.append(name)
            return func(*args, **(kwargs or {}))

    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_k=3, seed=2, logprobs=2),
        SamplingParams(temperature=1.2, top_p=0.7, seed=3),
        SamplingParams(temperature=1.0, min_p=0.2, repetition_penalty=1.2, seed=4),
    ]
    logits = torch.randn(len(kinds), 600)
    states = [SamplerState(p, i, (i,)) for i, p in enumerate(kinds)]
    for state in states:
        state.seen_mask(600, torch.device("cpu"))  # made once in a choice's life
    with Watched():
        draft = SAMPLER.launch(logits, states)
    assert looks == []
    result = draft.result(draft.packed.tolist())
    again = [SamplerState(p, i, (i,)) for i, p in enumerate(kinds)]
    assert result == SAMPLER.sample(logits, again)


def test_a_draft_that_is_thrown_away_draws_the_same_again() -> None:
    params = SamplingParams(temperature=1.0, seed=9)
    state, other = SamplerState(params), SamplerState(params)
    logits = torch.randn(1, 300)
    SAMPLER.launch(logits, [state])  # the step failed after that: its result was never taken
    for _ in range(3):
        assert SAMPLER.sample(logits, [state]).tokens == SAMPLER.sample(logits, [other]).tokens
    usable = SAMPLER.launch(logits, [state], usable=torch.tensor([False]))
    assert usable.result(usable.packed.tolist()).tokens == [None]
    assert state.uniform() == other.uniform()


def test_half_precision_logits() -> None:
    logits = torch.zeros(1, 8, dtype=torch.bfloat16)
    logits[0, 5] = 20.0
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=1)):
        assert SAMPLER.sample(logits, [SamplerState(params)]).tokens == [5]
