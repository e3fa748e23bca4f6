"""softmax(q k^T) v over flat tokens, scale 1, from three integers a query: no mask, no repeated key, memory linear in the sequence.

Legend: Q queries, K flat keys, h query heads, g key and value heads (h a multiple of g), d head dimension.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from . import attention_backward as backward_kernels
from .attention_forward import forward
from .attention_tiles import LARGEST_HEAD_DIM, LEAST_HEAD_DIM, AttentionTiles
from .launch import next_power_of_2


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts its work. rows, columns: of the tile that a program holds; step: of the inner dimension at a time; registers:
    the most a thread may have (None: as the compiler likes), so that two programs fit a processor."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Shapes:
    """forward: rows of queries, columns of keys. probabilities: `step` of the head dimension. gradients: columns of the head dimension."""

    forward: Shape
    probabilities: Shape
    query_gradient: Shape
    key_gradients: Shape


def shapes(head_dim: int, dtype: torch.dtype, tile: int) -> Shapes:
    """The shapes for a head dimension and dtype; tests use tiles that are smaller than any of these."""
    wide = dtype == torch.float32
    if head_dim >= 512:
        query_block = Shape(64, 32, 0, 8, 2)
    elif head_dim >= 256:
        query_block = Shape(128, 64, 0, 8, 2)
    else:
        query_block = Shape(128, 64, 0, 8 if head_dim > 64 else 4, 3)
    return Shapes(
        _within(query_block, tile, head_dim),
        _within(Shape(128, 128, 32 if wide else 64, 8, 3), tile, head_dim),
        _within(Shape(128, 256, 32 if wide else 64, 8, 5), tile, head_dim),
        _within(Shape(128, 256, 32 if wide else 64, 8, 5), tile, head_dim))


def _within(shape: Shape, tile: int, head_dim: int) -> Shape:
    """`shape` cut down to a tile and a head dimension."""
    columns = shape.columns if shape.step == 0 else min(shape.columns, head_dim)
    return replace(shape, rows=min(shape.rows, tile), columns=min(columns, tile) if shape.step == 0 else columns,
                   step=min(shape.step, head_dim, tile))


def attention_forward(query: Tensor, key: Tensor, value: Tensor, tiles: AttentionTiles,
                      shape: Shapes | None = None) -> tuple[Tensor, Tensor]:
    """out [Q, h, d] and lse fp32 [Q, h] of query [Q, h, d], key and value [K, g, d]; 0 and -inf for a query that sees nothing.

    Rows of the query after those of `tiles` see nothing. No gradient is recorded.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    num_rows, heads, head_dim = query.shape
    _check(query, key, value, tiles)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(num_rows, heads, dtype=torch.float32, device=query.device)
    covered = len(tiles.bounds)
    if num_rows > covered:
        out[covered:].zero_()
        lse[covered:].fill_(-torch.inf)
    how = (shape or shapes(head_dim, query.dtype, tiles.tile)).forward
    blocks = covered // how.rows
    if blocks:
        forward[(blocks * heads,)](
            query, key, value, out, lse, tiles.bounds, tiles.rows, tiles.masked, num_rows, len(key), blocks, *query.stride()[:2],
            *key.stride()[:2], *value.stride()[:2], HEADS=heads, GROUP=heads // key.shape[1], DIM=head_dim, TILE=tiles.tile,
            BLOCK_M=how.rows, BLOCK_N=how.columns, STAGES=how.stages, PRECISION=_precision(query), num_warps=how.warps,
            maxnreg=how.registers)
    return out, lse


def attention_backward(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, delta: Tensor, tiles: AttentionTiles,
                       shape: Shapes | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dquery, dkey and dvalue from lse and delta = sum of dout * out, fp32 [Q, h]: those of all keys, where `tiles` has some of them."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    dout = dout.contiguous()
    _check(query, key, value, tiles)
    (num_rows, heads, head_dim), groups, tile = query.shape, key.shape[1], tiles.tile
    how = shape or shapes(head_dim, query.dtype, tile)
    dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_rows > len(tiles.bounds):
        dquery[len(tiles.bounds):].zero_()
    # Several chunks add up in fp32.
    sums = query.dtype if len(tiles.chunks) == 1 else torch.float32
    dkey, dvalue = (torch.empty(x.shape, dtype=sums, device=x.device) for x in (key, value))
    p, ds = torch.empty(2, tiles.num_slots, heads, tile, tile, dtype=query.dtype, device=query.device)
    shared = {"HEADS": heads, "GROUP": heads // groups, "DIM": head_dim, "TILE": tile, "PRECISION": _precision(query)}
    query_tiles, key_tiles = len(tiles.bounds) // tile, len(tiles.chunks[0].by_key)
    for gradient in (dkey, dvalue):
        if len(key) > key_tiles * tile:
            gradient[key_tiles * tile:].zero_()
    for number, chunk in enumerate(tiles.chunks):
        part, each = how.probabilities, how.query_gradient
        backward_kernels.probabilities[(len(chunk.pairs) * heads,)](
            query, key, value, dout, lse, delta, tiles.bounds, chunk.pairs, p, ds, num_rows, len(key), *query.stride()[:2],
            *key.stride()[:2], *value.stride()[:2], PANEL=part.step, STAGES=part.stages, num_warps=part.warps, maxnreg=part.registers,
            **shared)
        if query_tiles:
            backward_kernels.query_gradient[(query_tiles * heads * (head_dim // each.columns),)](
                ds, key, dquery, chunk.pairs, chunk.by_query, num_rows, len(key), query_tiles, *key.stride()[:2], PANEL=each.columns,
                STEP=each.step, STAGES=each.stages, num_warps=each.warps, maxnreg=each.registers, **shared)
        each = how.key_gradients
        if key_tiles:
            backward_kernels.key_gradients[(key_tiles * groups * 2 * (head_dim // each.columns),)](
                p, ds, query, dout, dkey, dvalue, chunk.by_key, chunk.slots, num_rows, len(key), *query.stride()[:2], PANEL=each.columns,
                STEP=each.step, ADDS=number > 0, STAGES=each.stages, num_warps=each.warps, maxnreg=each.registers, **shared)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)


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
