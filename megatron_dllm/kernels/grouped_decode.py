"""The experts' feed-forward, forward only, for few rows an expert: what counts is how fast the weights come, each read once.

Legend: T tokens, N rows sorted by expert, E experts, I expert width, H hidden.

    a[n] = gelu(gate_e x[token n]) * up_e x[token n]      the rows are gathered on the way, the gate is applied before anything is stored
    y[n] = down_e a[n]

The weights stand on the left of each product: the matrix units take 64 rows of them for as few as 16 of ours.
"""
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .expert_rows import ExpertRows
from .gated_gelu import _gelu
from .grouped_gemm import ENTRY, RowTiles
from .launch import processors


@dataclass(frozen=True)
class DecodeTiling:
    """rows of ours x columns, which are rows of the weight; `depth` of the contraction a step, `stages` of them on their way; programs a
    processor (None: one a tile); whether the next tile's loop begins before a tile is stored."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int | None = None
    flatten: bool = False


# The same rows: one table of tiles serves both products. Measured on an H200 with 2048 rows of 128 experts: up 258 us, with other numbers
# of stages, columns or rows 268 to 278; down 137 to 140, with others 147 to 158.
UP_TILING = DecodeTiling(32, 64, 64, warps=4, stages=4)
DOWN_TILING = DecodeTiling(32, 128, 64, warps=4, stages=5, programs=2, flatten=True)
TOGETHER_DOWN_TILING = DecodeTiling(32, 128, 64, warps=4, stages=4)
# For many rows: 370 us for 128 experts and 16384 rows, where moving them first, grouped_gemm's product and the gate take 402 (H200).
MANY_UP_TILING = DecodeTiling(128, 128, 64, warps=8, stages=4, programs=1)


@triton.jit
def _rows_tile(x, at, inner, inside, D: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] of rows that start at `at`."""
    place = x + at[:, None] + inner[None, :]
    if D % DEPTH == 0:
        return tl.load(place, mask=inside[:, None], other=0.0)
    return tl.load(place, mask=inside[:, None] & (inner < D)[None, :], other=0.0)


@triton.jit
def _gated(x, at, inside, weight, expert, column, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           DEPTH: tl.constexpr):
    """fp32 [COLUMNS, ROWS]: gelu(gate) * up of the rows that start at `at` of x."""
    gate, up = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, D, DEPTH):
        part = _rows_tile(x, at, start + tl.arange(0, DEPTH), inside, D, DEPTH).T
        gate = tl.dot(weight.load([expert, column, start]).reshape(COLUMNS, DEPTH), part, gate)
        up = tl.dot(weight.load([expert, F + column, start]).reshape(COLUMNS, DEPTH), part, up)
    # Rounded as they are where they are stored first.
    activated, _ = _gelu(gate.to(weight.dtype).to(tl.float32))
    return activated * up.to(weight.dtype).to(tl.float32)


@triton.jit
def _put(y, values, row, inside, across, F: tl.constexpr):
    """Store `values` [columns, rows] in rows of y [., F]."""
    tl.store(y + row.to(tl.int64)[None, :] * F + across[:, None], values.to(y.dtype.element_ty),
             mask=inside[None, :] & (across < F)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _activated(x, weight, token, y, table, number, dense_x, dense_weight, dense_y, num_tokens, D: tl.constexpr, F: tl.constexpr,
               DENSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
               ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """x [T, D]; weight: a descriptor of [E, 2 F, D] by [1, COLUMNS, DEPTH]; y [N, F].

    The first tiles are of a dense layer, if there is one: dense_x [T, D], weight [1, 2 DENSE, D], y [T, DENSE].
    """
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    DENSE_ACROSS: tl.constexpr = (DENSE + COLUMNS - 1) // COLUMNS
    blocks = (num_tokens + ROWS - 1) // ROWS
    dense_tiles = blocks * DENSE_ACROSS
    down = tl.arange(0, ROWS)
    for tile in tl.range(tl.program_id(0), dense_tiles + tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        if DENSE > 0 and tile < dense_tiles:
            # Those that read the same columns run at the same time.
            row, column = tile % blocks * ROWS + down, tile // blocks * COLUMNS
            values = _gated(dense_x, row.to(tl.int64) * D, row < num_tokens, dense_weight, 0, column, D, DENSE, ROWS, COLUMNS, DEPTH)
            _put(dense_y, values, row, row < num_tokens, column + tl.arange(0, COLUMNS), DENSE)
        else:
            which = tile - dense_tiles
            entry, column = table + which // ACROSS * ENTRY, which % ACROSS * COLUMNS
            expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            inside = down < rows
            at = tl.load(token + first + down, mask=inside, other=0).to(tl.int64) * D
            values = _gated(x, at, inside, weight, expert, column, D, F, ROWS, COLUMNS, DEPTH)
            _put(y, values, first + down, inside, column + tl.arange(0, COLUMNS), F)


@triton.jit
def _product(x, first, weight, expert, column, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """fp32 [COLUMNS, ROWS] of rows from `first` of a descriptor x."""
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, D, DEPTH):
        total = tl.dot(weight.load([expert, column, start]).reshape(COLUMNS, DEPTH), x.load([first, start]).T, total)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _narrowed(x, weight, y, table, number, dense_x, dense_weight, dense_y, num_tokens, D: tl.constexpr, F: tl.constexpr,
              DENSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
              ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """x: a descriptor of [N, D] by [ROWS, DEPTH]; weight: one of [E, F, D] by [1, COLUMNS, DEPTH]; y [N, F].

    The first tiles are of a dense layer, if there is one: dense_x: a descriptor of [T, DENSE], weight [1, F, DENSE], y [T, F].
    """
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    blocks = (num_tokens + ROWS - 1) // ROWS
    dense_tiles = blocks * ACROSS
    if DENSE == 0:
        dense_tiles = 0
    down = tl.arange(0, ROWS)
    for tile in tl.range(tl.program_id(0), dense_tiles + tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        if DENSE > 0 and tile < dense_tiles:
            first, column = tile % blocks * ROWS, tile // blocks * COLUMNS
            total = _product(dense_x, first, dense_weight, 0, column, DENSE, ROWS, COLUMNS, DEPTH)
            _put(dense_y, total, first + down, first + down < num_tokens, column + tl.arange(0, COLUMNS), F)
        else:
            which = tile - dense_tiles
            entry, column = table + which // ACROSS * ENTRY, which % ACROSS * COLUMNS
            expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            total = _product(x, first, weight, expert, column, D, ROWS, COLUMNS, DEPTH)
            _put(y, total, first + down, down < rows, column + tl.arange(0, COLUMNS), F)


@dataclass(frozen=True)
class Dense:
    """A feed-forward of all T tokens beside the experts', in the same launches: x [T, H], gate_up [2, I', H], down [H, I']."""

    x: Tensor
    gate_up: Tensor
    down: Tensor


def _grid(tiles: RowTiles, width: int, tiling: DecodeTiling, dense: Tensor | None) -> tuple[int]:
    most = len(tiles.table) * triton.cdiv(width, tiling.columns)
    if dense is not None:
        most += triton.cdiv(len(dense), tiling.rows) * triton.cdiv(dense.shape[1], tiling.columns)
    return (most if tiling.programs is None else min(most, tiling.programs * processors(tiles.table.device)),)


def _constants(tiling: DecodeTiling) -> dict[str, int]:
    return {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth, "ENTRY": ENTRY,
            "FLATTEN": tiling.flatten, "num_warps": tiling.warps, "num_stages": tiling.stages}


def _of_rows(x: Tensor, tiling: DecodeTiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [tiling.rows, tiling.depth])


def _of_weight(weight: Tensor, tiling: DecodeTiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [1, tiling.columns, tiling.depth])


def activated_rows(x: Tensor, gate_up: Tensor, rows: ExpertRows, tiling: DecodeTiling, *,
                   dense: Dense | None = None) -> tuple[Tensor, Tensor | None]:
    """a [N, I] of x [T, H], gate_up [E, 2, I, H]; and that of the dense feed-forward, [T, I']; bf16.

    The rows' tiles are as high as the tiling's.
    """
    inner, width = gate_up.shape[2:]
    y, dense_y, beside = x.new_empty(len(rows.token), inner), None, (None, None)
    if dense is not None:
        dense_y = x.new_empty(len(dense.x), dense.gate_up.shape[1])
        beside = dense.x, _of_weight(dense.gate_up.flatten(0, 1)[None], tiling)
    _activated[_grid(rows.tiles, inner, tiling, dense_y)](
        x, _of_weight(gate_up.flatten(1, 2), tiling), rows.token, y, rows.tiles.table, rows.tiles.number, *beside, dense_y,
        0 if dense is None else len(dense.x), D=width, F=inner, DENSE=0 if dense is None else dense_y.shape[1], **_constants(tiling))
    return y, dense_y


def narrowed_rows(activated: Tensor, down: Tensor, rows: ExpertRows, tiling: DecodeTiling, *, dense_activated: Tensor | None = None,
                  dense: Dense | None = None) -> tuple[Tensor, Tensor | None]:
    """y [N, H] of a [N, I], down [E, H, I]; and that of the dense feed-forward, [T, H]."""
    width, inner = down.shape[1:]
    y, dense_y, beside = activated.new_empty(len(activated), width), None, (None, None)
    if dense is not None:
        dense_y = y.new_empty(len(dense_activated), width)
        beside = _of_rows(dense_activated, tiling), _of_weight(dense.down[None], tiling)
    _narrowed[_grid(rows.tiles, width, tiling, dense_y)](
        _of_rows(activated, tiling), _of_weight(down, tiling), y, rows.tiles.table, rows.tiles.number,
        *beside, dense_y, 0 if dense is None else len(dense_y), D=inner, F=width, DENSE=0 if dense is None else dense_activated.shape[1],
        **_constants(tiling))
    return y, dense_y
