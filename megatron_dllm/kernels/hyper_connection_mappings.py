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

from .dependent_launch import after_last, dependent
from .hyper_connection_projection import pieces_of, store_pieces
from .launch import next_power_of_2

EPSILON = tl.constexpr(1e-6)  # beside the norm of x, and the least denominator of Sinkhorn's rounds
TOKENS = 8  # whose gradients a program makes: a warp, a row of a matrix of 4 x 4 a lane
READ_NUMBERS = 8  # of a stream that a thread reads at once, 16 bytes of bf16
READ_WARPS = 4  # of a program, which has one token: 5,120 with a norm took 0.070 ms on an H200; two warps 0.081, one 0.088


@triton.jit
def _sum_splits(partial, at, inside, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr):
    total = tl.load(partial + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * OUTPUTS + at, mask=inside, other=0.0)
    return total


@triton.jit
def _load(start, at, inside):
    return tl.load(start + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _divided(matrix, AXIS: tl.constexpr):
    """A matrix [n, 1, n] over its sums along an axis, by their reciprocals: what that rounds, the next sums put right."""
    sums = 1.0 / tl.maximum(tl.sum(matrix, AXIS), EPSILON)
    return matrix * tl.expand_dims(sums, AXIS)


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
def _read(partial, alpha, bias, x, u, pre, post, res, projected, root, weight_1, weight_2, weight_3, out_1, out_2, out_3, inverse_root,
          factor, eps, HIDDEN: tl.constexpr, n: tl.constexpr, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, SPLITS: tl.constexpr,
          COLUMNS: tl.constexpr, NORMS: tl.constexpr, COPIES: tl.constexpr, DEPENDENT: tl.constexpr):
    """Of one token: u [T, C] = H_pre x, and NORMS (0, 1 or 3) norms of it, the third times `factor`, with their inverse root [T];
    H_pre [T, n], H_post [T, n], H_res [T, n, n]; projected [T, O] and root = |x| / sqrt(nC) [T] of partial [T, SPLITS, O].

    The last tokens first: they were written last, and may be in the cache. Programs that are at Sinkhorn's rounds leave the memory to
    others; several warps would make the same few numbers each.
    """
    after_last(DEPENDENT)
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row, i, one = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64), tl.arange(0, STREAMS), tl.full((), 1.0, tl.float32)
    at, first, square = row * (SPLITS * OUTPUTS), row * OUTPUTS, tl.zeros((COLUMNS,), tl.float32)
    PARTS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    STRIDE: tl.constexpr = 0 if COPIES else HIDDEN
    x += row * (HIDDEN if COPIES else n * HIDDEN)
    # Read here for its norm, and again below, from the cache: kept it would leave room for few programs.
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        for j in tl.static_range(n):
            values = _load(x + j * STRIDE, column, column < HIDDEN)
            square += values * values
    size = tl.sqrt_rn(tl.div_rn(tl.sum(square, 0), tl.full((), n * HIDDEN, tl.float32)))
    tl.store(root + row, size)
    inverse, gates = tl.div_rn(one, size + EPSILON), ()
    for j in tl.static_range(n):
        product = _sum_splits(partial, at + j, True, OUTPUTS, SPLITS)
        gate = tl.div_rn(one, 1.0 + tl.exp(-(inverse * product * tl.load(alpha) + tl.load(bias + j))))
        tl.store(projected + first + j, product)
        tl.store(pre + row * n + j, gate)
        gates = gates + (gate,)
    square, parts = tl.zeros((COLUMNS,), tl.float32), ()
    for part in tl.static_range(PARTS):
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        out = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(n):
            out += gates[j] * _load(x + j * STRIDE, column, inside)
        out = out.to(u.dtype.element_ty)
        tl.store(u + row * HIDDEN + column, out, mask=inside)
        if NORMS:
            # Rounded as it is stored, so that the backward, which reads it again, has the same norms.
            parts, square = parts + (out.to(tl.float32),), square + out.to(tl.float32) * out.to(tl.float32)
    if NORMS:
        own = tl.rsqrt(tl.sum(square, 0) / HIDDEN + eps)
        tl.store(inverse_root + row, own)
        for part in tl.static_range(len(parts)):
            column = part * COLUMNS + tl.arange(0, COLUMNS)
            inside, normed, to = column < HIDDEN, parts[part] * own, row * HIDDEN + column
            tl.store(out_1 + to, (normed * _load(weight_1, column, inside)).to(out_1.dtype.element_ty), mask=inside)
            if NORMS == 3:
                tl.store(out_2 + to, (normed * _load(weight_2, column, inside)).to(out_2.dtype.element_ty), mask=inside)
                tl.store(out_3 + to, normed * _load(weight_3, column, inside) * factor, mask=inside)
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
def _total(values):
    """The sum of a tuple."""
    total = values[0]
    for j in tl.static_range(1, len(values)):
        total += values[j]
    return total


@triton.jit
def _lane_sums(values):
    """Of each of a tuple [TOKENS, STREAMS] the sum over the lanes of a token, in its shape."""
    sums = ()
    for j in tl.static_range(len(values)):
        sums = sums + (tl.sum(values[j], 1)[:, None].broadcast_to(values[j].shape),)
    return sums


@triton.jit
def _times(values, others):
    """The products of two tuples."""
    out = ()
    for j in tl.static_range(len(values)):
        out = out + (values[j] * others[j],)
    return out


@triton.jit
def _scaled(values, factor):
    """A tuple times a factor."""
    out = ()
    for j in tl.static_range(len(values)):
        out = out + (values[j] * factor,)
    return out


@triton.jit
def _load_sums(kept, stride, n: tl.constexpr):
    sums = ()
    for j in tl.static_range(n + 1):
        sums = sums + (tl.load(kept + j * stride),)
    return sums


@triton.jit
def _backward_of_sinkhorn(start, grad, inside, kept, stride, n: tl.constexpr, ITERATIONS: tl.constexpr):
    """The gradient of `start`, of which `grad` is that of the matrices after all rounds: n columns [TOKENS, STREAMS] each. The matrices
    between are made again, last to first, from the sums that were divided by: `kept`, of which a lane reads what it wrote, has those of
    columns and then that of rows, `stride` numbers apart. They are read a round ahead."""
    matrix = start
    for _ in range(ITERATIONS):
        of_row = tl.maximum(_total(matrix), EPSILON)
        matrix, out, sums = _scaled(matrix, 1 / of_row), (), ()
        sums = _lane_sums(matrix)
        tl.store(kept + n * stride, of_row)
        for j in tl.static_range(n):
            of_column = tl.maximum(sums[j], EPSILON)
            tl.store(kept + j * stride, of_column)
            out = out + (matrix[j] / of_column,)
        matrix, kept = out, kept + (n + 1) * stride
    kept -= (n + 1) * stride
    sums = _load_sums(kept, stride, n)
    for step in range(ITERATIONS):
        kept -= tl.where(step + 1 < ITERATIONS, (n + 1) * stride, 0)
        following, alongs, before, old = _load_sums(kept, stride, n), _lane_sums(_times(grad, matrix)), (), ()
        for j in tl.static_range(n):
            # A sum that was clamped is a constant.
            before = before + ((grad[j] - tl.where(sums[j] > EPSILON, alongs[j], 0.0)) / sums[j],)
            old = old + (matrix[j] * sums[j],)
        along, share, grad = tl.where(sums[n] > EPSILON, _total(_times(before, old)), 0.0), 1 / sums[n], ()
        for j in tl.static_range(n):
            grad = grad + (tl.where(inside, (before[j] - along) * share, 0.0),)  # fill would grow
        matrix, sums = _scaled(old, sums[n]), following
    return grad


@triton.jit(do_not_specialize=["num_rows"])
def _mappings_backward(projected, root, alpha, bias, res, scale, dpre, dpost, dres, dprojected, mix, coefficient, partial, kept,
                       num_rows, WIDTH: tl.constexpr, n: tl.constexpr, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr,
                       PIECES: tl.constexpr, HAS_SCALE: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr):
    """dprojected [PIECES, T, O]; mix [T, n, n] = H_res * scale; coefficient [T] of -x in its gradient; partial
    [programs, O + 3]: dbias, then dalpha. A matrix is n columns, a row a lane: sums of rows are a lane's own. kept: room for
    [ITERATIONS, n + 1] numbers of each lane of all programs."""
    after_last(DEPENDENT)
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row, i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, STREAMS)
    in_rows, stride = row < num_rows, num_rows * OUTPUTS
    inside, first = in_rows[:, None] & (i < n)[None, :], row[:, None] * OUTPUTS
    size = tl.load(root + row, mask=in_rows, other=0.0)
    inverse, sums = tl.div_rn(tl.full((TOKENS,), 1.0, tl.float32), size + EPSILON), partial + tl.program_id(0) * (OUTPUTS + 3)
    by_token, dinverse = inverse[:, None], tl.zeros((TOKENS, STREAMS), tl.float32)
    for gate in tl.static_range(2):
        factor, output = tl.load(alpha + gate), gate * n + i[None, :]
        product = tl.load(projected + first + output, mask=inside, other=0.0)
        value = _sigmoid(by_token * product * factor + tl.load(bias + output, mask=(i < n)[None, :], other=0.0))
        if gate == 0:
            grad = tl.load(dpre + row[:, None] * n + i[None, :], mask=inside, other=0.0)
        else:
            grad = 2 * tl.load(dpost + row[:, None] * n + i[None, :], mask=inside, other=0.0)
        dh = grad * value * (1 - value)
        store_pieces(dprojected, first + output, dh * factor * by_token, inside, stride, PIECES)
        dinverse += dh * product * factor
        tl.store(sums + gate * n + i, tl.sum(dh, 0), mask=i < n)
        tl.store(sums + OUTPUTS + gate, tl.sum(tl.sum(dh * product, 1) * inverse, 0))
    factor, wide, products, logits, grads = tl.load(alpha + 2), 1.0, (), (), ()
    if HAS_SCALE:
        wide = tl.load(scale + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    largest = tl.full((TOKENS, STREAMS), float("-inf"), tl.float32)
    for j in tl.static_range(n):
        entry, at = (i * n + j)[None, :], row[:, None] * (n * n) + (i * n + j)[None, :]
        tl.store(mix + at, tl.load(res + at, mask=inside, other=0.0) * wide, mask=inside)
        product = tl.load(projected + first + 2 * n + entry, mask=inside, other=0.0)
        logit = by_token * product * factor + tl.load(bias + 2 * n + entry, mask=(i < n)[None, :], other=0.0)
        products, logits, largest = products + (product,), logits + (logit,), tl.maximum(largest, logit)
        grads = grads + (tl.load(dres + at, mask=inside, other=0.0),)
    start = ()
    for j in tl.static_range(n):
        start = start + (tl.where(inside, tl.exp(logits[j] - largest), 0.0),)
    kept += row[:, None] * STREAMS + i[None, :]
    grads = _backward_of_sinkhorn(start, grads, inside, kept, tl.num_programs(0) * (TOKENS * STREAMS), n, ITERATIONS)
    dhs, along = _times(grads, start), tl.zeros((TOKENS, STREAMS), tl.float32)
    for j in tl.static_range(n):
        store_pieces(dprojected, first + 2 * n + (i * n + j)[None, :], dhs[j] * factor * by_token, inside, stride, PIECES)
        tl.store(sums + 2 * n + i * n + j, tl.sum(dhs[j], 0), mask=i < n)
        along += dhs[j] * products[j]
    tl.store(sums + OUTPUTS + 2, tl.sum(tl.sum(along, 1) * inverse, 0))
    # d r / d x = -r^2 x / (|x| sqrt(WIDTH)), and nothing where x is zero (rows of fill may be).
    total, divisor = tl.sum(dinverse + along * factor, 1), tl.where(size > 0, size * WIDTH, 1.0)
    tl.store(coefficient + row, tl.where(size > 0, tl.div_rn(total * inverse * inverse, divisor), 0.0), mask=in_rows)


class Norms(NamedTuple):
    """Norms n(u) = u * (mean(u^2) + eps)^-0.5 of what is read, times each of the weights [C]: one or three, or none at all. The third is
    fp32, as is its result, which is times `factor` too."""

    weights: tuple[Tensor, ...] = ()
    eps: float = 0.0
    factor: float = 1.0

    @property
    def three(self) -> tuple[Tensor | None, ...]:
        """The weights, and None in the place of those that are not there."""
        return *self.weights, *[None] * (3 - len(self.weights))


NO_NORMS = Norms()


def read(x: Tensor, partial: Tensor, alpha: Tensor, bias: Tensor, num_streams: int, iterations: int,
         norms: Norms = NO_NORMS, *, copies: bool = False) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """(made, norms of u, their inverse root [T]) of x [T, nC], with `copies` of x [T, C] in every stream, of which `partial` is the
    projection (hyper_connection_projection.project).

    made: u = H_pre x [T, C] in the dtype of x; then fp32 H_pre [T, n], H_post [T, n], H_res [T, n, n], x W^T [T, O], |x| / sqrt(nC) [T].
    """
    (num_rows, width), outputs, n = x.shape, len(bias), num_streams
    hidden, warps = width if copies else width // n, READ_WARPS
    u = x.new_empty(num_rows, hidden)
    shapes = (num_rows, n), (num_rows, n), (num_rows, n, n), (num_rows, outputs), (num_rows,)
    made = tuple(torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes)
    normed = tuple(torch.empty_like(u, dtype=torch.float32 if which == 2 else None) for which in range(len(norms.weights)))
    inverse_root = torch.empty_like(made[-1])
    if num_rows:
        _read[(num_rows,)](
            partial, alpha, bias, x, u, *made, *norms.three, *normed, *[None] * (3 - len(normed)), inverse_root, norms.factor, norms.eps,
            HIDDEN=hidden, n=n, STREAMS=next_power_of_2(n), ITERATIONS=iterations, SPLITS=partial.shape[1],
            COLUMNS=min(READ_NUMBERS * 32 * warps, next_power_of_2(hidden)), NORMS=len(normed),
            COPIES=copies, num_warps=warps, **dependent(x.device))
    return (u, *made), normed, inverse_root


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
    partial = root.new_empty(programs, outputs + 3)
    kept = root.new_empty(iterations, n + 1, programs * TOKENS * next_power_of_2(n))
    if num_rows:
        _mappings_backward[(programs,)](
            projected, root, alpha, bias, res, scale, dpre, dpost, dres, dprojected, mix, coefficient, partial, kept, num_rows,
            WIDTH=width, n=n, STREAMS=next_power_of_2(n), ITERATIONS=iterations, PIECES=pieces, HAS_SCALE=scale is not None,
            TOKENS=TOKENS, num_warps=1, **dependent(root.device))
    return MappingGradients(dprojected, coefficient, mix, partial)
