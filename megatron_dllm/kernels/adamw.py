"""AdamW over many flat pieces in one launch, each number read and written once: 30 bytes of an element with a 16-bit copy.

    read     gradient, master, mean, square    fp32
    written  master, mean, square fp32; copy in 16 bits

The gradient is divided by a number on the device (clipping) on its way, and not changed. torch's own fused kernel writes the divided
gradient back, computes in fp64 in between, and leaves the copy to a pass of its own: 42 bytes.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pieces import CHUNK, Pieces

BLOCK = 1024  # elements of each tensor that a program has on its way at once: 16 bytes a thread
WARPS = 8


@dataclass(frozen=True)
class Rates:
    """Of one step, on the host: learning rate, decay of weights, decay of both moments, eps, and updates done, this one included."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    num_steps: int


@triton.jit
def _update(gradient, master, mean, square, copy, at, mask, factor, keep_mean, add_mean, keep_square, add_square, rate, root, eps, decay):
    """One block. What is taken off the master is summed up first: it is far smaller, and only one rounding is of the master's size."""
    g = tl.load(gradient + at, mask=mask) * factor
    m = keep_mean * tl.load(mean + at, mask=mask) + add_mean * g
    v = keep_square * tl.load(square + at, mask=mask) + add_square * g * g
    p = tl.load(master + at, mask=mask)
    p -= decay * p + rate * tl.div_rn(m, tl.sqrt_rn(v) * root + eps)
    tl.store(mean + at, m, mask=mask)
    tl.store(square + at, v, mask=mask)
    tl.store(master + at, p, mask=mask)
    if copy is not None:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def _adamw(table, chunks, divisor, keep_mean, add_mean, keep_square, add_square, rate, root, eps, decay, COPY: tl.constexpr,
           CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """A program a chunk. COPY: the copies' type; None: the pieces have none, nor a column for it in the table."""
    entry = chunks + tl.program_id(0) * 2
    row = table + tl.load(entry).to(tl.int64) * (5 if COPY is None else 6)
    gradient = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    master = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    mean = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    square = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    if COPY is None:
        copy = None
        length = tl.load(row + 4)
    else:
        copy = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(COPY)), 8)
        length = tl.load(row + 5)
    start = tl.load(entry + 1).to(tl.int64) * CHUNK
    stop = tl.minimum(start + CHUNK, length)
    factor = 1.0
    if divisor is not None:
        by = tl.load(divisor)
        factor = 1.0 / by
        stop = tl.where(by == by, stop, start)
    whole = stop - (stop - start) % BLOCK
    # Masked accesses of a length that is not known to be even go number by number, so that only the last block has a mask.
    for first in range(start, whole, BLOCK):
        _update(gradient, master, mean, square, copy, first + tl.arange(0, BLOCK), None, factor, keep_mean, add_mean, keep_square,
                add_square, rate, root, eps, decay)
    if whole < stop:
        at = whole + tl.arange(0, BLOCK)
        _update(gradient, master, mean, square, copy, at, at < stop, factor, keep_mean, add_mean, keep_square, add_square, rate, root, eps,
                decay)


def adamw_(pieces: Pieces, rates: Rates, divisor: Tensor | None, copy_dtype: torch.dtype | None) -> None:
    """Step in place; pieces of (gradient, master, mean, square), all fp32, and of `copy` in `copy_dtype`, unless that is None.

    divisor  fp32 of one element, on the device: gradients count as divided by it; where it is not a number, nothing is changed
    """
    first, second = rates.betas
    # Differences from one are made in fp64: those of fp32 numbers would be off by a part in ten thousand.
    correction, second_correction = 1 - first ** rates.num_steps, 1 - second ** rates.num_steps
    _adamw[(len(pieces.chunks),)](
        pieces.table, pieces.chunks, divisor, first, 1 - first, second, 1 - second, rates.lr / correction, second_correction ** -0.5,
        rates.eps, rates.lr * rates.weight_decay, COPY=None if copy_dtype is None else _TYPES[copy_dtype], CHUNK=CHUNK, BLOCK=BLOCK,
        num_warps=WARPS)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
