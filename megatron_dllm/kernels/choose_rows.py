"""Rows of two tensors in one order, each read and written once."""
from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2

ROWS, COLUMNS = 4, 1024


@triton.jit(do_not_specialize=["num_rows", "num_first"])
def _choose(first, second, source, out, num_rows, num_first, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < num_rows)[:, None] & (column < WIDTH)
    chosen = tl.load(source + row, mask=row < num_rows, other=0)[:, None]
    is_first = chosen < num_first
    values = tl.load(first + chosen * WIDTH + column, mask=inside & is_first, other=0.0)
    others = tl.load(second + (chosen - num_first) * WIDTH + column, mask=inside & (chosen >= num_first), other=0.0)
    tl.store(out + row[:, None] * WIDTH + column, tl.where(is_first, values, others), mask=inside)


def choose_rows(first: Tensor, second: Tensor, source: Tensor) -> Tensor:
    """out[n] = [first ; second][source[n]], of first [A, ...], second [B, ...] and source int64 [N]."""
    first, second = first.contiguous(), second.contiguous()
    out = first.new_empty(len(source), *first.shape[1:])
    width = math.prod(first.shape[1:])
    if out.numel():
        columns = min(COLUMNS, next_power_of_2(width))
        _choose[(triton.cdiv(len(source), ROWS), triton.cdiv(width, columns))](
            first, second, source, out, len(source), len(first), WIDTH=width, ROWS=ROWS, COLUMNS=columns, num_warps=8)
    return out
