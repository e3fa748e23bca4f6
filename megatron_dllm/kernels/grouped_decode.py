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


# The same rows: one table of tiles serves both products.
UP_TILING = DecodeTiling(32, 64, 64, warps=4, stages=4)
DOWN_TILING = DecodeTiling(32, 128, 64, warps=4, stages=5, programs=2, flatten=True)


@triton.jit
def _rows_tile(x, at, inner, inside, D: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] of rows that start at `at`."""
    place = x + at[:, None] + inner[None, :]
    if D % DEPTH == 0:
        return tl.load(place, mask=inside[:, None], other=0.0)
    return tl.load(place, mask=inside[:, None] & (inner < D)[None, :], other=0.0)


@triton.jit
def _activated(x, weight, token, y, table, number, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               DEPTH: tl.constexpr, ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """x [T, D], or without `token` a descriptor of the rows [N, D]; weight: one of [E, 2 F, D] by [1, COLUMNS, DEPTH]; y [N, F]."""
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        entry = table + tile // ACROSS * ENTRY
        expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column, down = tile % ACROSS * COLUMNS, tl.arange(0, ROWS)
        inside = down < rows
        if token is not None:
            at = tl.load(token + first + down, mask=inside, other=0).to(tl.int64) * D
        gate, up = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
        for start in range(0, D, DEPTH):
            if token is not None:
                part = _rows_tile(x, at, start + tl.arange(0, DEPTH), inside, D, DEPTH).T
            else:
                part = x.load([first, start]).T
            gate = tl.dot(weight.load([expert, column, start]).reshape(COLUMNS, DEPTH), part, gate)
            up = tl.dot(weight.load([expert, F + column, start]).reshape(COLUMNS, DEPTH), part, up)
        # Rounded as they are where they are stored first.
        activated, _ = _gelu(gate.to(y.dtype.element_ty).to(tl.float32))
        activated *= up.to(y.dtype.element_ty).to(tl.float32)
        across = column + tl.arange(0, COLUMNS)
        place = y + (first + down).to(tl.int64)[None, :] * F + across[:, None]
        tl.store(place, activated.to(y.dtype.element_ty), mask=inside[None, :] & (across < F)[:, None])


@triton.jit
def _narrowed(x, weight, y, table, number, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              DEPTH: tl.constexpr, ENTRY: tl.constexpr, FLATTEN: tl.constexpr):
    """x: a descriptor of [N, D] by [ROWS, DEPTH]; weight: one of [E, F, D] by [1, COLUMNS, DEPTH]; y [N, F]."""
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    for tile in tl.range(tl.program_id(0), tl.load(number) * ACROSS, tl.num_programs(0), flatten=FLATTEN):
        entry = table + tile // ACROSS * ENTRY
        expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column, down = tile % ACROSS * COLUMNS, tl.arange(0, ROWS)
        inside = down < rows
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for start in range(0, D, DEPTH):
            total = tl.dot(weight.load([expert, column, start]).reshape(COLUMNS, DEPTH), x.load([first, start]).T, total)
        across = column + tl.arange(0, COLUMNS)
        place = y + (first + down).to(tl.int64)[None, :] * F + across[:, None]
        tl.store(place, total.to(y.dtype.element_ty), mask=inside[None, :] & (across < F)[:, None])


def _grid(tiles: RowTiles, width: int, tiling: DecodeTiling) -> tuple[int]:
    most = len(tiles.table) * triton.cdiv(width, tiling.columns)
    return (most if tiling.programs is None else min(most, tiling.programs * processors(tiles.table.device)),)


def _constants(tiling: DecodeTiling) -> dict[str, int]:
    return {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "DEPTH": tiling.depth, "ENTRY": ENTRY, "FLATTEN": tiling.flatten,
            "num_warps": tiling.warps, "num_stages": tiling.stages}


def activated_rows(x: Tensor, gate_up: Tensor, rows: ExpertRows, tiling: DecodeTiling, *, is_ordered: bool = False) -> Tensor:
    """a [N, I] of x [T, H], or of the rows themselves [N, H] where x `is_ordered`, gate_up [E, 2, I, H]; bf16.

    The rows' tiles are as high as the tiling's.
    """
    inner, width = gate_up.shape[2:]
    y = x.new_empty(len(rows.token), inner)
    source = TensorDescriptor.from_tensor(x, [tiling.rows, tiling.depth]) if is_ordered else x
    _activated[_grid(rows.tiles, inner, tiling)](
        source, TensorDescriptor.from_tensor(gate_up.flatten(1, 2), [1, tiling.columns, tiling.depth]),
        None if is_ordered else rows.token, y, rows.tiles.table, rows.tiles.number, D=width, F=inner, **_constants(tiling))
    return y


def narrowed_rows(activated: Tensor, down: Tensor, rows: ExpertRows, tiling: DecodeTiling) -> Tensor:
    """y [N, H] of a [N, I], down [E, H, I]."""
    width, inner = down.shape[1:]
    y = activated.new_empty(len(activated), width)
    _narrowed[_grid(rows.tiles, width, tiling)](
        TensorDescriptor.from_tensor(activated, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(down, [1, tiling.columns, tiling.depth]), y, rows.tiles.table, rows.tiles.number, D=inner, F=width,
        **_constants(tiling))
    return y
