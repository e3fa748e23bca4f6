"""mHC's mappings of a token's streams, forward and backward, of the projection and the row's squares: gates and Sinkhorn's rounds on chip,
in the forward by the launch that reads the token's streams.

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
READ_WARPS = 4  # of a program, which has one token: 5,120 with a norm took 0.046 ms on an H200; two warps 0.047, eight 0.048


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
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


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
def _sinkhorn(matrix, ITERATIONS: tl.constexpr):
    """Rounds of rows, then columns, of n rows [TOKENS, STREAMS]; by reciprocals: what those round, the next sums put right."""
    for _ in range(ITERATIONS):
        out = ()
        for i in tl.static_range(len(matrix)):
            out = out + (matrix[i] * tl.expand_dims(1.0 / tl.maximum(tl.sum(matrix[i], 1), EPSILON), 1),)
        matrix = _scaled(out, 1.0 / tl.maximum(_total(out), EPSILON))
    return matrix


@triton.jit
def _size(square, WIDTH: tl.constexpr):
    """|x| / sqrt(WIDTH) of |x|^2."""
    return tl.sqrt_rn(tl.div_rn(square, tl.full(square.shape, WIDTH, tl.float32)))


@triton.jit
def _inverse(size):
    return tl.div_rn(tl.full(size.shape, 1.0, tl.float32), size + EPSILON)


@triton.jit
def _map(partial, alpha, bias, post, res, projected, root, first_row, num_rows, WIDTH: tl.constexpr, n: tl.constexpr,
         STREAMS: tl.constexpr, ITERATIONS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """H_post [T, n], H_res [T, n, n], projected [T, O] and root [T] of some tokens, of partial [T, SPLITS, O + 1]. A matrix is n rows,
    a column a lane."""
    OUTPUTS: tl.constexpr = n * n + 2 * n
    row, i = first_row + tl.arange(0, TOKENS), tl.arange(0, STREAMS)
    in_rows, in_gate = row < num_rows, (i < n)[None, :]
    inside, first, at = in_rows[:, None] & in_gate, row[:, None] * OUTPUTS, row.to(tl.int64)[:, None] * (SPLITS * (OUTPUTS + 1))
    size = _size(_sum_splits(partial, row.to(tl.int64) * (SPLITS * (OUTPUTS + 1)) + OUTPUTS, in_rows, OUTPUTS + 1, SPLITS), WIDTH)
    tl.store(root + row, size, mask=in_rows)
    inverse = _inverse(size)[:, None]
    tl.store(projected + first + i[None, :], _sum_splits(partial, at + i[None, :], inside, OUTPUTS + 1, SPLITS), mask=inside)
    product = _sum_splits(partial, at + n + i[None, :], inside, OUTPUTS + 1, SPLITS)
    tl.store(projected + first + n + i[None, :], product, mask=inside)
    gate = _sigmoid(inverse * product * tl.load(alpha + 1) + tl.load(bias + n + i[None, :], mask=in_gate, other=0.0))
    tl.store(post + row[:, None] * n + i[None, :], 2 * gate, mask=inside)
    factor, matrix = tl.load(alpha + 2), ()
    for which in tl.static_range(n):
        output = 2 * n + which * n + i[None, :]
        product = _sum_splits(partial, at + output, inside, OUTPUTS + 1, SPLITS)
        tl.store(projected + first + output, product, mask=inside)
        logits = inverse * product * factor + tl.load(bias + output, mask=in_gate, other=0.0)
        largest = tl.max(tl.where(in_gate, logits, -1e30), 1)
        matrix = matrix + (tl.where(inside, tl.exp(logits - tl.expand_dims(largest, 1)), 0.0),)
    matrix = _sinkhorn(matrix, ITERATIONS)
    for which in tl.static_range(n):
        tl.store(res + row[:, None] * (n * n) + which * n + i[None, :], matrix[which], mask=inside)


@triton.jit
def _over_splits(partial, at, STRIDE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr):
    split = tl.arange(0, PADDED)
    return tl.sum(tl.load(partial + at + split * STRIDE, mask=split < SPLITS, other=0.0), 0)


@triton.jit
def _read_token(partial, alpha, bias, x, u, pre, weight_1, weight_2, weight_3, out_1, out_2, out_3, inverse_root, factor, eps, row,
                HIDDEN: tl.constexpr, n: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
                NORMS: tl.constexpr, COPIES: tl.constexpr):
    """Of one token H_pre and u [C] = H_pre x, or in its place NORMS (1 or 3) norms of it, the third times `factor`, with their inverse
    root."""
    OUTPUTS: tl.constexpr = n * n + 2 * n
    PARTS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    KINDS: tl.constexpr = 1 if COPIES else n
    place, streams, gates = tl.arange(0, COLUMNS), (), ()
    for part in tl.static_range(PARTS):
        for j in tl.static_range(KINDS):
            at = part * COLUMNS + place
            streams = streams + (tl.load(x + row * (KINDS * HIDDEN) + j * HIDDEN + at, mask=at < HIDDEN, other=0.0,
                                         eviction_policy="evict_first"),)
    start = row * (SPLITS * (OUTPUTS + 1))
    inverse = _inverse(_size(_over_splits(partial, start + OUTPUTS, OUTPUTS + 1, SPLITS, PADDED_SPLITS), n * HIDDEN))
    for j in tl.static_range(n):
        product = _over_splits(partial, start + j, OUTPUTS + 1, SPLITS, PADDED_SPLITS)
        gate = _sigmoid(inverse * product * tl.load(alpha) + tl.load(bias + j))
        tl.store(pre + row * n + j, gate)
        gates = gates + (gate,)
    if COPIES:
        gates = (_total(gates),)
    square, parts = tl.zeros((COLUMNS,), tl.float32), ()
    for part in tl.static_range(PARTS):
        out = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(KINDS):
            out += gates[j] * streams[part * KINDS + j].to(tl.float32)
        at = part * COLUMNS + place
        if NORMS:
            parts, square = parts + (out,), square + out * out
        else:
            tl.store(u + row * HIDDEN + at, out.to(u.dtype.element_ty), mask=at < HIDDEN)
    if NORMS:
        own = tl.rsqrt(tl.sum(square, 0) / HIDDEN + eps)
        tl.store(inverse_root + row, own)
        for part in tl.static_range(len(parts)):
            column = part * COLUMNS + place
            inside, normed, to = column < HIDDEN, parts[part] * own, row * HIDDEN + column
            tl.store(out_1 + to, (normed * _load(weight_1, column, inside)).to(out_1.dtype.element_ty), mask=inside)
            if NORMS == 3:
                tl.store(out_2 + to, (normed * _load(weight_2, column, inside)).to(out_2.dtype.element_ty), mask=inside)
                tl.store(out_3 + to, normed * _load(weight_3, column, inside) * factor, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _read(partial, alpha, bias, x, u, pre, post, res, projected, root, weight_1, weight_2, weight_3, out_1, out_2, out_3, inverse_root,
          factor, eps, num_rows, HIDDEN: tl.constexpr, n: tl.constexpr, STREAMS: tl.constexpr, ITERATIONS: tl.constexpr,
          SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, COLUMNS: tl.constexpr, NORMS: tl.constexpr, COPIES: tl.constexpr,
          TOKENS: tl.constexpr, DEPENDENT: tl.constexpr):
    """The first programs make the mappings of TOKENS tokens each; their rounds wait for nothing but themselves, and others read meanwhile,
    a token each, the last ones first, which were written last and may be in the cache."""
    after_last(DEPENDENT)
    maps = tl.num_programs(0) - num_rows
    if tl.program_id(0) < maps:
        _map(partial, alpha, bias, post, res, projected, root, tl.program_id(0) * TOKENS, num_rows, n * HIDDEN, n, STREAMS, ITERATIONS,
             SPLITS, TOKENS)
    else:
        _read_token(partial, alpha, bias, x, u, pre, weight_1, weight_2, weight_3, out_1, out_2, out_3, inverse_root, factor, eps,
                    (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64), HIDDEN, n, SPLITS, PADDED_SPLITS, COLUMNS, NORMS, COPIES)


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

    made: u = H_pre x [T, C] in the dtype of x, None where norms of it are made; then fp32 H_pre [T, n], H_post [T, n], H_res [T, n, n],
    x W^T [T, O], |x| / sqrt(nC) [T].
    """
    (num_rows, width), outputs, n = x.shape, len(bias), num_streams
    hidden, warps = width if copies else width // n, READ_WARPS
    u = None if norms.weights else x.new_empty(num_rows, hidden)
    shapes = (num_rows, n), (num_rows, n), (num_rows, n, n), (num_rows, outputs), (num_rows,)
    made = tuple(torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes)
    normed = tuple(x.new_empty(num_rows, hidden, dtype=torch.float32 if which == 2 else None) for which in range(len(norms.weights)))
    inverse_root = torch.empty_like(made[-1])
    if num_rows:
        tokens = TOKENS * warps
        _read[(triton.cdiv(num_rows, tokens) + num_rows,)](
            partial, alpha, bias, x, u, *made, *norms.three, *normed, *[None] * (3 - len(normed)), inverse_root, norms.factor, norms.eps,
            num_rows, HIDDEN=hidden, n=n, STREAMS=next_power_of_2(n), ITERATIONS=iterations, SPLITS=partial.shape[1],
            PADDED_SPLITS=next_power_of_2(partial.shape[1]), COLUMNS=min(READ_NUMBERS * 32 * warps, next_power_of_2(hidden)),
            NORMS=len(normed), COPIES=copies, TOKENS=tokens, num_warps=warps, **dependent(x.device))
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
