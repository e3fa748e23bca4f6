"""What mHC does with the streams themselves, each number moved once: merge (write), its gradients, and those of a read.

Legend: T tokens, n streams, C hidden (HIDDEN); x [T, n*C], streams one after the other. A merge reads (n + 1) C numbers a token and writes
n C. The formulas, and the same in plain torch, are in transformer/hyper_connection.py.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2

COLUMNS = 1024  # of each stream that a program of 4 warps holds: 8 numbers a thread, 16 bytes of bf16
# Where n^2 + n sums are made besides, a program is one warp, whose lanes have 8 neighbouring numbers each, 16 bytes of bf16: no warp waits
# for another, and many fit a processor.
LANES, NUMBERS = 32, 8  # 87 registers a thread
# Of `_read_backward`: tokens, columns of each stream, warps. Three programs of 164 registers fit a processor, each with 36 KB on the way.
# On an H200, 5,120 tokens of 4 x 2816, with `_weight_gradient`: 0.212 ms; 64 x 16 0.263, 128 x 32 with 8 warps 0.270.
ROWS, TILE_COLUMNS, TILE_WARPS = 64, 32, 4
# Of `_weight_gradient`: tokens and columns of a tile, and the programs that share the tokens: 264 for 4 x 2816 columns, two a processor
# (88 with 4 stages take 0.018 ms more, twice as many 0.004).
SUMMED_ROWS, PRODUCT_COLUMNS, SPLITS, STAGES = 64, 128, 3, 3


@triton.jit
def _load(start, at, inside):
    return tl.load(start + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _read_products(x, du, dpre, HIDDEN: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr):
    """dpre [T, n]: each stream times du. The last tokens first, so that `_read_backward` finds the first ones in the cache."""
    row, products = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64), ()
    for _ in tl.static_range(n):
        products = products + (tl.zeros((COLUMNS,), tl.float32),)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        grad, sums = _load(du + row * HIDDEN, column, inside), ()
        for i in tl.static_range(n):
            sums = sums + (products[i] + _load(x + (row * n + i) * HIDDEN, column, inside) * grad,)
        products = sums
    for i in tl.static_range(n):
        tl.store(dpre + row * n + i, tl.sum(products[i], 0))


@triton.jit
def _read_backward(x, weight, pre, res, scale, dprojected, coefficient, du, grad, dx, num_rows, HIDDEN: tl.constexpr, n: tl.constexpr,
                   OUTPUTS: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr, HAS_SCALE: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):
    """dx = H_res^T grad * scale + H_pre^T du + dprojected W - coefficient * x, of some columns of every stream; all that comes from memory
    is asked for before the first product."""
    column, output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, in_rows = column < HIDDEN, row < num_rows
    here, at = in_rows[:, None] & inside[None, :], row[:, None] * (n * HIDDEN) + column[None, :]
    streams, above = (), ()
    for i in tl.static_range(n):
        streams = streams + (tl.load(x + at + i * HIDDEN, mask=here, other=0.0),)
        above = above + (tl.load(grad + at + i * HIDDEN, mask=here, other=0.0),)
    incoming = tl.load(du + row[:, None] * HIDDEN + column[None, :], mask=here, other=0.0).to(tl.float32)
    own, factor_of_row = tl.load(coefficient + row, mask=in_rows, other=0.0)[:, None], 1.0
    if HAS_SCALE:
        factor_of_row = tl.load(scale + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    in_grad, at_grad = in_rows[:, None] & (output < OUTPUTS)[None, :], row[:, None] * OUTPUTS + output[None, :]
    high = tl.load(dprojected + at_grad, mask=in_grad, other=0.0)
    if PIECES > 1:
        low = tl.load(dprojected + num_rows.to(tl.int64) * OUTPUTS + at_grad, mask=in_grad, other=0.0)
    for i in tl.static_range(n):
        factor = tl.load(weight + output[:, None] * (n * HIDDEN) + i * HIDDEN + column[None, :],
                         mask=(output < OUTPUTS)[:, None] & inside[None, :], other=0.0)
        if PIECES > 1:
            # 16 bits of each factor: dx is rounded to 8.
            factor_high = factor.to(tl.bfloat16)
            factor_low = (factor - factor_high.to(tl.float32)).to(tl.bfloat16)
            out = tl.dot(high, factor_high, tl.dot(high, factor_low, tl.dot(low, factor_high)))
        else:
            out = tl.dot(high, factor, input_precision="tf32x3")
        gate = tl.load(pre + row * n + i, mask=in_rows, other=0.0)[:, None]
        out += gate * incoming - own * streams[i].to(tl.float32)
        for j in tl.static_range(n):
            out += tl.load(res + (row * n + j) * n + i, mask=in_rows, other=0.0)[:, None] * factor_of_row * above[j].to(tl.float32)
        tl.store(dx + at + i * HIDDEN, out.to(dx.dtype.element_ty), mask=here)


@triton.jit
def _weight_gradient(x, dprojected, partial, num_rows, num_steps, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PADDED: tl.constexpr,
                     PIECES: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """partial [SPLITS, O, WIDTH]: dprojected^T x over our share of the tokens. The last first: `_read_backward` has read them just now."""
    column, output, split = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED), tl.program_id(1)
    inside, in_outputs = column < WIDTH, output < OUTPUTS
    total = tl.zeros((COLUMNS, PADDED), tl.float32)
    for step in range(0, num_steps):
        row = (split + (num_steps - 1 - step) * SPLITS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        in_rows = row < num_rows
        values = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        if PIECES == 1:
            values = values.to(tl.float32)
        part = tl.zeros((COLUMNS, PADDED), tl.float32)
        for number in tl.static_range(PIECES):
            grad = tl.load(dprojected + (number * num_rows.to(tl.int64) + row)[:, None] * OUTPUTS + output[None, :],
                           mask=in_rows[:, None] & in_outputs[None, :], other=0.0)
            part = tl.dot(tl.trans(values), grad, part, input_precision="tf32x3")
        total += part  # not by the product: see `_project` of hyper_connection_mappings
    at = (split.to(tl.int64) * OUTPUTS + output)[None, :] * WIDTH + column[:, None]
    tl.store(partial + at, total, mask=inside[:, None] & in_outputs[None, :])


@triton.jit
def _merge(x, y, post, res, scale, new, HIDDEN: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """new [T, nC] = (H_res x + H_post^T y) * scale."""
    row, mix, gates, factor = tl.program_id(0).to(tl.int64), (), (), 1.0
    if HAS_SCALE:
        factor = tl.load(scale + row).to(tl.float32)
    for i in tl.static_range(n):
        gates = gates + (tl.load(post + row * n + i) * factor,)
        for j in tl.static_range(n):
            mix = mix + (tl.load(res + (row * n + i) * n + j) * factor,)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        written, streams = _load(y + row * HIDDEN, column, inside), ()
        for j in tl.static_range(n):
            streams = streams + (_load(x + (row * n + j) * HIDDEN, column, inside),)
        for i in tl.static_range(n):
            out = gates[i] * written
            for j in tl.static_range(n):
                out += mix[i * n + j] * streams[j]
            tl.store(new + (row * n + i) * HIDDEN + column, out.to(new.dtype.element_ty), mask=inside)


@triton.jit
def _merge_backward(x, y, post, scale, grad, dy, dpost, dres, HIDDEN: tl.constexpr, n: tl.constexpr, LANES: tl.constexpr,
                    NUMBERS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """dy = H_post g, dH_post = g y, dH_res = g x^T, with g = grad * scale. A lane has some neighbouring columns, and a sum of each kind."""
    row, gates, dmix, dgates, factor = tl.program_id(0).to(tl.int64), (), (), (), 1.0
    if HAS_SCALE:
        factor = tl.load(scale + row).to(tl.float32)
    for i in tl.static_range(n):
        gates = gates + (tl.load(post + row * n + i) * factor,)
        dgates = dgates + (tl.zeros((LANES,), tl.float32),)
        for _ in tl.static_range(n):
            dmix = dmix + (tl.zeros((LANES,), tl.float32),)
    for start in range(0, HIDDEN, LANES * NUMBERS):
        column = start + tl.arange(0, LANES)[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
        inside = column < HIDDEN
        written, above, streams, out = _load(y + row * HIDDEN, column, inside), (), (), tl.zeros((LANES, NUMBERS), tl.float32)
        for i in tl.static_range(n):
            above = above + (_load(grad + (row * n + i) * HIDDEN, column, inside),)
            streams = streams + (_load(x + (row * n + i) * HIDDEN, column, inside),)
        gate_sums, mix_sums = (), ()
        for i in tl.static_range(n):
            out += gates[i] * above[i]
            gate_sums = gate_sums + (dgates[i] + tl.sum(above[i] * written, 1),)
            for j in tl.static_range(n):
                mix_sums = mix_sums + (dmix[i * n + j] + tl.sum(above[i] * streams[j], 1),)
        tl.store(dy + row * HIDDEN + column, out.to(dy.dtype.element_ty), mask=inside)
        dgates, dmix = gate_sums, mix_sums
    for i in tl.static_range(n):
        tl.store(dpost + row * n + i, tl.sum(dgates[i], 0) * factor)
        for j in tl.static_range(n):
            tl.store(dres + (row * n + i) * n + j, tl.sum(dmix[i * n + j], 0) * factor)


def _columns(hidden: int, most: int) -> int:
    return min(most, next_power_of_2(hidden))


def read_products(x: Tensor, du: Tensor) -> Tensor:
    """dH_pre [T, n] fp32 from x [T, nC] and du [T, C]."""
    (num_rows, hidden), n = du.shape, x.shape[1] // du.shape[1]
    dpre = torch.empty(num_rows, n, dtype=torch.float32, device=x.device)
    if num_rows:
        _read_products[(num_rows,)](x, du, dpre, HIDDEN=hidden, n=n, COLUMNS=_columns(hidden, COLUMNS),
                                    num_warps=4)
    return dpre


def read_backward(x: Tensor, weight: Tensor, pre: Tensor, res: Tensor, scale: Tensor | None, dprojected: Tensor, coefficient: Tensor,
                  du: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """dx [T, nC] in the dtype of x, from du [T, C] and the gradient [T, nC] of `merge`'s result, and dweight [O, nC] fp32; `dprojected` is
    as `mappings_backward` has it."""
    (num_rows, width), n, outputs, pieces = x.shape, pre.shape[1], len(weight), len(dprojected)
    dx = torch.empty_like(x)
    if not num_rows:
        return dx, torch.zeros_like(weight)
    hidden, shared = width // n, {"OUTPUTS": outputs, "PADDED": max(16, next_power_of_2(outputs)), "PIECES": pieces}
    _read_backward[(triton.cdiv(hidden, TILE_COLUMNS), triton.cdiv(num_rows, ROWS))](
        x, weight, pre, res, scale, dprojected, coefficient, du, grad, dx, num_rows, HIDDEN=hidden, n=n, HAS_SCALE=scale is not None,
        ROWS=ROWS, COLUMNS=TILE_COLUMNS, **shared, num_warps=TILE_WARPS)
    partial = torch.empty(SPLITS, outputs, width, dtype=torch.float32, device=x.device)
    _weight_gradient[(triton.cdiv(width, PRODUCT_COLUMNS), SPLITS)](
        x, dprojected, partial, num_rows, triton.cdiv(num_rows, SUMMED_ROWS * SPLITS), WIDTH=width, SPLITS=SPLITS, ROWS=SUMMED_ROWS,
        COLUMNS=PRODUCT_COLUMNS, **shared, num_warps=4, num_stages=STAGES)
    return dx, partial.sum(0)


def merge(x: Tensor, y: Tensor, post: Tensor, res: Tensor, scale: Tensor | None) -> Tensor:
    """(H_res x + H_post^T y) * scale, [T, nC] in x's dtype."""
    (num_rows, hidden), n, new = y.shape, post.shape[1], torch.empty_like(x)
    if num_rows:
        _merge[(num_rows,)](x, y, post, res, scale, new, HIDDEN=hidden, n=n,
                            COLUMNS=_columns(hidden, COLUMNS), HAS_SCALE=scale is not None, num_warps=4)
    return new


def merge_backward(x: Tensor, y: Tensor, post: Tensor, scale: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dy in y's dtype, dH_post [T, n] and dH_res [T, n, n] fp32, from the gradient [T, nC] of `merge`'s result."""
    (num_rows, hidden), n = y.shape, post.shape[1]
    dy, dpost, dres = made = torch.empty_like(y), torch.empty_like(post), post.new_empty(num_rows, n, n)
    if num_rows:
        _merge_backward[(num_rows,)](x, y, post, scale, grad, dy, dpost, dres, HIDDEN=hidden, n=n, LANES=LANES, NUMBERS=NUMBERS,
                                     HAS_SCALE=scale is not None, num_warps=1)
    return made
