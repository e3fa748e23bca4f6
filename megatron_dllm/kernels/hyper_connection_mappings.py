"""mHC's mappings of a token's streams, forward and backward: the projection with the row's norm, then gates and Sinkhorn's rounds on chip,
in the forward by the program that reads the token's streams.

Legend: T tokens, n streams (STREAMS: n up to a power of two), C hidden, O = n^2 + 2n outputs of the projection (PADDED: a power of two,
at least 16). Matrices of several tokens are [n, T, n], tokens between rows and columns: a warp then has whole matrices, and no sum of
Sinkhorn's waits for another warp (with tokens first Triton deals the rows out to warps, which meet in every one of 40 rounds). The
formulas, and the same in plain torch, are in transformer/hyper_connection.py.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2
from .rms_norm import sum_partials

EPSILON = tl.constexpr(1e-6)  # beside the norm of x, and the least denominator of Sinkhorn's rounds
ROWS, COLUMNS, WARPS, STAGES = 64, 64, 4, 3  # of a tile of the projection
# Programs along a row: 80 tiles of 5120 tokens alone do not fill the 132 processors of an H200.
SPLITS = 8
TOKENS = 8  # whose gradients a program of 4 warps makes: a matrix of 4 x 4 a token is a number a thread
READ_COLUMNS = 1024  # of each stream that a program of 4 warps reads at once: 8 numbers a thread, 16 bytes of bf16


@triton.jit
def _store_pieces(pointer, at, value, inside, stride, PIECES: tl.constexpr):
    """`value`, fp32, as it is, or as so many bf16 numbers, `stride` apart, whose sum it is."""
    if PIECES == 1:
        tl.store(pointer + at, value, mask=inside)
    else:
        for number in tl.static_range(PIECES):
            piece = value.to(tl.bfloat16)
            tl.store(pointer + number * stride + at, piece, mask=inside)
            value -= piece.to(tl.float32)


@triton.jit
def _split(weight, pieces, size, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _store_pieces(pieces, at, tl.load(weight + at, mask=at < size, other=0.0), at < size, size, PIECES)


@triton.jit
def _project(x, weight, partial, num_rows, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr,
             SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """partial [SPLITS, T, O + 1]: x W^T over our span of columns, and the sum of squares. The last tokens first: they were written last and
    may be in the cache; who reads x next begins with the first."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output, split = tl.arange(0, PADDED), tl.program_id(1)
    product, square = tl.zeros((ROWS, PADDED), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SPAN, COLUMNS):
        column = split * SPAN + start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        values = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=(row < num_rows)[:, None] & inside[None, :], other=0.0)
        if PIECES == 1:
            values = values.to(tl.float32)
        # Products of bf16 are exact. They are added to the rest outside of the product: tensor cores cut sums off instead of rounding
        # them, and 264 cuts to one side are an error of 5e-6.
        part = tl.zeros((ROWS, PADDED), tl.float32)
        for number in tl.static_range(PIECES):
            factor = tl.load(weight + (number * OUTPUTS + output)[None, :] * WIDTH + column[:, None],
                             mask=(output < OUTPUTS)[None, :] & inside[:, None], other=0.0)
            part = tl.dot(values, factor, part, input_precision="tf32x3")
        product += part
        wide = values.to(tl.float32)
        square += wide * wide
    at = (split.to(tl.int64) * num_rows + row) * (OUTPUTS + 1)
    tl.store(partial + at[:, None] + output[None, :], product, mask=(row < num_rows)[:, None] & (output < OUTPUTS)[None, :])
    tl.store(partial + at + OUTPUTS, tl.sum(square, 1), mask=row < num_rows)


@triton.jit
def _sum_splits(partial, at, inside, num_rows, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr):
    total = tl.load(partial + at, mask=inside, other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(partial + split * num_rows * (OUTPUTS + 1) + at, mask=inside, other=0.0)
    return total


@triton.jit
def _divide_rows(matrix):
    """Each row [n, T, n] by its sum; then the clamped sums in the matrix's shape, and where they were not clamped."""
    sums = tl.sum(matrix, 2)[:, :, None].broadcast_to(matrix.shape)
    clamped = tl.maximum(sums, EPSILON)
    return tl.div_rn(matrix, clamped), clamped, sums >= EPSILON


@triton.jit
def _divide_columns(matrix):
    sums = tl.sum(matrix, 0)[None, :, :].broadcast_to(matrix.shape)
    clamped = tl.maximum(sums, EPSILON)
    return tl.div_rn(matrix, clamped), clamped, sums >= EPSILON


@triton.jit
def _exponentials(logits, inside):
    """exp(logits - the row's maximum), 0 outside."""
    logits = tl.where(inside, logits, float("-inf"))
    largest = tl.maximum(tl.max(logits, 2), -1e30)  # finite in rows that are fill
    return tl.exp(logits - largest[:, :, None])


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def _read(partial, alpha, bias, x, u, pre, post, res, projected, root, num_rows, HIDDEN: tl.constexpr, n: tl.constexpr,
          STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of one token: u [T, C] = H_pre x; H_pre [T, n], H_post [T, n], H_res [T, n, n]; projected [T, O] and root = |x| / sqrt(nC) [T] of
    partial [SPLITS, T, O + 1]. Programs that are at Sinkhorn's rounds leave the memory to others: every warp makes the same few numbers."""
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row, i, one = tl.program_id(0).to(tl.int64), tl.arange(0, STREAMS), tl.full((), 1.0, tl.float32)
    at, first = row * (OUTPUTS + 1), row * OUTPUTS
    size = tl.sqrt_rn(tl.div_rn(_sum_splits(partial, at + OUTPUTS, True, num_rows, OUTPUTS, SPLITS), tl.full((), n * HIDDEN, tl.float32)))
    tl.store(root + row, size)
    inverse, gates = tl.div_rn(one, size + EPSILON), ()
    for j in tl.static_range(n):
        product = _sum_splits(partial, at + j, True, num_rows, OUTPUTS, SPLITS)
        gate = tl.div_rn(one, 1.0 + tl.exp(-(inverse * product * tl.load(alpha) + tl.load(bias + j))))
        tl.store(projected + first + j, product)
        tl.store(pre + row * n + j, gate)
        gates = gates + (gate,)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        out = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(n):
            out += gates[j] * tl.load(x + (row * n + j) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(u + row * HIDDEN + column, out.to(u.dtype.element_ty), mask=inside)
    output, in_gate = n + i, i < n
    product = _sum_splits(partial, at + output, in_gate, num_rows, OUTPUTS, SPLITS)
    tl.store(projected + first + output, product, mask=in_gate)
    h = inverse * product * tl.load(alpha + 1) + tl.load(bias + output, mask=in_gate, other=0.0)
    tl.store(post + row * n + i, 2 * _sigmoid(h), mask=in_gate)
    entry, in_matrix = (i[:, None] * n + i[None, :])[:, None, :], (in_gate[:, None] & in_gate[None, :])[:, None, :]
    product = _sum_splits(partial, at + 2 * n + entry, in_matrix, num_rows, OUTPUTS, SPLITS)
    tl.store(projected + first + 2 * n + entry, product, mask=in_matrix)
    h = inverse * product * tl.load(alpha + 2) + tl.load(bias + 2 * n + entry, mask=in_matrix, other=0.0)
    matrix = _exponentials(h, in_matrix)
    for _ in range(ITERATIONS):
        matrix, _sums, _free = _divide_rows(matrix)
        matrix, _sums, _free = _divide_columns(matrix)
    tl.store(res + row * n * n + entry, matrix, mask=in_matrix)


@triton.jit
def _backward_of_sinkhorn(start, grad, inside, ITERATIONS: tl.constexpr):
    """The gradient of `start`, of which `grad` is that of the matrix after all rounds. All matrices between are kept on chip."""
    kept, matrix = (), start
    for _ in tl.static_range(ITERATIONS):
        matrix, sums, free = _divide_rows(matrix)
        kept = kept + ((matrix, sums, free),)
        matrix, sums, free = _divide_columns(matrix)
        kept = kept + ((matrix, sums, free),)
    for step in tl.static_range(2 * ITERATIONS):
        matrix, sums, free = kept[2 * ITERATIONS - 1 - step]
        # Columns were divided last. A clamped sum is a constant.
        if step % 2 == 0:
            along = tl.sum(grad * matrix, 0)[None, :, :].broadcast_to(grad.shape)
        else:
            along = tl.sum(grad * matrix, 2)[:, :, None].broadcast_to(grad.shape)
        # Fill would grow without bound.
        grad = tl.where(inside, tl.div_rn(grad - tl.where(free, along, 0.0), sums), 0.0)
    return grad


@triton.jit
def _mappings_backward(projected, root, alpha, bias, dpre, dpost, dres, dprojected, coefficient, partial, num_rows, WIDTH: tl.constexpr,
                       n: tl.constexpr, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr):
    """dprojected [PIECES, T, O]; coefficient [T] of -x in its gradient; partial [programs, O + 3]: dbias, then dalpha."""
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, STREAMS)
    in_rows, in_gate = row < num_rows, (row < num_rows)[:, None] & (i < n)[None, :]
    in_matrix, stride = (i < n)[:, None, None] & in_gate[None, :, :], num_rows.to(tl.int64) * OUTPUTS
    size = tl.load(root + row, mask=in_rows, other=0.0)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), size + EPSILON)
    dinverse, sums = tl.zeros((ROWS,), tl.float32), partial + tl.program_id(0) * (OUTPUTS + 3)
    for gate in tl.static_range(2):
        output, factor = gate * n + i, tl.load(alpha + gate)
        product = tl.load(projected + row[:, None] * OUTPUTS + output[None, :], mask=in_gate, other=0.0)
        value = _sigmoid(inverse[:, None] * product * factor + tl.load(bias + output, mask=i < n, other=0.0)[None, :])
        if gate == 0:
            grad = tl.load(dpre + row[:, None] * n + i[None, :], mask=in_gate, other=0.0)
        else:
            grad = 2 * tl.load(dpost + row[:, None] * n + i[None, :], mask=in_gate, other=0.0)
        dh = grad * value * (1 - value)
        _store_pieces(dprojected, row[:, None] * OUTPUTS + output[None, :], dh * factor * inverse[:, None], in_gate, stride, PIECES)
        dinverse += tl.sum(dh * product, 1) * factor
        tl.store(sums + output, tl.sum(dh, 0), mask=i < n)
        tl.store(sums + OUTPUTS + gate, tl.sum(tl.sum(dh * product, 1) * inverse, 0))
    entry, factor = i[:, None] * n + i[None, :], tl.load(alpha + 2)
    inside = (i < n)[:, None] & (i < n)[None, :]
    product = tl.load(projected + row[None, :, None] * OUTPUTS + 2 * n + entry[:, None, :], mask=in_matrix, other=0.0)
    bound = tl.load(bias + 2 * n + entry, mask=inside, other=0.0)
    start = _exponentials(inverse[None, :, None] * product * factor + bound[:, None, :], in_matrix)
    grad = tl.load(dres + row[None, :, None] * n * n + entry[:, None, :], mask=in_matrix, other=0.0)
    dh = _backward_of_sinkhorn(start, grad, in_matrix, ITERATIONS) * start
    at = row[None, :, None] * OUTPUTS + 2 * n + entry[:, None, :]
    _store_pieces(dprojected, at, dh * factor * inverse[None, :, None], in_matrix, stride, PIECES)
    along = tl.sum(tl.sum(dh * product, 2), 0)
    dinverse += along * factor
    tl.store(sums + 2 * n + entry, tl.sum(dh, 1), mask=inside)
    tl.store(sums + OUTPUTS + 2, tl.sum(along * inverse, 0))
    # d r / d x = -r^2 x / (|x| sqrt(WIDTH)), and nothing where x is zero (rows of fill may be).
    divisor = tl.where(size > 0, size * WIDTH, 1.0)
    tl.store(coefficient + row, tl.where(size > 0, tl.div_rn(dinverse * inverse * inverse, divisor), 0.0), mask=in_rows)


def pieces_of(dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """(number, dtype) of the pieces that fp32 factors of streams of `dtype` come in: three of bf16, whose sum they are, or as they are."""
    return (3, torch.bfloat16) if dtype == torch.bfloat16 else (1, torch.float32)


def read(x: Tensor, weight: Tensor, alpha: Tensor, bias: Tensor, num_streams: int, iterations: int) -> tuple[Tensor, ...]:
    """u = H_pre x [T, C] in the dtype of x [T, nC]; then H_pre [T, n], H_post [T, n], H_res [T, n, n], x W^T [T, O] and |x| / sqrt(nC) [T],
    all fp32."""
    (num_rows, width), outputs, n = x.shape, len(weight), num_streams
    hidden, u = width // n, torch.empty(num_rows, width // n, dtype=x.dtype, device=x.device)
    shapes = (num_rows, n), (num_rows, n), (num_rows, n, n), (num_rows, outputs), (num_rows,)
    made = tuple(torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes)
    if num_rows:
        partial = torch.empty(SPLITS, num_rows, outputs + 1, dtype=torch.float32, device=x.device)
        span = triton.cdiv(triton.cdiv(width, SPLITS), COLUMNS) * COLUMNS
        pieces, of = pieces_of(x.dtype)
        factor = weight
        if pieces > 1:
            factor = torch.empty(pieces, outputs, width, dtype=of, device=x.device)
            _split[(triton.cdiv(weight.numel(), 1024),)](weight, factor, weight.numel(), PIECES=pieces, BLOCK=1024, num_warps=4)
        _project[(triton.cdiv(num_rows, ROWS), SPLITS)](
            x, factor, partial, num_rows, WIDTH=width, OUTPUTS=outputs, PADDED=max(16, next_power_of_2(outputs)), PIECES=pieces, SPAN=span,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS, num_stages=STAGES)
        _read[(num_rows,)](partial, alpha, bias, x, u, *made, num_rows, HIDDEN=hidden, n=n, STREAMS=next_power_of_2(n),
                           ITERATIONS=iterations, SPLITS=SPLITS, COLUMNS=min(READ_COLUMNS, next_power_of_2(hidden)), num_warps=4)
    return u, *made


def mappings_backward(projected: Tensor, root: Tensor, alpha: Tensor, bias: Tensor, dpre: Tensor, dpost: Tensor, dres: Tensor, width: int,
                      iterations: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dprojected [1, T, O], the coefficient [T] of -x in dx (the norm's part), dalpha [3] and dbias [O], all fp32.

    For streams of `dtype` bf16 dprojected is [3, T, O], three bf16 pieces whose sum it is: products with x are then exact.
    """
    (num_rows, outputs), n = projected.shape, dpre.shape[1]
    pieces, of = pieces_of(dtype)
    dprojected, coefficient = torch.empty(pieces, num_rows, outputs, dtype=of, device=root.device), torch.empty_like(root)
    programs = triton.cdiv(num_rows, TOKENS)
    if not num_rows:
        return dprojected, coefficient, torch.zeros_like(alpha), torch.zeros_like(bias)
    partial = torch.empty(programs, outputs + 3, dtype=torch.float32, device=root.device)
    _mappings_backward[(programs,)](
        projected, root, alpha, bias, dpre, dpost, dres, dprojected, coefficient, partial, num_rows, WIDTH=width, n=n,
        STREAMS=next_power_of_2(n), ITERATIONS=iterations, PIECES=pieces, ROWS=TOKENS, num_warps=4)
    sums = sum_partials(partial, torch.float32)
    return dprojected, coefficient, sums[outputs:], sums[:outputs]
