"""From a fused projection to attention's operands in one pass: norms and rotation of queries and keys, the values' norm, keys and values
written where the cache has them.

Legend: T tokens, h query heads, g key and value heads, d head dimension.
"""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import TILE, next_power_of_2


@triton.jit
def _load(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, at, low, high, inside, HALF: tl.constexpr):
    tl.store(pointer + at, low.to(pointer.dtype.element_ty), mask=inside)
    tl.store(pointer + at + HALF, high.to(pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _place(x, query_weight, key_weight, cos, sin, slots, query, key, value, num_tokens, eps, HEADS: tl.constexpr, GROUPS: tl.constexpr,
           WIDTH: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [T, WIDTH]; without values of their own (WIDTH = (h + g) d) values are the keys before their norm."""
    ALL: tl.constexpr = HEADS + 2 * GROUPS
    SHARED: tl.constexpr = WIDTH == (HEADS + GROUPS) * 2 * HALF
    number, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    token, head = (number // ALL).to(tl.int64), number % ALL
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + GROUPS)[:, None]
    inside = (token < num_tokens)[:, None] & (column < HALF)
    source = head
    if SHARED:
        source = tl.where(head >= HEADS + GROUPS, head - GROUPS, head)
    at = (token * WIDTH + source * (2 * HALF))[:, None] + column
    low, high = _load(x, at, inside), _load(x, at + HALF, inside)
    root = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)[:, None]
    in_half = column < HALF
    low *= root
    high *= root
    low *= tl.where(is_query, _load(query_weight, column, in_half), tl.where(is_value, 1.0, _load(key_weight, column, in_half)))
    high *= tl.where(is_query, _load(query_weight, column + HALF, in_half),
                     tl.where(is_value, 1.0, _load(key_weight, column + HALF, in_half)))
    angle = token[:, None] * HALF + column
    c, s = _load(cos, angle, inside), _load(sin, angle, inside)
    turned_low = tl.where(is_value, low, low * c - high * s)
    turned_high = tl.where(is_value, high, high * c + low * s)
    _store(query, ((token * HEADS + head) * (2 * HALF))[:, None] + column, turned_low, turned_high, inside & is_query, HALF)
    slot = tl.load(slots + token, mask=token < num_tokens, other=0)
    place = ((slot * GROUPS + (head - HEADS) % GROUPS) * (2 * HALF))[:, None] + column
    _store(key, place, turned_low, turned_high, inside & ~is_query & ~is_value, HALF)
    _store(value, place, turned_low, turned_high, inside & is_value, HALF)


def place_heads(x: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, key: Tensor, value: Tensor,
                heads: int, eps: float) -> Tensor:
    """The queries [T, h, d] of x [T, (h + 2 g) d], or [T, (h + g) d] where values are raw keys; keys and values go to `slots` int64 [T] of
    key, value [., g, d]. cos, sin fp32 [T, d/2]."""
    (num_tokens, width), (groups, head_dim) = x.shape, key.shape[-2:]
    assert x.is_contiguous() and key.is_contiguous() and value.is_contiguous() and width in (
        (heads + groups) * head_dim, (heads + 2 * groups) * head_dim), f"{width} columns, {heads} and {groups} heads of {head_dim}"
    query = x.new_empty(num_tokens, heads, head_dim)
    half = head_dim // 2
    columns = next_power_of_2(half)
    rows = max(1, TILE // (2 * columns))
    if num_tokens:
        _place[(triton.cdiv(num_tokens * (heads + 2 * groups), rows),)](
            x, query_weight, key_weight, cos, sin, slots, query, key, value, num_tokens, eps, HEADS=heads, GROUPS=groups, WIDTH=width,
            HALF=half, ROWS=rows, COLUMNS=columns, num_warps=8)
    return query
