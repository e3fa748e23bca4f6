"""RMSNorm of each head and rotation of its pairs (i, i + d/2) in one pass over the heads."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import TILE, next_power_of_2, persistent_programs
from .rms_norm import sum_partials


@triton.jit
def places(first, num_rows, token_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr):
    """Of the rows (token, head) from `first` on: (row, where their strided and contiguous halves start, their angles, the mask)."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    token, head = row // HEADS, row % HEADS
    strided = (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride)[:, None] + column
    dense = row.to(tl.int64)[:, None] * (2 * HALF) + column
    return row, strided, dense, token.to(tl.int64)[:, None] * HALF + column, (row < num_rows)[:, None] & (column < HALF)


@triton.jit
def load(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward(x, weight, cos, sin, y, inverse_root, num_rows, eps, token_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    row, strided, dense, angle, inside = places(tl.program_id(0) * ROWS, num_rows, token_stride, head_stride, HEADS, HALF, ROWS, COLUMNS)
    low, high = load(x, strided, inside), load(x, strided + HALF, inside)
    root = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + eps)
    tl.store(inverse_root + row, root, mask=row < num_rows)
    low, high = low * root[:, None], high * root[:, None]
    if HAS_WEIGHT:
        column = tl.arange(0, COLUMNS)
        low *= load(weight, column, column < HALF)[None, :]
        high *= load(weight, column + HALF, column < HALF)[None, :]
    c, s = load(cos, angle, inside), load(sin, angle, inside)
    tl.store(y + dense, (low * c - high * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + dense + HALF, (high * c + low * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, weight, cos, sin, inverse_root, dy, dx, partial, num_rows, num_tiles, token_stride, head_stride, HEADS: tl.constexpr,
              HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, WANTS_WEIGHT: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    if HAS_WEIGHT:
        weight_low = load(weight, column, column < HALF)[None, :]
        weight_high = load(weight, column + HALF, column < HALF)[None, :]
    dweight_low, dweight_high = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    number = tl.program_id(0)
    while number < num_tiles:
        row, strided, dense, angle, inside = places(number * ROWS, num_rows, token_stride, head_stride, HEADS, HALF, ROWS, COLUMNS)
        root = tl.load(inverse_root + row, mask=row < num_rows, other=0.0)[:, None]
        low, high = load(x, strided, inside) * root, load(x, strided + HALF, inside) * root
        dy_low, dy_high = load(dy, dense, inside), load(dy, dense + HALF, inside)
        c, s = load(cos, angle, inside), load(sin, angle, inside)
        grad_low, grad_high = dy_low * c + dy_high * s, dy_high * c - dy_low * s  # turned back
        if WANTS_WEIGHT:
            dweight_low += grad_low * low
            dweight_high += grad_high * high
        if HAS_WEIGHT:
            grad_low *= weight_low
            grad_high *= weight_high
        projection = tl.sum(grad_low * low + grad_high * high, 1)[:, None] / (2 * HALF)
        tl.store(dx + dense, ((grad_low - low * projection) * root).to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + dense + HALF, ((grad_high - high * projection) * root).to(dx.dtype.element_ty), mask=inside)
        number += tl.num_programs(0)
    if WANTS_WEIGHT:
        at = partial + tl.program_id(0) * (2 * HALF) + column
        tl.store(at, tl.sum(dweight_low, 0), mask=column < HALF)
        tl.store(at + HALF, tl.sum(dweight_high, 0), mask=column < HALF)


class _NormAndRotate(torch.autograd.Function):
    """Saved: x as given, the angles, and the inverse root, fp32, a number a head."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        num_tokens, heads, head_dim = x.shape
        num_rows, half = num_tokens * heads, head_dim // 2
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverse_root = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        columns = next_power_of_2(half)
        rows = max(1, TILE // (2 * columns))
        if num_rows:
            _forward[(triton.cdiv(num_rows, rows),)](x, weight, cos, sin, y, inverse_root, num_rows, eps, x.stride(0), x.stride(1),
                                                     HEADS=heads, HALF=half, ROWS=rows, COLUMNS=columns, HAS_WEIGHT=weight is not None,
                                                     num_warps=8)
        ctx.save_for_backward(x, weight, cos, sin, inverse_root)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, cos, sin, inverse_root = ctx.saved_tensors
        wants_weight = weight is not None and ctx.needs_input_grad[1]
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_rows, heads, half = len(inverse_root), x.shape[1], x.shape[2] // 2
        if not num_rows:
            return dx, torch.zeros_like(weight) if wants_weight else None, None, None, None
        columns = next_power_of_2(half)
        rows = max(1, TILE // (2 * columns))
        tiles = triton.cdiv(num_rows, rows)
        programs = persistent_programs(x.device, tiles) if wants_weight else tiles
        partial = torch.empty(programs, 2 * half, dtype=torch.float32, device=x.device) if wants_weight else None
        _backward[(programs,)](x, weight, cos, sin, inverse_root, dy.contiguous(), dx, partial, num_rows, tiles, x.stride(0), x.stride(1),
                               HEADS=heads, HALF=half, ROWS=rows, COLUMNS=columns, HAS_WEIGHT=weight is not None,
                               WANTS_WEIGHT=wants_weight, num_warps=8)
        return dx, sum_partials(partial, weight.dtype) if wants_weight else None, None, None, None


def norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """rms_norm of every head of x [T, heads, d], its pairs (i, i + d/2) turned by the angles of cos, sin fp32 [T, d/2], constants.

    In fp32; the dtype of `x`, which may be strided (a part of a fused projection).
    """
    assert x.shape[-1] % 2 == 0 and cos.shape == sin.shape == (len(x), x.shape[-1] // 2), f"{tuple(x.shape)}, angles {tuple(cos.shape)}"
    return _NormAndRotate.apply(x, weight, cos.contiguous(), sin.contiguous(), eps)
