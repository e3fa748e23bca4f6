"""What the attention kernels share: which keys a query sees, loads by row, and the product of two blocks of rows."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sees(bounds, row, column):
    """bool [rows, columns]: whether queries `row` see keys `column`, from bounds [Q, 4]."""
    first, past = tl.load(bounds + row * 4), tl.load(bounds + row * 4 + 1)
    own_first, own_past = tl.load(bounds + row * 4 + 2), tl.load(bounds + row * 4 + 3)
    clean = (column[None, :] >= first[:, None]) & (column[None, :] < past[:, None])
    return clean | (column[None, :] >= own_first[:, None]) & (column[None, :] < own_past[:, None])


@triton.jit
def sees_any(bounds, row):
    """bool [rows]: whether queries `row` see any key. Those that see none may stand in a tile that is full for the others."""
    clean = tl.load(bounds + row * 4) < tl.load(bounds + row * 4 + 1)
    return clean | (tl.load(bounds + row * 4 + 2) < tl.load(bounds + row * 4 + 3))


@triton.jit
def rows_at(x, at, inside, column):
    """x[at + column] for `at` [rows], where rows start (near each other: int32); 0 in rows that are not `inside`."""
    return tl.load(x + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def product(a, a_at, a_inside, b, b_at, b_inside, DIM: tl.constexpr, PANEL: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """fp32 [ROWS, COLUMNS]: rows of `a` times rows of `b`, the DIM columns taken in panels."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for panel in tl.range(0, DIM, PANEL, num_stages=STAGES):
        inner = panel + tl.arange(0, PANEL)
        total = tl.dot(rows_at(a, a_at, a_inside, inner), tl.trans(rows_at(b, b_at, b_inside, inner)), total, input_precision=PRECISION)
    return total
