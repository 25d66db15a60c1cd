# mypy: ignore-errors
# (Triton's language is not Python's: its values have no types that mypy could follow.)
"""The Triton kernels that write to the KV pool: new tokens into their slots, and copies of blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["k_token", "k_head", "v_token", "v_head", "slots"],
    do_not_specialize_on_alignment=["key", "value"],
)
def write_kernel(
    key,
    value,
    key_pool,
    value_pool,
    key_scale,
    value_scale,
    targets,
    k_token,
    k_head,
    v_token,
    v_head,
    slots,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid (T, KV_HEADS): one head of one token; `targets` int64 [T], negative: nowhere.

    key and value are [T, KV_HEADS, HEAD_DIM] with the given strides and 1; LANES >= HEAD_DIM, a power of two.
    With scales [KV_HEADS] the pools hold e4m3: what lies outside of its range is cut off (see `kernels.fp8`).
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(targets + token)
    if slot < 0:
        return
    lane = tl.arange(0, LANES)
    inside = lane < HEAD_DIM
    new_key = tl.load(key + token.to(tl.int64) * k_token + head * k_head + lane, mask=inside)
    new_value = tl.load(value + token.to(tl.int64) * v_token + head * v_head + lane, mask=inside)
    if HAS_SCALES:
        new_key = new_key.to(tl.float32) / tl.load(key_scale + head)
        new_value = new_value.to(tl.float32) / tl.load(value_scale + head)
        new_key = tl.clamp(new_key, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        new_value = tl.clamp(new_value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    row = (head.to(tl.int64) * slots + slot) * HEAD_DIM
    tl.store(key_pool + row + lane, new_key.to(key_pool.dtype.element_ty), mask=inside)
    tl.store(value_pool + row + lane, new_value.to(value_pool.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slots"])
def copy_kernel(
    pools,
    example,
    copies,
    slots,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (copies, 2 * layers, KV_HEADS): the first slots of one block, in all layers with one launch.

    pools    int64 [2 * layers]: addresses of all K and V pools
    example  any of them: only its element type is looked at (8-bit floats are copied as bytes)
    copies   int32 [copies, 3]: source block, target block, slots to copy
    LANES    a power of two that holds one block of one head
    """
    entry = copies + tl.program_id(0) * 3
    source = tl.load(entry).to(tl.int64)
    target = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    address = tl.load(pools + tl.program_id(1))
    pool = tl.multiple_of(address.to(example.dtype), 16)
    head = pool + tl.program_id(2).to(tl.int64) * slots * HEAD_DIM
    lane = tl.arange(0, LANES)
    inside = lane < count * HEAD_DIM
    values = tl.load(head + source * (BLOCK_SIZE * HEAD_DIM) + lane, mask=inside)
    tl.store(head + target * (BLOCK_SIZE * HEAD_DIM) + lane, values, mask=inside)
