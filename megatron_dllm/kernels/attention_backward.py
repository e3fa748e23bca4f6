"""Gradients of attention from the forward's log-sum-exp: every product once, a part of the probabilities in memory at a time.

    p = exp(q k^T - lse), ds = p * (dout v^T - delta), delta = dout . out        `probabilities`, for all pairs of tiles of a chunk
    dq = ds k                                                                      `query_gradient`
    dk = ds^T q, dv = p^T dout, summed over the heads of a group                   `key_gradients`

(Dao et al. 2022, arXiv 2205.14135, appendix B.) Kernels that keep p and ds on the chip have to form both twice, once for dq and once for dk
and dv: seven products instead of five. At head dimensions of 256 and more they also leave no room for the tiles that keep the matrix units
busy. Writing p and ds costs 10 bytes of traffic for each 10 d operations. Programs own what they write: repeats are bit-equal.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .attention_parts import product, rows_at, sees, sees_any


@triton.jit(do_not_specialize=["num_rows"])
def row_products(out, dout, delta, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr):
    """delta [rows] = sum of dout * out over the last dimension; both are contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, inside = row.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :], (row < num_rows)[:, None]
    a, b = tl.load(out + at, mask=inside, other=0.0), tl.load(dout + at, mask=inside, other=0.0)
    tl.store(delta + row, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def probabilities(query, key, value, dout, lse, delta, bounds, pairs, p_tiles, ds_tiles, num_queries, num_keys, query_stride,
                  query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, HEADS: tl.constexpr,
                  GROUP: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PANEL: tl.constexpr,
                  STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """p and ds, [slots, heads, TILE, TILE]; 0 where a query does not see a key. A program has PACK heads of a group and a pair."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    slot, first_head = tl.program_id(0) // (HEADS // PACK), tl.program_id(0) % (HEADS // PACK) * PACK
    query_tile, key_tile, is_full = tl.load(pairs + slot * 3), tl.load(pairs + slot * 3 + 1), tl.load(pairs + slot * 3 + 2)
    if query_tile >= 0:
        place, column = tl.arange(0, PACK * TILE), tl.arange(0, TILE)
        head, row = first_head + place // TILE, query_tile * TILE + place % TILE
        key_row = key_tile * TILE + column
        inside, key_inside, at_row = row < num_queries, key_row < num_keys, row.to(tl.int64) * HEADS + head
        scores = product(
            query + (query_tile * TILE).to(tl.int64) * query_stride + first_head * query_head_stride,
            place % TILE * query_stride + place // TILE * query_head_stride, inside,
            key + (key_tile * TILE).to(tl.int64) * key_stride + first_head // GROUP * key_head_stride, column * key_stride, key_inside,
            DIM, PANEL, STAGES, PACK * TILE, TILE, PRECISION)
        # A query that sees nothing here has p = 0, whatever it sees elsewhere.
        shift = tl.where(sees_any(bounds, row), tl.load(lse + at_row, mask=inside, other=0.0) * LOG2_E, float("inf"))
        if is_full == 0:
            scores = tl.where(sees(bounds, row, key_row), scores, float("-inf"))
        # Rounded before the second product, for whose time fp32 would take twice the registers.
        p = tl.exp2(scores * LOG2_E - shift[:, None]).to(p_tiles.dtype.element_ty)
        at, tile = place[:, None] * TILE + column[None, :], (slot * HEADS + first_head).to(tl.int64) * (TILE * TILE)
        tl.store(p_tiles + tile + at, p)
        dp = product(
            dout + ((query_tile * TILE).to(tl.int64) * HEADS + first_head) * DIM, (place % TILE * HEADS + place // TILE) * DIM, inside,
            value + (key_tile * TILE).to(tl.int64) * value_stride + first_head // GROUP * value_head_stride, column * value_stride,
            key_inside, DIM, PANEL, STAGES, PACK * TILE, TILE, PRECISION)
        ds = p.to(tl.float32) * (dp - tl.load(delta + at_row, mask=inside, other=0.0)[:, None])
        tl.store(ds_tiles + tile + at, ds.to(ds_tiles.dtype.element_ty))


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_tiles"])
def query_gradient(ds_tiles, key, dquery, pairs, by_query, num_queries, num_keys, num_tiles, key_stride, key_head_stride,
                   HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PANEL: tl.constexpr,
                   STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """dquery [Q, heads, DIM] of the query tiles of this chunk. A program has one tile, one head and PANEL of the DIM columns."""
    PANELS: tl.constexpr = DIM // PANEL
    PARTS: tl.constexpr = TILE // STEP
    panel, head = tl.program_id(0) % PANELS, tl.program_id(0) // PANELS % HEADS
    query_tile = num_tiles - 1 - tl.program_id(0) // (PANELS * HEADS)
    first, count = tl.load(by_query + query_tile * 2), tl.load(by_query + query_tile * 2 + 1)
    if count >= 0:
        place, step, inner = tl.arange(0, TILE), tl.arange(0, STEP), panel * PANEL + tl.arange(0, PANEL)
        key += head // GROUP * key_head_stride
        gradient = tl.zeros((TILE, PANEL), tl.float32)
        for i in tl.range(0, count * PARTS, num_stages=STAGES):
            slot, start = first + i // PARTS, i % PARTS * STEP
            ds = tl.load(ds_tiles + (slot * HEADS + head).to(tl.int64) * (TILE * TILE) + start + place[:, None] * TILE + step[None, :])
            first_key = tl.load(pairs + slot * 3 + 1) * TILE + start
            k = rows_at(key + first_key.to(tl.int64) * key_stride, step * key_stride, first_key + step < num_keys, inner)
            gradient = tl.dot(ds, k, gradient, input_precision=PRECISION)
        row = query_tile * TILE + place
        at = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + inner[None, :]
        tl.store(dquery + at, gradient.to(dquery.dtype.element_ty), mask=(row < num_queries)[:, None])


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def key_gradients(p_tiles, ds_tiles, query, dout, dkey, dvalue, by_key, slots, num_queries, num_keys, query_stride, query_head_stride,
                  HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PANEL: tl.constexpr,
                  STEP: tl.constexpr, ADDS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """dkey and dvalue [K, groups, DIM] of this chunk's pairs, on top of what is there if it ADDS.

    A program has one of the two, one key tile, one group of heads and PANEL of the DIM columns.
    """
    PANELS: tl.constexpr = DIM // PANEL
    PARTS: tl.constexpr = TILE // STEP
    GROUPS: tl.constexpr = HEADS // GROUP
    panel, of_value = tl.program_id(0) % PANELS, tl.program_id(0) // PANELS % 2
    group, key_tile = tl.program_id(0) // (PANELS * 2) % GROUPS, tl.program_id(0) // (PANELS * 2 * GROUPS)
    first, count = tl.load(by_key + key_tile * 2), tl.load(by_key + key_tile * 2 + 1)
    if of_value == 1:
        tiles, factor, gradient_at, stride, head_stride = p_tiles, dout, dvalue, HEADS * DIM, DIM
    else:
        tiles, factor, gradient_at, stride, head_stride = ds_tiles, query, dkey, query_stride, query_head_stride
    place, step, inner = tl.arange(0, TILE), tl.arange(0, STEP), panel * PANEL + tl.arange(0, PANEL)
    key_row = key_tile * TILE + place
    inside = (key_row < num_keys)[:, None]
    at = gradient_at + (key_row.to(tl.int64) * GROUPS + group)[:, None] * DIM + inner[None, :]
    if count > 0 or not ADDS:
        gradient = tl.zeros((TILE, PANEL), tl.float32)
        for i in tl.range(0, count * GROUP * PARTS, num_stages=STAGES):
            head, start = group * GROUP + i // PARTS % GROUP, i % PARTS * STEP
            entry = slots + (first + i // (PARTS * GROUP)) * 2
            tile = tiles + ((tl.load(entry) * HEADS + head).to(tl.int64) * TILE + start) * TILE
            a = tl.load(tile + step[:, None] * TILE + place[None, :])
            first_row = tl.load(entry + 1) * TILE + start
            b = rows_at(factor + first_row.to(tl.int64) * stride + head * head_stride, step * stride, first_row + step < num_queries, inner)
            gradient = tl.dot(tl.trans(a), b, gradient, input_precision=PRECISION)
        if ADDS:
            gradient += tl.load(at, mask=inside, other=0.0)
        tl.store(at, gradient.to(gradient_at.dtype.element_ty), mask=inside)
