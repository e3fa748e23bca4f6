"""softmax(q k^T) v over flat tokens, scale 1, from three integers a query: no mask, no repeated key, memory linear in the sequence.

Legend: Q queries, K flat keys, h query heads, g key and value heads (h a multiple of g), d head dimension.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from . import attention_backward as backward_kernels
from . import attention_wide as wide_kernels
from .attention_forward import forward
from .attention_tiles import LARGEST_HEAD_DIM, LEAST_HEAD_DIM, AttentionTiles, num_slots
from .launch import next_power_of_2, processors


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts its work. rows, columns: of the tile that a program holds; step: of the inner dimension at a time; heads: of a
    group that a program takes, which share its keys."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    heads: int = 1


@dataclass(frozen=True)
class Shapes:
    """forward: rows of queries, columns of keys; None: by `scores` and `mix`. scores, probabilities: `step` of the head dimension. mix
    and gradients: columns of the head dimension."""

    forward: Shape | None
    scores: Shape
    mix: Shape
    probabilities: Shape
    query_gradient: Shape
    key_gradients: Shape


def shapes(head_dim: int, tile: int, *, few: bool = False) -> Shapes:
    """The shapes for a head dimension; tests use tiles that are smaller than any of these. `few`: programs of 128 queries leave more than
    half of the processors without one.

    Measured on an H200, ms of kernels for 4096 causal tokens, 16 heads, bf16, first what is used:
        forward          256: 128 x 64 0.32, 128 x 32 0.46, 64 x 64 0.64, by scores and mix 0.42. 512: by scores and mix 0.66, 64 x 32 1.57
        scores           512: 2 heads, 16 or 8 warps 0.37, 1 head 0.46
        mix              512: 5 or 7 stages 0.29, 3 stages 0.39, steps of 32 0.33, 128 columns 0.32
        probabilities    256: 2 heads in 4 stages 0.55, in 3 0.64, 1 head 0.62, steps of 32 0.62. 512: 0.78, 0.79, 0.84, 0.78
        key_gradients    256: 5 stages 0.24, 7 0.25. 512: 7 stages 0.52, 5 0.55
    A canvas of 256 over 1023 keys, ms as the host sees them: forward 64 x 64 0.10, 128 x 64 0.13; four canvases 0.13 and 0.14.
    """
    if head_dim >= 512:
        block = None
    elif head_dim >= 256:
        block = Shape(64, 64, 0, 4, 2) if few else Shape(128, 64, 0, 8, 2)
    else:
        block = Shape(128, 64, 0, 8 if head_dim > 64 else 4, 3)
    panel = Shape(tile, min(256, head_dim), min(64, tile), 8, 5)
    pair = Shape(tile, tile, min(64, head_dim), 16, 4, heads=2)
    return Shapes(
        forward=None if block is None else replace(block, rows=min(block.rows, tile), columns=min(block.columns, tile)),
        scores=pair, mix=panel, probabilities=pair, query_gradient=panel,
        key_gradients=replace(panel, stages=7) if head_dim >= 512 else panel)


def attention_forward(query: Tensor, key: Tensor, value: Tensor, tiles: AttentionTiles, shape: Shapes | None = None, *,
                      dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """out [Q, h, d] and lse fp32 [Q, h] of query [Q, h, d], key and value [K, g, d]; 0 and -inf for a query that sees nothing.

    `dtype` is that of out (None: the query's). Rows of the query after those of `tiles` see nothing. No gradient is recorded.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    num_rows, heads, head_dim = query.shape
    _check(query, key, value, tiles)
    out = torch.empty(query.shape, dtype=dtype or query.dtype, device=query.device)
    lse = torch.empty(num_rows, heads, dtype=torch.float32, device=query.device)
    covered = len(tiles.bounds)
    if num_rows > covered:
        out[covered:].zero_()
        lse[covered:].fill_(-torch.inf)
    few = 2 * heads * len(tiles.rows) <= processors(query.device)
    how = shape or shapes(head_dim, tiles.tile, few=few)
    if not covered:
        return out, lse
    if how.forward is None:
        _wide_forward(query, key, value, out, lse, tiles, how)
        return out, lse
    block = how.forward
    blocks = covered // block.rows
    forward[(blocks * heads,)](
        query, key, value, out, lse, tiles.bounds, tiles.rows, tiles.masked, num_rows, len(key), blocks, *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], HEADS=heads, GROUP=heads // key.shape[1], DIM=head_dim, TILE=tiles.tile,
        BLOCK_M=block.rows, BLOCK_N=block.columns, STAGES=block.stages, PRECISION=_precision(query), num_warps=block.warps)
    return out, lse


def _wide_forward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tiles: AttentionTiles, how: Shapes) -> None:
    """Fills out and lse with the probabilities of a chunk of tiles in memory at a time."""
    (num_rows, heads, head_dim), tile, group = query.shape, tiles.tile, query.shape[1] // key.shape[1]
    slots = num_slots(tiles.chunks)
    p = torch.empty(slots, heads, tile, tile, dtype=query.dtype, device=query.device)
    peaks, sums, scales = torch.empty(3, slots, heads, tile, dtype=torch.float32, device=query.device)
    shared = {"HEADS": heads, "GROUP": group, "DIM": head_dim, "TILE": tile, "PRECISION": _precision(query)}
    query_tiles, pack, part, mix = len(tiles.bounds) // tile, _pack(how.scores, group), how.scores, how.mix
    for chunk in tiles.chunks:
        wide_kernels.tile_probabilities[(len(chunk.pairs) * (heads // pack),)](
            query, key, tiles.bounds, chunk.pairs, p, peaks, sums, num_rows, len(key), *query.stride()[:2], *key.stride()[:2], PACK=pack,
            PANEL=part.step, STAGES=part.stages, num_warps=part.warps, **shared)
        wide_kernels.tile_scales[(query_tiles * heads,)](
            peaks, sums, scales, lse, chunk.by_query, num_rows, HEADS=heads, TILE=tile, SLOTS=16, num_warps=4)
        wide_kernels.mixed_values[(query_tiles * heads * (head_dim // mix.columns),)](
            p, scales, value, out, chunk.pairs, chunk.by_query, num_rows, len(key), query_tiles, *value.stride()[:2], PANEL=mix.columns,
            STEP=mix.step, STAGES=mix.stages, num_warps=mix.warps, **shared)


def _pack(shape: Shape, group: int) -> int:
    """Heads that a program takes: those of the shape, or one where a group has no multiple of them."""
    return shape.heads if group % shape.heads == 0 else 1


def attention_backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, delta: Tensor, tiles: AttentionTiles,
                       shape: Shapes | None = None, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dquery, dkey and dvalue, in `dtype` (None: their own), from lse and delta = sum of dout * out, fp32 [Q, h].

    lse and delta may be those of more keys than are here: then these are the parts of the gradients that these keys give and get.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    dout, lse, delta = dout.contiguous(), lse.contiguous(), delta.contiguous()
    _check(query, key, value, tiles)
    (num_rows, heads, head_dim), groups, tile = query.shape, key.shape[1], tiles.tile
    how = shape or shapes(head_dim, tile)
    dtype = dtype or query.dtype
    dquery = torch.empty(query.shape, dtype=dtype, device=query.device)
    if num_rows > len(tiles.bounds):
        dquery[len(tiles.bounds):].zero_()
    chunks = tiles.in_backward
    # Several chunks add up in fp32.
    sums = dtype if len(chunks) == 1 else torch.float32
    dkey, dvalue = (torch.empty(x.shape, dtype=sums, device=x.device) for x in (key, value))
    p, ds = torch.empty(2, num_slots(chunks), heads, tile, tile, dtype=query.dtype, device=query.device)
    shared = {"HEADS": heads, "GROUP": heads // groups, "DIM": head_dim, "TILE": tile, "PRECISION": _precision(query)}
    query_tiles, key_tiles = len(tiles.bounds) // tile, len(chunks[0].by_key)
    for gradient in (dkey, dvalue):
        if len(key) > key_tiles * tile:
            gradient[key_tiles * tile:].zero_()
    for number, chunk in enumerate(chunks):
        part, each, pack = how.probabilities, how.query_gradient, _pack(how.probabilities, heads // groups)
        backward_kernels.probabilities[(len(chunk.pairs) * (heads // pack),)](
            query, key, value, dout, lse, delta, tiles.bounds, chunk.pairs, p, ds, num_rows, len(key), *query.stride()[:2],
            *key.stride()[:2], *value.stride()[:2], PACK=pack, PANEL=part.step, STAGES=part.stages, num_warps=part.warps,
            **shared)
        if query_tiles:
            backward_kernels.query_gradient[(query_tiles * heads * (head_dim // each.columns),)](
                ds, key, dquery, chunk.pairs, chunk.by_query, num_rows, len(key), query_tiles, *key.stride()[:2], PANEL=each.columns,
                STEP=each.step, STAGES=each.stages, num_warps=each.warps, **shared)
        each = how.key_gradients
        if key_tiles:
            backward_kernels.key_gradients[(key_tiles * groups * 2 * (head_dim // each.columns),)](
                p, ds, query, dout, dkey, dvalue, chunk.by_key, chunk.slots, num_rows, len(key), *query.stride()[:2], PANEL=each.columns,
                STEP=each.step, ADDS=number > 0, STAGES=each.stages, num_warps=each.warps, **shared)
    return dquery, dkey.to(dtype), dvalue.to(dtype)


def row_products(out: Tensor, dout: Tensor) -> Tensor:
    """delta fp32 [Q, h]: the sum of dout * out over the last dimension."""
    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    rows = max(1, 4096 // out.shape[2])
    if delta.numel():
        backward_kernels.row_products[(triton.cdiv(delta.numel(), rows),)](
            out.contiguous(), dout.contiguous(), delta, delta.numel(), DIM=out.shape[2], ROWS=rows, num_warps=4)
    return delta


class _Attention(torch.autograd.Function):
    """Saved: the inputs, out, and lse (fp32, a number a query and head)."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, tiles: AttentionTiles) -> Tensor:
        out, lse = attention_forward(query, key, value, tiles)
        ctx.tiles = tiles
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        return *attention_backward(dout, query, key, value, lse, row_products(out, dout), ctx.tiles), None


def attention(query: Tensor, key: Tensor, value: Tensor, tiles: AttentionTiles) -> Tensor:
    """out [Q, h, d] from query [Q, h, d], key and value [K, g, d], in their dtype, with fp32 scores; rows that see nothing are 0."""
    return _Attention.apply(query, key, value, tiles)


def _check(query: Tensor, key: Tensor, value: Tensor, tiles: AttentionTiles) -> None:
    heads, head_dim = query.shape[1:]
    assert key.shape == value.shape and key.shape[2] == head_dim and heads % key.shape[1] == 0, \
        f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    assert len(query) >= tiles.num_queries and len(key) >= tiles.num_keys, \
        f"{len(query)} queries and {len(key)} keys where the tiles are of {tiles.num_queries} and {tiles.num_keys}"
    assert LEAST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM and head_dim == next_power_of_2(head_dim), \
        f"head dimension {head_dim} is no power of two from {LEAST_HEAD_DIM} to {LARGEST_HEAD_DIM}"


def _precision(x: Tensor) -> str:
    """fp32 is multiplied as fp32; 16-bit factors have one way."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
