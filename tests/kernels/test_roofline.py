"""The plan's counters against the formula, over regular batches."""

from __future__ import annotations

import pytest

from kernels.plan import ALWAYS, build_plan
from kernels.roofline import CARDS, LLAMA3_8B, SHAPES, Decode, decode_cost, table


def plan_tokens(work: Decode, *, shared_pass: bool, block: int = 16) -> int:
    shared = list(range(work.shared // block))
    own_blocks = -(-work.own // block)
    tables = [
        [*shared, *range(10_000 + s * own_blocks, 10_000 + (s + 1) * own_blocks)] for s in range(work.readers)
    ]
    plan = build_plan(
        page_tables=tables,
        query_lens=[1] * work.readers,
        context_lens=[work.shared + work.own] * work.readers,
        block_size=block,
        cost=ALWAYS,
        shared_pass=shared_pass,
    )
    return plan.counters.physical_tokens


@pytest.mark.parametrize("readers", [1, 2, 16, 64])
@pytest.mark.parametrize("shared", [0, 16, 1840, 8000])
@pytest.mark.parametrize("own", [1, 16, 100])
def test_the_plans_counters_match_the_formula(readers: int, shared: int, own: int) -> None:
    work = Decode(readers, shared // 16 * 16, own)
    assert plan_tokens(work, shared_pass=True) == work.tokens_two_phase
    assert plan_tokens(work, shared_pass=False) == work.tokens_one_phase


def test_bytes_follow_the_tokens_and_operations_do_not() -> None:
    work = Decode(64, 7360, 832)
    two, one = (decode_cost(LLAMA3_8B, work, shared_pass=p) for p in (True, False))
    assert LLAMA3_8B.token_bytes == 2 * 8 * 128 * 2
    assert one.bytes - two.bytes == 63 * 7360 * LLAMA3_8B.token_bytes
    assert one.operations == two.operations == 4 * 32 * 128 * 64 * 8192


def test_every_card_is_bound_by_memory_without_sharing() -> None:
    for heads in SHAPES:
        cost = decode_cost(heads, Decode(64, 0, 8192), shared_pass=False)
        for card in CARDS:
            assert cost.seconds(card) == cost.bytes / card.bandwidth


def test_the_table_has_a_line_for_every_model_and_share() -> None:
    assert table().count("\n") == 1 + 4 * len(SHAPES)
