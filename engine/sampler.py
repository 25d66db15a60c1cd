"""Choosing the next token, for all rows of a step at once, on whatever device the logits are.

Order of the filters: repetition penalty, temperature, top-k, top-p, min-p, then one draw by inverting
the cumulative distribution. A choice owns its random numbers (one uniform a token, from a generator
seeded by (seed, choice)), so what it draws depends neither on its neighbours nor on the batch's order.

Work is enqueued by `launch` without waiting for the device; one small table comes back (`Draft.packed`)::

    launch ─▶ parameters and uniforms up in one copy ─▶ filters, draw ─▶ [token, finite, short, logprobs]
    result ◄────────────────────── one copy back ◄───────────────────────────────┘

The random numbers are the same on every device. The token is therefore the same wherever the logits are,
up to a draw that falls within rounding of the border between two tokens.

Log-probabilities are those of the model itself: before the penalty, the temperature and the filters.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.transfer import to_device
from engine.types import SamplingParams, TokenLogprob

#: Candidates looked at for top-p before the whole vocabulary is sorted: nearly always enough.
_NUCLEUS = 256
#: Columns of the table that goes to the device, float64: one row for each of the step's rows. `_ROW` is no
#: parameter but a list of row numbers: those that draw without ranking, then those that need it.
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _PENALTY, _UNIFORM, _ROW, _PENALISED = range(8)
#: Columns of the table that comes back, before the log-probabilities.
_TOKEN, _FINITE, _SHORT, _LOGPROB = range(4)


class SamplerState:
    """One choice's sampling parameters, random numbers and the set of tokens it has seen.

    The generator is Python's Mersenne Twister seeded with text, whose stream is the same on every
    platform and device; n > 1 choices of one seed get different streams. Without a seed the stream is
    unpredictable. The state outlives a preemption: resuming continues the stream.
    """

    __slots__ = ("_mask", "_next", "_rng", "_seen", "choice", "params")

    def __init__(self, params: SamplingParams, choice: int = 0, prompt: Sequence[int] = ()) -> None:
        self.params = params
        self.choice = choice
        seed = secrets.randbits(128) if params.seed is None else params.seed
        self._rng = random.Random(f"coread/{seed}/{choice}")
        self._next: float | None = None
        self._seen: set[int] = set(prompt) if params.repetition_penalty != 1.0 else set()
        self._mask: Tensor | None = None

    def peek(self) -> float:
        """The next random number of this choice, in [0, 1), which stays the next one until `uniform`."""
        if self._next is None:
            self._next = self._rng.random()
        return self._next

    def uniform(self) -> float:
        """Take the next random number."""
        value = self.peek()
        self._next = None
        return value

    def observe(self, token: int) -> None:
        """Count an accepted token for the repetition penalty. `Draft.result` does so by itself."""
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
            self._mask = to_device(mask, device)
        return self._mask


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry a row. `tokens` is None where the row's logits were not finite."""

    tokens: list[int | None]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that were drawn on the device. `packed`: float64 `[R, columns]`, the table to bring back."""

    packed: Tensor
    logits: Tensor
    adjusted: Tensor
    states: Sequence[SamplerState]

    def result(self, table: Sequence[Sequence[float]]) -> SampleResult:
        """What `packed` says, given as lists. Moves the states on, so it is called once.

        A row whose nucleus was larger than the candidates looked at is drawn again here over the whole
        vocabulary, with the same random number: that costs one more wait for the device, in such steps only.
        """
        states = self.states
        finite = [row[_FINITE] != 0 for row in table]
        tokens: list[int | None] = [
            int(row[_TOKEN]) if good else None for row, good in zip(table, finite, strict=True)
        ]
        logprobs = _read_logprobs(table, states, tokens)
        again = [i for i, row in enumerate(table) if finite[i] and row[_SHORT] != 0]
        if again:
            some = [states[i] for i in again]
            chosen = _draw_whole(
                self.adjusted[again], _Table(some, [], list(range(len(again))), [], self.logits)
            )
            extra = _logprob_columns(self.logits[again], some, chosen)
            rows = torch.cat([_columns(chosen, torch.ones_like(chosen)), extra], dim=1).tolist()
            for i, row in zip(again, rows, strict=True):
                tokens[i] = int(row[_TOKEN])
            for i, entry in zip(again, _read_logprobs(rows, some, [tokens[i] for i in again]), strict=True):
                logprobs[i] = entry
        for state, token in zip(states, tokens, strict=True):
            if token is not None:
                if state.params.temperature > 0:
                    state.uniform()
                state.observe(token)
        return SampleResult(tokens, finite, logprobs)


class Sampler:
    """Stateless: everything that lasts is in the `SamplerState`s."""

    def sample(self, logits: Tensor, states: Sequence[SamplerState]) -> SampleResult:
        """Choose a token for each row of `logits` `[R, vocab]` (any float dtype).

        A row is not finite if it holds a NaN or +inf or nothing but -inf; it is reported, gets no token
        and draws no random number, and the others are unaffected. Raises ValueError where the numbers of
        rows differ.
        """
        draft = self.launch(logits, states)
        return draft.result(draft.packed.tolist())

    def launch(self, logits: Tensor, states: Sequence[SamplerState], usable: Tensor | None = None) -> Draft:
        """As `sample`, without waiting for the device. `usable`: bool `[R]`, False for rows that get no token
        whatever their logits are."""
        if logits.dim() != 2 or logits.shape[0] != len(states):
            raise ValueError(f"logits have shape {tuple(logits.shape)}; {len(states)} rows are to be sampled")
        if not states:
            empty = logits.new_empty((0, _LOGPROB), dtype=torch.float64)
            return Draft(empty, logits, logits, states)
        logits = logits.float()
        # max passes NaN on, so one reduction finds NaN, +inf and rows of nothing but -inf.
        best, tokens = logits.max(dim=-1)
        finite = torch.isfinite(best)
        if usable is not None:
            finite = finite & usable
        plain: list[int] = []
        ranked: list[int] = []
        penalised: list[int] = []
        for row, state in enumerate(states):
            params = state.params
            if params.repetition_penalty != 1.0:
                penalised.append(row)
            if params.temperature > 0:
                (plain if params.top_k == 0 and params.top_p >= 1.0 else ranked).append(row)
        adjusted, short = logits, None
        if plain or ranked or penalised:
            table = _Table(states, plain, ranked, penalised, logits)
            if penalised:
                adjusted = _penalised(logits, table)
                tokens = adjusted.argmax(dim=-1)
            if plain:
                _put(tokens, table.plain, _draw_plain(_take(adjusted, table.plain), table))
            if ranked:
                drawn, lacking = _draw_ranked(_take(adjusted, table.ranked), table)
                _put(tokens, table.ranked, drawn)
                short = torch.zeros_like(finite)
                _put(short, table.ranked, lacking)
        packed = torch.cat([_columns(tokens, finite, short), _logprob_columns(logits, states, tokens)], dim=1)
        return Draft(packed, logits, adjusted, states)


class _Table:
    """The rows' parameters on the device. `plain`, `ranked`, `penalised`: indices of rows, None for all."""

    def __init__(
        self,
        states: Sequence[SamplerState],
        plain: list[int],
        ranked: list[int],
        penalised: list[int],
        logits: Tensor,
    ) -> None:
        vocab = logits.shape[1]
        drawing = [*plain, *ranked]
        values = []
        for place, state in enumerate(states):
            params = state.params
            values.append(
                (
                    params.temperature,
                    params.top_p,
                    params.min_p,
                    min(params.top_k or vocab, vocab),
                    params.repetition_penalty,
                    state.peek() if params.temperature > 0 else 0.0,
                    drawing[place] if place < len(drawing) else 0,
                    penalised[place] if place < len(penalised) else 0,
                )
            )
        self.values = to_device(torch.tensor(values, dtype=torch.float64), logits.device)
        self.states, self.vocab, count = states, vocab, len(states)
        all_alike = not drawing or count in (len(plain), len(ranked))
        at = None if all_alike else self.values[:, _ROW].long()
        self.plain = None if at is None else at[: len(plain)]
        self.ranked = None if at is None else at[len(plain) : len(drawing)]
        self.penalised = None if len(penalised) == count else self.values[: len(penalised), _PENALISED].long()
        self.penalised_states = [states[row] for row in penalised]
        # Rows that only have top-p rarely need more than a few candidates; whether they do is checked.
        widths = [int(values[row][_TOP_K]) for row in ranked]
        self.width = min(vocab, max((k if k < vocab else _NUCLEUS for k in widths), default=0))

    def column(self, name: int, rows: Tensor | None) -> Tensor:
        """`[rows, 1]`"""
        return _take(self.values[:, name], rows)[:, None]


def _take(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def _put(target: Tensor, rows: Tensor | None, values: Tensor) -> None:
    if rows is None:
        target.copy_(values)
    else:
        target.index_copy_(0, rows, values)


def _penalised(logits: Tensor, table: _Table) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, CTRL, eq. 2 with the sign correction everybody uses):
    a seen token's logit is divided by it if positive and multiplied if negative."""
    rows = table.penalised
    seen = torch.stack([state.seen_mask(table.vocab, logits.device) for state in table.penalised_states])
    penalty = table.column(_PENALTY, rows).float()
    part = _take(logits, rows)
    part = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
    return part if rows is None else logits.index_copy(0, rows, part)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index `[R]` of the first entry whose cumulative weight exceeds `uniform * total`.

    In float64, so that an entry's share does not depend on how many zeros stand around it. Rows with NaN get
    some index within the row.
    """
    cumulative = weights.cumsum(dim=-1)
    target = uniforms * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put the target on the total itself: the last entry with any weight, then.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(index, last).clamp_(max=weights.shape[1] - 1)


def _draw_plain(logits: Tensor, table: _Table) -> Tensor:
    """Rows that need no ranking: temperature and min-p only."""
    rows = table.plain
    scaled = logits.double() / table.column(_TEMPERATURE, rows)
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
    # The best token's weight is 1, so min-p is a plain threshold.
    weights = weights.masked_fill(weights < table.column(_MIN_P, rows), 0.0)
    return _invert(weights, table.column(_UNIFORM, rows))


def _draw_ranked(logits: Tensor, table: _Table) -> tuple[Tensor, Tensor]:
    """Rows with top-k or top-p, over the best candidates: tokens, and which rows would have needed more."""
    scaled = logits.double() / table.column(_TEMPERATURE, table.ranked)
    values, index = scaled.topk(table.width, dim=-1)
    weights, short = _nucleus(values, scaled, table)
    drawn = _invert(weights, table.column(_UNIFORM, table.ranked))
    return index.gather(1, drawn[:, None])[:, 0], short


def _draw_whole(logits: Tensor, table: _Table) -> Tensor:
    """The same over the whole vocabulary."""
    scaled = logits.double() / table.column(_TEMPERATURE, table.ranked)
    values, index = scaled.sort(dim=-1, descending=True)
    weights, _ = _nucleus(values, scaled, table)
    drawn = _invert(weights, table.column(_UNIFORM, table.ranked))
    return index.gather(1, drawn[:, None])[:, 0]


def _nucleus(values: Tensor, scaled: Tensor, table: _Table) -> tuple[Tensor, Tensor]:
    """Weights of the ranked candidates `values` `[R, width]` after top-k, top-p and min-p, and which rows
    would have needed more candidates (bool `[R]`). The best candidate always stays."""
    rows, width = table.ranked, values.shape[1]
    k = table.column(_TOP_K, rows)
    weights = (values - values[:, :1]).exp()
    weights = weights.masked_fill(torch.arange(width, device=values.device)[None] >= k, 0.0)
    # Top-p is a share of what top-k left; without top-k, of the whole vocabulary.
    whole = (scaled - values[:, :1]).exp().sum(dim=-1, keepdim=True)
    total = torch.where(k > width, whole, weights.sum(dim=-1, keepdim=True))
    before = weights.cumsum(dim=-1) - weights
    top_p = table.column(_TOP_P, rows)
    outside = before >= top_p * total
    outside[:, 0] = False
    covered = weights.sum(dim=-1, keepdim=True) >= top_p * total
    short = ((k > width) & ~covered)[:, 0]
    weights = weights.masked_fill(outside, 0.0)
    return weights.masked_fill(weights < table.column(_MIN_P, rows), 0.0), short


def _columns(tokens: Tensor, finite: Tensor, short: Tensor | None = None) -> Tensor:
    """The head of the table that comes back; token ids are exact in float64."""
    packed = tokens.new_zeros((tokens.shape[0], _LOGPROB), dtype=torch.float64)
    packed[:, _TOKEN] = tokens
    packed[:, _FINITE] = finite
    if short is not None:
        packed[:, _SHORT] = short
    return packed


def _logprob_columns(logits: Tensor, states: Sequence[SamplerState], tokens: Tensor) -> Tensor:
    """For the rows that ask: log-probability of the chosen token, ids and log-probabilities of the best, from
    the model's own logits; as wide as the row that asks for most. `[R, 0]` where none asks."""
    asking = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    width = min(max((states[row].params.logprobs or 0 for row in asking), default=0), logits.shape[1])
    columns = logits.new_zeros((len(states), 1 + 2 * width if asking else 0), dtype=torch.float64)
    if asking:
        rows = None if len(asking) == len(states) else to_device(torch.tensor(asking), logits.device)
        table = _take(logits, rows).double().log_softmax(dim=-1)
        values, ids = table.topk(width, dim=-1)
        own = table.gather(1, _take(tokens, rows)[:, None])
        _put(columns, rows, torch.cat([own, ids.double(), values], dim=1))
    return columns


def _read_logprobs(
    table: Sequence[Sequence[float]], states: Sequence[SamplerState], tokens: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """The log-probabilities of the rows that asked for them."""
    result: list[TokenLogprob | None] = [None] * len(states)
    for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
        count = state.params.logprobs
        if count is None or token is None:
            continue
        own, *rest = table[row][_LOGPROB:]
        width = len(rest) // 2
        top = tuple((int(rest[i]), rest[width + i]) for i in range(min(count, width)))
        result[row] = TokenLogprob(token=token, logprob=own, top=top)
    return result
