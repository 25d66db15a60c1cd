"""One step of the engine on the device: copies, one packed forward pass, sampling.

A step is a ragged batch: prefill chunks and decodes side by side, packed into one `[T]` row of tokens.
Row `r` computes positions `start .. start + len(tokens) - 1` of its sequence; its page table covers at
least those positions; everything before `start` is in the pool already.

    tokens     | row 0: chunk of a prompt | row 1: 1 token | row 2: 1 token |
    positions  | 512 513 ... 767          | 1840           | 96             |
    slots      | where each K and V is written, -1: nowhere (already there)  |
    logits     |                        x | x              | x              |  (rows that sample)

How hidden states are computed is the `Decoder`'s business; the runner neither knows the model's
architecture nor keeps anything between steps. On a GPU the host only waits once, for the step's result:
everything before is enqueued, and steps of decodes alone are replayed as CUDA graphs (`engine.cuda_graphs`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.bridge import StepContext
from engine.cuda_graphs import DecodeGraphs, broken_tokens
from engine.decoder import DecoderOutput
from engine.errors import IntegrityError
from engine.kv_pool import KVPool
from engine.model import LoadedModel
from engine.sampler import Sampler, SamplerState
from engine.transfer import to_device
from engine.types import Copy, SamplingParams, TokenLogprob
from kernels.api import AttentionBackend
from kernels.plan import AttentionPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step.

    key         the caller's name of the sequence (not interpreted)
    tokens      ids of positions `start .. start + len(tokens) - 1`
    page_table  block ids from position 0 on, at least up to the row's last position
    write_from  positions below it are not written: a fully cached prompt runs its last token again for
                the logits with `write_from = start + 1` and reads the cached K and V
    sample      whether the row's last position gets a token; needs `state`
    drafts      how many of the last tokens are proposals to be verified: positions from the one before
                them on get tokens, each as long as the draft before it was right
    """

    key: int
    tokens: Sequence[int]
    start: int
    page_table: Sequence[int]
    write_from: int
    sample: bool
    state: SamplerState | None = None
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, one entry a row in the rows' order.

    tokens    the sampled token; None where the row does not sample or is not finite
    finite    False where a hidden state or a logit of the row was NaN or infinite: nothing that the row
              wrote may be published
    kv_bytes_logical, kv_bytes_read   KV bytes of all contexts, and bytes really read, over all layers
    further   for rows with drafts: the tokens after `tokens`, one for each draft found right
    eligible_nodes, shared_nodes      runs of blocks with two or more readers, and how many of them took
                                      the pass that reads them once for all
    """

    tokens: list[int | None]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]
    kv_bytes_logical: int
    kv_bytes_read: int
    eligible_nodes: int
    shared_nodes: int
    further: dict[int, list[tuple[int, TokenLogprob | None]]] = field(default_factory=dict)


class Runner:
    """Runs steps of one model over one pool. Used by one thread.

    `graphs`: replays for steps of decodes, where the device has them.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        backend: AttentionBackend,
        *,
        shared_pass: bool = True,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        if pool.shape != model.shape:
            raise ValueError(f"the pool was made for {pool.shape}, the model is {model.shape}")
        self.model, self.pool, self.backend, self.shared_pass = model, pool, backend, shared_pass
        self.graphs = graphs
        self.sampler = Sampler()

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], copies: Sequence[Copy] = ()) -> StepOutput:
        """Carry out `copies`, then compute `rows`, then sample.

        Raises `IntegrityError` for rows or copies that contradict themselves, before anything is touched.
        An error during the pass leaves all blocks as they were but the unpublished slots of these rows and
        the copies' targets; no sampler state has changed, so the step may be run again (with drafts: where it
        was not the drawing of their tokens, one after another, that failed).
        """
        for row in rows:
            self._check(row)
        self.pool.check_copies(copies)
        self._copy(copies)
        if not rows:
            return StepOutput([], [], [], 0, 0, 0, 0)

        sampled = [index for index, row in enumerate(rows) if row.sample]
        logits, broken, plan = self._compute(rows, sampled)

        tokens: list[int | None] = [None] * len(rows)
        logprobs: list[TokenLogprob | None] = [None] * len(rows)
        further: dict[int, list[tuple[int, TokenLogprob | None]]] = {}
        places = dict(zip(sampled, _starts([rows[index].drafts + 1 for index in sampled]), strict=True))
        drawing = sampled
        finite: list[bool] = []
        for ahead in range(1 + max((row.drafts for row in rows), default=0)):
            states = [state for index in drawing if (state := rows[index].state) is not None]
            chosen = self._pick(logits, [places[index] + ahead for index in drawing])
            if ahead == 0:
                # A row whose hidden states are broken anywhere must not draw: its neighbours' streams are
                # their own, but its own would move on although the token is thrown away.
                draft = self.sampler.launch(chosen, states, usable=self._pick(broken, sampled) == 0)
                finite, table = _bring_back(broken, draft.packed)
                result = draft.result(table)
            else:
                result = self.sampler.sample(chosen, states)
            right: list[int] = []
            for index, token, logprob, good in zip(
                drawing, result.tokens, result.logprobs, result.finite, strict=True
            ):
                row = rows[index]
                if ahead == 0:
                    tokens[index], logprobs[index], finite[index] = token, logprob, good
                elif token is not None:
                    further[index].append((token, logprob))
                if token is not None and ahead < row.drafts and row.tokens[ahead - row.drafts] == token:
                    further.setdefault(index, [])
                    right.append(index)
            drawing = right
            if not drawing:
                break
        return StepOutput(
            tokens,
            finite,
            logprobs,
            plan.tally.kv_bytes_logical,
            plan.tally.kv_bytes_read,
            plan.counters.eligible_nodes,
            plan.counters.shared_nodes,
            further,
        )

    def _compute(self, rows: Sequence[Row], sampled: Sequence[int]) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Logits of the rows in `sampled` (for a row with drafts: of the position before them and of each),
        `broken` `[rows]` (0 where all of a row's hidden states are finite), and the plan."""
        lengths = [len(row.tokens) for row in rows]
        if self.graphs is not None and self.graphs.why_not(lengths) is None:
            plan = self._plan(rows, lengths)
            positions = np.asarray([row.start for row in rows], dtype=np.int64)
            slots = np.concatenate([self._slots(row) for row in rows])
            done = self.graphs.run([row.tokens[0] for row in rows], positions, slots, plan)
            if done is not None:
                return self._pick(done[0], sampled), done[1], plan
        ends = np.cumsum(lengths) - 1
        wanted = [int(ends[index]) - back for index in sampled for back in range(rows[index].drafts, -1, -1)]
        output, plan = self.forward(rows, np.asarray(wanted, dtype=np.int64))
        broken = broken_tokens(output.hidden)
        if broken.shape[0] > len(rows):
            owner = self._tensor(np.repeat(np.arange(len(rows)), lengths))
            broken = broken.new_zeros(len(rows)).index_add_(0, owner, broken)
        return output.logits, broken, plan

    def _pick(self, values: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of `values`; all of them, in order, without a copy."""
        if list(rows) == list(range(values.shape[0])):
            return values
        return values.index_select(0, self._tensor(np.asarray(rows, dtype=np.int64)))

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], wanted: IntArray) -> tuple[DecoderOutput, AttentionPlan]:
        """The forward pass alone: hidden states of all tokens, logits of packed tokens `wanted` `[R]`."""
        lengths = [len(row.tokens) for row in rows]
        plan = self._plan(rows, lengths)
        ids = np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows])
        positions = np.concatenate(
            [np.arange(row.start, row.start + n) for row, n in zip(rows, lengths, strict=True)]
        )
        slots = np.concatenate([self._slots(row) for row in rows])
        context = StepContext(self.pool, self.backend, plan, self._tensor(slots), self.model.windows)
        output = self.model.decoder(self._tensor(ids), self._tensor(positions), self._tensor(wanted), context)
        return output, plan

    def _plan(self, rows: Sequence[Row], lengths: Sequence[int]) -> AttentionPlan:
        return self.backend.plan(
            page_tables=[row.page_table for row in rows],
            query_lens=lengths,
            context_lens=[row.start + n for row, n in zip(rows, lengths, strict=True)],
            block_size=self.pool.block_size,
            shared_pass=self.shared_pass,
        )

    def _copy(self, copies: Sequence[Copy]) -> None:
        if self.backend.captures:  # one launch for all of them, in all layers
            plain = [(copy.source, copy.target, copy.slots) for copy in copies]
            self.backend.copy_blocks(self.pool.key, self.pool.value, plain, self.pool.block_size)
        else:
            self.pool.copy(copies)

    def _tensor(self, values: IntArray) -> Tensor:
        return to_device(torch.from_numpy(values.astype(np.int64, copy=False)), self.pool.device)

    def warm_up(self, prefill_tokens: int = 64, decode_rows: Sequence[int] = (1, 8)) -> None:
        """Run typical shapes once, so that the first request pays for no lazy set-up.

        Uses the pool's first blocks: to be called before any block is handed out. What it writes there is
        garbage like everything in a free block.
        """
        blocks = self.pool.num_blocks
        size = self.pool.block_size
        length = max(1, min(prefill_tokens, blocks * size, self.model.shape.max_context))
        table = list(range((length + size - 1) // size))
        greedy = SamplingParams(temperature=0.0)
        drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
        self.step([Row(0, [0] * length, 0, table, 0, True, SamplerState(greedy))])
        for count in decode_rows:
            # All rows re-run the last position without writing: readers of one run of blocks, as in service.
            state = SamplerState(drawn)
            self.step([Row(key, [0], length - 1, table, length, True, state) for key in range(count)])
        group = self.model.q_heads // self.model.shape.kv_heads
        for table, queries, contexts in self.backend.warm_up_batches(group, size):
            if len(table) <= blocks and max(contexts) <= self.model.shape.max_context:
                self.step(
                    [
                        Row(key, [0] * n, context - n, table, context, True, SamplerState(drawn))
                        for key, (n, context) in enumerate(zip(queries, contexts, strict=True))
                    ]
                )
        if blocks > 1:
            self.step([], [Copy(0, 1, size)])

    def _check(self, row: Row) -> None:
        end = row.start + len(row.tokens)
        if not len(row.tokens) or row.start < 0:
            raise IntegrityError(f"Sequence {row.key} has nothing to compute at position {row.start}.")
        if end > self.model.shape.max_context:
            raise IntegrityError(
                f"Sequence {row.key} would reach {end} tokens; the limit is {self.model.shape.max_context}."
            )
        if len(row.page_table) * self.pool.block_size < end:
            raise IntegrityError(
                f"Sequence {row.key} reaches position {end - 1}; its {len(row.page_table)} blocks end before."
            )
        if not 0 <= min(row.page_table) <= max(row.page_table) < self.pool.num_blocks:
            raise IntegrityError(
                f"Sequence {row.key} names a block outside the pool's {self.pool.num_blocks}."
            )
        if not 0 <= min(row.tokens) <= max(row.tokens) < self.model.vocab_size:
            raise IntegrityError(
                f"Sequence {row.key} has a token id outside 0 to {self.model.vocab_size - 1}."
            )
        if not 0 <= row.drafts < len(row.tokens) or (row.drafts and not row.sample):
            raise IntegrityError(f"Sequence {row.key} has {row.drafts} drafts in {len(row.tokens)} tokens.")
        if row.sample and row.state is None:
            raise IntegrityError(f"Sequence {row.key} is to sample but has no sampler state.")

    def _slots(self, row: Row) -> IntArray:
        """Physical slot of each of the row's positions; -1 for those that are not written."""
        size = self.pool.block_size
        positions = np.arange(row.start, row.start + len(row.tokens), dtype=np.int64)
        first, last = row.start // size, int(positions[-1]) // size
        table = np.asarray(row.page_table[first : last + 1], dtype=np.int64)
        slots: IntArray = table[positions // size - first] * size + positions % size
        slots[positions < row.write_from] = -1
        return slots


def _starts(counts: Sequence[int]) -> list[int]:
    """Where each group begins when `counts` groups stand one after another."""
    return list(itertools.accumulate(counts, initial=0))[:-1]


def _bring_back(broken: Tensor, packed: Tensor) -> tuple[list[bool], list[list[float]]]:
    """Which rows are finite, and the sampler's table, in one copy from the device."""
    count, (rows, columns) = len(broken), packed.shape
    values = torch.cat([broken.double(), packed.flatten()]).tolist()
    rest = values[count:]
    return [value == 0 for value in values[:count]], [
        rest[at : at + columns] for at in range(0, rows * columns, columns)
    ]
