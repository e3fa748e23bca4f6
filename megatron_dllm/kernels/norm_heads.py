"""Attention's operands in one pass each way: queries and keys normed and turned, values normed without a weight.

Where there are no values of their own, these are the raw keys, normed. Keys and values of n tokens may be handed on beside all of them.

Legend: T tokens, h query heads, g key and value heads, d head dimension.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import TILE, next_power_of_2, persistent_programs
from .norm_and_rotate import load, places
from .rms_norm import sum_partials


@triton.jit
def _kept_rows(row, place, inside, num_rows, HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Where rows (token, head) stand among those that are handed on, and which of them are."""
    at = tl.load(place + row // HEADS, mask=row < num_rows, other=-1)
    dense = (at.to(tl.int64) * HEADS + row % HEADS)[:, None] * (2 * HALF) + tl.arange(0, COLUMNS)[None, :]
    return dense, inside & (at >= 0)[:, None]


@triton.jit
def _store(y, at, low, high, inside, HALF: tl.constexpr):
    tl.store(y + at, low.to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, high.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _forward_of(x, weight, cos, sin, turned, plain, kept_turned, kept_plain, place, inverse_root, tile, num_tokens, eps, token_stride,
                head_stride, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of (token, head) rows: `turned` gets them normed, weighted and turned, `plain` normed alone; either may be None."""
    row, strided, dense, angle, inside = places(tile * ROWS, num_tokens * HEADS, token_stride, head_stride, HEADS, HALF, ROWS, COLUMNS)
    low, high = load(x, strided, inside), load(x, strided + HALF, inside)
    root = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)
    tl.store(inverse_root + row, root, mask=row < num_tokens * HEADS)
    low, high = low * root[:, None], high * root[:, None]
    if place is not None:
        kept, is_kept = _kept_rows(row, place, inside, num_tokens * HEADS, HEADS, HALF, COLUMNS)
    if plain is not None:
        _store(plain, dense, low, high, inside, HALF)
        if place is not None:
            _store(kept_plain, kept, low, high, is_kept, HALF)
    if turned is not None:
        column = tl.arange(0, COLUMNS)
        low *= load(weight, column, column < HALF)[None, :]
        high *= load(weight, column + HALF, column < HALF)[None, :]
        c, s = load(cos, angle, inside), load(sin, angle, inside)
        turned_low, turned_high = low * c - high * s, high * c + low * s
        _store(turned, dense, turned_low, turned_high, inside, HALF)
        if place is not None:
            _store(kept_turned, kept, turned_low, turned_high, is_kept, HALF)


@triton.jit(do_not_specialize=["num_tokens"])
def _forward(query, key, value, query_weight, key_weight, cos, sin, place, out_query, out_key, out_value, kept_key, kept_value, roots,
             num_tokens, eps, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
             HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """roots fp32, a number a head: of all queries, then of keys, then of values if there are any."""
    tile, of_query, of_key = tl.program_id(0), tl.cdiv(num_tokens * HEADS, ROWS), tl.cdiv(num_tokens * GROUPS, ROWS)
    if tile < of_query:
        _forward_of(query, query_weight, cos, sin, out_query, None, None, None, None, roots, tile, num_tokens, eps, query_stride,
                    query_head_stride, HEADS, HALF, ROWS, COLUMNS)
    elif tile < of_query + of_key:
        _forward_of(key, key_weight, cos, sin, out_key, out_value if value is None else None, kept_key, kept_value, place,
                    roots + num_tokens * HEADS, tile - of_query, num_tokens, eps, key_stride, key_head_stride, GROUPS, HALF, ROWS, COLUMNS)
    elif value is not None:
        _forward_of(value, None, None, None, None, out_value, None, kept_value, place, roots + num_tokens * (HEADS + GROUPS),
                    tile - of_query - of_key, num_tokens, eps, value_stride, value_head_stride, GROUPS, HALF, ROWS, COLUMNS)


@triton.jit
def _backward_of(x, weight, cos, sin, inverse_root, dturned, dplain, dkept_turned, dkept_plain, place, dx, tile, num_tokens, num_live,
                 token_stride, head_stride, dx_stride, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dx has the heads of a token one after the other, and tokens at `dx_stride`; of tokens from `num_live` on it is zero.

    What each row gives to both halves of the weight's gradient is returned.
    """
    row, strided, dense, angle, inside = places(tile * ROWS, num_tokens * HEADS, token_stride, head_stride, HEADS, HALF, ROWS, COLUMNS)
    seen = inside & (row < num_live * HEADS)[:, None]
    root = tl.load(inverse_root + row, mask=row < num_live * HEADS, other=0.0)[:, None]
    low, high = load(x, strided, seen) * root, load(x, strided + HALF, seen) * root
    if place is not None:
        kept, is_kept = _kept_rows(row, place, seen, num_tokens * HEADS, HEADS, HALF, COLUMNS)
    grad_low, grad_high = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    weight_low, weight_high = grad_low, grad_high
    if dturned is not None:
        column = tl.arange(0, COLUMNS)
        dy_low, dy_high = load(dturned, dense, seen), load(dturned, dense + HALF, seen)
        if place is not None:
            dy_low += load(dkept_turned, kept, is_kept)
            dy_high += load(dkept_turned, kept + HALF, is_kept)
        c, s = load(cos, angle, seen), load(sin, angle, seen)
        grad_low, grad_high = dy_low * c + dy_high * s, dy_high * c - dy_low * s  # turned back
        weight_low, weight_high = grad_low * low, grad_high * high
        grad_low *= load(weight, column, column < HALF)[None, :]
        grad_high *= load(weight, column + HALF, column < HALF)[None, :]
    if dplain is not None:
        grad_low += load(dplain, dense, seen)
        grad_high += load(dplain, dense + HALF, seen)
        if place is not None:
            grad_low += load(dkept_plain, kept, is_kept)
            grad_high += load(dkept_plain, kept + HALF, is_kept)
    projection = tl.sum(grad_low * low + grad_high * high, 1)[:, None] / (2 * HALF)
    dx += ((row // HEADS).to(tl.int64) * dx_stride + row % HEADS * (2 * HALF))[:, None] + tl.arange(0, COLUMNS)[None, :]
    tl.store(dx, ((grad_low - low * projection) * root).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + HALF, ((grad_high - high * projection) * root).to(dx.dtype.element_ty), mask=inside)
    return weight_low, weight_high


@triton.jit
def _store_sums(partial, low, high, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over the rows of both halves."""
    column = tl.arange(0, COLUMNS)
    tl.store(partial + column, tl.sum(low, 0), mask=column < HALF)
    tl.store(partial + HALF + column, tl.sum(high, 0), mask=column < HALF)


@triton.jit(do_not_specialize=["num_tokens", "num_live"])
def _backward(query, key, value, query_weight, key_weight, cos, sin, place, roots, dout_query, dout_key, dout_value, dkept_key, dkept_value,
              dx, num_tokens, num_live, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
              dx_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program a tile, of weights without gradient."""
    tile, of_query, of_key = tl.program_id(0), tl.cdiv(num_tokens * HEADS, ROWS), tl.cdiv(num_tokens * GROUPS, ROWS)
    if tile < of_query:
        _backward_of(query, query_weight, cos, sin, roots, dout_query, None, None, None, None, dx, tile, num_tokens, num_live, query_stride,
                     query_head_stride, dx_stride, HEADS, HALF, ROWS, COLUMNS)
    elif tile < of_query + of_key:
        _backward_of(key, key_weight, cos, sin, roots + num_tokens * HEADS, dout_key, dout_value if value is None else None, dkept_key,
                     dkept_value, place, dx + HEADS * 2 * HALF, tile - of_query, num_tokens, num_live, key_stride, key_head_stride,
                     dx_stride, GROUPS, HALF, ROWS, COLUMNS)
    elif value is not None:
        _backward_of(value, None, None, None, roots + num_tokens * (HEADS + GROUPS), None, dout_value, None, dkept_value, place,
                     dx + (HEADS + GROUPS) * 2 * HALF, tile - of_query - of_key, num_tokens, num_live, value_stride, value_head_stride,
                     dx_stride, GROUPS, HALF, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["num_tokens", "num_live"])
def _backward_of_all(query, key, value, query_weight, key_weight, cos, sin, place, roots, dout_query, dout_key, dout_value, dkept_key,
                     dkept_value, dx, partial, num_tokens, num_live, query_stride, query_head_stride, key_stride, key_head_stride,
                     value_stride, value_head_stride, dx_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Programs share the tiles in turns; partial fp32 [programs, 2, d]: what each has of the gradients of both weights."""
    first, step = tl.program_id(0), tl.num_programs(0)
    sum_low, sum_high = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(first, tl.cdiv(num_tokens * HEADS, ROWS), step):
        low, high = _backward_of(query, query_weight, cos, sin, roots, dout_query, None, None, None, None, dx, tile, num_tokens, num_live,
                                 query_stride, query_head_stride, dx_stride, HEADS, HALF, ROWS, COLUMNS)
        sum_low += low
        sum_high += high
    partial += first * (4 * HALF)
    _store_sums(partial, sum_low, sum_high, HALF, COLUMNS)
    sum_low, sum_high = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(first, tl.cdiv(num_tokens * GROUPS, ROWS), step):
        low, high = _backward_of(key, key_weight, cos, sin, roots + num_tokens * HEADS, dout_key, dout_value if value is None else None,
                                 dkept_key, dkept_value, place, dx + HEADS * 2 * HALF, tile, num_tokens, num_live, key_stride,
                                 key_head_stride, dx_stride, GROUPS, HALF, ROWS, COLUMNS)
        sum_low += low
        sum_high += high
    _store_sums(partial + 2 * HALF, sum_low, sum_high, HALF, COLUMNS)
    if value is not None:
        for tile in range(first, tl.cdiv(num_tokens * GROUPS, ROWS), step):
            _backward_of(value, None, None, None, roots + num_tokens * (HEADS + GROUPS), None, dout_value, None, dkept_value, place,
                         dx + (HEADS + GROUPS) * 2 * HALF, tile, num_tokens, num_live, value_stride, value_head_stride, dx_stride, GROUPS,
                         HALF, ROWS, COLUMNS)


def _launch(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[tuple[int], list[int], dict[str, int]]:
    """Programs, strides, and what a kernel is compiled for."""
    num_tokens, heads, head_dim = query.shape
    groups, half = key.shape[1], head_dim // 2
    columns = next_power_of_2(half)
    rows = max(1, TILE // (2 * columns))
    tiles = sum(triton.cdiv(num_tokens * count, rows) for count in (heads, groups, 0 if value is None else groups))
    strides = [stride for x in (query, key, key if value is None else value) for stride in x.stride()[:2]]
    return (tiles,), strides, {"HEADS": heads, "GROUPS": groups, "HALF": half, "ROWS": rows, "COLUMNS": columns, "num_warps": 8}


class _NormHeads(torch.autograd.Function):
    """Saved: the inputs as given, the angles, and the inverse roots, fp32, a number a head. The gradients are parts of one tensor, as the
    gradient of a fused projection is."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor | None, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor,
                eps: float, place: Tensor | None, num_kept: int, num_live: int | None) -> tuple[Tensor, ...]:
        query, key, value = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        outs = tuple(x.new_empty(x.shape) for x in (query, key, key))
        kept = (None, None) if place is None else tuple(key.new_empty(num_kept, *key.shape[1:]) for _ in range(2))
        heads = [query.shape[1], *[key.shape[1]] * (1 if value is None else 2)]
        roots = torch.empty(len(query) * sum(heads), dtype=torch.float32, device=query.device)
        programs, strides, shape = _launch(query, key, value)
        if len(query):
            _forward[programs](query, key, value, query_weight, key_weight, cos, sin, place, *outs, *kept, roots, len(query), eps, *strides,
                               **shape)
        # By tokens, as a joint backward wants them; the first is where all lie.
        by_token = (part.view(-1, count) for part, count in zip(roots.split([len(query) * count for count in heads]), heads, strict=True))
        ctx.save_for_backward(query, key, value, query_weight, key_weight, cos, sin, place, *by_token)
        ctx.num_live = len(query) if num_live is None else num_live
        return outs if place is None else (*outs, *kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts: Tensor):
        query, key, value, *others = ctx.saved_tensors
        others = others[:6]
        douts = [dout.contiguous() for dout in douts]
        heads, groups, num_values = query.shape[1], key.shape[1], 0 if value is None else value.shape[1]
        dx = query.new_empty(len(query), heads + groups + num_values, query.shape[2])
        (tiles,), strides, shape = _launch(query, key, value)
        inputs = query, key, value, *others, *douts, *[None] * (5 - len(douts)), dx
        sizes = len(query), ctx.num_live, *strides, dx.stride(0)
        wants, dweights = ctx.needs_input_grad[3:5], (None, None)
        if any(wants):
            programs = persistent_programs(dx.device, tiles)
            partial = torch.empty(programs, 2 * query.shape[2], dtype=torch.float32, device=dx.device)
            if tiles:
                _backward_of_all[(programs,)](*inputs, partial, *sizes, **shape)
            sums = sum_partials(partial, others[0].dtype).split(query.shape[2])
            dweights = tuple(total if wanted else None for total, wanted in zip(sums, wants, strict=True))
        elif tiles:
            _backward[(tiles,)](*inputs, *sizes, **shape)
        dquery, dkey, dvalue = dx.split([heads, groups, num_values], 1)
        return dquery, dkey, None if value is None else dvalue, *dweights, *[None] * 6


def norm_heads(query: Tensor, key: Tensor, value: Tensor | None, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor,
               eps: float, place: Tensor | None = None, num_kept: int = 0, num_live: int | None = None) -> tuple[Tensor, ...]:
    """rms_norm of every head of query [T, h, d], key and value [T, g, d], the first two weighted and their pairs (i, i + d/2) turned by the
    angles of cos, sin fp32 [T, d/2]; value None: the normed raw keys. Inputs may be strided; the weights are of one dtype.

    With `place` int64 [T] also the keys and values [n, g, d] of `num_kept` tokens, in other tensors: a token's number among them, or -1.
    Gradients of tokens from `num_live` on (None: of none) are taken for zero.
    """
    assert query.shape[-1] % 2 == 0 and cos.shape == sin.shape == (len(query), query.shape[-1] // 2), \
        f"{tuple(query.shape)}, angles {tuple(cos.shape)}"
    return _NormHeads.apply(query, key, value, query_weight, key_weight, cos.contiguous(), sin.contiguous(), eps, place, num_kept,
                            num_live)
