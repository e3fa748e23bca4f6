"""mHC's projection of a token's streams, x W^T; where streams are written first, by the program that writes them, so that they are not
read again for it.

Legend: T tokens, n streams (STREAMS: n up to a power of two), C hidden (HIDDEN), O = n^2 + 2n outputs (PADDED: a power of two, at least
16); x [T, nC] (WIDTH numbers a token). A tile has some tokens and some columns of every stream, [ROWS, STREAMS, COLUMNS] and
[ROWS, STREAMS * COLUMNS]: numbers that belong to one column lie in one thread. The formulas are in transformer/hyper_connection.py.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .launch import has_large_shared_memory, next_power_of_2

# Of a tile; STEPS of them, one after the other, are a program: the columns of a token are so shared by several.
COLUMNS, STEPS = 32, 7
# Rows, warps, stages: 188 KB of shared memory; and for fp32, or where there is less of it. On an H200 5,120 tokens of 4 x 2816 took 0.103
# ms with LARGE; 64 rows, 4 warps, 2 stages and 11 steps 0.112; 16 columns, so that twice the warps fit, 0.120 and more; 64 columns 0.166.
LARGE, SMALL = (128, 8, 3), (64, 4, 1)


@triton.jit
def store_pieces(pointer, at, value, inside, stride, PIECES: tl.constexpr):
    """`value`, fp32, as it is, or as so many bf16 numbers, `stride` apart, whose sum it is."""
    if PIECES == 1:
        tl.store(pointer + at, value, mask=inside)
    else:
        for number in tl.static_range(PIECES):
            piece = value.to(tl.bfloat16)
            tl.store(pointer + number * stride + at, piece, mask=inside)
            value -= piece.to(tl.float32)


@triton.jit
def _split(weight, pieces, size, PIECES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    after_last(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    store_pieces(pieces, at, tl.load(weight + at, mask=at < size, other=0.0), at < size, size, PIECES)


@triton.jit(do_not_specialize=["num_rows"])
def _project(x, y, post, res, scale, new, weight, partial, num_rows, HIDDEN: tl.constexpr, n: tl.constexpr, STREAMS: tl.constexpr,
             OUTPUTS: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr, HAS_SCALE: tl.constexpr, MERGES: tl.constexpr,
             COPIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
             DEPENDENT: tl.constexpr):
    """partial [T, splits, O + 1]: the products of our columns of `new` = (H_res x + H_post^T y) * scale, which is written too, or without
    MERGES of x, and last the sum of their squares. COPIES: x is [T, C], and every stream the same."""
    after_last(DEPENDENT)
    WIDTH: tl.constexpr = n * HIDDEN
    split, output, place, stream = tl.program_id(0), tl.arange(0, PADDED), tl.arange(0, ROWS), tl.arange(0, STREAMS)
    every = tl.arange(0, STREAMS * COLUMNS)
    first, of_stream, within = tl.program_id(1) * ROWS, every // COLUMNS, every % COLUMNS
    row, start, in_rows, in_outputs = first.to(tl.int64) + place, first.to(tl.int64) * HIDDEN, place < num_rows - first, output < OUTPUTS
    if MERGES:
        in_mix, factor, mixes = in_rows[:, None] & (stream < n)[None, :], 1.0, ()
        if HAS_SCALE:
            factor = tl.load(scale + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        gates = (tl.load(post + row[:, None] * n + stream[None, :], mask=in_mix, other=0.0) * factor)[:, :, None]
        for j in tl.static_range(n):
            mix = tl.load(res + row[:, None] * (n * n) + stream[None, :] * n + j, mask=in_mix, other=0.0) * factor
            mixes = mixes + (mix[:, :, None],)
        together = mixes[0]
        for j in tl.static_range(1, n):
            together += mixes[j]
        none, nothing = tl.zeros((ROWS, 16), tl.bfloat16), tl.zeros((16, STREAMS * COLUMNS), tl.bfloat16)
    product, square = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS,), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        begin = (step * tl.num_programs(0) + split) * COLUMNS  # neighbours at once: a row of memory is opened once for all
        column, wide = begin + tl.arange(0, COLUMNS), of_stream * HIDDEN + begin + within
        inside = (of_stream < n) & (begin + within < HIDDEN)
        here = in_rows[:, None] & inside[None, :]
        if MERGES:
            narrow = in_rows[:, None] & (column < HIDDEN)[None, :]
            written = tl.load(y + start + place[:, None] * HIDDEN + column[None, :], mask=narrow, other=0.0).to(tl.float32)
            # A product of zeros: what is added to it stands in registers as the products below want it. Otherwise Triton makes it
            # twice, once as it is stored and once as it is multiplied.
            out = tl.reshape(tl.dot(none, nothing), (ROWS, STREAMS, COLUMNS)) + gates * written[:, None, :]
            if COPIES:
                old = tl.load(x + start + place[:, None] * HIDDEN + column[None, :], mask=narrow, other=0.0)
                out += together * old.to(tl.float32)[:, None, :]
            else:
                for j in tl.static_range(n):
                    old = tl.load(x + start * n + j * HIDDEN + place[:, None] * WIDTH + column[None, :], mask=narrow, other=0.0)
                    out += mixes[j] * old.to(tl.float32)[:, None, :]
            values = tl.reshape(out, (ROWS, STREAMS * COLUMNS)).to(new.dtype.element_ty)
            tl.store(new + start * n + place[:, None] * WIDTH + wide[None, :], values, mask=here)
        elif COPIES:
            values = tl.load(x + start + place[:, None] * HIDDEN + (begin + within)[None, :], mask=here, other=0.0)
        else:
            values = tl.load(x + start * n + place[:, None] * WIDTH + wide[None, :], mask=here, other=0.0)
        if MERGES and PIECES > 1:
            # As `values` are, but for ties. Made of those they would be converted one at a time, where now it is two.
            bits = (tl.reshape(out, (ROWS, STREAMS * COLUMNS)).to(tl.int32, bitcast=True) + 0x8000) & -0x10000
            numbers = bits.to(tl.float32, bitcast=True)
        else:
            numbers = values.to(tl.float32)
        square += tl.sum(numbers * numbers, 1)
        if PIECES == 1:
            values = numbers
        # Products of bf16 are exact. They are added to the rest outside of the product: tensor cores cut sums off instead of rounding
        # them, and 264 cuts to one side are an error of 5e-6.
        part = tl.zeros((ROWS, PADDED), tl.float32)
        for number in tl.static_range(PIECES):
            factors = tl.load(weight + (number * OUTPUTS + output)[None, :] * WIDTH + wide[:, None],
                              mask=in_outputs[None, :] & inside[:, None], other=0.0)
            part = tl.dot(values, factors, part, input_precision="tf32x3")
        product += part
    at = (row * tl.num_programs(0) + split) * (OUTPUTS + 1)
    tl.store(partial + at[:, None] + output[None, :], product, mask=in_rows[:, None] & in_outputs[None, :])
    tl.store(partial + at + OUTPUTS, square, mask=in_rows)


def pieces_of(dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(number, dtype) of the pieces that fp32 factors of streams of `dtype` come in: three of bf16, whose sum they are, or as they are."""
    return (3, torch.bfloat16) if dtype == torch.bfloat16 else (1, torch.float32)


def project(x: Tensor, weight: Tensor, num_streams: int) -> Tensor:
    """fp32 [T, splits, O + 1], whose sum over the splits is x W^T and |x|^2, of x [T, nC], or of x [T, C] in every stream, and W [O, nC].
    """
    return _launch(x, None, None, None, None, None, weight, num_streams)


def merge_and_project(x: Tensor, y: Tensor, post: Tensor, res: Tensor, scale: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """new = (H_res x + H_post^T y) * scale, [T, nC] in x's dtype, and `project` of it as it is rounded."""
    new = x.new_empty(len(x), weight.shape[1])
    return new, _launch(x, y, post, res, scale, new, weight, post.shape[1])


def _launch(x: Tensor, y: Tensor | None, post: Tensor | None, res: Tensor | None, scale: Tensor | None, new: Tensor | None, weight: Tensor,
            n: int) -> Tensor:
    num_rows, (outputs, width) = len(x), weight.shape
    hidden = width // n
    steps = min(STEPS, triton.cdiv(hidden, COLUMNS))
    splits = triton.cdiv(hidden, COLUMNS * steps)
    partial = torch.empty(num_rows, splits, outputs + 1, dtype=torch.float32, device=x.device)
    if num_rows:
        pieces, of = pieces_of(x.dtype)
        factor = weight
        if pieces > 1:
            factor = torch.empty(pieces, outputs, width, dtype=of, device=x.device)
            _split[(triton.cdiv(weight.numel(), 1024),)](weight, factor, weight.numel(), PIECES=pieces, BLOCK=1024, num_warps=4,
                                                         **dependent(x.device, early=False))
        rows, warps, stages = LARGE if x.dtype == torch.bfloat16 and has_large_shared_memory(x.device) else SMALL
        _project[(splits, triton.cdiv(num_rows, rows))](
            x, y, post, res, scale, new, factor, partial, num_rows, HIDDEN=hidden, n=n, STREAMS=next_power_of_2(n), OUTPUTS=outputs,
            PADDED=max(16, next_power_of_2(outputs)), PIECES=pieces, HAS_SCALE=scale is not None, MERGES=new is not None, ROWS=rows,
            COLUMNS=COLUMNS, STEPS=steps, STAGES=stages, COPIES=x.shape[1] < width,
            num_warps=warps, **dependent(x.device, early=pieces > 1))
    return partial
