"""The step against transformers' own eager generation, in float32, token for token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import IntegrityError
from engine.runner import Row
from engine.sampler import SamplerState
from engine.types import Copy, SamplingParams
from kernels.api import get_backend
from tests.engine.tiny import FAMILIES, Paged, eager_greedy, eager_logits, some_tokens, tiny_model

BACKENDS = ("reference", "torch_cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_eager_generation(family: str, backend: str) -> None:
    prompt = some_tokens(37)
    want = eager_greedy(family, prompt, 20)
    assert Paged(tiny_model(family), backend).greedy(prompt, 20, chunk=13) == want


@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
def test_block_sizes(block_size: int) -> None:
    prompt = some_tokens(33)
    paged = Paged(tiny_model(), "torch_cpu", block_size=block_size)
    assert paged.greedy(prompt, 12, chunk=9) == eager_greedy("llama", prompt, 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_chunk_and_decodes_in_one_batch(backend: str) -> None:
    """Each row of a mixed step gets what it gets alone."""
    paged = Paged(tiny_model(), backend)
    texts = [some_tokens(n, seed=n) for n in (21, 9, 30)]
    tables = [paged.take(len(text) + 1) for text in texts]
    # Prompts 0 and 1 are in the pool; 2 has its first 11 tokens there.
    first = paged.runner.step(
        [
            paged.row(texts[0], 0, tables[0]),
            paged.row(texts[1], 0, tables[1]),
            paged.row(texts[2][:11], 0, tables[2], sample=False),
        ]
    )
    assert first.tokens[2] is None
    assert first.finite == [True, True, True]
    a, b = first.tokens[0], first.tokens[1]
    assert a is not None
    assert b is not None
    out = paged.runner.step(
        [
            paged.row([a], 21, tables[0]),
            paged.row(texts[2][11:], 11, tables[2]),
            paged.row([b], 9, tables[1]),
        ]
    )
    assert [a, out.tokens[0]] == eager_greedy("llama", texts[0], 2)
    assert [b, out.tokens[2]] == eager_greedy("llama", texts[1], 2)
    assert [out.tokens[1]] == eager_greedy("llama", texts[2], 1)


@pytest.mark.parametrize("length", [16, 18])
def test_full_hit_reruns_the_last_token_without_writing(length: int) -> None:
    paged = Paged(tiny_model())
    prompt = some_tokens(length)
    table = paged.take(length)
    cold = paged.runner.forward([paged.row(prompt, 0, table)], np.array([length - 1]))[0].logits
    before = paged.pool.storage.clone()
    rerun = paged.row(prompt[-1:], length - 1, table, write_from=length)
    warm = paged.runner.forward([rerun], np.array([0]))[0].logits
    torch.testing.assert_close(warm, cold, rtol=0, atol=1e-5)
    torch.testing.assert_close(paged.pool.storage, before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cold[0], eager_logits("llama", prompt)[-1], rtol=0, atol=1e-4)


def test_write_from_inside_a_chunk_leaves_shared_slots_alone() -> None:
    paged = Paged(tiny_model())
    prompt = some_tokens(14)
    table = paged.take(16)
    paged.runner.step([paged.row(prompt[:10], 0, table, sample=False)])
    before = paged.pool.storage.clone()
    out = paged.runner.step([paged.row(prompt[7:], 7, table, write_from=10)])
    slots = torch.tensor([table[t // 4] * 4 + t % 4 for t in range(10)])
    torch.testing.assert_close(paged.pool.storage[:, :, :, slots], before[:, :, :, slots], rtol=0, atol=0)
    assert out.tokens == eager_greedy("llama", prompt, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [16, 18])
def test_forks_continue_from_one_prefill(backend: str, length: int) -> None:
    """Two forks diverge: aligned ones copy nothing, others one block; both equal a cold run."""
    paged = Paged(tiny_model(), backend)
    prompt = some_tokens(length)
    table = paged.take(length)
    paged.runner.step([paged.row(prompt, 0, table, sample=False)])
    forks = [paged.fork(table, length) for _ in range(2)]
    assert [len(copies) for _, copies in forks] == ([0, 0] if length % 4 == 0 else [1, 1])
    rows = [
        paged.row([token], length, paged.grow(fork, length + 1), key=token)
        for token, (fork, _) in zip((5, 6), forks, strict=True)
    ]
    out = paged.runner.step(rows, [copy for _, copies in forks for copy in copies])
    for token, got in zip((5, 6), out.tokens, strict=True):
        assert [got] == eager_greedy("llama", [*prompt, token], 1)
    assert out.eligible_nodes >= 1
    assert out.kv_bytes_logical >= out.kv_bytes_read > 0


def test_chained_hits_do_not_drift() -> None:
    """Twelve turns, each a hit on the one before, end where one cold prefill ends."""
    paged = Paged(tiny_model())
    text = some_tokens(12 * 7)
    table: list[int] = []
    for turn in range(12):
        end = 7 * (turn + 1)
        row = paged.row(text[end - 7 : end], end - 7, paged.grow(table, end))
        logits = paged.runner.forward([row], np.array([6]))[0].logits[0]
    torch.testing.assert_close(logits, eager_logits("llama", text)[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row(backend: str) -> None:
    paged = Paged(tiny_model(), backend)
    texts = [some_tokens(8, seed=s) for s in range(3)]
    tables = [paged.take(12) for _ in texts]
    paged.runner.step([paged.row(t, 0, table, sample=False) for t, table in zip(texts, tables, strict=True)])
    paged.pool.key[1][:, tables[1][0] * 4 + 2] = float("nan")
    state = SamplerState(SamplingParams(temperature=1.0, seed=1))
    rows = [
        paged.row([3], 8, tables[0]),
        Row(1, [3], 8, tables[1], 0, True, state),
        paged.row([3, 4], 8, tables[2], sample=False),
    ]
    out = paged.runner.step(rows)
    assert out.finite == [True, False, True]
    assert out.tokens == [eager_greedy("llama", [*texts[0], 3], 1)[0], None, None]
    assert state.uniform() == SamplerState(SamplingParams(temperature=1.0, seed=1)).uniform()


def test_nan_in_a_row_that_does_not_sample_is_reported() -> None:
    paged = Paged(tiny_model())
    tables = [paged.take(16), paged.take(16)]
    paged.runner.step([paged.row(some_tokens(8), 0, table, sample=False) for table in tables])
    paged.pool.value[0][:, tables[0][1] * 4] = float("inf")
    out = paged.runner.step([paged.row(some_tokens(3), 8, table, sample=False) for table in tables])
    assert out.finite == [False, True]


class _Breaking:
    """A backend that raises in the given layer's attention."""

    def __init__(self, layer: int) -> None:
        self._backend = get_backend("reference", "cpu")
        self.name, self.left, self.armed = "breaking", layer, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.armed:
            if self.left == 0:
                raise RuntimeError("out of order")
            self.left -= 1
        return self._backend.attend(*args, **kwargs)


def test_a_failed_pass_touches_only_its_own_slots_and_can_be_repeated() -> None:
    backend = _Breaking(1)
    paged = Paged(tiny_model(), backend)  # type: ignore[arg-type]
    kept, text = some_tokens(9, seed=4), some_tokens(7, seed=5)
    kept_table, table = paged.take(12), paged.take(8)
    paged.runner.step([paged.row(kept, 0, kept_table, sample=False)])
    before = paged.pool.storage.clone()
    backend.armed = True
    state = SamplerState(SamplingParams(temperature=1.0, seed=3))
    row = Row(0, text, 0, table, 0, True, state)
    with pytest.raises(RuntimeError, match="out of order"):
        paged.runner.step([row])
    untouched = torch.ones(paged.pool.num_blocks * 4, dtype=torch.bool)
    untouched[[b * 4 + s for b in table for s in range(4)]] = False
    torch.testing.assert_close(
        paged.pool.storage[:, :, :, untouched], before[:, :, :, untouched], rtol=0, atol=0, equal_nan=True
    )
    backend.armed = False
    again = paged.runner.step([row])
    fresh = Paged(tiny_model())
    other = SamplerState(SamplingParams(temperature=1.0, seed=3))
    assert again.tokens == fresh.runner.step([Row(0, text, 0, fresh.take(8), 0, True, other)]).tokens
    assert again.finite == [True]


def test_rows_that_contradict_themselves_are_refused_before_anything_is_touched() -> None:
    paged = Paged(tiny_model(), blocks=8)
    before = paged.pool.storage.clone()
    good = paged.row([3, 4], 0, [0])
    bad = [
        paged.row([], 0, [1]),
        paged.row([3] * 5, 0, [1]),
        paged.row([3], 300, [1] * 80),
        paged.row([3], 0, [8]),
        paged.row([3], 0, [-1]),
        paged.row([97], 0, [1]),
        Row(0, [3], 0, [1], 0, True, None),
    ]
    for row in bad:
        with pytest.raises(IntegrityError):
            paged.runner.step([good, row], [Copy(2, 3, 4)])
    with pytest.raises(IntegrityError):
        paged.runner.step([good], [Copy(2, 3, 4), Copy(3, 4, 1)])
    torch.testing.assert_close(paged.pool.storage, before, rtol=0, atol=0, equal_nan=True)


def test_copies_alone_and_nothing_at_all() -> None:
    paged = Paged(tiny_model())
    paged.runner.step([paged.row(some_tokens(4), 0, [2], sample=False)])
    out = paged.runner.step([], [Copy(2, 5, 3)])
    assert out.tokens == []
    storage = paged.pool.storage
    torch.testing.assert_close(storage[:, :, :, 20:23], storage[:, :, :, 8:11], rtol=0, atol=0)
    assert storage[:, :, :, 23].isnan().all()


def test_logprobs_and_choices_of_one_seed() -> None:
    paged = Paged(tiny_model())
    prompt = some_tokens(8)
    table = paged.take(8)
    paged.runner.step([paged.row(prompt, 0, table, sample=False)])
    params = SamplingParams(temperature=2.0, seed=7, logprobs=3)

    def draw(choices: list[int]) -> list[list[int | None]]:
        states = [SamplerState(params, choice) for choice in choices]
        rows = [Row(c, prompt[-1:], 7, table, 8, True, s) for c, s in zip(choices, states, strict=True)]
        return [
            list(column) for column in zip(*(paged.runner.step(rows).tokens for _ in range(8)), strict=True)
        ]

    together = draw([0, 1, 2])
    assert together[0] != together[1] != together[2]
    assert draw([1]) == [together[1]]
    out = paged.runner.step([Row(0, prompt[-1:], 7, table, 8, True, SamplerState(params))])
    logprob = out.logprobs[0]
    assert logprob is not None
    want = eager_logits("llama", prompt)[-1].log_softmax(-1)
    assert logprob.logprob == pytest.approx(float(want[logprob.token]), abs=1e-4)
    assert [token for token, _ in logprob.top] == want.topk(3).indices.tolist()


def test_warm_up_runs_within_a_small_pool() -> None:
    paged = Paged(tiny_model(), "torch_cpu", blocks=2)
    paged.runner.warm_up()
    prompt = some_tokens(5)
    assert paged.greedy(prompt, 1) == eager_greedy("llama", prompt, 1)
