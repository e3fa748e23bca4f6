"""The sum of squares of many flat pieces, and how many of their elements are zero, in one reading."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import processors
from .pieces import CHUNK, Pieces

BLOCK = 1024
WARPS = 4
PROGRAMS = 8  # a processor


@triton.jit
def _sums(table, chunks, number, squares, zeros, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Programs share the chunks in turns. A chunk is summed in fp32, the chunks of a program in fp64."""
    total, count = tl.zeros((), tl.float64), tl.zeros((), tl.int64)
    for chunk in range(tl.program_id(0), number, tl.num_programs(0)):
        entry = chunks + chunk * 2
        row = table + tl.load(entry).to(tl.int64) * 2
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
        start = tl.load(entry + 1).to(tl.int64) * CHUNK
        stop = tl.minimum(start + CHUNK, tl.load(row + 1))
        whole = stop - (stop - start) % BLOCK
        some, none = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
        for first in range(start, whole, BLOCK):
            values = tl.load(source + first + tl.arange(0, BLOCK))
            some += values * values
            none += (values == 0).to(tl.int32)
        if whole < stop:
            at = whole + tl.arange(0, BLOCK)
            values = tl.load(source + at, mask=at < stop, other=1.0)
            some += tl.where(at < stop, values * values, 0.0)
            none += (values == 0).to(tl.int32)
        total += tl.sum(some, 0).to(tl.float64)
        count += tl.sum(none, 0)
    tl.store(squares + tl.program_id(0), total)
    tl.store(zeros + tl.program_id(0), count)


def sums(pieces: Pieces) -> tuple[Tensor, Tensor]:
    """(fp64 [], int64 []): sum of squares, and elements that are exactly zero, of pieces of one fp32 tensor each. The same on every run."""
    programs = min(len(pieces.chunks), PROGRAMS * processors(pieces.table.device))
    squares = torch.empty(programs, dtype=torch.float64, device=pieces.table.device)
    zeros = torch.empty_like(squares, dtype=torch.int64)
    if programs:
        _sums[(programs,)](pieces.table, pieces.chunks, len(pieces.chunks), squares, zeros, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS)
    return squares.sum(), zeros.sum()
