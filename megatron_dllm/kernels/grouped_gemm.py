"""Matrix products of rows sorted by expert with each expert's own matrix, tile by tile; the host never reads how many rows an expert has.

Legend: N rows, E experts, D width of the rows, F width of the results, I width of the gate; counts int64 [E].

    product          y[n] = x[n] W_e^T       W [E, F, D]    (F.linear of each expert's rows)
    product          y[n] = x[n] W_e         W [E, D, F]    `transposed`: the gradient of its rows
    gated_product    the first with W [E, 2, I, D], then gelu(gate) * up
    gated_gradient   the second, then the gradient of gelu(gate) * up
    weight_gradient  G_e = dy_e^T x_e        stored in bf16, or added to an fp32 buffer

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

from .gated_gelu import _gelu
from .launch import next_power_of_2, processors

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
    """

    table: Tensor
    number: Tensor
    starts: Tensor
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
def _gated_product(x, weight, gate_up, y, table, number, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """x, weight [2 E, I, D]: descriptors; gate_up [N, 2, I] (None: not wanted), y [N, I]. A program has the same columns of gate and up."""
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        entry = table + tile // ACROSS * ENTRY
        expert, row, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column = tile % ACROSS * COLUMNS
        gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, D, DEPTH):
            part = x.load([row, at])
            gate = tl.dot(part, _weight_tile(weight, 2 * expert, column, at, False, COLUMNS, DEPTH), gate)
            up = tl.dot(part, _weight_tile(weight, 2 * expert + 1, column, at, False, COLUMNS, DEPTH), up)
        down, across = tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
        inside = (down < rows) & (across < WIDTH)
        # The backward sees the rounded gate and up, so the product is made of them too.
        gate, up = gate.to(y.dtype.element_ty), up.to(y.dtype.element_ty)
        if gate_up is not None:
            place = gate_up + row.to(tl.int64) * (2 * WIDTH) + down * (2 * WIDTH) + across
            tl.store(place, gate, mask=inside)
            tl.store(place + WIDTH, up, mask=inside)
        activated, _ = _gelu(gate.to(tl.float32))
        place = y + row.to(tl.int64) * WIDTH + down * WIDTH + across
        tl.store(place, (activated * up.to(tl.float32)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_gradient(dy, weight, gate_up, dgate_up, activated, table, number, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """dy, weight [E, D, I]: descriptors; gate_up, dgate_up [N, 2, I]; activated [N, I] (None: not wanted), gelu(gate) * up again."""
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        entry = table + tile // ACROSS * ENTRY
        expert, row, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column = tile % ACROSS * COLUMNS
        grad = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, D, DEPTH):
            grad = tl.dot(dy.load([row, at]), _weight_tile(weight, expert, column, at, True, COLUMNS, DEPTH), grad)
        # Half a tile at a time: gate, up and all that is made of them would not fit the registers beside a whole one.
        first, second = grad.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        _put_gated(first, gate_up, dgate_up, activated, row, rows, column, WIDTH)
        _put_gated(second, gate_up, dgate_up, activated, row, rows, column + COLUMNS // 2, WIDTH)


@triton.jit
def _put_gated(grad, gate_up, dgate_up, activated, row, rows, column, WIDTH: tl.constexpr):
    """From a part of the gradient of gelu(gate) * up, whose first number stands at (row, column)."""
    down, across = tl.arange(0, grad.shape[0])[:, None], column + tl.arange(0, grad.shape[1])[None, :]
    inside = (down < rows) & (across < WIDTH)
    place = row.to(tl.int64) * (2 * WIDTH) + down * (2 * WIDTH) + across
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value, slope = _gelu(gate)
    tl.store(dgate_up + place, (grad * up * slope).to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(dgate_up + place + WIDTH, (grad * value).to(dgate_up.dtype.element_ty), mask=inside)
    if activated is not None:
        tl.store(activated + row.to(tl.int64) * WIDTH + down * WIDTH + across, (value * up).to(activated.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(dy, x, starts, more_dy, more_x, more_starts, grad, NUM_EXPERTS: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ADD: tl.constexpr, FLATTEN: tl.constexpr):
    """dy, x: ragged descriptors, which read zeros outside the expert's rows; more_: a second part, or None; grad [E, F, D]: a descriptor
    of half a tile.

    ADD: "no", "reduce" (the memory adds; every element is added to once, so the result is the same every time), or "read".
    """
    ACROSS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (F + ROWS - 1) // ROWS * ACROSS
    for tile in tl.range(tl.program_id(0), NUM_EXPERTS * TILES, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // TILES
        down, across = tile % TILES // ACROSS * ROWS, tile % ACROSS * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        start = tl.load(starts + expert)
        count = tl.load(starts + expert + 1) - start
        for at in range(0, count, DEPTH):
            left, right = load_ragged(dy, start, count, [at, down]), load_ragged(x, start, count, [at, across])
            total = tl.dot(left.T, right, total)
        if more_dy is not None:
            start = tl.load(more_starts + expert)
            count = tl.load(more_starts + expert + 1) - start
            for at in range(0, count, DEPTH):
                left, right = load_ragged(more_dy, start, count, [at, down]), load_ragged(more_x, start, count, [at, across])
                total = tl.dot(left.T, right, total)
        # Half a tile at a time: a whole one in fp32 would leave too little shared memory for the loop's own tiles.
        first, second = total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        _put(grad, expert, down, across, first, ADD)
        _put(grad, expert, down, across + COLUMNS // 2, second, ADD)


@triton.jit
def _put(grad, expert, down, across, values, ADD: tl.constexpr):
    """Store or add a part of a gradient."""
    part = values.reshape(1, values.shape[0], values.shape[1])
    if ADD == "reduce":
        grad.atomic_add([expert, down, across], part)
    elif ADD == "read":
        grad.store([expert, down, across], grad.load([expert, down, across]) + part)
    else:
        grad.store([expert, down, across], part.to(grad.dtype))


def place_tiles(counts: Tensor, num_rows: int, height: int) -> RowTiles:
    """Tiles of `height` rows for counts int64 [E], whose sum is at most `num_rows`."""
    num_experts = len(counts)
    table = torch.empty(num_rows // height + num_experts, ENTRY, dtype=torch.int32, device=counts.device)
    number, starts = table.new_empty(1), table.new_empty(num_experts + 1)
    _place_tiles[(len(table),)](counts, table, number, starts, NUM_EXPERTS=num_experts, POWER=next_power_of_2(num_experts),
                                 HEIGHT=height, ENTRY=ENTRY, num_warps=1)
    return RowTiles(table, number, starts, height)


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


def gated_product(x: Tensor, weight: Tensor, tiles: RowTiles, tiling: Tiling, *, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    """(gate and up [N, 2, I] if they are to be kept, gelu(gate) * up [N, I]) of x [N, D] and weight [E, 2, I, D]."""
    num_rows, depth = x.shape
    width = weight.shape[2]
    gate_up, y = x.new_empty(num_rows, 2, width) if keep else None, x.new_empty(num_rows, width)
    if y.numel():
        _gated_product[_programs(x, tiling)](
            _rows_descriptor(x, tiling), _weight_descriptor(weight.flatten(0, 1), tiling, False), gate_up, y, tiles.table, tiles.number,
            D=depth, WIDTH=width, **_constants(tiling))
    return gate_up, y


def gated_gradient(dy: Tensor, weight: Tensor, gate_up: Tensor, tiles: RowTiles, tiling: Tiling, *,
                   again: bool) -> tuple[Tensor, Tensor | None]:
    """(gradient [N, 2, I] of gate_up [N, 2, I], gelu(gate) * up [N, I] if wanted `again`) of dy [N, D] and weight [E, D, I]."""
    num_rows, _, width = gate_up.shape
    dgate_up, activated = torch.empty_like(gate_up), dy.new_empty(num_rows, width) if again else None
    if gate_up.numel():
        _gated_gradient[_programs(dy, tiling)](
            _rows_descriptor(dy, tiling), _weight_descriptor(weight, tiling, True), gate_up, dgate_up, activated, tiles.table, tiles.number,
            D=dy.shape[1], WIDTH=width, **_constants(tiling))
    return dgate_up, activated


def weight_gradient(parts: Sequence[OuterProducts], tiling: Tiling, *, total: Tensor | None = None) -> Tensor:
    """G [E, F, D], the sum of one or two parts, in their dtype, or added to `total` fp32 of as many elements. Zero without rows."""
    dy, x, starts = parts[0].dy, parts[0].x, parts[0].tiles.starts
    num_experts, width, depth = len(starts) - 1, dy.shape[1], x.shape[1]
    grad = x.new_empty(num_experts, width, depth) if total is None else total.view(num_experts, width, depth)
    filled = [part for part in parts if len(part.x)]
    if not filled:
        return grad.zero_() if total is None else grad
    rows = [argument for part in filled for argument in (
        create_ragged_descriptor(part.dy, [tiling.depth, tiling.rows]), create_ragged_descriptor(part.x, [tiling.depth, tiling.columns]),
        part.tiles.starts)]
    add = "no" if total is None else "reduce" if x.is_cuda else "read"  # interpreted kernels have no reduction
    _weight_gradient[_programs(x, tiling)](
        *rows, *[None] * (6 - len(rows)), TensorDescriptor.from_tensor(grad, [1, tiling.rows, tiling.columns // 2]),
        NUM_EXPERTS=num_experts, F=width, D=depth, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=tiling.depth, ADD=add,
        FLATTEN=tiling.flatten, num_warps=tiling.warps, num_stages=tiling.stages)
    return grad


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
