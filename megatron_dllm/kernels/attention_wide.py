"""The forward for heads so wide that an online softmax leaves no room on the chip: a part of the probabilities in memory at a time.

    tile_probabilities    p = exp(s - peak), peak and sum of each row of each tile of scores s
    tile_scales           largest over the tiles of a row; lse; scale = exp(peak - largest) / total, of each row of each tile
    mixed_values          out = sum over tiles of (scale p) v

A head dimension of 512 needs 128 KiB of registers to mix the values of 64 queries alone. So few queries for a tile of keys ask for more of
the second-level cache than it gives: on an H200 the online softmax reaches 170 TFLOP/s there, against 480 of such products of 128 x 256.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .attention_parts import product, rows_at, sees, sees_any


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def tile_probabilities(query, key, bounds, pairs, p_tiles, peaks, sums, num_queries, num_keys, query_stride, query_head_stride, key_stride,
                       key_head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr,
                       TILE: tl.constexpr, PANEL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """p [slots, heads, TILE, TILE], peaks (in base 2) and sums [slots, heads, TILE]. A program has PACK heads of a group and a pair."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    slot, first_head = tl.program_id(0) // (HEADS // PACK), tl.program_id(0) % (HEADS // PACK) * PACK
    query_tile, key_tile, is_full = tl.load(pairs + slot * 3), tl.load(pairs + slot * 3 + 1), tl.load(pairs + slot * 3 + 2)
    if query_tile >= 0:
        place, column = tl.arange(0, PACK * TILE), tl.arange(0, TILE)
        row, key_row = query_tile * TILE + place % TILE, key_tile * TILE + column
        scores = product(
            query + (query_tile * TILE).to(tl.int64) * query_stride + first_head * query_head_stride,
            place % TILE * query_stride + place // TILE * query_head_stride, row < num_queries,
            key + (key_tile * TILE).to(tl.int64) * key_stride + first_head // GROUP * key_head_stride, column * key_stride,
            key_row < num_keys, DIM, PANEL, STAGES, PACK * TILE, TILE, PRECISION) * LOG2_E
        if is_full == 0:
            scores = tl.where(sees(bounds, row, key_row), scores, float("-inf"))
        peak = tl.max(scores, 1)
        p = tl.exp2(scores - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
        at, seeing = (slot * HEADS + first_head).to(tl.int64) * TILE + place, sees_any(bounds, row)
        tl.store(peaks + at, tl.where(seeing, peak, float("-inf")))
        tl.store(sums + at, tl.where(seeing, tl.sum(p, 1), 0.0))
        tl.store(p_tiles + at[:, None] * TILE + column[None, :], p.to(p_tiles.dtype.element_ty))


@triton.jit(do_not_specialize=["num_queries"])
def tile_scales(peaks, sums, scales, lse, by_query, num_queries, HEADS: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """scales [slots, heads, TILE] and lse [Q, heads] of the query tiles of this chunk. A program has one tile and one head."""
    LN_2: tl.constexpr = 0.6931471805599453
    query_tile, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first, count = tl.load(by_query + query_tile * 2), tl.load(by_query + query_tile * 2 + 1)
    if count >= 0:
        place, some = tl.arange(0, TILE), tl.arange(0, SLOTS)
        largest, total = tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32)
        for start in range(0, count, SLOTS):
            at = ((first + start + some) * HEADS + head).to(tl.int64)[:, None] * TILE + place[None, :]
            inside = (start + some < count)[:, None]
            peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
            now_largest = tl.maximum(largest, tl.max(peak, 0))
            shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
            part = tl.load(sums + at, mask=inside, other=0.0) * tl.exp2(peak - shift[None, :])
            total = total * tl.exp2(largest - shift) + tl.sum(part, 0)
            largest = now_largest
        seeing = largest > float("-inf")
        shift, total = tl.where(seeing, largest, 0.0), tl.where(seeing, total, 1.0)
        row = query_tile * TILE + place
        value = tl.where(seeing, (shift + tl.log2(total)) * LN_2, float("-inf"))
        tl.store(lse + row.to(tl.int64) * HEADS + head, value, mask=row < num_queries)
        for start in range(0, count, SLOTS):
            at = ((first + start + some) * HEADS + head).to(tl.int64)[:, None] * TILE + place[None, :]
            inside = (start + some < count)[:, None]
            peak = tl.load(peaks + at, mask=inside, other=float("-inf"))
            tl.store(scales + at, tl.exp2(peak - shift[None, :]) / total[None, :], mask=inside)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_tiles"])
def mixed_values(p_tiles, scales, value, out, pairs, by_query, num_queries, num_keys, num_tiles, value_stride, value_head_stride,
                 HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PANEL: tl.constexpr, STEP: tl.constexpr,
                 STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """out [Q, heads, DIM] of the query tiles of this chunk. A program has one tile, one head and PANEL of the DIM columns."""
    PANELS: tl.constexpr = DIM // PANEL
    PARTS: tl.constexpr = TILE // STEP
    panel, head = tl.program_id(0) % PANELS, tl.program_id(0) // PANELS % HEADS
    query_tile = num_tiles - 1 - tl.program_id(0) // (PANELS * HEADS)
    first, count = tl.load(by_query + query_tile * 2), tl.load(by_query + query_tile * 2 + 1)
    if count >= 0:
        place, step, inner = tl.arange(0, TILE), tl.arange(0, STEP), panel * PANEL + tl.arange(0, PANEL)
        value += head // GROUP * value_head_stride
        mixed = tl.zeros((TILE, PANEL), tl.float32)
        for i in tl.range(0, count * PARTS, num_stages=STAGES):
            slot, start = first + i // PARTS, i % PARTS * STEP
            tile = (slot * HEADS + head).to(tl.int64) * TILE
            p = tl.load(p_tiles + tile * TILE + start + place[:, None] * TILE + step[None, :])
            first_key = tl.load(pairs + slot * 3 + 1) * TILE + start
            v = rows_at(value + first_key.to(tl.int64) * value_stride, step * value_stride, first_key + step < num_keys, inner)
            weights = (p.to(tl.float32) * tl.load(scales + tile + place)[:, None]).to(v.dtype)
            mixed = tl.dot(weights, v, mixed, input_precision=PRECISION)
        row = query_tile * TILE + place
        at = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + inner[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=(row < num_queries)[:, None])
