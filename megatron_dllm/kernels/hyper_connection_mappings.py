"""mHC's mappings of a token's streams, forward and backward: the projection with the row's norm, then gates and Sinkhorn's rounds on chip,
in the forward by the program that reads the token's streams.

Legend: T tokens, n streams (STREAMS: n up to a power of two), C hidden, O = n^2 + 2n outputs of the projection (PADDED: a power of two,
at least 16). Matrices of several tokens are [n, T, n], tokens between rows and columns: a warp then has whole matrices, and no sum of
Sinkhorn's waits for another warp (with tokens first Triton deals the rows out to warps, which meet in every one of 40 rounds). The
formulas, and the same in plain torch, are in transformer/hyper_connection.py.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hyper_connection_projection import pieces_of, store_pieces
from .launch import next_power_of_2

EPSILON = tl.constexpr(1e-6)  # beside the norm of x, and the least denominator of Sinkhorn's rounds
TOKENS = 32  # whose gradients a program makes: a warp, a token a lane
READ_COLUMNS = 1024  # of each stream that a program of 4 warps reads at once: 8 numbers a thread, 16 bytes of bf16


@triton.jit
def _sum_splits(partial, at, inside, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr):
    total = tl.load(partial + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * (OUTPUTS + 1) + at, mask=inside, other=0.0)
    return total


@triton.jit
def _divided(matrix, AXIS: tl.constexpr):
    """A matrix [n, 1, n] over its sums along an axis."""
    sums = tl.maximum(tl.sum(matrix, AXIS), EPSILON)
    return tl.div_rn(matrix, tl.expand_dims(sums, AXIS).broadcast_to(matrix.shape))


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
def _read(partial, alpha, bias, x, u, pre, post, res, projected, root, HIDDEN: tl.constexpr, n: tl.constexpr,
          STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of one token: u [T, C] = H_pre x; H_pre [T, n], H_post [T, n], H_res [T, n, n]; projected [T, O] and root = |x| / sqrt(nC) [T] of
    partial [T, SPLITS, O + 1]. The last tokens first: they were written last, and may be in the cache. Programs that are at Sinkhorn's
    rounds leave the memory to others: every warp makes the same few numbers."""
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row, i, one = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64), tl.arange(0, STREAMS), tl.full((), 1.0, tl.float32)
    at, first = row * (SPLITS * (OUTPUTS + 1)), row * OUTPUTS
    size = tl.sqrt_rn(tl.div_rn(_sum_splits(partial, at + OUTPUTS, True, OUTPUTS, SPLITS), tl.full((), n * HIDDEN, tl.float32)))
    tl.store(root + row, size)
    inverse, gates = tl.div_rn(one, size + EPSILON), ()
    for j in tl.static_range(n):
        product = _sum_splits(partial, at + j, True, OUTPUTS, SPLITS)
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
    product = _sum_splits(partial, at + output, in_gate, OUTPUTS, SPLITS)
    tl.store(projected + first + output, product, mask=in_gate)
    h = inverse * product * tl.load(alpha + 1) + tl.load(bias + output, mask=in_gate, other=0.0)
    tl.store(post + row * n + i, 2 * _sigmoid(h), mask=in_gate)
    entry, in_matrix = (i[:, None] * n + i[None, :])[:, None, :], (in_gate[:, None] & in_gate[None, :])[:, None, :]
    product = _sum_splits(partial, at + 2 * n + entry, in_matrix, OUTPUTS, SPLITS)
    tl.store(projected + first + 2 * n + entry, product, mask=in_matrix)
    h = inverse * product * tl.load(alpha + 2) + tl.load(bias + 2 * n + entry, mask=in_matrix, other=0.0)
    matrix = _exponentials(h, in_matrix)
    for _ in range(ITERATIONS):
        matrix = _divided(_divided(matrix, 2), 0)
    tl.store(res + row * n * n + entry, matrix, mask=in_matrix)


@triton.jit
def _one_over(sums):
    """1 / sums for each of a tuple."""
    shares = ()
    for i in tl.static_range(len(sums)):
        shares = shares + (1 / sums[i],)
    return shares


@triton.jit
def _sums(matrix, n: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Of n x n numbers the sum of each row, or of each column, clamped."""
    sums = ()
    for i in tl.static_range(n):
        total = matrix[i if BY_COLUMN else i * n]
        for j in tl.static_range(1, n):
            total += matrix[j * n + i if BY_COLUMN else i * n + j]
        sums = sums + (tl.maximum(total, EPSILON),)
    return sums


@triton.jit
def _times(matrix, factors, n: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Each row, or each column, times its factor."""
    out = ()
    for at in tl.static_range(n * n):
        out = out + (matrix[at] * factors[at % n if BY_COLUMN else at // n],)
    return out


@triton.jit
def _through_division(grad, matrix, sums, n: tl.constexpr, BY_COLUMN: tl.constexpr):
    """(gradient, matrix) before rows, or columns, were divided by their sums. A sum that was clamped is a constant."""
    alongs, before = (), ()
    for i in tl.static_range(n):
        along = grad[i if BY_COLUMN else i * n] * matrix[i if BY_COLUMN else i * n]
        for j in tl.static_range(1, n):
            along += grad[j * n + i if BY_COLUMN else i * n + j] * matrix[j * n + i if BY_COLUMN else i * n + j]
        alongs = alongs + (tl.where(sums[i] > EPSILON, along, 0.0),)
    for at in tl.static_range(n * n):
        before = before + (grad[at] - alongs[at % n if BY_COLUMN else at // n],)
    return _times(before, _one_over(sums), n, BY_COLUMN), _times(matrix, sums, n, BY_COLUMN)


@triton.jit
def _store_all(values, pointer, mask, stride):
    for i in tl.static_range(len(values)):
        tl.store(pointer + i * stride, values[i], mask=mask)


@triton.jit
def _load_all(pointer, mask, stride, n: tl.constexpr):
    values = ()
    for i in tl.static_range(n):
        values = values + (tl.load(pointer + i * stride, mask=mask, other=1.0),)
    return values


@triton.jit
def _backward_of_sinkhorn(start, dres, kept, row, in_rows, num_rows, n: tl.constexpr, ITERATIONS: tl.constexpr):
    """The gradient of `start`, n^2 numbers of each token, of which dres [T, n, n] has that of the matrix after all rounds. The matrices
    between are made again, last to first, from the sums that were divided by; those of the next round are asked for ahead."""
    matrix, at = start, kept + row
    for _ in range(ITERATIONS):
        sums = _sums(matrix, n, False)
        _store_all(sums, at, in_rows, num_rows)
        matrix = _times(matrix, _one_over(sums), n, False)
        sums = _sums(matrix, n, True)
        _store_all(sums, at + n * num_rows, in_rows, num_rows)
        matrix, at = _times(matrix, _one_over(sums), n, True), at + 2 * n * num_rows
    grad = ()
    for entry in tl.static_range(n * n):
        grad = grad + (tl.load(dres + row * (n * n) + entry, mask=in_rows, other=0.0),)
    at -= 2 * n * num_rows
    of_rows, of_columns = _load_all(at, in_rows, num_rows, n), _load_all(at + n * num_rows, in_rows, num_rows, n)
    for step in range(ITERATIONS):
        at -= tl.where(step + 1 < ITERATIONS, 2 * n * num_rows, 0)
        next_rows, next_columns = _load_all(at, in_rows, num_rows, n), _load_all(at + n * num_rows, in_rows, num_rows, n)
        grad, matrix = _through_division(grad, matrix, of_columns, n, True)
        grad, matrix = _through_division(grad, matrix, of_rows, n, False)
        of_rows, of_columns = next_rows, next_columns
    return grad


@triton.jit(do_not_specialize=["num_rows"])
def _mappings_backward(projected, root, alpha, bias, res, scale, dpre, dpost, dres, dprojected, mix, coefficient, kept, partial, num_rows,
                       WIDTH: tl.constexpr, n: tl.constexpr, ITERATIONS: tl.constexpr, PIECES: tl.constexpr, HAS_SCALE: tl.constexpr,
                       TOKENS: tl.constexpr):
    """dprojected [PIECES, T, O]; mix [T, n, n] = H_res * scale; coefficient [T] of -x in its gradient; partial [programs, O + 3]: dbias,
    then dalpha. A lane has all of a token, its matrix as n^2 numbers; kept [ITERATIONS, 2, n, T]: the sums that were divided by."""
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    in_rows, stride, first = row < num_rows, num_rows * OUTPUTS, row * OUTPUTS
    size = tl.load(root + row, mask=in_rows, other=0.0)
    inverse, sums = tl.div_rn(tl.full((TOKENS,), 1.0, tl.float32), size + EPSILON), partial + tl.program_id(0) * (OUTPUTS + 3)
    dinverse = tl.zeros((TOKENS,), tl.float32)
    for gate in tl.static_range(2):
        factor, along = tl.load(alpha + gate), tl.zeros((TOKENS,), tl.float32)
        for i in tl.static_range(n):
            output = gate * n + i
            product = tl.load(projected + first + output, mask=in_rows, other=0.0)
            value = _sigmoid(inverse * product * factor + tl.load(bias + output))
            if gate == 0:
                grad = tl.load(dpre + row * n + i, mask=in_rows, other=0.0)
            else:
                grad = 2 * tl.load(dpost + row * n + i, mask=in_rows, other=0.0)
            dh = grad * value * (1 - value)
            store_pieces(dprojected, first + output, dh * factor * inverse, in_rows, stride, PIECES)
            tl.store(sums + output, tl.sum(dh, 0))
            along += dh * product
        dinverse += along * factor
        tl.store(sums + OUTPUTS + gate, tl.sum(along * inverse, 0))
    factor, along, wide, products, start = tl.load(alpha + 2), tl.zeros((TOKENS,), tl.float32), 1.0, (), ()
    if HAS_SCALE:
        wide = tl.load(scale + row, mask=in_rows, other=0.0).to(tl.float32)
    for i in tl.static_range(n):
        logits, largest = (), tl.full((TOKENS,), float("-inf"), tl.float32)
        for j in tl.static_range(n):
            at = i * n + j
            value = tl.load(res + row * (n * n) + at, mask=in_rows, other=0.0)
            tl.store(mix + row * (n * n) + at, value * wide, mask=in_rows)
            product = tl.load(projected + first + 2 * n + at, mask=in_rows, other=0.0)
            logit = inverse * product * factor + tl.load(bias + 2 * n + at)
            products, logits, largest = products + (product,), logits + (logit,), tl.maximum(largest, logit)
        for j in tl.static_range(n):
            start = start + (tl.exp(logits[j] - largest),)
    grad = _backward_of_sinkhorn(start, dres, kept, row, in_rows, num_rows, n, ITERATIONS)
    for at in tl.static_range(n * n):
        dh = grad[at] * start[at]
        store_pieces(dprojected, first + 2 * n + at, dh * factor * inverse, in_rows, stride, PIECES)
        tl.store(sums + 2 * n + at, tl.sum(dh, 0))
        along += dh * products[at]
    dinverse += along * factor
    tl.store(sums + OUTPUTS + 2, tl.sum(along * inverse, 0))
    # d r / d x = -r^2 x / (|x| sqrt(WIDTH)), and nothing where x is zero (rows of fill may be).
    divisor = tl.where(size > 0, size * WIDTH, 1.0)
    tl.store(coefficient + row, tl.where(size > 0, tl.div_rn(dinverse * inverse * inverse, divisor), 0.0), mask=in_rows)


def read(x: Tensor, partial: Tensor, alpha: Tensor, bias: Tensor, num_streams: int, iterations: int) -> tuple[Tensor, ...]:
    """u = H_pre x [T, C] in the dtype of x [T, nC], of which `partial` is the projection (see hyper_connection_projection.project); then
    H_pre [T, n], H_post [T, n], H_res [T, n, n], x W^T [T, O] and |x| / sqrt(nC) [T], all fp32."""
    (num_rows, width), outputs, n = x.shape, len(bias), num_streams
    hidden, u = width // n, torch.empty(num_rows, width // n, dtype=x.dtype, device=x.device)
    shapes = (num_rows, n), (num_rows, n), (num_rows, n, n), (num_rows, outputs), (num_rows,)
    made = tuple(torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes)
    if num_rows:
        _read[(num_rows,)](partial, alpha, bias, x, u, *made, HIDDEN=hidden, n=n, STREAMS=next_power_of_2(n), ITERATIONS=iterations,
                           SPLITS=partial.shape[1], COLUMNS=min(READ_COLUMNS, next_power_of_2(hidden)), num_warps=4)
    return u, *made


class MappingGradients(NamedTuple):
    """What `mappings_backward` gives, fp32 where nothing else is said.

        projected    [P, T, O]   of x W^T; for streams of bf16 three pieces of bf16 whose sum it is: products with x are then exact
        coefficient  [T]         of -x in the gradient of x: the norm's part
        mix          [T, n, n]   H_res times the scale
        partial      [K, O + 3]  of bias, then of alpha: their sums over some tokens each
    """

    projected: Tensor
    coefficient: Tensor
    mix: Tensor
    partial: Tensor


def mappings_backward(projected: Tensor, root: Tensor, alpha: Tensor, bias: Tensor, res: Tensor, scale: Tensor | None, dpre: Tensor,
                      dpost: Tensor, dres: Tensor, width: int, iterations: int, dtype: torch.dtype) -> MappingGradients:
    """Gradients through the mappings of streams [T, width] of `dtype`, from those of H_pre, H_post and H_res. T: the rows of dpre; of
    tensors that have more the first are taken."""
    (num_rows, n), outputs = dpre.shape, projected.shape[1]
    pieces, of = pieces_of(dtype)
    dprojected, coefficient = torch.empty(pieces, num_rows, outputs, dtype=of, device=root.device), root.new_empty(num_rows)
    mix, programs = root.new_empty(num_rows, n, n), triton.cdiv(num_rows, TOKENS)
    partial, kept = root.new_empty(programs, outputs + 3), root.new_empty(iterations, 2, n, num_rows)
    if num_rows:
        _mappings_backward[(programs,)](
            projected, root, alpha, bias, res, scale, dpre, dpost, dres, dprojected, mix, coefficient, kept, partial, num_rows,
            WIDTH=width, n=n, ITERATIONS=iterations, PIECES=pieces, HAS_SCALE=scale is not None, TOKENS=TOKENS, num_warps=1)
    return MappingGradients(dprojected, coefficient, mix, partial)
