"""gelu(gate) * up over a fused tensor, its gradient fused the same way: nothing is split, nothing concatenated.

Rows may be weighted: the value is then w * gelu(gate) * up, and w, one of each token's and choice's, gets a gradient.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_weights import RowWeights

ROWS, COLUMNS = 8, 256  # 704 and 2112 columns fill 92 % of their tiles; a thread has 8 pairs


class Gradients(NamedTuple):
    """Of gate_up [N, 2, I] and of the weights [T, k]; the value [N, I] again. None: not asked for."""

    gate_up: Tensor
    value: Tensor | None
    weights: Tensor | None


@triton.jit
def _place(num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    return row[:, None], column[None, :], (row < num_rows)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _gelu(x):
    """(gelu, its derivative). With u = sqrt(2 / pi) (x + 0.044715 x^3): 0.5 (1 + tanh u) = sigmoid(2 u)."""
    square = x * x
    twice = 1.5957691216057308 * x * (1 + 0.044715 * square)
    # sigmoid and its slope from exp(-|2 u|), which cannot overflow; sigmoid * (1 - sigmoid) would cancel in the upper tail.
    small = tl.exp(-tl.abs(twice))
    part = 1 / (1 + small)
    share = tl.where(twice >= 0, part, small * part)
    return x * share, share + x * (small * part * part) * 1.5957691216057308 * (1 + 0.134145 * square)


@triton.jit
def _forward(gate_up, y, weights, slot, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, inside = _place(num_rows, WIDTH, ROWS, COLUMNS)
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = _gelu(gate)
    value = activated * up
    if weights is not None:
        value *= tl.load(weights + tl.load(slot + row, mask=row < num_rows, other=0), mask=row < num_rows, other=0.0)
    tl.store(y + row * WIDTH + column, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_live"])
def _backward(gate_up, dy, dgate_up, y, weights, slot, shares, num_rows, num_live, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr):
    """shares fp32 [T * k, tiles of a row]: what each tile adds to the gradient of its row's weight. Of weighted rows those of slots from
    `num_live` on have a dy of zero: nothing of them is read, nothing but shares of zero written."""
    row, column, inside = _place(num_rows, WIDTH, ROWS, COLUMNS)
    at = row * (2 * WIDTH) + column
    if weights is not None:
        place = tl.load(slot + row, mask=row < num_rows, other=0)
        inside = inside & (place < num_live)
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _gelu(gate)
    value = activated * up
    if weights is not None:
        TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
        share = tl.sum(grad * value, 1)[:, None]
        tl.store(shares + place * TILES + tl.program_id(0) % TILES, share, mask=row < num_rows)
        weight = tl.load(weights + place, mask=row < num_rows, other=0.0)
        grad *= weight
        value *= weight
    tl.store(dgate_up + at, (grad * up * slope).to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(dgate_up + at + WIDTH, (grad * activated).to(dgate_up.dtype.element_ty), mask=inside)
    if y is not None:
        tl.store(y + row * WIDTH + column, value.to(y.dtype.element_ty), mask=inside)


def _programs(num_rows: int, width: int) -> tuple[int]:
    return (triton.cdiv(num_rows, ROWS) * triton.cdiv(width, COLUMNS),)


def value(gate_up: Tensor, weighted: RowWeights | None = None) -> Tensor:
    """gelu(gate) * up [N, I] from contiguous gate_up [N, 2, I], weighted if asked for."""
    num_rows, _, width = gate_up.shape
    y = gate_up.new_empty(num_rows, width)
    if y.numel():
        _forward[_programs(num_rows, width)](gate_up, y, *_of(weighted), num_rows, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS)
    return y


def gradient(gate_up: Tensor, dy: Tensor, *, with_value: bool = False, weighted: RowWeights | None = None) -> Gradients:
    """The gradients for that of the value, dy [N, I]; all contiguous. A weight that no row has gets none: the result has no number there
    that means anything. Weights of rows that are not live have gradients of zero, whatever their dy; nothing is written for these rows."""
    num_rows, _, width = gate_up.shape
    dgate_up, y, shares = torch.empty_like(gate_up), torch.empty_like(dy) if with_value else None, None
    if weighted is not None:
        shares = torch.empty(weighted.weights.numel(), triton.cdiv(width, COLUMNS), dtype=torch.float32, device=dy.device)
    if dy.numel():
        _backward[_programs(num_rows, width)](
            gate_up, dy, dgate_up, y, *_of(weighted), shares, num_rows, num_rows if weighted is None else weighted.num_live_slots,
            WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS)
    return Gradients(dgate_up, y, None if shares is None else shares.sum(1).view(weighted.weights.shape))


def _of(weighted: RowWeights | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if weighted is None else (weighted.weights, weighted.slot)


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return value(gate_up)

    @staticmethod
    def backward(ctx, dy: Tensor):
        gate_up, = ctx.saved_tensors
        return gradient(gate_up, dy.contiguous()).gate_up


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up [N, I] from gate_up [N, 2, I], in fp32; the dtype of `gate_up`."""
    return _GatedGelu.apply(gate_up)
