"""The experts' feed-forward, forward only, for about as many rows an expert as a tile is high: there reading the weights takes as long as
multiplying by them, so that each is to be read once and multiplied by little that is not there.

Legend: T tokens, N rows sorted by expert, E experts, I expert width, H hidden.

    a[n] = gelu(gate_e x[token n]) * up_e x[token n]      the rows are gathered on the way, the gate is applied before anything is stored
    y[n] = down_e a[n]

A tile is of `rows` rows, or of `more` besides, of which both meet the same weights: an expert that has somewhat more rows than its share
would otherwise read its weights twice, the second time for a few rows. The weights stand on the left of each product.
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


@dataclass(frozen=True)
class ManyTiling:
    """rows and, in tiles that are higher, `more` of ours x columns, which are rows of the weight; `depth` of the contraction a step,
    `stages` of them on their way."""

    rows: int
    more: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def height(self) -> int:
        """Rows of the highest tile."""
        return self.rows + self.more


# 16384 rows of 128 experts of 704 x 2816, 104 to 157 each: 307 and 161 us on an H200, 3.2 TB/s of weights; by tiles of 128 rows, and others
# of what is left, 330 and 177; with the rows on the left 341 and 172; 64 columns above 334, 256 below 162.
UP_TILING = ManyTiling(128, 32, 128, 64, warps=8, stages=4)
DOWN_TILING = ManyTiling(128, 32, 128, 64, warps=4, stages=3)


@triton.jit
def _gathered(x, at, inner, inside, D: tl.constexpr, DEPTH: tl.constexpr):
    """[DEPTH, rows] of rows that start at `at`."""
    place = x + at[:, None] + inner[None, :]
    if D % DEPTH == 0:
        return tl.load(place).T
    return tl.load(place, mask=inside[None, :], other=0.0).T


@triton.jit
def _activated_values(gate, up, dtype: tl.constexpr):
    # Rounded as they are where they are stored first.
    value, _ = _gelu(gate.to(dtype).to(tl.float32))
    return value * up.to(dtype).to(tl.float32)


@triton.jit
def _put(y, values, row, inside, across, F: tl.constexpr):
    """Store `values` [columns, rows] in rows of y [., F]."""
    tl.store(y + row.to(tl.int64)[None, :] * F + across[:, None], values.to(y.dtype.element_ty),
             mask=inside[None, :] & (across < F)[:, None])


@triton.jit
def _activate(x, weight, token, y, expert, first, rows, column, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
              COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """A tile of ROWS rows at most, and MORE, if that is not 0."""
    place, across = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    at = tl.load(token + first + place, mask=place < rows, other=0).to(tl.int64) * D
    gate, up = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
    if MORE > 0:
        more_place = ROWS + tl.arange(0, MORE)
        more_at = tl.load(token + first + more_place, mask=more_place < rows, other=0).to(tl.int64) * D
        more_gate, more_up = tl.zeros((COLUMNS, MORE), tl.float32), tl.zeros((COLUMNS, MORE), tl.float32)
    for start in range(0, D, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        part = _gathered(x, at, inner, inner < D, D, DEPTH)
        gate_weight = weight.load([expert, 0, column, start]).reshape(COLUMNS, DEPTH)
        up_weight = weight.load([expert, 1, column, start]).reshape(COLUMNS, DEPTH)
        gate = tl.dot(gate_weight, part, gate)
        up = tl.dot(up_weight, part, up)
        if MORE > 0:
            more_part = _gathered(x, more_at, inner, inner < D, D, DEPTH)
            more_gate = tl.dot(gate_weight, more_part, more_gate)
            more_up = tl.dot(up_weight, more_part, more_up)
    _put(y, _activated_values(gate, up, weight.dtype), first + place, place < rows, across, F)
    if MORE > 0:
        _put(y, _activated_values(more_gate, more_up, weight.dtype), first + more_place, more_place < rows, across, F)


@triton.jit
def _many_activated(x, weight, token, y, table, number, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
                    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, DEPENDENT: tl.constexpr):
    """x [T, D]; weight: a descriptor of [E, 2, F, D] by [1, 1, COLUMNS, DEPTH]; y [N, F]."""
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    after_last(DEPENDENT)
    if tl.program_id(0) < tl.load(number) * ACROSS:
        entry, column = table + tl.program_id(0) // ACROSS * ENTRY, tl.program_id(0) % ACROSS * COLUMNS
        expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if rows <= ROWS:
            _activate(x, weight, token, y, expert, first, rows, column, D, F, ROWS, 0, COLUMNS, DEPTH)
        else:
            _activate(x, weight, token, y, expert, first, rows, column, D, F, ROWS, MORE, COLUMNS, DEPTH)


@triton.jit
def _narrow(x, more_x, weight, y, expert, first, rows, column, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
            COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """As `_activate`."""
    place, across = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if MORE > 0:
        more_place, more_total = ROWS + tl.arange(0, MORE), tl.zeros((COLUMNS, MORE), tl.float32)
    for start in range(0, D, DEPTH):
        part = weight.load([expert, column, start]).reshape(COLUMNS, DEPTH)
        total = tl.dot(part, x.load([first, start]).T, total)
        if MORE > 0:
            more_total = tl.dot(part, more_x.load([first + ROWS, start]).T, more_total)
    _put(y, total, first + place, place < rows, across, F)
    if MORE > 0:
        _put(y, more_total, first + more_place, more_place < rows, across, F)


@triton.jit
def _many_narrowed(x, more_x, weight, y, table, number, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
                   COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, DEPENDENT: tl.constexpr):
    """x, more_x: descriptors of [N, D] by [ROWS, DEPTH] and [MORE, DEPTH]; weight: one of [E, F, D] by [1, COLUMNS, DEPTH]; y [N, F]."""
    ACROSS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    after_last(DEPENDENT)
    if tl.program_id(0) < tl.load(number) * ACROSS:
        entry, column = table + tl.program_id(0) // ACROSS * ENTRY, tl.program_id(0) % ACROSS * COLUMNS
        expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if rows <= ROWS:
            _narrow(x, more_x, weight, y, expert, first, rows, column, D, F, ROWS, 0, COLUMNS, DEPTH)
        else:
            _narrow(x, more_x, weight, y, expert, first, rows, column, D, F, ROWS, MORE, COLUMNS, DEPTH)


def _grid(tiles: RowTiles, width: int, tiling: ManyTiling) -> tuple[int]:
    return (len(tiles.table) * triton.cdiv(width, tiling.columns),)


def _constants(tiling: ManyTiling, device: torch.device) -> dict[str, int]:
    return {"ROWS": tiling.rows, "MORE": tiling.more, "COLUMNS": tiling.columns, "DEPTH": tiling.depth, "ENTRY": ENTRY,
            "num_warps": tiling.warps, "num_stages": tiling.stages, **dependent(device)}


def activated_rows(x: Tensor, gate_up: Tensor, rows: ExpertRows, tiling: ManyTiling) -> Tensor:
    """a [N, I] of x [T, H], gate_up [E, 2, I, H], bf16; the rows' tiles are as high as the tiling's. Right after the kernel that makes the
    rows, and waiting for nothing else."""
    assert rows.tiles.height == tiling.height, f"tiles of {rows.tiles.height} rows, not of {tiling.height}"
    inner, width = gate_up.shape[2:]
    y = x.new_empty(len(rows.token), inner)
    weight = TensorDescriptor.from_tensor(gate_up, [1, 1, tiling.columns, tiling.depth])
    _many_activated[_grid(rows.tiles, inner, tiling)](
        x, weight, rows.token, y, rows.tiles.table, rows.tiles.number, D=width, F=inner, **_constants(tiling, x.device))
    return y


def narrowed_rows(activated: Tensor, down: Tensor, rows: ExpertRows, tiling: ManyTiling) -> Tensor:
    """y [N, H] of a [N, I], down [E, H, I]. Right after `activated_rows`."""
    assert rows.tiles.height == tiling.height, f"tiles of {rows.tiles.height} rows, not of {tiling.height}"
    width, inner = down.shape[1:]
    y = activated.new_empty(len(activated), width)
    x, more_x = (TensorDescriptor.from_tensor(activated, [rows_, tiling.depth]) for rows_ in (tiling.rows, tiling.more))
    weight = TensorDescriptor.from_tensor(down, [1, tiling.columns, tiling.depth])
    _many_narrowed[_grid(rows.tiles, width, tiling)](
        x, more_x, weight, y, rows.tiles.table, rows.tiles.number, D=inner, F=width, **_constants(tiling, y.device))
    return y
