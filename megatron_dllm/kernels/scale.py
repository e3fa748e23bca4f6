"""A large fp32 matrix times one number, rounded to 16 bits or added to another one: torch's kernels for mixed dtypes take twice as long."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # of a program: 4 warps, 32 numbers a thread in reads of 16 bytes


@triton.jit
def _scaled(x, scale, y, count, NUMBERS: tl.constexpr, ADDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(x + at, mask=at < count, other=0.0) * tl.load(scale)
    if ADDS:
        value += tl.load(y + at, mask=at < count, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in `dtype`; x fp32, contiguous, scale fp32 []."""
    y = torch.empty_like(x, dtype=dtype)
    if y.numel():
        _scaled[(triton.cdiv(y.numel(), NUMBERS),)](x, scale, y, y.numel(), NUMBERS=NUMBERS, ADDS=False)
    return y


def add_scaled_(total: Tensor, x: Tensor, scale: Tensor) -> None:
    """total += x * scale; all fp32, total and x contiguous and of one shape, scale []."""
    if total.numel():
        _scaled[(triton.cdiv(total.numel(), NUMBERS),)](x, scale, total, total.numel(), NUMBERS=NUMBERS, ADDS=True)
