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
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import next_power_of_2, processors

CLEARED = 4096  # numbers a program clears at once
FAR = 2**40  # bytes; a descriptor's strides are less
RAGGED_AXES, RAGGED_ROWS = (0x7fff0000, 0x7fff0000), 2**30  # sizes of a ragged descriptor, see triton.tools.ragged_tma
ENTRY = 4  # int32 of an entry of the table of tiles: expert, first row, rows, none


@dataclass(frozen=True)
class Tiling:
    """rows x columns of a program's result, `depth` of the contraction a step, `stages` of them on their way; programs a processor;
    whether the next tile's loop begins before a tile is stored (a weight's gradient's always does); pieces that a tile is stored in, one
    after the other: whole it would leave too little shared memory for what is on its way."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    flatten: bool = False
    pieces: int = 1


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
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, FLATTEN: tl.constexpr, PIECES: tl.constexpr):
    """x, y: ragged descriptors, y's of a piece of a tile; weight: a descriptor. Rows after the expert's are read as zeros."""
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        entry = table + tile // ACROSS * ENTRY
        expert, row, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column = tile % ACROSS * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, D, DEPTH):
            left = load_ragged(x, row, rows, [0, at])
            total = tl.dot(left, _weight_tile(weight, expert, column, at, TRANSPOSED, COLUMNS, DEPTH), total)
        _store_rows(y, row, rows, column, total.to(y.dtype), PIECES)


@triton.jit
def _store_rows(y, row, rows, column, values, PIECES: tl.constexpr):
    """What triton.tools.ragged_tma's store_ragged does, in PIECES; that one cannot be interpreted."""
    if PIECES > 1:
        HALF: tl.constexpr = values.shape[1] // 2
        left, right = values.reshape(values.shape[0], 2, HALF).permute(0, 2, 1).split()
        _store_rows(y, row, rows, column, left, PIECES // 2)
        _store_rows(y, row, rows, column + HALF, right, PIECES // 2)
    else:
        far, end, at = to_ragged_indices(row, rows, 0)
        y.store([far, end, at, column], values.reshape(1, 1, values.shape[0], values.shape[1]))


@triton.jit
def _num_steps(starts, ends, expert, inside, DEPTH: tl.constexpr):
    count = tl.load(ends + expert, mask=inside, other=0) - tl.load(starts + expert, mask=inside, other=0)
    return (count + DEPTH - 1) // DEPTH


@triton.jit(do_not_specialize=["first_dy", "first_x"])
def _weight_gradient(dy, first_dy, x, first_x, starts, ends, more_starts, more_ends, grad, is_fresh, squares, NUM_EXPERTS: tl.constexpr,
                     F: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                     PIECES: tl.constexpr, POWER: tl.constexpr):
    """dy, x: ragged descriptors of one part or two, which read zeros outside the expert's rows; first_: which matrix of the descriptor is
    the first part's; more_: the second's rows, or None; grad [E, F, D]: a descriptor of a piece of a tile; squares [tiles]: of each, the
    sum of grad's squares, or None. POWER: the most tiles of a program, or more.

    grad = G where there is no `is_fresh`, or it is 1; otherwise grad = grad + G, which reads it: the memory's own addition takes longer.
    """
    ACROSS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (F + ROWS - 1) // ROWS * ACROSS
    own = tl.program_id(0) + tl.arange(0, POWER) * tl.num_programs(0)
    inside = own < NUM_EXPERTS * TILES
    steps = _num_steps(starts, ends, own // TILES, inside, DEPTH)
    if more_starts is not None:
        steps += _num_steps(more_starts, more_ends, own // TILES, inside, DEPTH)
    num_steps = tl.sum(tl.where(inside, tl.maximum(steps, 1), 0), 0)
    # One loop over the steps of all its tiles, which have few of them: a tile's rows are on their way before the last one is stored.
    tile, step, last = tl.program_id(0) - tl.num_programs(0), -1, -1
    expert, down, across, start, count, more_start, more_count, steps_before = 0, 0, 0, 0, 0, 0, 0, 0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in tl.range(0, num_steps):
        step = tl.where(step == last, 0, step + 1)
        if step == 0:
            tile += tl.num_programs(0)
            expert, down, across = tile // TILES, tile % TILES // ACROSS * ROWS, tile % ACROSS * COLUMNS
            start = tl.load(starts + expert)
            count = tl.load(ends + expert) - start
            steps_before = (count + DEPTH - 1) // DEPTH
            last = steps_before - 1
            if more_starts is not None:
                more_start = tl.load(more_starts + expert)
                more_count = tl.load(more_ends + expert) - more_start
                last += (more_count + DEPTH - 1) // DEPTH
            last = tl.maximum(last, 0)  # an expert without rows has a step of zeros
        is_more = step >= steps_before
        part, begin, rows = is_more.to(tl.int32), tl.where(is_more, more_start, start), tl.where(is_more, more_count, count)
        at = (step - tl.where(is_more, steps_before, 0)) * DEPTH
        left = load_ragged(dy, begin, rows, [part ^ first_dy, at, down], ragged_dim=1).reshape(DEPTH, ROWS)
        right = load_ragged(x, begin, rows, [part ^ first_x, at, across], ragged_dim=1).reshape(DEPTH, COLUMNS)
        total = tl.dot(left.T, right, total)
        if step == last:
            square = _put(grad, expert, down, across, total, is_fresh, PIECES)
            if squares is not None:
                tl.store(squares + tile, tl.sum(square))
            total = tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _put(grad, expert, down, across, values, is_fresh, PIECES: tl.constexpr):
    """Store or add a part of a gradient in PIECES; the squares of what then stands there, added up over the pieces."""
    if PIECES > 1:
        HALF: tl.constexpr = values.shape[1] // 2
        left, right = values.reshape(values.shape[0], 2, HALF).permute(0, 2, 1).split()
        return _put(grad, expert, down, across, left, is_fresh, PIECES // 2) + _put(
            grad, expert, down, across + HALF, right, is_fresh, PIECES // 2)
    else:
        piece = values.reshape(1, values.shape[0], values.shape[1])
        if is_fresh is not None:
            if tl.load(is_fresh) == 0:
                piece += grad.load([expert, down, across])
        grad.store([expert, down, across], piece.to(grad.dtype))
        return piece * piece


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
            create_ragged_descriptor(x, [tiling.rows, tiling.depth]), _weight_descriptor(weight, tiling, transposed),
            create_ragged_descriptor(y, [tiling.rows, tiling.columns // tiling.pieces]), tiles.table, tiles.number,
            D=depth, F=width, TRANSPOSED=transposed, **_constants(tiling))
    return y


def weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling) -> Tensor:
    """G [E, F, D], the sum of one or two parts (see `pairs`), in their dtype. Zero for experts without rows."""
    part = parts[0]
    grad = part.x.new_empty(len(part.tiles.starts) - 1, part.dy.shape[1], part.x.shape[1])
    if not len(part.x):
        return grad.zero_()
    _launch_weight_gradient(parts, tiling, grad, None)
    return grad


def add_weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling, total: Tensor, is_fresh: Tensor,
                        squares: Tensor | None = None) -> None:
    """total = total + G, or G where `is_fresh` int32 [1] is 1 (which then becomes 0); total fp32, of as many elements as G; one or two
    parts, see `pairs`.

    squares  fp32 [num_tiles(total, tiling)]: gets sums of the total's squares
    """
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


def pairs(parts: Sequence[OuterProducts]) -> list[list[OuterProducts]]:
    """The parts that have rows, two at a time where one launch takes both. Where memory lies may not decide: it would decide how the sum of
    both is rounded, and so whether repeats are bit-equal."""
    found: list[list[OuterProducts]] = []
    for part in parts:
        if len(part.x):
            if found and len(found[-1]) == 1 and _are_apart(found[-1][0], part):
                found[-1].append(part)
            else:
                found.append([part])
    return found


def _are_apart(one: OuterProducts, other: OuterProducts) -> bool:
    """Whether neither has a tensor of the other: a descriptor's axis for the parts has a stride, which is not zero."""
    return all(_distance(first, second) for first, second in ((one.dy, other.dy), (one.x, other.x)))


def _distance(first: Tensor, second: Tensor) -> int:
    """Bytes."""
    return second.data_ptr() - first.data_ptr()


def _launch_weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling, grad: Tensor, is_fresh: Tensor | None,
                            squares: Tensor | None = None) -> None:
    num_experts, width, depth = grad.shape
    programs = _programs(grad, tiling)
    tiles, more = [part.tiles for part in parts], (None, None) if len(parts) == 1 else (parts[1].tiles.starts, parts[1].tiles.ends)
    _weight_gradient[programs](
        *_parts_descriptor([part.dy for part in parts], tiling.depth, tiling.rows),
        *_parts_descriptor([part.x for part in parts], tiling.depth, tiling.columns), tiles[0].starts, tiles[0].ends, *more,
        TensorDescriptor.from_tensor(grad, [1, tiling.rows, tiling.columns // tiling.pieces]), is_fresh, squares, NUM_EXPERTS=num_experts,
        F=width, D=depth, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=tiling.depth, PIECES=tiling.pieces,
        POWER=next_power_of_2(triton.cdiv(num_tiles(grad, tiling), programs[0])), num_warps=tiling.warps, num_stages=tiling.stages)


def _parts_descriptor(parts: Sequence[Tensor], depth: int, columns: int) -> tuple[TensorDescriptor, int]:
    """(a ragged descriptor of one or two matrices [., C], which of them is the first). Two stand in one descriptor as if they were parts of
    one tensor: the one that lies higher in memory comes a stride after the other. No stride is FAR: what lies so far apart is copied."""
    distance = _distance(parts[0], parts[-1])
    if abs(distance) >= FAR:
        parts = torch.cat(list(parts)).split([len(part) for part in parts])
        distance = _distance(parts[0], parts[-1])
    low = parts[0] if distance >= 0 else parts[-1]
    stride, apart = low.stride(0), abs(distance) // low.element_size()
    # As create_ragged_descriptor makes one, with an axis for the parts.
    descriptor = TensorDescriptor(low, [*RAGGED_AXES, len(parts), RAGGED_ROWS, low.shape[1]],
                                  [2**34 - stride, stride, apart or stride, stride, 1], [1, 1, 1, depth, columns])
    return descriptor, int(distance < 0)


def _programs(x: Tensor, tiling: Tiling) -> tuple[int]:
    return (processors(x.device) * tiling.programs,)


def _constants(tiling: Tiling) -> dict[str, int | bool]:
    return {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth, "ENTRY": ENTRY, "FLATTEN": tiling.flatten,
            "PIECES": tiling.pieces, "num_warps": tiling.warps, "num_stages": tiling.stages}


def _weight_descriptor(weight: Tensor, tiling: Tiling, transposed: bool) -> TensorDescriptor:
    tile = [tiling.depth, tiling.columns] if transposed else [tiling.columns, tiling.depth]
    return TensorDescriptor.from_tensor(weight, [1, *tile])
