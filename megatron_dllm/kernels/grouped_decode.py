"""The experts' feed-forward, forward only, for few rows an expert: what counts is how fast the weights come, each read once.

Legend: T tokens, N rows sorted by expert, E experts, I expert width, H hidden.

    a[n] = gelu(gate_e x[token n]) * up_e x[token n]      the rows are gathered on the way, the gate is applied before anything is stored
    y[n] = down_e a[n]

The weights stand on the left of each product: the matrix units take 64 rows of them for as few as 16 of ours.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .dependent_launch import after_last, dependent
from .expert_rows import ExpertRows
from .gated_gelu import _gelu
from .grouped_gemm import ENTRY, RowTiles
from .launch import processors


@dataclass(frozen=True)
class DecodeTiling:
    """rows of ours x columns, which are rows of the weight; `depth` of the contraction a step, `stages` of them on their way; programs a
    processor (None: one a tile); whether the next tile's loop begins before a tile is stored; rows of a dense layer's tile."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int | None = None
    flatten: bool = False
    dense_rows: int = 64


# The same rows: one table of tiles serves both products. On an H200, 2048 rows of 128 experts, a dense layer of 256 tokens and the sorting
# took 381 us, 4.1 TB/s; 384 with 4 stages, 386 with 5, 400 with dense tiles of 128 rows, 384 to 405 with 256 bytes of a row at a time.
UP_TILING = DecodeTiling(32, 64, 64, warps=4, stages=3)
DOWN_TILING = DecodeTiling(32, 128, 64, warps=4, stages=5, programs=2, flatten=True)
TOGETHER_DOWN_TILING = DecodeTiling(32, 128, 64, warps=4, stages=4)


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


@triton.jit
def _activate_tile(x, weight, token, y, table, tile, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   DEPTH: tl.constexpr, ENTRY: tl.constexpr):
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    entry, column = table + tile // ACROSS * ENTRY, tile % ACROSS * COLUMNS
    expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    down = tl.arange(0, ROWS)
    inside = down < rows
    at = tl.load(token + first + down, mask=inside, other=0).to(tl.int64) * D
    values = _gated(x, at, inside, weight, expert, column, D, F, ROWS, COLUMNS, DEPTH)
    _put(y, values, first + down, inside, column + tl.arange(0, COLUMNS), F)


@triton.jit(do_not_specialize=["num_tokens"])
def _activated(x, weight, token, y, table, number, dense_x, dense_weight, dense_y, num_tokens, D: tl.constexpr, F: tl.constexpr,
               DENSE: tl.constexpr, ROWS: tl.constexpr, DENSE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
               ENTRY: tl.constexpr, FLATTEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """x [T, D]; weight: a descriptor of [E, 2 F, D] by [1, COLUMNS, DEPTH]; y [N, F].

    Of a dense layer, if there is one, dense_x [T, D], weight [1, 2 DENSE, D], y [T, DENSE]: its tiles stand between the experts', since
    they find their weights in the cache, all but the first of those that share them, which run at the same time.
    """
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    DENSE_ACROSS: tl.constexpr = (DENSE + COLUMNS - 1) // COLUMNS
    after_last(DEPENDENT)
    tiles = tl.load(number) * ACROSS
    if DENSE == 0:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _activate_tile(x, weight, token, y, table, tile, D, F, ROWS, COLUMNS, DEPTH, ENTRY)
    else:
        blocks, share = (num_tokens + DENSE_ROWS - 1) // DENSE_ROWS, (tiles + DENSE_ACROSS - 1) // DENSE_ACROSS
        for place in tl.range(tl.program_id(0), (blocks + share) * DENSE_ACROSS, tl.num_programs(0)):
            group, inner = place // (blocks + share), place % (blocks + share)
            tile = group * share + inner - blocks
            if inner < blocks:
                row, column = inner * DENSE_ROWS + tl.arange(0, DENSE_ROWS), group * COLUMNS
                values = _gated(dense_x, row.to(tl.int64) * D, row < num_tokens, dense_weight, 0, column, D, DENSE, DENSE_ROWS, COLUMNS,
                                DEPTH)
                _put(dense_y, values, row, row < num_tokens, column + tl.arange(0, COLUMNS), DENSE)
            elif tile < tiles:
                _activate_tile(x, weight, token, y, table, tile, D, F, ROWS, COLUMNS, DEPTH, ENTRY)


@triton.jit
def _narrow_rows(x, weight, y, expert, first, rows, column, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 DEPTH: tl.constexpr):
    """A tile of `rows` rows, ROWS at most, of a descriptor x [., D] by [ROWS, DEPTH]."""
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, D, DEPTH):
        total = tl.dot(weight.load([expert, column, start]).reshape(COLUMNS, DEPTH), x.load([first, start]).T, total)
    down = tl.arange(0, ROWS)
    _put(y, total, first + down, down < rows, column + tl.arange(0, COLUMNS), F)


@triton.jit
def _narrow_tile(x, weight, y, table, tile, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 DEPTH: tl.constexpr, ENTRY: tl.constexpr):
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    entry, column = table + tile // ACROSS * ENTRY, tile % ACROSS * COLUMNS
    _narrow_rows(x, weight, y, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), column, D, F, ROWS, COLUMNS, DEPTH)


@triton.jit(do_not_specialize=["num_tokens"])
def _narrowed(x, weight, y, table, number, dense_x, dense_weight, dense_y, num_tokens, D: tl.constexpr, F: tl.constexpr,
              DENSE: tl.constexpr, ROWS: tl.constexpr, DENSE_ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
              ENTRY: tl.constexpr, FLATTEN: tl.constexpr, DEPENDENT: tl.constexpr):
    """x: a descriptor of [N, D] by [ROWS, DEPTH]; weight: one of [E, F, D] by [1, COLUMNS, DEPTH]; y [N, F].

    A dense layer, if there is one, as above; dense_x: a descriptor of [T, DENSE] by [DENSE_ROWS, DEPTH], weight [1, F, DENSE], y [T, F].
    """
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    after_last(DEPENDENT)
    tiles = tl.load(number) * ACROSS
    if DENSE == 0:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _narrow_tile(x, weight, y, table, tile, D, F, ROWS, COLUMNS, DEPTH, ENTRY)
    else:
        blocks, share = (num_tokens + DENSE_ROWS - 1) // DENSE_ROWS, (tiles + ACROSS - 1) // ACROSS
        for place in tl.range(tl.program_id(0), (blocks + share) * ACROSS, tl.num_programs(0)):
            group, inner = place // (blocks + share), place % (blocks + share)
            tile = group * share + inner - blocks
            if inner < blocks:
                first = inner * DENSE_ROWS
                _narrow_rows(dense_x, dense_weight, dense_y, 0, first, num_tokens - first, group * COLUMNS, DENSE, F, DENSE_ROWS, COLUMNS,
                             DEPTH)
            elif tile < tiles:
                _narrow_tile(x, weight, y, table, tile, D, F, ROWS, COLUMNS, DEPTH, ENTRY)


@dataclass(frozen=True)
class Dense:
    """A feed-forward of all T tokens beside the experts', in the same launches: x [T, H], gate_up [2, I', H], down [H, I']."""

    x: Tensor
    gate_up: Tensor
    down: Tensor


def _grid(tiles: RowTiles, width: int, tiling: DecodeTiling, dense: Tensor | None) -> tuple[int]:
    most = len(tiles.table) * triton.cdiv(width, tiling.columns)
    if dense is not None:
        most += (triton.cdiv(len(dense), tiling.dense_rows) + 1) * triton.cdiv(dense.shape[1], tiling.columns)
    return (most if tiling.programs is None else min(most, tiling.programs * processors(tiles.table.device)),)


def _constants(tiling: DecodeTiling, device: torch.device, *, early: bool) -> dict[str, int]:
    return {"ROWS": tiling.rows, "DENSE_ROWS": tiling.dense_rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth,
            "ENTRY": ENTRY, "FLATTEN": tiling.flatten, "num_warps": tiling.warps, "num_stages": tiling.stages,
            **dependent(device, early=early)}


def _of_rows(x: Tensor, rows: int, tiling: DecodeTiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, tiling.depth])


def _of_weight(weight: Tensor, tiling: DecodeTiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, [1, tiling.columns, tiling.depth])


def activated_rows(x: Tensor, gate_up: Tensor, rows: ExpertRows, tiling: DecodeTiling, *,
                   dense: Dense | None = None, follows_one: bool = False) -> tuple[Tensor, Tensor | None]:
    """a [N, I] of x [T, H], gate_up [E, 2, I, H]; and that of the dense feed-forward, [T, I']; bf16.

    The rows' tiles are as high as the tiling's. `follows_one`: whether what comes before this on the device is one kernel of one stream.
    """
    inner, width = gate_up.shape[2:]
    y, dense_y, beside = x.new_empty(len(rows.token), inner), None, (None, None)
    if dense is not None:
        dense_y = x.new_empty(len(dense.x), dense.gate_up.shape[1])
        beside = dense.x, _of_weight(dense.gate_up.flatten(0, 1)[None], tiling)
    _activated[_grid(rows.tiles, inner, tiling, dense_y)](
        x, _of_weight(gate_up.flatten(1, 2), tiling), rows.token, y, rows.tiles.table, rows.tiles.number, *beside, dense_y,
        0 if dense is None else len(dense.x), D=width, F=inner, DENSE=0 if dense is None else dense_y.shape[1],
        **_constants(tiling, x.device, early=follows_one))
    return y, dense_y


def narrowed_rows(activated: Tensor, down: Tensor, rows: ExpertRows, tiling: DecodeTiling, *, dense_activated: Tensor | None = None,
                  dense: Dense | None = None) -> tuple[Tensor, Tensor | None]:
    """y [N, H] of a [N, I], down [E, H, I]; and that of the dense feed-forward, [T, H]. Right after `activated_rows`."""
    width, inner = down.shape[1:]
    y, dense_y, beside = activated.new_empty(len(activated), width), None, (None, None)
    if dense is not None:
        dense_y = y.new_empty(len(dense_activated), width)
        beside = _of_rows(dense_activated, tiling.dense_rows, tiling), _of_weight(dense.down[None], tiling)
    _narrowed[_grid(rows.tiles, width, tiling, dense_y)](
        _of_rows(activated, tiling.rows, tiling), _of_weight(down, tiling), y, rows.tiles.table, rows.tiles.number, *beside,
        dense_y, 0 if dense is None else len(dense_y), D=inner, F=width,
        DENSE=0 if dense is None else dense_activated.shape[1], **_constants(tiling, y.device, early=True))
    return y, dense_y
