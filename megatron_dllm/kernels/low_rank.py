"""What low-rank adapters add beside up to three frozen matrices that read one input, in six launches however many matrices there are.

    narrow      low = x A.T, in parts of the sum, and the sum          of all matrices, x read once
    widen       y = scale * low B.T                                    to which the frozen product is then added
    outward     dlow = dy B,  dB = scale * dy.T low
    inward      dx = scale * dlow A,  dA = scale * dlow.T x            to dx the frozen product is then added
    add_up      the parts of dA and dB, added to buffers in fp32 or written as tensors

Those that always follow another kernel of theirs, or a product, are launched before that has ended.

As products of torch these are some thirty launches, half of them of a few microseconds. Programs own what they write, and parts are summed
in one order: repeats are bit-equal.

Legend: T rows, of which n have a gradient, D inputs, M matrices of P parts (P > 1: of one matrix), F outputs of a part, r rank; R = M P r.
A is [P r, D] and B [P F, r] of each matrix.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .launch import next_power_of_2

MOST_MATRICES, MOST_COLUMNS = 3, 64  # of A x, of a matrix: with more, three stages do not fit shared memory, and torch's products do well
LEAST_COLUMNS = 16  # of a product on tensor cores
# Measured on an H200, bf16, rank 16, three matrices of 2816 x (4096, 2048, 2048), us of 5120 rows: A x by 64 rows in two parts 12, in four
# 15, in one part by 32 rows 25; y by 64 x 128 24, with the parts summed in each of its blocks 46; dlow and dB by 64 rows and 64 x 128, four
# stages 37, by 16 rows and 64 x 64, three stages 48, other shapes no less; dx and dA in four stages 21, in two 27, other shapes no less;
# the sums by blocks of 256 4.
MANY_ROWS = 4096
SPLIT, SPLIT_OF_MANY = 4, 2  # parts that A x is summed in
FOLDED = 1024  # numbers of A x that a program sums up
PARTS = 8  # that a gradient over rows is summed in: an eighth of the reading of dy at these widths, and 350 programs for dA


@triton.jit
def _pick(number, x_0, x_1, x_2, COUNT: tl.constexpr):
    """x_number, of COUNT."""
    chosen = x_0
    if COUNT > 1:
        if number == 1:
            chosen = x_1
        if COUNT > 2:
            if number == 2:
                chosen = x_2
    return chosen


@triton.jit
def _part_of(block, width_0, width_1, width_2, MATRICES: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """(matrix, part, first column in it, first row of it in all B) of a block of COLUMNS columns of a part."""
    blocks_0, blocks_1 = tl.cdiv(width_0, COLUMNS) * PARTS, tl.cdiv(width_1, COLUMNS)
    matrix, first = 0, 0
    if MATRICES > 1:
        is_second, is_third = block >= blocks_0, block >= blocks_0 + blocks_1
        if MATRICES == 2:
            is_third = block < 0
        matrix = is_second.to(tl.int32) + is_third.to(tl.int32)
        block -= tl.where(is_second, blocks_0, 0) + tl.where(is_third, blocks_1, 0)
        first = tl.where(is_second, width_0, 0) + tl.where(is_third, width_1, 0)
    each = tl.cdiv(_pick(matrix, width_0, width_1, width_2, MATRICES), COLUMNS)
    return matrix, block // each, block % each * COLUMNS, first


@triton.jit(do_not_specialize=["num_rows"])
def _narrow(x, a_0, a_1, a_2, low, num_rows, depth, x_stride, low_stride, MATRICES: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
            STEP: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr):
    """low fp32 [parts, T, R]; a program has a block of rows and a part of the inner dimension."""
    after_last(DEPENDENT)
    row, step, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP), tl.arange(0, COLUMNS)
    each = tl.cdiv(tl.cdiv(depth, STEP), tl.num_programs(1)) * STEP
    x += row.to(tl.int64)[:, None] * x_stride + step[None, :]
    at = column[None, :] * depth + step[:, None]
    sum_0, sum_1 = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_2 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, depth), STEP, num_stages=STAGES):
        some = tl.load(x + start, mask=(row < num_rows)[:, None] & (start + step < depth)[None, :], other=0.0)
        inside = (column < RANKS)[None, :] & (start + step < depth)[:, None]
        sum_0 = tl.dot(some, tl.load(a_0 + at + start, mask=inside, other=0.0), sum_0, input_precision=PRECISION)
        if MATRICES > 1:
            sum_1 = tl.dot(some, tl.load(a_1 + at + start, mask=inside, other=0.0), sum_1, input_precision=PRECISION)
        if MATRICES > 2:
            sum_2 = tl.dot(some, tl.load(a_2 + at + start, mask=inside, other=0.0), sum_2, input_precision=PRECISION)
    low += (tl.program_id(1) * num_rows + row)[:, None] * low_stride + column[None, :]
    inside = (row < num_rows)[:, None] & (column < RANKS)[None, :]
    tl.store(low, sum_0, mask=inside)
    if MATRICES > 1:
        tl.store(low + RANKS, sum_1, mask=inside)
    if MATRICES > 2:
        tl.store(low + 2 * RANKS, sum_2, mask=inside)


@triton.jit
def _fold(parts, low, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """low as the sum of SPLIT parts, in order, rounded."""
    after_last(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(low + at, total.to(low.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["num_rows"])
def _widen(low, b_0, b_1, b_2, y, num_rows, low_stride, y_stride, width_0, width_1, width_2, scale, MATRICES: tl.constexpr,
           PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
           PRECISION: tl.constexpr, DEPENDENT: tl.constexpr):
    after_last(DEPENDENT)
    matrix, part, first, before = _part_of(tl.program_id(0), width_0, width_1, width_2, MATRICES, PARTS, COLUMNS)
    width, b = _pick(matrix, width_0, width_1, width_2, MATRICES), _pick(matrix, b_0, b_1, b_2, MATRICES)
    row, column, inner = tl.program_id(1) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    at, inside = row[:, None] * low_stride + (matrix * PARTS + part) * RANK + inner[None, :], (row < num_rows)[:, None] & (inner < RANK)
    narrow = tl.load(low + at, mask=inside, other=0.0)
    b += (part * width + column)[None, :] * RANK + inner[:, None]
    wide = tl.load(b, mask=(column < width)[None, :] & (inner < RANK)[:, None], other=0.0)
    value = tl.dot(narrow, wide, input_precision=PRECISION) * scale
    y += row.to(tl.int64)[:, None] * y_stride + (before + part * width + column)[None, :]
    tl.store(y, value.to(y.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < width)[None, :])


@triton.jit
def _narrow_gradient(index, row, dy_0, dy_1, dy_2, b_0, b_1, b_2, dlow, num_rows, low_stride, stride_0, stride_1, stride_2, width_0,
                     width_1, width_2, MATRICES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
                     STEP: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """dlow of these ROWS rows, of a part of a matrix."""
    matrix, part = index // PARTS, index % PARTS
    step, inner = tl.arange(0, STEP), tl.arange(0, INNER)
    width = _pick(matrix, width_0, width_1, width_2, MATRICES)
    b = _pick(matrix, b_0, b_1, b_2, MATRICES) + part * width * RANK
    dy = _pick(matrix, dy_0, dy_1, dy_2, MATRICES) + part * width
    stride = _pick(matrix, stride_0, stride_1, stride_2, MATRICES)
    at_dy, at_b = row.to(tl.int64)[:, None] * stride + step[None, :], step[:, None] * RANK + inner[None, :]
    total = tl.zeros((ROWS, INNER), tl.float32)
    for start in tl.range(0, width, STEP, num_stages=STAGES):
        some = tl.load(dy + at_dy + start, mask=(row < num_rows)[:, None] & (start + step < width)[None, :], other=0.0)
        wide = tl.load(b + at_b + start * RANK, mask=(start + step < width)[:, None] & (inner < RANK)[None, :], other=0.0)
        total = tl.dot(some, wide, total, input_precision=PRECISION)
    tl.store(dlow + row[:, None] * low_stride + index * RANK + inner[None, :], total.to(dlow.dtype.element_ty),
             mask=(row < num_rows)[:, None] & (inner < RANK)[None, :])


@triton.jit
def _wide_gradient(block, place, dy_0, dy_1, dy_2, low, db, num_rows, chunk, low_stride, stride_0, stride_1, stride_2, width_0, width_1,
                   width_2, num_wide, scale, MATRICES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """What `chunk` rows give to dB of a block of COLUMNS outputs."""
    matrix, part, first, before = _part_of(block, width_0, width_1, width_2, MATRICES, PARTS, COLUMNS)
    width, stride = _pick(matrix, width_0, width_1, width_2, MATRICES), _pick(matrix, stride_0, stride_1, stride_2, MATRICES)
    row, column, inner = tl.arange(0, ROWS), first + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    dy = _pick(matrix, dy_0, dy_1, dy_2, MATRICES) + part * width
    low += (matrix * PARTS + part) * RANK
    total = tl.zeros((COLUMNS, INNER), tl.float32)
    for start in tl.range(place * chunk, tl.minimum(place * chunk + chunk, num_rows), ROWS, num_stages=STAGES):
        at, there = (start + row)[:, None], (start + row < num_rows)[:, None]
        some = tl.load(dy + at.to(tl.int64) * stride + column[None, :], mask=there & (column < width)[None, :], other=0.0)
        narrow = tl.load(low + at * low_stride + inner[None, :], mask=there & (inner < RANK)[None, :], other=0.0)
        total = tl.dot(tl.trans(some), narrow, total, input_precision=PRECISION)
    at_b = (before + part * width + column)[:, None] * RANK + inner[None, :]
    tl.store(db + place * num_wide + at_b, total * scale, mask=(column < width)[:, None] & (inner < RANK)[None, :])


@triton.jit(do_not_specialize=["num_rows", "chunk", "num_narrow", "num_blocks"])
def _outward(dy_0, dy_1, dy_2, b_0, b_1, b_2, low, dlow, db, num_rows, chunk, num_narrow, num_blocks, low_stride, stride_0, stride_1,
             stride_2, width_0, width_1, width_2, num_wide, scale, MATRICES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
             ROWS: tl.constexpr, STEP: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, TALL: tl.constexpr,
             STAGES: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr):
    """Of each `chunk` of rows `num_narrow` programs make dlow and then `num_blocks` make dB, while dy is still in the cache."""
    after_last(DEPENDENT)
    place, number = tl.program_id(0) // (num_narrow + num_blocks), tl.program_id(0) % (num_narrow + num_blocks)
    if number < num_narrow:
        row = place * chunk + number // (MATRICES * PARTS) * ROWS
        if row < num_rows:
            _narrow_gradient(number % (MATRICES * PARTS), row + tl.arange(0, ROWS), dy_0, dy_1, dy_2, b_0, b_1, b_2, dlow, num_rows,
                             low_stride, stride_0, stride_1, stride_2, width_0, width_1, width_2, MATRICES, PARTS, RANK, ROWS, STEP, INNER,
                             STAGES, PRECISION)
    else:
        _wide_gradient(number - num_narrow, place, dy_0, dy_1, dy_2, low, db, num_rows, chunk, low_stride, stride_0, stride_1, stride_2,
                       width_0, width_1, width_2, num_wide, scale, MATRICES, PARTS, RANK, TALL, COLUMNS, INNER, STAGES, PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_live", "chunk"])
def _inward(dlow, a_0, a_1, a_2, x, dx, da, num_rows, num_live, chunk, depth, x_stride, low_stride, scale, MATRICES: tl.constexpr,
            RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
            PRECISION: tl.constexpr, DEPENDENT: tl.constexpr):
    """dx may be None. Its rows from `num_live` on are zero."""
    after_last(DEPENDENT)
    row, column, inner = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    at_a, in_a = inner[:, None] * depth + column[None, :], (inner < RANKS)[:, None] & (column < depth)[None, :]
    own_0 = tl.load(a_0 + at_a, mask=in_a, other=0.0)
    sum_0, sum_1 = tl.zeros((INNER, COLUMNS), tl.float32), tl.zeros((INNER, COLUMNS), tl.float32)
    sum_2 = tl.zeros((INNER, COLUMNS), tl.float32)
    own_1, own_2 = own_0, own_0
    if MATRICES > 1:
        own_1 = tl.load(a_1 + at_a, mask=in_a, other=0.0)
    if MATRICES > 2:
        own_2 = tl.load(a_2 + at_a, mask=in_a, other=0.0)
    first = tl.program_id(1) * chunk
    for start in tl.range(first, tl.minimum(first + chunk, num_rows), ROWS, num_stages=STAGES):
        at, there = (start + row)[:, None], (start + row < num_live)[:, None]
        some = tl.load(x + at.to(tl.int64) * x_stride + column[None, :], mask=there & (column < depth)[None, :], other=0.0)
        narrow, in_low = dlow + at * low_stride + inner[None, :], there & (inner < RANKS)[None, :]
        part = tl.load(narrow, mask=in_low, other=0.0)
        sum_0 = tl.dot(tl.trans(part), some, sum_0, input_precision=PRECISION)
        if dx is not None:
            gradient = tl.dot(part, own_0, input_precision=PRECISION)
        if MATRICES > 1:
            part = tl.load(narrow + RANKS, mask=in_low, other=0.0)
            sum_1 = tl.dot(tl.trans(part), some, sum_1, input_precision=PRECISION)
            if dx is not None:
                gradient = tl.dot(part, own_1, gradient, input_precision=PRECISION)
        if MATRICES > 2:
            part = tl.load(narrow + 2 * RANKS, mask=in_low, other=0.0)
            sum_2 = tl.dot(tl.trans(part), some, sum_2, input_precision=PRECISION)
            if dx is not None:
                gradient = tl.dot(part, own_2, gradient, input_precision=PRECISION)
        if dx is not None:
            tl.store(dx + at.to(tl.int64) * depth + column[None, :], (gradient * scale).to(dx.dtype.element_ty),
                     mask=(start + row < num_rows)[:, None] & (column < depth)[None, :])
    da += tl.program_id(1) * (MATRICES * RANKS * depth) + at_a
    tl.store(da, sum_0 * scale, mask=in_a)
    if MATRICES > 1:
        tl.store(da + RANKS * depth, sum_1 * scale, mask=in_a)
    if MATRICES > 2:
        tl.store(da + 2 * RANKS * depth, sum_2 * scale, mask=in_a)


@triton.jit(do_not_specialize=["num_da", "num_db"])
def _add_up(da, db, a_0, a_1, a_2, b_0, b_1, b_2, num_da, num_db, size_a, size_0, size_1, size_2, MATRICES: tl.constexpr,
            PARTS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr):
    """da [num_da, M, size_a], db [num_db, the sizes of B one after the other]."""
    after_last(DEPENDENT)
    part, of_a = tl.arange(0, PARTS)[:, None], tl.cdiv(size_a, BLOCK)
    number = tl.program_id(0)
    if number < MATRICES * of_a:
        matrix, at = number // of_a, number % of_a * BLOCK + tl.arange(0, BLOCK)
        target, size, count = _pick(matrix, a_0, a_1, a_2, MATRICES), size_a, num_da
        source, stride = da + matrix * size_a, MATRICES * size_a
    else:
        matrix, _, first, before = _part_of(number - MATRICES * of_a, size_0, size_1, size_2, MATRICES, 1, BLOCK)
        target, size, count = _pick(matrix, b_0, b_1, b_2, MATRICES), _pick(matrix, size_0, size_1, size_2, MATRICES), num_db
        at, source, stride = first + tl.arange(0, BLOCK), db + before, size_0
        if MATRICES > 1:
            stride += size_1
        if MATRICES > 2:
            stride += size_2
    inside = at < size
    total = tl.sum(tl.load(source + part * stride + at[None, :], mask=(part < count) & inside[None, :], other=0.0), 0)
    if ADDS:
        total += tl.load(target + at, mask=inside, other=0.0)
    tl.store(target + at, total.to(target.dtype.element_ty), mask=inside)


def suits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether the matrices are as many, of as many parts and of such ranks as the kernels take: a [(P,) r, D], b [(P,) F, r]."""
    parts, ranks = {_num_parts(each) for each in b}, {each.numel() // each.shape[-1] for each in a}
    return len(a) <= MOST_MATRICES and (len(a) == 1 or parts == {1}) and len(ranks) == 1 and max(ranks) <= MOST_COLUMNS


def _num_parts(b: Tensor) -> int:
    return b.shape[0] if b.dim() == 3 else 1


def _three(tensors: Sequence) -> list:
    return [*tensors, *[tensors[0]] * (MOST_MATRICES - len(tensors))]


def _widths(b: Sequence[Tensor]) -> list[int]:
    return _three([each.shape[-2] for each in b])


def _columns(ranks: int) -> int:
    return max(LEAST_COLUMNS, next_power_of_2(ranks))


def _precision(x: Tensor) -> str:
    """fp32 is multiplied as fp32: for tests, in which rounding hides nothing; adapted_linear leaves it to torch's products."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _thin(x: Tensor, num_rows: int, columns: int) -> tuple[int, int]:
    """Rows of a program of a thin product, and the step of its inner dimension, of which three fit shared memory.

    From 64 rows on there are instructions for a group of warps, so that warps need not read the same columns of A or B; few rows want more
    programs.
    """
    rows = 64 if num_rows >= MANY_ROWS else 16
    return rows, 64 if x.itemsize == 4 else 128 if rows == 64 or columns > 128 else 256


def narrow(x: Tensor, a: Sequence[Tensor]) -> Tensor:
    """low [T, R] of x [T, D], whose rows may be strided; a [(P,) r, D] each, contiguous."""
    num_rows, depth = x.shape
    ranks = a[0].numel() // depth
    columns = len(a) * _columns(ranks)
    rows, step = _thin(x, num_rows, columns)
    low = x.new_empty(num_rows, len(a) * ranks)
    split = SPLIT_OF_MANY if num_rows >= MANY_ROWS else SPLIT
    parts = low.new_empty(split, *low.shape, dtype=torch.float32)
    if num_rows:
        _narrow[(triton.cdiv(num_rows, rows), split)](
            x, *_three(a), parts, num_rows, depth, x.stride(0), parts.stride(1), MATRICES=len(a), RANKS=ranks, ROWS=rows, STEP=step,
            COLUMNS=_columns(ranks), STAGES=4 if columns <= 128 else 3, PRECISION=_precision(x),
            **dependent(x.device, early=False))
        _fold[(triton.cdiv(low.numel(), FOLDED),)](parts, low, low.numel(), SPLIT=split, BLOCK=FOLDED, **dependent(x.device))
    return low


def widen(low: Tensor, b: Sequence[Tensor], scale: float) -> Tensor:
    """scale * low B.T of all matrices beside each other, [T, the sum of their P F], of low [T, R]; b [(P,) F, r] each, contiguous."""
    num_rows, rank, parts = len(low), b[0].shape[-1], _num_parts(b[0])
    y = low.new_empty(num_rows, sum(each.numel() for each in b) // rank)
    rows, columns = 64, 128
    blocks = sum(parts * triton.cdiv(each.shape[-2], columns) for each in b)
    if num_rows:
        _widen[(blocks, triton.cdiv(num_rows, rows))](
            low, *_three(b), y, num_rows, low.stride(0), y.stride(0), *_widths(b), scale, MATRICES=len(b), PARTS=parts, RANK=rank,
            ROWS=rows, COLUMNS=columns, INNER=_columns(rank), PRECISION=_precision(low), **dependent(low.device))
    return y


def outward(dys: Sequence[Tensor], b: Sequence[Tensor], low: Tensor, scale: float, num_live: int) -> tuple[Tensor, Tensor]:
    """dlow [n, R], and dB in parts, fp32 [parts, all of B], of dys [T, P F], whose rows may be strided, and low [T, R]."""
    rank, parts, columns, tall = b[0].shape[-1], _num_parts(b[0]), 128, 64
    rows, step = _thin(low, num_live, _columns(rank))
    num_wide, chunk = sum(each.numel() for each in b), _chunk(num_live, tall)
    num_chunks = triton.cdiv(num_live, chunk)
    dlow, db = low.new_empty(num_live, low.shape[1]), low.new_empty(num_chunks, num_wide, dtype=torch.float32)
    num_narrow = chunk // rows * len(b) * parts  # of each chunk
    blocks = sum(parts * triton.cdiv(each.shape[-2], columns) for each in b)
    if num_live:
        _outward[((num_narrow + blocks) * num_chunks,)](
            *_three(dys), *_three(b), low, dlow, db, num_live, chunk, num_narrow, blocks, low.stride(0),
            *_three([dy.stride(0) for dy in dys]), *_widths(b), num_wide, scale, MATRICES=len(b), PARTS=parts, RANK=rank, ROWS=rows,
            STEP=step, INNER=_columns(rank), COLUMNS=columns, TALL=tall, STAGES=4, PRECISION=_precision(low),
            **dependent(low.device, early=False))
    return dlow, db


def _chunk(num_rows: int, step: int) -> int:
    """Rows that a part of a gradient is summed over: a multiple of `step`."""
    return triton.cdiv(max(num_rows, 1), PARTS * step) * step


def inward(dlow: Tensor, a: Sequence[Tensor], x: Tensor, scale: float, *, wants_x: bool) -> tuple[Tensor | None, Tensor]:
    """dx [T, D], zero after the n rows of dlow, and dA in parts, fp32 [parts, all of A]; x [T, D], whose rows may be strided."""
    (num_rows, depth), num_live, rows, columns = x.shape, len(dlow), 64, 64
    ranks = a[0].numel() // depth
    num_programs = num_rows if wants_x else num_live
    chunk = _chunk(num_programs, rows)
    num_chunks = triton.cdiv(num_programs, chunk)
    dx = x.new_empty(num_rows, depth) if wants_x else None
    da = x.new_empty(num_chunks, len(a) * ranks * depth, dtype=torch.float32)
    if num_programs:
        _inward[(triton.cdiv(depth, columns), num_chunks)](
            dlow, *_three(a), x, dx, da, num_programs, num_live, chunk, depth, x.stride(0), dlow.stride(0), scale, MATRICES=len(a),
            RANKS=ranks, ROWS=rows, COLUMNS=columns, INNER=_columns(ranks), STAGES=2 if x.itemsize == 4 else 4, PRECISION=_precision(x),
            **dependent(x.device))
    return dx, da


def add_up(da: Tensor, db: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], *, adds: bool) -> None:
    """Sum the parts of `inward` and `outward` into contiguous a and b, shaped as the factors: on top of what is there if it `adds`."""
    block, size_a, sizes = 256, a[0].numel(), [each.numel() for each in b]
    programs = len(a) * triton.cdiv(size_a, block) + sum(triton.cdiv(size, block) for size in sizes)
    _add_up[(programs,)](da, db, *_three(a), *_three(b), len(da), len(db), size_a, *_three(sizes), MATRICES=len(a), PARTS=PARTS,
                         BLOCK=block, ADDS=adds, **dependent(da.device))
