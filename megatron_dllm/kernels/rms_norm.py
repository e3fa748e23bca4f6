"""RMSNorm, forward and backward: one read of each tensor, a row in the registers of one program."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2, persistent_programs, tile


@triton.jit
def _forward(x, weight, y, inverse_root, num_rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             HAS_WEIGHT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at, inside = row[:, None] * WIDTH + column[None, :], (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    tl.store(inverse_root + row, root, mask=row < num_rows)
    out = wide * root[:, None]
    if HAS_WEIGHT:
        out *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, weight, inverse_root, dy, beside, dx, partial, num_rows, num_live, num_tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, HAS_WEIGHT: tl.constexpr, WANTS_WEIGHT: tl.constexpr):
    """`beside`, of the shape of dx, is added to it (None: nothing is). Rows from `num_live` on are not read: their gradient is zero."""
    column = tl.arange(0, COLUMNS)
    in_row = column < WIDTH
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    number = tl.program_id(0)
    while number < num_tiles:
        row = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        at, inside = row[:, None] * WIDTH + column[None, :], (row < num_rows)[:, None] & in_row[None, :]
        root, seen = tl.load(inverse_root + row, mask=row < num_live, other=0.0)[:, None], inside & (row < num_live)[:, None]
        normed = tl.load(x + at, mask=seen, other=0.0).to(tl.float32) * root
        grad = tl.load(dy + at, mask=seen, other=0.0).to(tl.float32)
        if WANTS_WEIGHT:
            dweight += grad * normed
        if HAS_WEIGHT:
            grad *= factor
        projection = tl.sum(grad * normed, 1)[:, None] / WIDTH
        total = (grad - normed * projection) * root
        if beside is not None:
            total += tl.load(beside + at, mask=seen, other=0.0).to(tl.float32)
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
        number += tl.num_programs(0)
    if WANTS_WEIGHT:
        tl.store(partial + tl.program_id(0) * WIDTH + column, tl.sum(dweight, 0), mask=in_row)


@triton.jit
def _sum_rows(partial, total, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    summed = tl.zeros((ROWS, COLUMNS), tl.float32)
    row = tl.arange(0, ROWS)
    while tl.min(row) < num_rows:
        inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        summed += tl.load(partial + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        row += ROWS
    tl.store(total + column, tl.sum(summed, 0).to(total.dtype.element_ty), mask=column < WIDTH)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """[W] in `dtype`: the sum over the programs of partial fp32 [P, W], always in the same order."""
    num_rows, width = partial.shape
    total = torch.empty(width, dtype=dtype, device=partial.device)
    # All rows of a few columns at once: there are two a processor, and waiting for a second reading would take as long as the first.
    _sum_rows[(triton.cdiv(width, 16),)](partial, total, num_rows, WIDTH=width, ROWS=min(512, next_power_of_2(num_rows)), COLUMNS=16,
                                         num_warps=8)
    return total


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y, and the inverse root, fp32, a number a row of x, which is contiguous."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    y, inverse_root = torch.empty_like(x), torch.empty(num_rows, dtype=torch.float32, device=x.device)
    rows, columns, warps = tile(width)
    if num_rows:
        _forward[(triton.cdiv(num_rows, rows),)](x, weight, y, inverse_root, num_rows, eps, WIDTH=width, ROWS=rows, COLUMNS=columns,
                                                 HAS_WEIGHT=weight is not None, num_warps=warps)
    return y, inverse_root


def _gradients(x: Tensor, weight: Tensor | None, inverse_root: Tensor, dy: Tensor, beside: Tensor | None, *, wants_weight: bool,
               num_live: int | None = None) -> tuple[Tensor, Tensor | None]:
    """dx, with `beside` added, and the weight's gradient where it is wanted; of rows from `num_live` on (None: of none) zero."""
    num_rows, width, dx = len(inverse_root), x.shape[-1], torch.empty_like(x)
    if not num_rows:
        return dx, torch.zeros_like(weight) if wants_weight else None
    rows, columns, warps = tile(width)
    tiles = triton.cdiv(num_rows, rows)
    programs = persistent_programs(x.device, tiles) if wants_weight else tiles
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device) if wants_weight else None
    beside = None if beside is None else beside.contiguous()
    _backward[(programs,)](x, weight, inverse_root, dy.contiguous(), beside, dx, partial, num_rows,
                           num_rows if num_live is None else num_live, tiles, WIDTH=width, ROWS=rows, COLUMNS=columns,
                           HAS_WEIGHT=weight is not None, WANTS_WEIGHT=wants_weight, num_warps=warps)
    return dx, sum_partials(partial, weight.dtype) if wants_weight else None


class _RMSNorm(torch.autograd.Function):
    """Saved: x as given and the inverse root."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        y, inverse_root = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_root)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, inverse_root = ctx.saved_tensors
        wants_weight = weight is not None and ctx.needs_input_grad[1]
        return *_gradients(x, weight, inverse_root, dy, None, wants_weight=wants_weight), None


class _NormBeside(torch.autograd.Function):
    """Saved: x and the inverse root."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, num_live: int | None) -> tuple[Tensor, Tensor]:
        y, inverse_root = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_root)
        ctx.num_live = num_live
        return y, x

    @staticmethod
    def backward(ctx, dy: Tensor, beside: Tensor):
        wants_weight = ctx.needs_input_grad[1]
        return *_gradients(*ctx.saved_tensors, dy, beside, wants_weight=wants_weight, num_live=ctx.num_live), None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dimension, at most WIDEST_ROW wide, in fp32; the dtype of `x`."""
    return _RMSNorm.apply(x, weight, eps)


def rms_norm_beside(x: Tensor, weight: Tensor, eps: float, num_live: int | None = None) -> tuple[Tensor, Tensor]:
    """(rms_norm(x), x) of contiguous x: for two readers of x, whose gradients are added up in one pass.

    Gradients of rows from `num_live` on (None: of none) are taken for zero.
    """
    return _NormBeside.apply(x, weight, eps, num_live)
