"""Choosing the next token, for all rows of a step at once.

Order of the filters: repetition penalty, temperature, top-k, top-p, min-p, then one draw by inverting
the cumulative distribution. A choice owns its random numbers (one uniform a token, from a generator
seeded by (seed, choice)), so what it draws depends neither on its neighbours nor on the batch's order.

Log-probabilities are those of the model itself: before the penalty, the temperature and the filters.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.types import SamplingParams, TokenLogprob

#: Candidates looked at for top-p before the whole vocabulary is sorted: nearly always enough.
_NUCLEUS = 256


class SamplerState:
    """One choice's sampling parameters, random numbers and the set of tokens it has seen.

    The generator is Python's Mersenne Twister seeded with text, whose stream is the same on every
    platform and device; n > 1 choices of one seed get different streams. Without a seed the stream is
    unpredictable. The state outlives a preemption: resuming continues the stream.
    """

    __slots__ = ("_mask", "_rng", "_seen", "choice", "params")

    def __init__(self, params: SamplingParams, choice: int = 0, prompt: Sequence[int] = ()) -> None:
        self.params = params
        self.choice = choice
        seed = secrets.randbits(128) if params.seed is None else params.seed
        self._rng = random.Random(f"coread/{seed}/{choice}")
        self._seen: set[int] = set(prompt) if params.repetition_penalty != 1.0 else set()
        self._mask: Tensor | None = None

    def uniform(self) -> float:
        """The next random number of this choice, in [0, 1)."""
        return self._rng.random()

    def observe(self, token: int) -> None:
        """Count an accepted token for the repetition penalty. `Sampler.sample` does so by itself."""
        if self.params.repetition_penalty == 1.0 or token in self._seen:
            return
        self._seen.add(token)
        if self._mask is not None:
            self._mask[token] = True

    def seen_mask(self, vocab: int, device: torch.device) -> Tensor:
        """Bool `[vocab]`: tokens of the prompt and of the answer so far."""
        if self._mask is None or self._mask.shape[0] != vocab or self._mask.device != device:
            mask = torch.zeros(vocab, dtype=torch.bool)
            known = [token for token in self._seen if 0 <= token < vocab]
            mask[torch.tensor(known, dtype=torch.int64)] = True
            self._mask = mask.to(device)
        return self._mask


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry a row. `tokens` is None where the row's logits were not finite."""

    tokens: list[int | None]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """Stateless: everything that lasts is in the `SamplerState`s."""

    def sample(self, logits: Tensor, states: Sequence[SamplerState]) -> SampleResult:
        """Choose a token for each row of `logits` `[R, vocab]` (any float dtype).

        A row is not finite if it holds a NaN or +inf or nothing but -inf; it is reported, gets no token
        and draws no random number, and the others are unaffected. Raises ValueError where the numbers of
        rows differ.
        """
        if logits.dim() != 2 or logits.shape[0] != len(states):
            raise ValueError(f"logits have shape {tuple(logits.shape)}; {len(states)} rows are to be sampled")
        if not states:
            return SampleResult([], [], [])
        logits = logits.float()
        # max passes NaN on, so one reduction finds NaN, +inf and rows of nothing but -inf.
        best, greedy = logits.max(dim=-1)
        finite: list[bool] = torch.isfinite(best).tolist()
        tokens: list[int | None] = [None] * len(states)

        adjusted = self._penalised(logits, states)
        if adjusted is not logits:
            greedy = adjusted.argmax(dim=-1)
        plain: list[int] = []
        ranked: list[int] = []
        for row, (state, argmax) in enumerate(zip(states, greedy.tolist(), strict=True)):
            params = state.params
            if not finite[row]:
                continue
            if params.temperature == 0:
                tokens[row] = argmax
            elif params.top_k == 0 and params.top_p >= 1.0:
                plain.append(row)
            else:
                ranked.append(row)
        for rows, draw in ((plain, _draw_plain), (ranked, _draw_ranked)):
            if rows:
                chosen = draw(adjusted[rows], [states[row] for row in rows])
                for row, token in zip(rows, chosen, strict=True):
                    tokens[row] = token
        logprobs = _logprobs(logits, states, tokens)
        for state, chosen_token in zip(states, tokens, strict=True):
            if chosen_token is not None:
                state.observe(chosen_token)
        return SampleResult(tokens, finite, logprobs)

    @staticmethod
    def _penalised(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
        """Repetition penalty (Keskar et al. 2019, CTRL, eq. 2 with the sign correction everybody uses):
        a seen token's logit is divided by it if positive and multiplied if negative."""
        rows = [row for row, state in enumerate(states) if state.params.repetition_penalty != 1.0]
        if not rows:
            return logits
        vocab, device = logits.shape[1], logits.device
        seen = torch.stack([states[row].seen_mask(vocab, device) for row in rows])
        penalty = torch.tensor(
            [states[row].params.repetition_penalty for row in rows], dtype=torch.float32, device=device
        )[:, None]
        part = logits[rows]
        part = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
        result = logits.clone()
        result[rows] = part
        return result


def _column(states: Sequence[SamplerState], name: str, device: torch.device) -> Tensor:
    values = [float(getattr(state.params, name)) for state in states]
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _uniforms(states: Sequence[SamplerState], device: torch.device) -> Tensor:
    return torch.tensor([state.uniform() for state in states], dtype=torch.float64, device=device)[:, None]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index `[R]` of the first entry whose cumulative weight exceeds `uniform * total`.

    In float64, so that an entry's share does not depend on how many zeros stand around it.
    """
    cumulative = weights.cumsum(dim=-1)
    target = uniforms * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put the target on the total itself: the last entry with any weight, then.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(index, last)


def _draw_plain(logits: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Rows that need no ranking: temperature and min-p only."""
    scaled = logits.double() / _column(states, "temperature", logits.device)
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
    # The best token's weight is 1, so min-p is a plain threshold.
    weights = weights.masked_fill(weights < _column(states, "min_p", logits.device), 0.0)
    return _as_ints(_invert(weights, _uniforms(states, logits.device)))


def _draw_ranked(logits: Tensor, states: Sequence[SamplerState]) -> list[int]:
    """Rows with top-k or top-p: over the best candidates, over all tokens where those do not suffice."""
    vocab, device = logits.shape[1], logits.device
    top_k = [min(state.params.top_k or vocab, vocab) for state in states]
    # Rows that only have top-p rarely need more than a few candidates; the check below is exact.
    width = min(vocab, max(k if k < vocab else _NUCLEUS for k in top_k))
    scaled = logits.double() / _column(states, "temperature", device)
    uniforms = _uniforms(states, device)
    values, index = scaled.topk(width, dim=-1)
    weights, short = _nucleus(values, scaled, top_k, states)
    chosen = index.gather(1, _invert(weights, uniforms)[:, None])[:, 0]
    if short.any():
        rows = short.nonzero()[:, 0]
        some = [states[row] for row in rows.tolist()]
        values, index = scaled[rows].sort(dim=-1, descending=True)
        weights, _ = _nucleus(values, scaled[rows], [top_k[row] for row in rows.tolist()], some)
        chosen[rows] = index.gather(1, _invert(weights, uniforms[rows])[:, None])[:, 0]
    return _as_ints(chosen)


def _nucleus(
    values: Tensor, scaled: Tensor, top_k: list[int], states: Sequence[SamplerState]
) -> tuple[Tensor, Tensor]:
    """Weights of the ranked candidates `values` `[R, width]` after top-k, top-p and min-p, and which rows
    would have needed more candidates (bool `[R]`). The best candidate always stays."""
    device, width = values.device, values.shape[1]
    k = torch.tensor(top_k, device=device)[:, None]
    weights = (values - values[:, :1]).exp()
    weights = weights.masked_fill(torch.arange(width, device=device)[None] >= k, 0.0)
    # Top-p is a share of what top-k left; without top-k, of the whole vocabulary.
    whole = (scaled - values[:, :1]).exp().sum(dim=-1, keepdim=True)
    total = torch.where(k > width, whole, weights.sum(dim=-1, keepdim=True))
    before = weights.cumsum(dim=-1) - weights
    top_p = _column(states, "top_p", device)
    outside = before >= top_p * total
    outside[:, 0] = False
    covered = weights.sum(dim=-1, keepdim=True) >= top_p * total
    short = ((k > width) & ~covered)[:, 0]
    weights = weights.masked_fill(outside, 0.0)
    return weights.masked_fill(weights < _column(states, "min_p", device), 0.0), short


def _logprobs(
    logits: Tensor, states: Sequence[SamplerState], tokens: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """Log-probabilities of the rows that ask for them, from the model's own logits."""
    result: list[TokenLogprob | None] = [None] * len(states)
    rows = [r for r, s in enumerate(states) if s.params.logprobs is not None and tokens[r] is not None]
    if not rows:
        return result
    table = logits[rows].double().log_softmax(dim=-1)
    chosen = torch.tensor([tokens[row] or 0 for row in rows], device=logits.device)
    own = table.gather(1, chosen[:, None])[:, 0].tolist()
    width = min(max(states[row].params.logprobs or 0 for row in rows), logits.shape[1])
    top_values, top_index = table.topk(width, dim=-1)
    values, ids = top_values.tolist(), top_index.tolist()
    for place, row in enumerate(rows):
        count = states[row].params.logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        result[row] = TokenLogprob(token=int(chosen[place]), logprob=own[place], top=top)
    return result


def _as_ints(tokens: Tensor) -> list[int]:
    values: list[int] = tokens.tolist()
    return values
