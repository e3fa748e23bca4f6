"""A large fp32 matrix times one number, rounded to 16 bits or added to another one: torch's kernels for mixed dtypes take twice as long."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # of a program: 4 warps, 32 numbers a thread in reads of 16 bytes


@triton.jit
def _scaled(x, scale, y, is_fresh, squares, count, NUMBERS: tl.constexpr):
    """Added to y where there is an `is_fresh` that is 0; then `squares` gets the sum of each program's squares."""
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(x + at, mask=at < count, other=0.0) * tl.load(scale)
    if is_fresh is not None:
        if tl.load(is_fresh) == 0:
            value += tl.load(y + at, mask=at < count, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)
    if squares is not None:
        tl.store(squares + tl.program_id(0), tl.sum(value * value))


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in `dtype`; x fp32, contiguous, scale fp32 []."""
    y = torch.empty_like(x, dtype=dtype)
    if y.numel():
        _scaled[(triton.cdiv(y.numel(), NUMBERS),)](x, scale, y, None, None, y.numel(), NUMBERS=NUMBERS)
    return y


def add_scaled_(total: Tensor, x: Tensor, scale: Tensor, is_fresh: Tensor, squares: Tensor) -> None:
    """total = total + x * scale, or x * scale where `is_fresh` int32 [1] is 1 (which then becomes 0).

    All fp32, total and x contiguous and of one shape, scale []; squares [num_sums(total)] gets sums of the total's squares.
    """
    if total.numel():
        _scaled[(num_sums(total),)](x, scale, total, is_fresh, squares, total.numel(), NUMBERS=NUMBERS)
    is_fresh.zero_()


def num_sums(total: Tensor) -> int:
    """How many sums `add_scaled_` makes of the squares."""
    return triton.cdiv(total.numel(), NUMBERS)
