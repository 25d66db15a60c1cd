"""Layout, copies and refusals of the pool."""

from __future__ import annotations

import pytest
import torch

from engine.errors import IntegrityError, PoolTooSmall
from engine.kv_pool import KVPool
from engine.types import Copy, ModelShape

SHAPE = ModelShape(layers=3, kv_heads=2, head_dim=8, itemsize=4, max_context=64)


def _pool(blocks: int = 6, size: int = 4) -> KVPool:
    return KVPool(SHAPE, blocks, size, torch.float32, "cpu", fill_nan=True)


def test_one_block_of_one_head_is_one_contiguous_tile() -> None:
    pool = _pool()
    assert len(pool.key) == len(pool.value) == 3
    assert tuple(pool.key[0].shape) == (2, 24, 8)
    assert pool.key[1][1, 8:12].is_contiguous()
    pool.key[2].zero_()
    assert pool.storage[0, 2].count_nonzero() == 0
    assert pool.storage[1].isnan().all()


def test_bytes() -> None:
    pool = _pool()
    assert pool.num_bytes == pool.storage.numel() * 4 == 6 * SHAPE.block_bytes(4)
    assert KVPool.blocks_within(3 * SHAPE.block_bytes(4) + 5, SHAPE, 4) == 3
    assert KVPool.blocks_within(-1, SHAPE, 4) == 0


def test_copies_move_only_the_given_slots_in_all_layers() -> None:
    pool = _pool()
    pool.storage.copy_(torch.arange(pool.storage.numel()).view_as(pool.storage))
    before = pool.storage.clone()
    pool.copy([Copy(1, 4, 3), Copy(1, 0, 4), Copy(2, 3, 0)])
    want = before.clone()
    want[:, :, :, 16:19] = before[:, :, :, 4:7]
    want[:, :, :, 0:4] = before[:, :, :, 4:8]
    torch.testing.assert_close(pool.storage, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "copies",
    [
        [Copy(0, 6, 1)],
        [Copy(-1, 2, 1)],
        [Copy(0, 1, 5)],
        [Copy(0, 1, -1)],
        [Copy(0, 1, 2), Copy(2, 1, 2)],
        [Copy(0, 1, 2), Copy(1, 2, 2)],
        [Copy(3, 3, 2)],
    ],
)
def test_copies_that_contradict_themselves_change_nothing(copies: list[Copy]) -> None:
    pool = _pool()
    pool.storage.zero_()
    pool.key[0][:, 0] = 1.0
    before = pool.storage.clone()
    with pytest.raises(IntegrityError):
        pool.copy(copies)
    assert torch.equal(pool.storage, before)


def test_refuses_a_pool_of_nothing_and_the_wrong_element() -> None:
    with pytest.raises(PoolTooSmall):
        _pool(blocks=0)
    with pytest.raises(ValueError, match="bytes an element"):
        KVPool(SHAPE, 4, 4, torch.bfloat16, "cpu")
