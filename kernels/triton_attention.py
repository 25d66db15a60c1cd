# mypy: ignore-errors
# (Triton's language is not Python's: its values have no types that mypy could follow.)
"""The Triton kernels of attention over pages: one for all tiles, one that merges their partial results.

A tile stacks `block_m` query rows: row `r` is head `r % GROUP` of token `r // GROUP` of the tile, so one
KV head's keys meet all query heads that share it, and tensor cores are busy even for a single token.
Scores are kept in base 2 (`exp2` is one instruction). Keys outside a tile's stretch are never loaded:
neither K nor V of an unwritten slot reaches a product.

A pool of 8-bit floats is widened to the query's type as it is loaded; a head's scales meet the score's factor
and the finished output, never a key or a value (see `kernels.fp8`).

Integer arguments are `do_not_specialize`d: no batch can make Triton compile again.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: log2(e)
LOG2E = tl.constexpr(1.4426950408889634)
#: Row maximum before any key: finite, so that `exp2(-inf - maximum)` is 0 and never NaN.
NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def _visit(
    acc_a,
    acc_b,
    row_max,
    row_sum,
    query_a,
    query_b,
    key_head,
    value_head,
    blocks,
    low,
    high,
    key_end,
    position,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_A: tl.constexpr,
    HEAD_B: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over keys `[low, high)` in turns of BLOCK_N; MASKED turns look at ends and positions."""
    HEAD_DIM: tl.constexpr = HEAD_A + HEAD_B
    lane_a = tl.arange(0, HEAD_A)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < key_end
        if MASKED:
            block = tl.load(blocks + keys // BLOCK_SIZE, mask=inside, other=0)
        else:
            block = tl.load(blocks + keys // BLOCK_SIZE)
        # Within one head 32 bits are enough (the launcher checks), and half the registers.
        slot = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        if MASKED:
            key_a = tl.load(key_head + slot[None, :] + lane_a[:, None], mask=inside[None, :], other=0.0)
        else:
            key_a = tl.load(key_head + slot[None, :] + lane_a[:, None])
        key_a = key_a.to(query_a.dtype)  # of 8-bit floats; nothing where the types are the same
        scores = tl.dot(query_a, key_a, input_precision=PRECISION)
        if HEAD_B > 0:
            lane_b = HEAD_A + tl.arange(0, HEAD_B)
            if MASKED:
                key_b = tl.load(key_head + slot[None, :] + lane_b[:, None], mask=inside[None, :], other=0.0)
            else:
                key_b = tl.load(key_head + slot[None, :] + lane_b[:, None])
            key_b = key_b.to(query_a.dtype)
            scores = tl.dot(query_b, key_b, scores, input_precision=PRECISION)
        scores = scores * scale
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1); the cap comes with LOG2E already multiplied in.
            scores = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E)) + 1.0)
            scores = scores * soft_cap
        if MASKED:
            seen = inside[None, :] & (keys[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        acc_a = acc_a * rescale[:, None]
        if MASKED:
            value_a = tl.load(value_head + slot[:, None] + lane_a[None, :], mask=inside[:, None], other=0.0)
        else:
            value_a = tl.load(value_head + slot[:, None] + lane_a[None, :])
        value_a = value_a.to(query_a.dtype)
        weights = weights.to(query_a.dtype)
        acc_a = tl.dot(weights, value_a, acc_a, input_precision=PRECISION)
        if HEAD_B > 0:
            acc_b = acc_b * rescale[:, None]
            lane_b = HEAD_A + tl.arange(0, HEAD_B)
            if MASKED:
                value_b = tl.load(
                    value_head + slot[:, None] + lane_b[None, :], mask=inside[:, None], other=0.0
                )
            else:
                value_b = tl.load(value_head + slot[:, None] + lane_b[None, :])
            value_b = value_b.to(query_a.dtype)
            acc_b = tl.dot(weights, value_b, acc_b, input_precision=PRECISION)
    return acc_a, acc_b, row_max, row_sum


@triton.jit(
    do_not_specialize=["tiles_at", "rows_at", "positions_at", "blocks_at", "slots", "q_token8", "q_head8"],
)
def attention_kernel(
    query,
    key_pool,
    value_pool,
    output,
    partial_out,
    partial_lse,
    sinks,
    key_scale,
    value_scale,
    arrays,
    tiles_at,
    rows_at,
    positions_at,
    blocks_at,
    slots,
    q_token8,
    q_head8,
    scale,
    soft_cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_A: tl.constexpr,
    HEAD_B: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, KV_HEADS).

    query [T, q_heads, head_dim] with strides 8 q_token8, 8 q_head8 and 1; pools [KV_HEADS, slots, head_dim];
    output [T, q_heads, head_dim]; partial_out [partials, q_heads, head_dim] and partial_lse [partials,
    q_heads], float32; arrays: the step's int32 vector, `*_at` are starts in it. `scale` and `soft_cap` as
    the host prepares them: without a cap scale carries LOG2E; with one it is scale / cap, and the cap
    carries LOG2E. key_scale, value_scale [KV_HEADS], float32, of a pool of 8-bit floats.
    """
    HEAD_DIM: tl.constexpr = HEAD_A + HEAD_B
    tile = arrays + tiles_at + tl.program_id(0) * 8
    head = tl.program_id(1)
    row_start = tl.load(tile)
    row_count = tl.load(tile + 1)
    if row_count == 0:  # padding of a captured graph
        return
    block_base = tl.load(tile + 2)
    key_start = tl.load(tile + 3)
    key_full = tl.load(tile + 4)
    key_end = tl.load(tile + 5)
    target = tl.load(tile + 6)

    stacked = tl.arange(0, BLOCK_M)
    local = stacked // GROUP
    q_head_index = head * GROUP + stacked % GROUP
    valid = local < row_count
    token = tl.load(arrays + rows_at + row_start + local, mask=valid, other=0)
    position = tl.load(arrays + positions_at + token, mask=valid, other=0)
    lane_a = tl.arange(0, HEAD_A)
    # Strides arrive in units of 8 elements: so the compiler knows that rows start at 16 bytes.
    source = query + token.to(tl.int64) * q_token8 * 8 + q_head_index * q_head8 * 8
    query_a = tl.load(source[:, None] + lane_a[None, :], mask=valid[:, None], other=0.0)
    acc_a = tl.zeros((BLOCK_M, HEAD_A), dtype=tl.float32)
    if HEAD_B > 0:
        lane_b = HEAD_A + tl.arange(0, HEAD_B)
        query_b = tl.load(source[:, None] + lane_b[None, :], mask=valid[:, None], other=0.0)
        acc_b = tl.zeros((BLOCK_M, HEAD_B), dtype=tl.float32)
    else:
        query_b = query_a
        acc_b = acc_a
    row_max = tl.full((BLOCK_M,), NOTHING, dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # `slots * HEAD_DIM` is a multiple of the head dimension, which is what keeps loads 16 bytes wide.
    pool_offset = head.to(tl.int64) * slots * HEAD_DIM
    key_head = key_pool + pool_offset
    value_head = value_pool + pool_offset
    blocks = arrays + blocks_at + block_base
    if HAS_SCALES:
        scale = scale * tl.load(key_scale + head)
    if WINDOW == 0:
        acc_a, acc_b, row_max, row_sum = _visit(
            acc_a, acc_b, row_max, row_sum, query_a, query_b, key_head, value_head, blocks,
            key_start, key_full, key_end, position, scale, soft_cap,
            WINDOW, HAS_CAP, False, HEAD_A, HEAD_B, BLOCK_SIZE, BLOCK_N, PRECISION,
        )  # fmt: skip
        masked_from = key_full
    else:
        masked_from = key_start
    acc_a, acc_b, row_max, row_sum = _visit(
        acc_a, acc_b, row_max, row_sum, query_a, query_b, key_head, value_head, blocks,
        masked_from, key_end, key_end, position, scale, soft_cap,
        WINDOW, HAS_CAP, True, HEAD_A, HEAD_B, BLOCK_SIZE, BLOCK_N, PRECISION,
    )  # fmt: skip

    if HAS_SCALES:
        factor = tl.load(value_scale + head)
        acc_a = acc_a * factor
        if HEAD_B > 0:
            acc_b = acc_b * factor
    if target < 0:
        # The only tile of its tokens: finish here.
        if HAS_SINKS:
            sink = tl.load(sinks + q_head_index).to(tl.float32) * LOG2E
            new_max = tl.maximum(row_max, sink)
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.exp2(sink - new_max)
            acc_a = acc_a * rescale[:, None]
            if HEAD_B > 0:
                acc_b = acc_b * rescale[:, None]
        divisor = tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        whole = (output + (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head_index) * HEAD_DIM)[:, None]
        kind = output.dtype.element_ty
        tl.store(whole + lane_a[None, :], (acc_a / divisor).to(kind), mask=valid[:, None])
        if HEAD_B > 0:
            lane_b = HEAD_A + tl.arange(0, HEAD_B)
            tl.store(whole + lane_b[None, :], (acc_b / divisor).to(kind), mask=valid[:, None])
    else:
        found = row_sum > 0.0
        total = tl.where(found, row_sum, 1.0)
        entry = (target + local).to(tl.int64) * (KV_HEADS * GROUP) + q_head_index
        tl.store(partial_lse + entry, tl.where(found, row_max + tl.log2(total), NOTHING), mask=valid)
        part = (partial_out + entry * HEAD_DIM)[:, None]
        tl.store(part + lane_a[None, :], acc_a / total[:, None], mask=valid[:, None])
        if HEAD_B > 0:
            lane_b = HEAD_A + tl.arange(0, HEAD_B)
            tl.store(part + lane_b[None, :], acc_b / total[:, None], mask=valid[:, None])


@triton.jit(do_not_specialize=["from_at", "list_at"])
def merge_kernel(
    output,
    partial_out,
    partial_lse,
    sinks,
    arrays,
    from_at,
    list_at,
    Q_HEADS: tl.constexpr,
    HEAD_A: tl.constexpr,
    HEAD_B: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (T, Q_HEADS): the exact weighted mean of a token's partial results, float32.

    Tokens whose output a tile has written already have an empty list.
    """
    HEAD_DIM: tl.constexpr = HEAD_A + HEAD_B
    token = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(arrays + from_at + token)
    last = tl.load(arrays + from_at + token + 1)
    if first == last:
        return
    lane_a = tl.arange(0, HEAD_A)
    acc_a = tl.zeros((HEAD_A,), dtype=tl.float32)
    if HEAD_B > 0:
        acc_b = tl.zeros((HEAD_B,), dtype=tl.float32)
    top = tl.full((), NOTHING, dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = total + 1.0
    for i in range(first, last):
        entry = tl.load(arrays + list_at + i).to(tl.int64) * Q_HEADS + head
        lse = tl.load(partial_lse + entry)
        new_top = tl.maximum(top, lse)
        rescale = tl.exp2(top - new_top)
        # A partial that saw no key has the same `NOTHING` as an empty total: it must not weigh.
        weight = tl.where(lse > NOTHING, tl.exp2(lse - new_top), 0.0)
        total = total * rescale + weight
        acc_a = acc_a * rescale + weight * tl.load(partial_out + entry * HEAD_DIM + lane_a)
        if HEAD_B > 0:
            lane_b = HEAD_A + tl.arange(0, HEAD_B)
            acc_b = acc_b * rescale + weight * tl.load(partial_out + entry * HEAD_DIM + lane_b)
        top = new_top
    row = output + (token.to(tl.int64) * Q_HEADS + head) * HEAD_DIM
    total = tl.where(total > 0.0, total, 1.0)
    tl.store(row + lane_a, (acc_a / total).to(output.dtype.element_ty))
    if HEAD_B > 0:
        tl.store(row + HEAD_A + tl.arange(0, HEAD_B), (acc_b / total).to(output.dtype.element_ty))
