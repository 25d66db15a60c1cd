"""The tiles of a step against a plain recount, and the launcher's choice of configuration."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.api import KernelError
from kernels.plan import ALWAYS, PlanError, build_plan
from kernels.triton_config import (
    BLOCK_SIZES,
    HEAD_DIMS,
    SHARED_LIMIT,
    TileConfig,
    choose,
    head_parts,
    register_budget,
    register_estimate,
    shared_bytes,
)
from kernels.triton_plan import Capacity, TilePlan, layout, pack, split_length, tile_plan
from tests.kernels.cases import Batch, batches


def tiles_of(batch: Batch, group: int, window: int | None, processors: int) -> TilePlan:
    plan = build_plan(
        page_tables=batch.page_tables,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        block_size=batch.block_size,
        cost=ALWAYS,
    )
    launch = choose(head_dim=64, group=group, block_size=16, itemsize=2, capability=(8, 0))
    return tile_plan(plan, window=window, group=group, kv_heads=1, launch=launch, processors=processors)


@given(
    batch=batches(block_sizes=(16, 32)),
    group=st.integers(1, 16),
    window=st.none() | st.integers(1, 100),
    processors=st.sampled_from([1, 4, 100]),
)
@settings(max_examples=100, deadline=None)
def test_every_visible_key_of_every_token_is_met_exactly_once(
    batch: Batch, group: int, window: int | None, processors: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.triton_plan.SHORTEST_SPLIT", 64)
        tiles = tiles_of(batch, group, window, processors)
    size = batch.block_size
    met: list[list[int]] = [[] for _ in tiles.positions]  # physical slots of the keys that a token sees
    partial_rows: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for launch in (tiles.narrow, tiles.wide):
        for row_start, count, base, start, full, end, target, _ in launch.table.tolist():
            assert 0 < count <= launch.config.tokens(group)
            assert start <= full <= end
            assert (full - start) % launch.config.block_n == 0
            for i, token in enumerate(tiles.rows[row_start : row_start + count].tolist()):
                position = int(tiles.positions[token])
                oldest = 0 if window is None else position - window + 1
                keys = [p for p in range(start, end) if oldest <= p <= position]
                if window is None:
                    # Unmasked turns hold nothing that must be hidden.
                    assert full == start or full <= position + 1
                met[token] += [int(tiles.blocks[base + p // size]) * size + p % size for p in keys]
                if target < 0:
                    written[token] += 1
                else:
                    partial_rows[target + i] += 1
    token = 0
    for s, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        slots = batch.slots(s)
        for position in range(context - queries, context):
            assert tiles.positions[token] == position
            oldest = 0 if window is None else max(0, position - window + 1)
            assert sorted(met[token]) == sorted(slots[oldest : position + 1])
            merged = tiles.merge_list[tiles.merge_from[token] : tiles.merge_from[token + 1]]
            assert (written[token] == 1) == (len(merged) == 0)
            token += 1
    # Every partial row is written once and merged once.
    assert set(partial_rows.values()) <= {1}
    assert sorted(partial_rows) == sorted(tiles.merge_list.tolist()) == list(range(tiles.partials))


def test_one_vector_holds_the_arrays_and_a_capacity_pads_them() -> None:
    tiles = tiles_of(Batch(16, [[0, 1, 2], [0, 1, 3]], [1, 1], [40, 41], 8), 4, None, 1)
    exact = layout(tiles, None)
    capacity = Capacity(tokens=4, narrow_tiles=8, wide_tiles=8, rows=16, blocks=32, merges=16, partials=16)
    padded = layout(tiles, capacity)
    assert exact.size < padded.size
    for where in (exact, padded):
        host = np.full(padded.size, -7, dtype=np.int32)
        pack(tiles, where, host)
        assert host[where.rows : where.rows + len(tiles.rows)].tolist() == tiles.rows.tolist()
        assert host[where.blocks : where.blocks + len(tiles.blocks)].tolist() == tiles.blocks.tolist()
        narrow = host[where.narrow : where.narrow + 8 * where.narrow_tiles].reshape(-1, 8)
        assert narrow[: len(tiles.narrow.table)].tolist() == tiles.narrow.table.tolist()
        assert not narrow[len(tiles.narrow.table) :].any()  # no rows: the kernel returns at once
        ends = host[where.merge_from : where.merge_from + where.tokens + 1]
        assert ends[2:].tolist() == [tiles.merge_from[-1]] * (where.tokens - 1)
    small = Capacity(tokens=1, narrow_tiles=8, wide_tiles=8, rows=16, blocks=32, merges=16, partials=16)
    with pytest.raises(PlanError, match="needs 2 tokens, the captured graph has 1"):
        layout(tiles, small)


def test_long_contexts_are_split_until_the_chip_is_busy() -> None:
    assert split_length([(1, 65536)], kv_heads=8, processors=132, block_n=64) == 2048
    # One short context is not split at all, many contexts neither: each is a program of its own.
    assert split_length([(1, 200)], kv_heads=8, processors=132, block_n=64) >= 200
    assert split_length([(1, 8192)] * 256, kv_heads=8, processors=132, block_n=64) >= 8192


class TestConfiguration:
    @pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("kv_itemsize", [2, 1])
    def test_every_choice_fits_the_chip(
        self, capability: tuple[int, int], head_dim: int, group: int, block_size: int, kv_itemsize: int
    ) -> None:
        launch = choose(
            head_dim=head_dim,
            group=group,
            block_size=block_size,
            itemsize=2,
            kv_itemsize=kv_itemsize,
            capability=capability,
        )
        budget = register_budget(head_dim, capability, widens=kv_itemsize < 2)
        for config in (launch.narrow, launch.wide, launch.tall):
            assert shared_bytes(config, head_dim, 2, capability, kv_itemsize) <= SHARED_LIMIT[capability]
            assert register_estimate(config, head_dim) <= budget
            assert config.tokens(group) >= 1
            assert config.block_n >= 16
            assert config.block_m % 16 == 0
        assert launch.narrow.block_m == 16
        assert launch.tall.block_m >= launch.wide.block_m == 64

    def test_the_choice_is_a_function_of_its_arguments(self) -> None:
        first, second = (
            choose(head_dim=128, group=4, block_size=16, itemsize=2, capability=(9, 0)) for _ in range(2)
        )
        assert first == second
        assert first.narrow == TileConfig(16, 64, 4, 4)
        assert first.wide == TileConfig(64, 64, 4, 3)
        assert first.tall == TileConfig(128, 64, 8, 3)

    @pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
    def test_a_head_in_two_parts_that_is_widened_spreads_over_more_warps(
        self, capability: tuple[int, int]
    ) -> None:
        """Four warps spilled there (on 12.0), and so did 128 rows of queries (on 10.0)."""
        shape = {"head_dim": 80, "group": 4, "block_size": 16, "itemsize": 2, "capability": capability}
        as_stored = choose(**shape)  # type: ignore[arg-type]
        widened = choose(**shape, kv_itemsize=1)  # type: ignore[arg-type]
        assert (as_stored.wide.warps, as_stored.tall.block_m) == (4, 128)
        assert widened.wide == widened.tall == TileConfig(64, 64, 8, 3)

    def test_chips_that_are_not_listed_get_the_smallest_limit(self) -> None:
        unknown = choose(head_dim=128, group=4, block_size=16, itemsize=2, capability=(11, 0))
        known = choose(head_dim=128, group=4, block_size=16, itemsize=2, capability=(8, 6))
        assert unknown == known

    def test_heads_split_into_powers_of_two(self) -> None:
        assert [head_parts(d) for d in HEAD_DIMS] == [(64, 0), (64, 16), (64, 32), (128, 0), (256, 0)]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"head_dim": 72}, "head dimension 72"),
            ({"group": 17}, "group of 17"),
            ({"block_size": 8}, "block size 8"),
            ({"capability": (7, 5)}, r"7\.5 is below 8\.0"),
        ],
    )
    def test_what_has_no_kernel_is_refused(self, change: dict[str, int], words: str) -> None:
        shape = {"head_dim": 128, "group": 4, "block_size": 16, "itemsize": 2, "capability": (8, 0)}
        with pytest.raises(KernelError, match=words):
            choose(**{**shape, **change})  # type: ignore[arg-type]
