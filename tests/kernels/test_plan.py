"""The plan against a plain recount of who reads what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from kernels.plan import ALWAYS, CPU, AttentionPlan, CostModel, PlanError, Run, build_plan, segment_runs
from tests.kernels.cases import Batch, batches


def make(batch: Batch, cost: CostModel = ALWAYS, shared_pass: bool = True) -> AttentionPlan:
    return build_plan(
        page_tables=batch.page_tables,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        block_size=batch.block_size,
        cost=cost,
        shared_pass=shared_pass,
    )


def expand(runs: tuple[Run, ...]) -> list[int]:
    return [slot for run in runs for slot in range(run.slot, run.slot + run.tokens)]


@given(batches())
@settings(max_examples=100, deadline=None)
def test_every_position_is_covered_once_and_at_its_slot(batch: Batch) -> None:
    for cost in (ALWAYS, CPU, CostModel(overhead_tokens=20)):
        plan = make(batch, cost)
        for s in range(len(batch.page_tables)):
            mine = [g for g in (*plan.shared, *plan.own) if s in g.readers]
            covered: list[tuple[int, int]] = []
            for g in mine:
                covered.extend(zip(range(g.start, g.end), expand(g.runs), strict=True))
            assert sorted(covered) == list(enumerate(batch.slots(s)))
            assert all(g.end <= plan.first_query(s) for g in mine if len(g.readers) > 1)
            assert plan.own[s].tokens >= batch.query_lens[s]


@given(batches())
@settings(max_examples=100, deadline=None)
def test_with_no_overhead_each_shareable_block_is_read_once(batch: Batch) -> None:
    """Oracle: a block position counts once for each distinct chain of blocks up to it."""
    size = batch.block_size
    readers: dict[tuple[int, ...], int] = {}
    limits = [(c - q) // size for c, q in zip(batch.context_lens, batch.query_lens, strict=True)]
    for table, limit in zip(batch.page_tables, limits, strict=True):
        for depth in range(limit):
            chain = tuple(table[: depth + 1])
            readers[chain] = readers.get(chain, 0) + 1
    spared = sum((count - 1) * size for count in readers.values())
    counters = make(batch).counters
    assert counters.logical_tokens == sum(batch.context_lens)
    assert counters.physical_tokens == sum(batch.context_lens) - spared
    assert (counters.eligible_nodes > 0) == any(count > 1 for count in readers.values())
    assert counters.shared_nodes == counters.eligible_nodes


@given(batches())
@settings(max_examples=100, deadline=None)
def test_without_the_shared_pass_everything_is_own_work(batch: Batch) -> None:
    plan = make(batch, shared_pass=False)
    assert plan.shared == ()
    assert plan.counters.physical_tokens == plan.counters.logical_tokens
    assert plan.counters.eligible_nodes == make(batch).counters.eligible_nodes


def test_nested_nodes_name_their_readers() -> None:
    instructions, document = [0, 1], [2, 3, 4]
    tables = [[*instructions, *document, 10], [*instructions, *document, 20], [*instructions, 30], [40]]
    plan = build_plan(
        page_tables=tables, query_lens=[1] * 4, context_lens=[82, 90, 33, 16], block_size=16, cost=ALWAYS
    )
    assert [(g.readers, g.start, g.end, g.runs) for g in plan.shared] == [
        ((0, 1, 2), 0, 32, (Run(0, 32),)),
        ((0, 1), 32, 80, (Run(32, 48),)),
    ]
    assert [(g.start, g.end) for g in plan.own] == [(80, 82), (80, 90), (32, 33), (0, 16)]
    assert plan.counters.physical_tokens == 32 + 48 + 2 + 10 + 1 + 16


def test_a_node_that_does_not_pay_joins_the_nodes_below_it() -> None:
    tables = [[0, 1, 2, 3, 9], [0, 1, 2, 3, 8], [0, 7, 7, 7, 7]]
    # The root (16 tokens, 3 readers) spares 32, the document with it (64 tokens, 2 readers) 64.
    plan = build_plan(
        page_tables=tables,
        query_lens=[1, 1, 1],
        context_lens=[70, 70, 70],
        block_size=16,
        cost=CostModel(overhead_tokens=40),
    )
    assert [(g.readers, g.start, g.end) for g in plan.shared] == [((0, 1), 0, 64)]
    assert (plan.counters.eligible_nodes, plan.counters.shared_nodes) == (2, 1)


def test_a_fully_cached_prompt_keeps_its_last_block_to_itself() -> None:
    """Two readers of the same two full blocks run their last token again: it lies in the second block."""
    plan = build_plan(
        page_tables=[[5, 6], [5, 6]], query_lens=[1, 1], context_lens=[32, 32], block_size=16, cost=ALWAYS
    )
    assert [(g.start, g.end) for g in plan.shared] == [(0, 16)]
    assert [(g.start, g.end) for g in plan.own] == [(16, 32), (16, 32)]


def test_runs_are_maximal_and_cut_inside_blocks() -> None:
    table = np.array([4, 5, 9, 10, 3])
    assert segment_runs(table, 3, 38, 8) == (Run(35, 13), Run(72, 16), Run(24, 6))
    assert segment_runs(table, 8, 8, 8) == ()


def test_clipping_for_a_window_drops_whole_runs_and_cuts_one() -> None:
    table = np.array([4, 5, 9])
    plan = build_plan(page_tables=[table], query_lens=[1], context_lens=[24], block_size=8, cost=ALWAYS)
    clipped = plan.own[0].clipped(18)
    assert (clipped.start, clipped.end, clipped.runs) == (18, 24, (Run(74, 6),))
    assert plan.own[0].clipped(99).tokens == 0


@pytest.mark.parametrize(
    ("tables", "queries", "contexts", "words"),
    [
        ([[0]], [1], [17], "needs 2 blocks"),
        ([[0]], [0], [3], "0 queries"),
        ([[0]], [4], [3], "4 queries in a context of 3"),
        ([[0, -1]], [1], [20], "names block -1"),
        ([[0], [1]], [1], [3], "do not describe one batch"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(
    tables: list[list[int]], queries: list[int], contexts: list[int], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        build_plan(page_tables=tables, query_lens=queries, context_lens=contexts, block_size=16, cost=ALWAYS)


def test_the_callers_page_table_may_grow_while_the_plan_lives() -> None:
    from array import array

    table = array("i", [1, 2])
    plan = build_plan(page_tables=[table], query_lens=[1], context_lens=[20], block_size=16, cost=ALWAYS)
    table.append(3)  # raises BufferError if the plan still looks into it
    table[0] = 7
    assert plan.tables[0].tolist() == [1, 2]


def test_an_empty_batch_has_an_empty_plan() -> None:
    plan = build_plan(page_tables=[], query_lens=[], context_lens=[], block_size=16, cost=ALWAYS)
    assert plan.rows == 0
    assert plan.counters.physical_tokens == 0
