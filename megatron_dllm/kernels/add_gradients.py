"""Gradients of a weight's uses, in 16 bits, added up in its fp32 buffer, and the sum's squares taken on the way: one pass over each.

And zeros in all buffers that nothing was added to, in one launch.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .copies import upload
from .pieces import addresses

NUMBERS = 4096  # of a program: 4 warps, 32 numbers a thread
PROGRAMS = 64  # that clear a buffer


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


@triton.jit
def _clear(table, BLOCK: tl.constexpr):
    """Programs (buffer, share)."""
    row = table + tl.program_id(0) * 5
    fresh, step = tl.load(tl.load(row).to(tl.pointer_type(tl.int32))), tl.num_programs(1) * BLOCK
    for number in tl.static_range(2):
        target = tl.load(row + 1 + 2 * number).to(tl.pointer_type(tl.float32))
        size = tl.load(row + 2 + 2 * number) * fresh
        for start in range(tl.program_id(1) * BLOCK, size, step):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.zeros((BLOCK,), tl.float32), mask=at < size)


class FreshBuffers:
    """Rows (total, squares, is_fresh) as `add_gradients` has them, at least one, on one device, where all of them stay."""

    def __init__(self, rows: Sequence[tuple[Tensor, Tensor, Tensor]]):
        assert all(x.is_contiguous() and x.dtype == torch.float32 for total, squares, _ in rows for x in (total, squares))
        self.rows, self._flags = rows, [is_fresh for _, _, is_fresh in rows]
        sizes = [(total.numel(), squares.numel()) for total, squares, _ in rows]
        places = [addresses((is_fresh, total, squares)) for total, squares, is_fresh in rows]
        self._table = upload(torch.tensor([[flag, total, size, squares, count] for (flag, total, squares), (size, count) in zip(
            places, sizes, strict=True)]), rows[0][0].device)

    def clear(self) -> None:
        """Zeros in the buffers, and in the sums of squares, whose flag is 1; then all flags are 0. The host waits for nothing."""
        _clear[(len(self.rows), PROGRAMS)](self._table, BLOCK=NUMBERS)
        torch._foreach_zero_(self._flags)
