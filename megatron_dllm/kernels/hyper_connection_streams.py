"""What mHC does with the streams themselves, each number moved once: merge (write), its gradients, and those of a read.

Legend: T tokens, n streams, C hidden (HIDDEN); x [T, n*C], streams one after the other, or with COPIES [T, C], which every stream is a
copy of. A merge reads (n + 1) C numbers a token and writes n C, or with MEAN the streams' mean, C. The formulas, and the same in plain
torch, are in transformer/hyper_connection.py.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .hyper_connection_mappings import MappingGradients, Norms
from .launch import has_large_shared_memory, next_power_of_2, processors

COLUMNS = 1024  # of each stream that a program of 4 warps holds: 8 numbers a thread, 16 bytes of bf16
# Where n^2 + n sums are made besides, a program is one warp, whose lanes have 8 neighbouring numbers each, 16 bytes of bf16: no warp waits
# for another, and many fit a processor.
LANES, NUMBERS = 32, 8  # 87 registers a thread
SUMS = 1024  # that a program adds up
# Of `_read_backward`: columns of each stream in a tile, warps; then tokens in a tile, programs that share the tokens, stages and registers
# a thread, in LARGE for bf16 where shared memory is large. On an H200 5,120 tokens of 4 x 2816, sums included, took 0.140 ms with LARGE;
# 4 programs, 3 stages and 168 registers 0.149, 64 tokens and 2 stages 0.159, 6 programs of 128 registers 0.173 and more. Without its
# products it takes as long: it is bound by what it loads.
TILE_COLUMNS, WARPS = 32, 4
LARGE, SMALL = (32, 3, 4, 255), (64, 3, 1, None)
# Of `_normed_products`: warps, programs a processor, rows that are there or on the way with three norms and with one, the shared memory for
# these, and registers a thread. 5,120 tokens took 0.099 ms with three norms and 0.056 with one; the other number of rows 0.112 and 0.064.
NORM_WARPS, NORM_PROGRAMS, NORM_STAGES, NORM_SHARED = 8, 2, {3: 2, 1: 1}, 220_000
NORM_REGISTERS = 128  # two programs of 8 warps fit a processor
ADD_ROWS, NORM_ROWS, NORM_COLUMNS = 256, 128, 32  # of tiles of parts that are added up


@triton.jit
def _load(start, at, inside):
    return tl.load(start + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _read_products(x, du, dpre, HIDDEN: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr):
    """dpre [T, n]: each stream times du. The last tokens first, so that `_read_backward`, which then leaves its last tokens to
    `_merge_backward`, finds the first ones in the cache."""
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
def _joined(values, n: tl.constexpr, STREAMS: tl.constexpr):
    """[COLUMNS, STREAMS] of n [COLUMNS]: a sum of it over columns is one, where each by itself would wait for all warps."""
    if STREAMS == 1:
        return tl.expand_dims(values[0], 1)
    elif STREAMS == 2:
        return tl.join(values[0], values[1])
    else:
        last = values[n - 1] if n == 4 else tl.zeros_like(values[0])
        # join puts its second operand innermost last: 0, 2 and 1, 3 come out in order
        both = tl.join(tl.join(values[0], values[2]), tl.join(values[1], last))
        return tl.reshape(both, (values[0].shape[0], 4))


@triton.jit(do_not_specialize=["num_live"])
def _normed_products(x, pre, inverse_root, weight_1, weight_2, weight_3, grad_1, grad_2, grad_3, du, dpre, partial, factor,
                     num_live, HIDDEN: tl.constexpr, n: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr,
                     NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WANTS_WEIGHTS: tl.constexpr, STAGES: tl.constexpr,
                     COPIES: tl.constexpr, DEPENDENT: tl.constexpr):
    """du [T, C] from the gradients of NORMS (1 or 3) norms of u = H_pre x, the third of which was times `factor`; then dpre [T, n]: each
    stream times it. partial [programs, NORMS, C]: the gradients of the norms' weights. A program has some of the tokens,
    and of each of them all columns in registers, in parts of COLUMNS; the next token is fetched meanwhile.

    With t the weighted sum of the gradients, du = root (t - root u s), where s = root t u / C: t x and u x, which are summed at once,
    give s and dpre.
    """
    after_last(DEPENDENT)
    PARTS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    LANES: tl.constexpr = COLUMNS // NEIGHBOURS
    column = tl.arange(0, LANES)[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
    stream, program, programs = tl.arange(0, STREAMS), tl.program_id(0), tl.num_programs(0)
    ROW: tl.constexpr = HIDDEN if COPIES else n * HIDDEN
    STRIDE: tl.constexpr = 0 if COPIES else HIDDEN
    none, nothing = tl.zeros((LANES, NEIGHBOURS), tl.float32), tl.zeros((LANES,), tl.float32)
    dweights_1, dweights_2, dweights_3 = (none,) * PARTS, (none,) * PARTS, (none,) * PARTS
    for step in tl.range(0, tl.cdiv(num_live - program, programs), num_stages=STAGES):
        row = (num_live - 1 - program - step * programs).to(tl.int64)  # the last first: see `_read_products`
        root, gates = tl.load(inverse_root + row), ()
        for i in tl.static_range(n):
            gates = gates + (tl.load(pre + row * n + i),)
        reads, totals, sums_1, sums_2, sums_3, of_totals, of_reads = (), (), (), (), (), (nothing,) * n, (nothing,) * n
        for part in tl.static_range(PARTS):
            at = part * COLUMNS + column
            inside, here = at < HIDDEN, row * HIDDEN + at
            read, streams = none, ()
            for i in tl.static_range(n):
                streams = streams + (_load(x + row * ROW + i * STRIDE, at, inside),)
                read += gates[i] * streams[i]
            normed, grad = read * root, _load(grad_1, here, inside)
            if WANTS_WEIGHTS:
                sums_1 = sums_1 + (dweights_1[part] + grad * normed,)
            total = grad * _load(weight_1, at, inside)
            if NORMS == 3:
                other, third = _load(grad_2, here, inside), _load(grad_3, here, inside) * factor
                if WANTS_WEIGHTS:
                    sums_2 = sums_2 + (dweights_2[part] + other * normed,)
                    sums_3 = sums_3 + (dweights_3[part] + third * normed,)
                total += other * _load(weight_2, at, inside) + third * _load(weight_3, at, inside)
            added, more = (), ()
            for i in tl.static_range(n):
                added, more = added + (of_totals[i] + tl.sum(streams[i] * total, 1),), more + (of_reads[i] + tl.sum(streams[i] * read, 1),)
            of_totals, of_reads, reads, totals = added, more, reads + (read,), totals + (total,)
        if WANTS_WEIGHTS:
            dweights_1 = sums_1
            if NORMS == 3:
                dweights_2, dweights_3 = sums_2, sums_3
        both = tl.sum(tl.join(_joined(of_totals, n, STREAMS), _joined(of_reads, n, STREAMS)), 0)
        of_total, of_read = tl.split(both)
        gate = tl.load(pre + row * n + stream, mask=stream < n, other=0.0)
        share = root * root * tl.sum(gate * of_total, 0) / HIDDEN
        for part in tl.static_range(PARTS):
            at = part * COLUMNS + column
            out = root * (totals[part] - reads[part] * share)
            tl.store(du + row * HIDDEN + at, out.to(du.dtype.element_ty), mask=at < HIDDEN)
        tl.store(dpre + row * n + stream, root * (of_total - of_read * share), mask=stream < n)
    if WANTS_WEIGHTS:
        for part in tl.static_range(PARTS):
            at = part * COLUMNS + column
            inside = at < HIDDEN
            first = partial + program.to(tl.int64) * (NORMS * HIDDEN)
            tl.store(first + at, dweights_1[part], mask=inside)
            if NORMS == 3:
                tl.store(first + HIDDEN + at, dweights_2[part], mask=inside)
                tl.store(first + 2 * HIDDEN + at, dweights_3[part], mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_live", "num_steps"])
def _read_backward(x, weight, pre, mix, dprojected, coefficient, du, grad, dx, partial, num_rows, num_live, num_steps,
                   HIDDEN: tl.constexpr, n: tl.constexpr, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, PADDED: tl.constexpr,
                   PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, OF_MEAN: tl.constexpr,
                   COPIES: tl.constexpr, DEPENDENT: tl.constexpr):
    """dx = mix^T grad + H_pre^T du + dprojected W - coefficient * x, of some columns of every stream and our share of the tokens (COPIES:
    the sum over the streams; OF_MEAN: grad [T, C] is that of the mean of what was written), and partial [splits, O, WIDTH] =
    dprojected^T x of them: x is read once for both. Rows from `num_live` on are zero.

    A tile is [ROWS, STREAMS * COLUMNS], in registers as products leave it, where the streams of a column lie in one thread.
    """
    after_last(DEPENDENT)
    WIDTH: tl.constexpr = n * HIDDEN
    split, splits = tl.program_id(1), tl.num_programs(1)
    output, place, stream, every = tl.arange(0, PADDED), tl.arange(0, ROWS), tl.arange(0, STREAMS), tl.arange(0, STREAMS * COLUMNS)
    column, of_stream = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), every // COLUMNS
    within = tl.program_id(0) * COLUMNS + every % COLUMNS
    wide, inside, in_outputs = of_stream * HIDDEN + within, (of_stream < n) & (within < HIDDEN), output < OUTPUTS
    factor = tl.load(weight + output[:, None] * WIDTH + wide[None, :], mask=in_outputs[:, None] & inside[None, :], other=0.0)
    if PIECES > 1:
        high = factor.to(tl.bfloat16)
        low = (factor - high.to(tl.float32)).to(tl.bfloat16)
    local, narrow = place[:, None] * WIDTH + wide[None, :], place[:, None] * WIDTH + column[None, :]
    same, single = place[:, None] * HIDDEN + within[None, :], place[:, None] * HIDDEN + column[None, :]
    sums = tl.zeros((STREAMS * COLUMNS, PADDED), tl.float32)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        first = (split + step * splits) * ROWS
        start, in_rows = first.to(tl.int64) * HIDDEN, place < num_live - first
        here, in_column = in_rows[:, None] & inside[None, :], in_rows[:, None] & (column < HIDDEN)[None, :]
        in_mix = in_rows[:, None] & (stream < n)[None, :]
        if COPIES:
            streams = tl.load(x + start + same, mask=here, other=0.0)
        else:
            streams = tl.load(x + start * n + local, mask=here, other=0.0)
        pieces = ()
        for number in tl.static_range(PIECES):
            at_grad = (number * num_live + first + place)[:, None] * OUTPUTS + output[None, :]
            pieces = pieces + (tl.load(dprojected + at_grad, mask=in_rows[:, None] & in_outputs[None, :], other=0.0),)
        if PIECES > 1:
            # 16 bits of each factor: dx is rounded to 8.
            out = tl.dot(pieces[0], high, tl.dot(pieces[0], low, tl.dot(pieces[1], high)))
        else:
            out = tl.dot(pieces[0], factor, input_precision="tf32x3")
        part = tl.zeros((STREAMS * COLUMNS, PADDED), tl.float32)
        for number in tl.static_range(PIECES):
            values = tl.trans(streams)
            if PIECES == 1:
                values = values.to(tl.float32)
            part = tl.dot(values, pieces[number], part, input_precision="tf32x3")
        sums += part  # not by the product: see `_project` of hyper_connection_projection
        out -= tl.load(coefficient + first + place, mask=in_rows, other=0.0)[:, None] * streams.to(tl.float32)
        out = tl.reshape(out, (ROWS, STREAMS, COLUMNS))
        gate = tl.load(pre + (first + place)[:, None] * n + stream[None, :], mask=in_mix, other=0.0)
        incoming = tl.load(du + start + single, mask=in_column, other=0.0)
        out += gate[:, :, None] * incoming.to(tl.float32)[:, None, :]
        if OF_MEAN:
            gate = tl.zeros((ROWS, STREAMS), tl.float32)
            for j in tl.static_range(n):
                gate += tl.load(mix + (first + place)[:, None] * (n * n) + j * n + stream[None, :], mask=in_mix, other=0.0)
            above = tl.load(grad + start + single, mask=in_column, other=0.0)
            out += (gate / n)[:, :, None] * above.to(tl.float32)[:, None, :]
        for j in tl.static_range(0 if OF_MEAN else n):
            gate = tl.load(mix + (first + place)[:, None] * (n * n) + j * n + stream[None, :], mask=in_mix, other=0.0)
            above = tl.load(grad + start * n + j * HIDDEN + narrow, mask=in_column, other=0.0)
            out += gate[:, :, None] * above.to(tl.float32)[:, None, :]
        if COPIES:
            tl.store(dx + start + single, tl.sum(out, 1).to(dx.dtype.element_ty), mask=in_column)
        else:
            tl.store(dx + start * n + local, tl.reshape(out, (ROWS, STREAMS * COLUMNS)).to(dx.dtype.element_ty), mask=here)
    at_sum = (split * OUTPUTS + output)[None, :] * WIDTH + wide[:, None]
    tl.store(partial + at_sum, sums, mask=inside[:, None] & in_outputs[None, :])
    for step in range(0, tl.cdiv(num_rows - num_live, splits * ROWS)):
        first = num_live + (split + step * splits) * ROWS
        if COPIES:
            tl.store(dx + first.to(tl.int64) * HIDDEN + single, tl.zeros((ROWS, COLUMNS), dx.dtype.element_ty),
                     mask=(place < num_rows - first)[:, None] & (column < HIDDEN)[None, :])
        else:
            tl.store(dx + first.to(tl.int64) * WIDTH + local, tl.zeros((ROWS, STREAMS * COLUMNS), dx.dtype.element_ty),
                     mask=(place < num_rows - first)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_others", "num_norms"])
def _add_up(partial, total, others, bias, alpha, of_norms, norms, norm_3, num_others, num_norms, SIZE: tl.constexpr, SPLITS: tl.constexpr,
            OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr,
            NORM_ROWS: tl.constexpr, NORM_COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):
    """total [SIZE] of partial [SPLITS, SIZE]; by one program bias [O] and alpha [3] of others [num_others, O + 3]; by the last ones norms
    [FIRST] and norm_3 [WIDTH - FIRST] of of_norms [num_norms, WIDTH]. Always in the same order."""
    after_last(DEPENDENT)
    program, blocks = tl.program_id(0), tl.cdiv(SIZE, BLOCK)
    if program < blocks:
        at = program * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        out = tl.load(partial + at, mask=inside)
        for split in tl.static_range(1, SPLITS):
            out += tl.load(partial + split * SIZE + at, mask=inside)
        tl.store(total + at, out, mask=inside)
    elif program == blocks:
        column, summed = tl.arange(0, COLUMNS), tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(0, tl.cdiv(num_others, ROWS)):
            row = step * ROWS + tl.arange(0, ROWS)
            inside = (row < num_others)[:, None] & (column < OUTPUTS + 3)[None, :]
            summed += tl.load(others + row[:, None] * (OUTPUTS + 3) + column[None, :], mask=inside, other=0.0)
        tl.store(bias + column, tl.sum(summed, 0), mask=column < OUTPUTS)
        tl.store(alpha + column - OUTPUTS, tl.sum(summed, 0), mask=(column >= OUTPUTS) & (column < OUTPUTS + 3))
    elif WIDTH > 0:
        place = (program - blocks - 1) * NORM_COLUMNS + tl.arange(0, NORM_COLUMNS)
        gathered = tl.zeros((NORM_ROWS, NORM_COLUMNS), tl.float32)
        for block in range(0, tl.cdiv(num_norms, NORM_ROWS)):
            part = block * NORM_ROWS + tl.arange(0, NORM_ROWS)
            seen = (part < num_norms)[:, None] & (place < WIDTH)[None, :]
            gathered += tl.load(of_norms + part[:, None] * WIDTH + place[None, :], mask=seen, other=0.0)
        sums = tl.sum(gathered, 0)
        tl.store(norms + place, sums.to(norms.dtype.element_ty), mask=place < FIRST)
        if FIRST < WIDTH:
            tl.store(norm_3 + place - FIRST, sums.to(norm_3.dtype.element_ty), mask=(place >= FIRST) & (place < WIDTH))


@triton.jit
def _merge(x, y, post, res, scale, new, HIDDEN: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr, HAS_SCALE: tl.constexpr,
           MEAN: tl.constexpr, COPIES: tl.constexpr):
    """new [T, nC] = (H_res x + H_post^T y) * scale; with MEAN [T, C], the mean of these streams."""
    row, mix, gates, factor = tl.program_id(0).to(tl.int64), (), (), 1.0
    if HAS_SCALE:
        factor = tl.load(scale + row).to(tl.float32)
    for i in tl.static_range(n):
        gates = gates + (tl.load(post + row * n + i) * factor,)
        for j in tl.static_range(n):
            mix = mix + (tl.load(res + (row * n + i) * n + j) * factor,)
    ROW: tl.constexpr = HIDDEN if COPIES else n * HIDDEN
    STRIDE: tl.constexpr = 0 if COPIES else HIDDEN
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        written, streams = _load(y + row * HIDDEN, column, inside), ()
        for j in tl.static_range(n):
            streams = streams + (_load(x + row * ROW + j * STRIDE, column, inside),)
        total = tl.zeros((COLUMNS,), tl.float32)
        for i in tl.static_range(n):
            out = gates[i] * written
            for j in tl.static_range(n):
                out += mix[i * n + j] * streams[j]
            if MEAN:
                total += out
            else:
                tl.store(new + (row * n + i) * HIDDEN + column, out.to(new.dtype.element_ty), mask=inside)
        if MEAN:
            tl.store(new + row * HIDDEN + column, (total / n).to(new.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_live"])
def _merge_backward(x, y, post, scale, grad, dy, dpost, dres, num_live, HIDDEN: tl.constexpr, n: tl.constexpr, LANES: tl.constexpr,
                    NUMBERS: tl.constexpr, HAS_SCALE: tl.constexpr, OF_MEAN: tl.constexpr, COPIES: tl.constexpr, DEPENDENT: tl.constexpr):
    """dy = H_post g, dH_post = g y, dH_res = g x^T, with g = grad * scale. A lane has some neighbouring columns, and a sum of each kind.
    OF_MEAN: grad [T, C] is that of the streams' mean. Rows of dy from `num_live` on are zero, and the others are not written. The last
    tokens first: see `_read_products`."""
    after_last(DEPENDENT)
    row, gates, dmix, dgates, factor = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64), (), (), (), 1.0
    if row >= num_live:
        for start in range(0, HIDDEN, LANES * NUMBERS):
            column = start + tl.arange(0, LANES)[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
            tl.store(dy + row * HIDDEN + column, tl.zeros((LANES, NUMBERS), dy.dtype.element_ty), mask=column < HIDDEN)
        return
    if HAS_SCALE:
        factor = tl.load(scale + row).to(tl.float32)
    if OF_MEAN:
        factor /= n
    ROW: tl.constexpr = HIDDEN if COPIES else n * HIDDEN
    STRIDE: tl.constexpr = 0 if COPIES else HIDDEN
    for i in tl.static_range(n):
        gates = gates + (tl.load(post + row * n + i) * factor,)
        dgates = dgates + (tl.zeros((LANES,), tl.float32),)
        for _ in tl.static_range(n):
            dmix = dmix + (tl.zeros((LANES,), tl.float32),)
    for start in range(0, HIDDEN, LANES * NUMBERS):
        column = start + tl.arange(0, LANES)[:, None] * NUMBERS + tl.arange(0, NUMBERS)[None, :]
        inside = column < HIDDEN
        written, above, streams, out = _load(y + row * HIDDEN, column, inside), (), (), tl.zeros((LANES, NUMBERS), tl.float32)
        if OF_MEAN:
            above = (_load(grad + row * HIDDEN, column, inside),) * n
        for i in tl.static_range(n):
            if not OF_MEAN:
                above = above + (_load(grad + (row * n + i) * HIDDEN, column, inside),)
            streams = streams + (_load(x + row * ROW + i * STRIDE, column, inside),)
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


@triton.jit
def _sum_streams(x, total, factor, HIDDEN: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr):
    """total [T, C]: the sum of the streams, times a factor."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        out = tl.zeros((COLUMNS,), tl.float32)
        for i in tl.static_range(n):
            out += _load(x + (row * n + i) * HIDDEN, column, inside)
        tl.store(total + row * HIDDEN + column, (out * factor).to(total.dtype.element_ty), mask=inside)


@triton.jit
def _spread(x, streams, factor, HIDDEN: tl.constexpr, n: tl.constexpr, COLUMNS: tl.constexpr):
    """streams [T, nC]: x [T, C] times a factor in each."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < HIDDEN
        out = (_load(x + row * HIDDEN, column, inside) * factor).to(streams.dtype.element_ty)
        for i in tl.static_range(n):
            tl.store(streams + (row * n + i) * HIDDEN + column, out, mask=inside)


def _columns(hidden: int, most: int) -> int:
    return min(most, next_power_of_2(hidden))


def read_products(x: Tensor, du: Tensor, num_live: int) -> Tensor:
    """dH_pre fp32 of the first `num_live` tokens, [num_live, n], from x [T, nC] and du [T, C]."""
    hidden, n = du.shape[1], x.shape[1] // du.shape[1]
    dpre = torch.empty(num_live, n, dtype=torch.float32, device=x.device)
    if num_live:
        _read_products[(num_live,)](x, du, dpre, HIDDEN=hidden, n=n, COLUMNS=_columns(hidden, COLUMNS), num_warps=4)
    return dpre


def normed_products(x: Tensor, pre: Tensor, inverse_root: Tensor, norms: Norms, grads: Sequence[Tensor], num_live: int, *,
                    num_streams: int, wants_weights: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """`read_products` of a du [T, C] that is made here too, in the first `num_live` rows, from the gradients of `norms` of u = H_pre x;
    (du, dH_pre, and fp32 [P, norms * C], whose sum over P is the gradients of the norms' weights, if they are wanted)."""
    hidden, n, count = grads[0].shape[1], num_streams, len(norms.weights)
    du, dpre = x.new_empty(len(x), hidden), torch.empty(num_live, n, dtype=torch.float32, device=x.device)
    programs = min(num_live, NORM_PROGRAMS * processors(x.device))
    partial = dpre.new_empty(programs, count * hidden) if wants_weights else None
    # A wide row is held by more warps, and the next one is fetched where it fits beside it.
    warps, columns = (NORM_WARPS, COLUMNS) if hidden <= 4096 else (16, 2 * COLUMNS)
    columns = _columns(hidden, columns)
    sizes = n * x.element_size() + sum(t.element_size() for t in (*grads, *norms.weights))
    row = triton.cdiv(hidden, columns) * columns * sizes
    stages = NORM_STAGES[count] if has_large_shared_memory(x.device) and (NORM_STAGES[count] - 1) * row <= NORM_SHARED else 1
    if num_live:
        _normed_products[(programs,)](
            x, pre, inverse_root, *norms.three, *grads, *[None] * (3 - count), du, dpre, partial, norms.factor, num_live, HIDDEN=hidden,
            n=n, STREAMS=next_power_of_2(n), COLUMNS=columns, NEIGHBOURS=min(4, columns), NORMS=count, WANTS_WEIGHTS=wants_weights,
            STAGES=stages, COPIES=x.shape[1] < n * hidden, num_warps=warps, maxnreg=NORM_REGISTERS if warps == NORM_WARPS else None,
            **dependent(x.device, early=False))
    return du, dpre, partial


def read_backward(x: Tensor, weight: Tensor, pre: Tensor, through: MappingGradients, du: Tensor, grad: Tensor,
                  norm_weights: Sequence[Tensor] = (), of_norms: Tensor | None = None) -> tuple[Tensor, ...]:
    """dx [T, nC] in the dtype of x, from du [T, C] and the gradient [T, nC] of `merge`'s result; dweight [O, nC], dalpha [3] and dbias [O],
    fp32; then the gradients of `norm_weights`, of which `of_norms` has the parts (see `normed_products`). `through`: the gradients of the
    mappings, of as many tokens as have a gradient that is not zero."""
    num_rows, n, (outputs, width) = len(x), pre.shape[1], weight.shape
    (pieces, num_live, _), hidden, dx = through.projected.shape, width // n, torch.empty_like(x)
    rows, splits, stages, registers = LARGE if x.dtype == torch.bfloat16 and has_large_shared_memory(x.device) else SMALL
    partial = torch.empty(splits, outputs, width, dtype=torch.float32, device=x.device)
    _read_backward[(triton.cdiv(hidden, TILE_COLUMNS), splits)](
        x, weight, pre, through.mix, through.projected, through.coefficient, du, grad, dx, partial, num_rows, num_live,
        triton.cdiv(num_live, rows * splits), HIDDEN=hidden, n=n, STREAMS=next_power_of_2(n), OUTPUTS=outputs,
        PADDED=max(16, next_power_of_2(outputs)), PIECES=pieces, ROWS=rows, COLUMNS=TILE_COLUMNS, STAGES=stages,
        OF_MEAN=grad.shape[1] < width, COPIES=x.shape[1] < width, num_warps=WARPS, maxnreg=registers, **dependent(x.device))
    dweight, dalpha, dbias = torch.empty_like(weight), weight.new_empty(3), weight.new_empty(outputs)
    norms, norm_3, of_width = None, None, 0
    if of_norms is not None:
        of_width, norms = of_norms.shape[1], norm_weights[0].new_empty(min(len(norm_weights), 2) * hidden)
        norm_3 = torch.empty_like(norm_weights[2]) if len(norm_weights) == 3 else None
    _add_up[(triton.cdiv(weight.numel(), SUMS) + 1 + triton.cdiv(of_width, NORM_COLUMNS),)](
        partial, dweight, through.partial, dbias, dalpha, of_norms, norms, norm_3, len(through.partial),
        0 if of_norms is None else len(of_norms), SIZE=weight.numel(), SPLITS=splits, OUTPUTS=outputs,
        COLUMNS=next_power_of_2(outputs + 3), ROWS=ADD_ROWS, BLOCK=SUMS, WIDTH=of_width, FIRST=0 if norms is None else len(norms),
        NORM_ROWS=NORM_ROWS, NORM_COLUMNS=NORM_COLUMNS, num_warps=4, **dependent(x.device))
    made = dx, dweight, dalpha, dbias
    return made if norms is None else (*made, *norms.split(hidden), *(() if norm_3 is None else (norm_3,)))


def merge(x: Tensor, y: Tensor, post: Tensor, res: Tensor, scale: Tensor | None, *, mean: bool = False) -> Tensor:
    """(H_res x + H_post^T y) * scale, [T, nC] in x's dtype, or the mean of these streams, [T, C]."""
    (num_rows, hidden), n = y.shape, post.shape[1]
    new = x.new_empty(num_rows, hidden if mean else n * hidden)
    if num_rows:
        _merge[(num_rows,)](x, y, post, res, scale, new, HIDDEN=hidden, n=n,
                            COLUMNS=_columns(hidden, COLUMNS), HAS_SCALE=scale is not None, MEAN=mean,
                            COPIES=x.shape[1] < n * hidden, num_warps=4)
    return new


def merge_backward(x: Tensor, y: Tensor, post: Tensor, scale: Tensor | None, grad: Tensor, num_live: int) -> tuple[Tensor, Tensor, Tensor]:
    """dy in y's dtype, dH_post [T, n] and dH_res [T, n, n] fp32, from the gradient [T, nC] of `merge`'s result, of which the first
    `num_live` rows are not zero: of the others dH_post and dH_res are not written."""
    (num_rows, hidden), n = y.shape, post.shape[1]
    dy, dpost, dres = made = torch.empty_like(y), torch.empty_like(post), post.new_empty(num_rows, n, n)
    if num_rows:
        _merge_backward[(num_rows,)](x, y, post, scale, grad, dy, dpost, dres, num_live, HIDDEN=hidden, n=n, LANES=LANES,
                                     NUMBERS=NUMBERS, HAS_SCALE=scale is not None, OF_MEAN=grad.shape[1] < n * hidden,
                                     COPIES=x.shape[1] < n * hidden, num_warps=1, **dependent(x.device, early=False))
    return made


def sum_streams(x: Tensor, num_streams: int, factor: float) -> Tensor:
    """[T, C] in the dtype of x [T, nC]: the sum of the streams, in fp32, times a factor."""
    num_rows, hidden = len(x), x.shape[1] // num_streams
    total = x.new_empty(num_rows, hidden)
    if num_rows:
        _sum_streams[(num_rows,)](x, total, factor, HIDDEN=hidden, n=num_streams, COLUMNS=_columns(hidden, COLUMNS), num_warps=4)
    return total


def spread(x: Tensor, num_streams: int, factor: float) -> Tensor:
    """[T, nC]: x [T, C] times a factor in every stream."""
    (num_rows, hidden), streams = x.shape, x.new_empty(len(x), x.shape[1] * num_streams)
    if num_rows:
        _spread[(num_rows,)](x, streams, factor, HIDDEN=hidden, n=num_streams, COLUMNS=_columns(hidden, COLUMNS), num_warps=4)
    return streams
