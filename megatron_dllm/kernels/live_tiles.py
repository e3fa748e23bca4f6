"""Tiles of the rows that have a gradient, after which each expert's other rows stand: what those would give is not computed."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grouped_gemm import ENTRY, RowTiles
from .launch import next_power_of_2


@triton.jit
def _place(counts, live, table, number, ends, NUM_EXPERTS: tl.constexpr, POWER: tl.constexpr, HEIGHT: tl.constexpr, ENTRY: tl.constexpr):
    """A program an entry, used or not; the first ones write `ends` too, since there are as many entries as experts or more."""
    place = tl.program_id(0)
    experts = tl.arange(0, POWER)
    count = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0).to(tl.int32)
    own = tl.load(live + experts, mask=experts < NUM_EXPERTS, other=0).to(tl.int32)
    tiles = (own + HEIGHT - 1) // HEIGHT
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= place).to(tl.int32), 0)
    is_own = experts == expert
    offset = (place - tl.sum(tl.where(is_own, after - tiles, 0), 0)) * HEIGHT
    start, rows = tl.sum(tl.where(experts < expert, count, 0), 0), tl.sum(tl.where(is_own, own, 0), 0)
    entry, used = table + place * ENTRY, expert < NUM_EXPERTS
    tl.store(entry, expert, mask=used)
    tl.store(entry + 1, start + offset, mask=used)
    tl.store(entry + 2, tl.minimum(rows - offset, HEIGHT), mask=used)
    tl.store(ends + place, tl.sum(tl.where(experts < place, count, 0), 0) + tl.sum(tl.where(experts == place, own, 0), 0),
             mask=place < NUM_EXPERTS)
    if place == 0:
        tl.store(number, tl.sum(tiles, 0))


def place_live_tiles(counts: Tensor, live: Tensor, tiles: RowTiles) -> RowTiles:
    """The tiles of the first live[e] of each expert's counts[e] rows, both int64 [E], beside `tiles`, which are those of all."""
    table, number, ends = torch.empty_like(tiles.table), torch.empty_like(tiles.number), torch.empty_like(tiles.ends)
    _place[(len(table),)](counts, live, table, number, ends, NUM_EXPERTS=len(counts), POWER=next_power_of_2(len(counts)),
                          HEIGHT=tiles.height, ENTRY=ENTRY, num_warps=1)
    return RowTiles(table, number, tiles.starts, ends, tiles.height)
