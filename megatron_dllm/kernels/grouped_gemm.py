"""Matrix products of rows sorted by expert with each expert's own matrix, tile by tile; the host never reads how many rows an expert has.

Legend: N rows, E experts, D width of the rows, F width of the results; counts int64 [E].

    product          y[n] = x[n] W_e^T       W [E, F, D]
    product          y[n] = x[n] W_e         W [E, D, F]    `transposed`: the gradient of its rows
    weight_gradient  G_e = dy_e^T x_e        stored in the rows' dtype, or added to an fp32 buffer

N may be more than the sum of counts: the rows after the last expert's are neither read into any result nor written.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import next_power_of_2, processors

CLEARED = 4096  # numbers a program clears at once
ENTRY = 4  # int32 of an entry of the table of tiles: expert, first row, rows, none


@dataclass(frozen=True)
class Tiling:
    """rows x columns of a program's result, `depth` of the contraction a step, `stages` of them on their way; programs a processor;
    whether the next tile's loop begins before a tile is stored."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    flatten: bool = False


@dataclass(frozen=True)
class RowTiles:
    """Where tiles of rows begin; on the device alone.

        table   int32 [., 4]   expert, first row, rows of a tile
        number  int32 [1]      tiles in the table
        starts  int32 [E + 1]  first row of each expert
        ends    int32 [E]      one past its last row
    """

    table: Tensor
    number: Tensor
    starts: Tensor
    ends: Tensor
    height: int


@dataclass(frozen=True)
class OuterProducts:
    """A part of a weight's gradient: dy_e^T x_e of every expert, of rows dy [N, F] and x [N, D]."""

    dy: Tensor
    x: Tensor
    tiles: RowTiles


@triton.jit
def _place_tiles(counts, table, number, starts, NUM_EXPERTS: tl.constexpr, POWER: tl.constexpr, HEIGHT: tl.constexpr,
                 ENTRY: tl.constexpr):
    """A program an entry, used or not; the first ones write `starts` too, since there are as many entries as experts or more."""
    place = tl.program_id(0)
    experts = tl.arange(0, POWER)
    count = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0).to(tl.int32)
    tiles = (count + HEIGHT - 1) // HEIGHT
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= place).to(tl.int32), 0)
    is_own = experts == expert
    offset = (place - tl.sum(tl.where(is_own, after - tiles, 0), 0)) * HEIGHT
    start, own = tl.sum(tl.where(experts < expert, count, 0), 0), tl.sum(tl.where(is_own, count, 0), 0)
    entry, used = table + place * ENTRY, expert < NUM_EXPERTS
    tl.store(entry, expert, mask=used)
    tl.store(entry + 1, start + offset, mask=used)
    tl.store(entry + 2, tl.minimum(own - offset, HEIGHT), mask=used)
    tl.store(starts + place, tl.sum(tl.where(experts < place, count, 0), 0), mask=place <= NUM_EXPERTS)
    if place == 0:
        tl.store(starts + NUM_EXPERTS, tl.sum(count, 0))
        tl.store(number, tl.sum(tiles, 0))


@triton.jit
def _weight_tile(weight, expert, column, at, TRANSPOSED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """[DEPTH, COLUMNS] of an expert's matrix; zeros outside it."""
    if TRANSPOSED:
        return weight.load([expert, at, column]).reshape(DEPTH, COLUMNS)
    return weight.load([expert, column, at]).reshape(COLUMNS, DEPTH).T


@triton.jit
def _product(x, weight, y, table, number, D: tl.constexpr, F: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """x, weight: descriptors; y [N, F]."""
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        entry = table + tile // ACROSS * ENTRY
        expert, row, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column = tile % ACROSS * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, D, DEPTH):
            total = tl.dot(x.load([row, at]), _weight_tile(weight, expert, column, at, TRANSPOSED, COLUMNS, DEPTH), total)
        down, across = tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
        place = y + row.to(tl.int64) * F + down * F + across
        tl.store(place, total.to(y.dtype.element_ty), mask=(down < rows) & (across < F))


@triton.jit
def _weight_gradient(dy, x, starts, ends, more_dy, more_x, more_starts, more_ends, grad, is_fresh, squares, NUM_EXPERTS: tl.constexpr,
                     F: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                     FLATTEN: tl.constexpr):
    """dy, x: ragged descriptors, which read zeros outside the expert's rows; more_: a second part, or None; grad [E, F, D]: a descriptor
    of half a tile; squares [tiles]: of each, the sum of grad's squares, or None.

    grad = G where there is no `is_fresh`, or it is 1; otherwise grad = grad + G. Reading it through registers takes 1.15 ms where the
    memory's own addition takes 1.64 (H200, 128 experts of 1408 x 2816, 8192 rows).
    """
    ACROSS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (F + ROWS - 1) // ROWS * ACROSS
    for tile in tl.range(tl.program_id(0), NUM_EXPERTS * TILES, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // TILES
        down, across = tile % TILES // ACROSS * ROWS, tile % ACROSS * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        start = tl.load(starts + expert)
        count = tl.load(ends + expert) - start
        for at in range(0, count, DEPTH):
            left, right = load_ragged(dy, start, count, [at, down]), load_ragged(x, start, count, [at, across])
            total = tl.dot(left.T, right, total)
        if more_dy is not None:
            start = tl.load(more_starts + expert)
            count = tl.load(more_ends + expert) - start
            for at in range(0, count, DEPTH):
                left, right = load_ragged(more_dy, start, count, [at, down]), load_ragged(more_x, start, count, [at, across])
                total = tl.dot(left.T, right, total)
        # Half a tile at a time: a whole one in fp32 would leave too little shared memory for the loop's own tiles.
        first, second = total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        first = _put(grad, expert, down, across, first, is_fresh)
        second = _put(grad, expert, down, across + COLUMNS // 2, second, is_fresh)
        if squares is not None:
            tl.store(squares + tile, tl.sum(first * first + second * second))


@triton.jit
def _put(grad, expert, down, across, values, is_fresh):
    """Store or add a part of a gradient; what then stands there."""
    part = values.reshape(1, values.shape[0], values.shape[1])
    if is_fresh is not None:
        if tl.load(is_fresh) == 0:
            part += grad.load([expert, down, across])
    grad.store([expert, down, across], part.to(grad.dtype))
    return part


@triton.jit
def _clear_fresh(total, squares, is_fresh, size, num_squares, BLOCK: tl.constexpr):
    """Zeros in `total` and `squares` if it is fresh, otherwise nothing."""
    fresh = tl.load(is_fresh)
    for at in range(tl.program_id(0) * BLOCK, size * fresh, tl.num_programs(0) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        tl.store(total + place, tl.zeros((BLOCK,), tl.float32), mask=place < size)
    for at in range(tl.program_id(0) * BLOCK, num_squares * fresh, tl.num_programs(0) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        tl.store(squares + place, tl.zeros((BLOCK,), tl.float32), mask=place < num_squares)


def place_tiles(counts: Tensor, num_rows: int, height: int) -> RowTiles:
    """Tiles of `height` rows for counts int64 [E], whose sum is at most `num_rows`."""
    num_experts = len(counts)
    table = torch.empty(num_rows // height + num_experts, ENTRY, dtype=torch.int32, device=counts.device)
    number, starts = table.new_empty(1), table.new_empty(num_experts + 1)
    _place_tiles[(len(table),)](counts, table, number, starts, NUM_EXPERTS=num_experts, POWER=next_power_of_2(num_experts),
                                 HEIGHT=height, ENTRY=ENTRY, num_warps=1)
    return RowTiles(table, number, starts, starts[1:], height)


def product(x: Tensor, weight: Tensor, tiles: RowTiles, tiling: Tiling, *, transposed: bool = False) -> Tensor:
    """y [N, F] of x [N, D] and weight [E, F, D] (transposed: [E, D, F])."""
    num_rows, depth = x.shape
    width = weight.shape[2 if transposed else 1]
    y = x.new_empty(num_rows, width)
    if y.numel():
        _product[_programs(x, tiling)](
            _rows_descriptor(x, tiling), _weight_descriptor(weight, tiling, transposed), y, tiles.table, tiles.number,
            D=depth, F=width, TRANSPOSED=transposed, **_constants(tiling))
    return y


def weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling) -> Tensor:
    """G [E, F, D], the sum of one or two parts, in their dtype. Zero for experts without rows."""
    part = parts[0]
    grad = part.x.new_empty(len(part.tiles.starts) - 1, part.dy.shape[1], part.x.shape[1])
    if not any(len(part.x) for part in parts):
        return grad.zero_()
    _launch_weight_gradient(parts, tiling, grad, None)
    return grad


def add_weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling, total: Tensor, is_fresh: Tensor,
                        squares: Tensor | None = None) -> None:
    """total = total + G, or G where `is_fresh` int32 [1] is 1 (which then becomes 0); total fp32, of as many elements as G.

    squares  fp32 [num_tiles(total, tiling)]: gets sums of the total's squares
    """
    if any(len(part.x) for part in parts):
        part = parts[0]
        grad = total.view(len(part.tiles.starts) - 1, part.dy.shape[1], part.x.shape[1])
        _launch_weight_gradient(parts, tiling, grad, is_fresh, squares)
        is_fresh.zero_()


def num_tiles(total: Tensor, tiling: Tiling) -> int:
    """Tiles of the gradient of a weight [E, ..., D]."""
    num_experts, depth = total.shape[0], total.shape[-1]
    return num_experts * triton.cdiv(total.numel() // (num_experts * depth), tiling.rows) * triton.cdiv(depth, tiling.columns)


def clear_fresh(total: Tensor, is_fresh: Tensor, squares: Tensor) -> None:
    """Zeros in `total` and `squares`, fp32, if `is_fresh` int32 [1] is 1 (which then becomes 0). The host waits for nothing."""
    _clear_fresh[(4 * processors(total.device),)](total, squares, is_fresh, total.numel(), squares.numel(), BLOCK=CLEARED)
    is_fresh.zero_()


def _launch_weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling, grad: Tensor, is_fresh: Tensor | None,
                            squares: Tensor | None = None) -> None:
    num_experts, width, depth = grad.shape
    rows = [argument for part in parts if len(part.x) for argument in (
        create_ragged_descriptor(part.dy, [tiling.depth, tiling.rows]), create_ragged_descriptor(part.x, [tiling.depth, tiling.columns]),
        part.tiles.starts, part.tiles.ends)]
    _weight_gradient[_programs(grad, tiling)](
        *rows, *[None] * (8 - len(rows)), TensorDescriptor.from_tensor(grad, [1, tiling.rows, tiling.columns // 2]), is_fresh, squares,
        NUM_EXPERTS=num_experts, F=width, D=depth, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=tiling.depth,
        FLATTEN=tiling.flatten, num_warps=tiling.warps, num_stages=tiling.stages)


def _programs(x: Tensor, tiling: Tiling) -> tuple[int]:
    return (processors(x.device) * tiling.programs,)


def _constants(tiling: Tiling) -> dict[str, int | bool]:
    return {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth, "ENTRY": ENTRY, "FLATTEN": tiling.flatten,
            "num_warps": tiling.warps, "num_stages": tiling.stages}


def _rows_descriptor(x: Tensor, tiling: Tiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [tiling.rows, tiling.depth])


def _weight_descriptor(weight: Tensor, tiling: Tiling, transposed: bool) -> TensorDescriptor:
    tile = [tiling.depth, tiling.columns] if transposed else [tiling.columns, tiling.depth]
    return TensorDescriptor.from_tensor(weight, [1, *tile])
