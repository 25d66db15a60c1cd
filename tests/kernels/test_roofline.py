"""The plan's counters against the formula, over regular batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.plan import ALWAYS, AttentionPlan, build_plan
from kernels.roofline import CARDS, LLAMA3_8B, SHAPES, Decode, decode_cost, table
from kernels.triton_config import choose
from kernels.triton_plan import tile_plan


def plan_of(work: Decode, *, shared_pass: bool, block: int = 16) -> AttentionPlan:
    shared = list(range(work.shared // block))
    own_blocks = -(-work.own // block)
    tables = [
        [*shared, *range(10_000 + s * own_blocks, 10_000 + (s + 1) * own_blocks)] for s in range(work.readers)
    ]
    return build_plan(
        page_tables=tables,
        query_lens=[1] * work.readers,
        context_lens=[work.shared + work.own] * work.readers,
        block_size=block,
        cost=ALWAYS,
        shared_pass=shared_pass,
    )


@pytest.mark.parametrize("readers", [1, 2, 16, 64])
@pytest.mark.parametrize("shared", [0, 16, 1840, 8000])
@pytest.mark.parametrize("own", [1, 16, 100])
def test_the_plans_counters_match_the_formula(readers: int, shared: int, own: int) -> None:
    work = Decode(readers, shared // 16 * 16, own)
    assert plan_of(work, shared_pass=True).counters.physical_tokens == work.tokens_two_phase
    assert plan_of(work, shared_pass=False).counters.physical_tokens == work.tokens_one_phase


@pytest.mark.parametrize("work", [Decode(16, 1840, 16), Decode(5, 16, 100), Decode(1, 0, 100)], ids=str)
@pytest.mark.parametrize("shared_pass", [True, False])
def test_bytes_and_operations_of_the_kernels_tiles_match_the_formula(work: Decode, shared_pass: bool) -> None:
    """Rows times keys over all tiles are the products; a tile's padding of rows is not counted."""
    heads = LLAMA3_8B
    group = heads.q_heads // heads.kv_heads
    tiles = tile_plan(
        plan_of(work, shared_pass=shared_pass),
        window=None,
        group=group,
        kv_heads=heads.kv_heads,
        launch=choose(head_dim=heads.head_dim, group=group, block_size=16, itemsize=2, capability=(9, 0)),
        processors=132,
    )
    cost = decode_cost(heads, work, shared_pass=shared_pass)
    queries_and_output = 2 * work.readers * heads.q_heads * heads.head_dim * heads.itemsize
    assert tiles.tokens_read * heads.token_bytes + queries_and_output == cost.bytes
    pairs = sum(
        int((launch.table[:, 1] * (launch.table[:, 5] - launch.table[:, 3])).sum())
        for launch in (tiles.narrow, tiles.wide)
    )
    assert 4 * heads.q_heads * heads.head_dim * pairs == cost.operations


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
    page = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
    assert table() in page.read_text()
