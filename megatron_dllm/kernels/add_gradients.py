"""Gradients of a weight's uses, in 16 bits, added up in its fp32 buffer, and the sum's squares taken on the way: one pass over each."""
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # of a program: 4 warps, 32 numbers a thread


@triton.jit
def _add(total, first, second, is_fresh, squares, count, NUMBERS: tl.constexpr):
    """second: may be None. A fresh total is not read; `squares` gets the sum of each program's squares."""
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(first + at, mask=at < count, other=0.0).to(tl.float32)
    if second is not None:
        value += tl.load(second + at, mask=at < count, other=0.0).to(tl.float32)
    if tl.load(is_fresh) == 0:
        value += tl.load(total + at, mask=at < count, other=0.0)
    tl.store(total + at, value, mask=at < count)
    tl.store(squares + tl.program_id(0), tl.sum(value * value))


def add_gradients(total: Tensor, parts: Sequence[Tensor], is_fresh: Tensor, squares: Tensor) -> None:
    """total = total + the sum of `parts`, or that sum alone where `is_fresh` int32 [1] is 1 (which then becomes 0); in fp32.

    total fp32, contiguous; parts, contiguous, have as many elements; squares fp32 [num_sums(total)] gets sums of the total's squares.
    """
    assert all(part.numel() == total.numel() and part.is_contiguous() for part in parts) and total.is_contiguous()
    for number in range(0, len(parts), 2):
        first, second = (*parts[number:], None)[:2]
        if total.numel():
            _add[(num_sums(total),)](total, first, second, is_fresh, squares, total.numel(), NUMBERS=NUMBERS)
        is_fresh.zero_()


def num_sums(total: Tensor) -> int:
    """How many sums `add_gradients` makes of the squares."""
    return triton.cdiv(total.numel(), NUMBERS)
