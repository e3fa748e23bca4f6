"""softmax(q k^T) v and its log-sum-exp with an online softmax (Dao et al. 2022, arXiv 2205.14135), over the tiles of attention_tiles.

A program has one head and BLOCK_M queries. It goes through the full key tiles without a look at the bounds, then through the masked ones.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .attention_parts import rows_at, sees, sees_any


@triton.jit
def _step(q, key, value, bounds, row, column, num_keys, key_stride, value_stride, total, largest, mixed, MASKED: tl.constexpr,
          DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Takes the keys `column` into the running sum, largest score and mix. Scores and `largest` are in base 2."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    inner = tl.arange(0, DIM)
    # Only masked tiles can reach over the last key.
    k_at = key + column.to(tl.int64)[:, None] * key_stride + inner[None, :]
    v_at = value + column.to(tl.int64)[:, None] * value_stride + inner[None, :]
    if MASKED:
        k = tl.load(k_at, mask=(column < num_keys)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * LOG2_E
    if MASKED:
        scores = tl.where(sees(bounds, row, column), scores, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = now_largest
    if MASKED:
        shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)  # a row that has seen nothing: 0 and not NaN below
    p = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(largest - shift)
    if MASKED:
        v = tl.load(v_at, mask=(column < num_keys)[:, None], other=0.0)
    else:
        v = tl.load(v_at)
    mixed = tl.dot(p.to(v.dtype), v, mixed * rescale[:, None], input_precision=PRECISION)
    return total * rescale + tl.sum(p, 1), now_largest, mixed


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_blocks"])
def forward(query, key, value, out, lse, bounds, rows, masked, num_queries, num_keys, num_blocks, query_stride, query_head_stride,
            key_stride, key_head_stride, value_stride, value_head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
            TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    # Later queries see more keys: the longest programs start first.
    head, block = tl.program_id(0) % HEADS, num_blocks - 1 - tl.program_id(0) // HEADS
    row, inner = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    place = tl.arange(0, BLOCK_N)
    q = rows_at(query + head * query_head_stride, row.to(tl.int64) * query_stride, row < num_queries, inner)
    key += head // GROUP * key_head_stride
    value += head // GROUP * value_head_stride

    PARTS: tl.constexpr = TILE // BLOCK_N
    lists = rows + block // (TILE // BLOCK_M) * 6
    start, count = tl.load(lists) * PARTS, tl.load(lists + 1) * PARTS
    then_start, then_count = tl.load(lists + 2) * PARTS, tl.load(lists + 3) * PARTS
    first_masked, num_masked = tl.load(lists + 4), tl.load(lists + 5) * PARTS

    total, largest = tl.zeros((BLOCK_M,), tl.float32), tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mixed = tl.zeros((BLOCK_M, DIM), tl.float32)
    for i in tl.range(0, count + then_count, num_stages=STAGES):
        part = tl.where(i < count, start + i, then_start + i - count)
        total, largest, mixed = _step(q, key, value, bounds, row, part * BLOCK_N + place, num_keys, key_stride, value_stride,
                                      total, largest, mixed, False, DIM, PRECISION)
    for i in tl.range(0, num_masked, num_stages=STAGES):
        part = tl.load(masked + first_masked + i // PARTS) * PARTS + i % PARTS
        total, largest, mixed = _step(q, key, value, bounds, row, part * BLOCK_N + place, num_keys, key_stride, value_stride,
                                      total, largest, mixed, True, DIM, PRECISION)

    LN_2: tl.constexpr = 0.6931471805599453
    seeing = sees_any(bounds, row)
    total = tl.where(seeing, total, 1.0)
    y = tl.where(seeing[:, None], mixed / total[:, None], 0.0)
    inside = row < num_queries
    tl.store(out + (row.to(tl.int64) * HEADS + head)[:, None] * DIM + inner[None, :], y.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + row.to(tl.int64) * HEADS + head, tl.where(seeing, (largest + tl.log2(total)) * LN_2, float("-inf")), mask=inside)
