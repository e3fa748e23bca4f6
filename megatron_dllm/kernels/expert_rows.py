"""Rows in expert order from routing choices, and the tiles of these rows: a stable counting sort in one launch, or, of many choices, three.

In one, a program an expert reads all choices twice. In three, a program a block counts its choices, a program an expert adds up its counts
over the blocks, and a program a block puts its choices in their places.

Legend: T tokens, k choices a token, E experts.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .expert_order import BLOCK, BLOCKS, _add_up_blocks
from .grouped_gemm import ENTRY, RowTiles
from .launch import next_power_of_2

LEAST_CHUNK = 256  # choices at a time, at least
# In one launch: an H200 took 19.5 us for 16384 choices of 128 experts, in three 6.4.
MOST_CHOICES = 4096


@dataclass(frozen=True)
class ExpertRows:
    """row int32 [T, k]: where each choice's row stands, rows sorted by expert, then by token; token int32 [T k]: the inverse's token; tiles
    of the rows."""

    row: Tensor
    token: Tensor
    tiles: RowTiles


@triton.jit(do_not_specialize=["num_choices"])
def _place(indices, row, token, table, number, starts, num_choices, CHOICES: tl.constexpr, NUM_EXPERTS: tl.constexpr, POWER: tl.constexpr,
           CHUNK: tl.constexpr, HEIGHT: tl.constexpr, ENTRY: tl.constexpr, DEPENDENT: tl.constexpr):
    after_last(DEPENDENT)
    own, experts, lanes = tl.program_id(0), tl.arange(0, POWER), tl.arange(0, CHUNK)
    counts = tl.zeros((POWER,), tl.int32)
    for at in range(0, num_choices, CHUNK):
        inside = at + lanes < num_choices
        chosen = tl.load(indices + at + lanes, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(chosen, POWER, mask=inside)
    before = tl.sum(tl.where(experts < own, counts, 0), 0)
    place = before
    for at in range(0, num_choices, CHUNK):
        inside = at + lanes < num_choices
        is_own = inside & (tl.load(indices + at + lanes, mask=inside, other=-1) == own)
        at_row = place + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(row + at + lanes, at_row, mask=is_own)
        tl.store(token + at_row, (at + lanes) // CHOICES, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    tiles = (counts + HEIGHT - 1) // HEIGHT
    first = tl.sum(tl.where(experts < own, tiles, 0), 0)
    for start in range(before, place, HEIGHT):
        entry = table + (first + (start - before) // HEIGHT) * ENTRY
        tl.store(entry, own)
        tl.store(entry + 1, start)
        tl.store(entry + 2, tl.minimum(place - start, HEIGHT))
    tl.store(starts + own, before)
    if own == 0:
        tl.store(starts + NUM_EXPERTS, num_choices)
        tl.store(number, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["num_choices"])
def _count_blocks(indices, of_blocks, num_choices, POWER: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """of_blocks [B, POWER]: how many of a block's choices are of each expert."""
    after_last(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(indices + at, mask=at < num_choices, other=0).to(tl.int32)
    tl.store(of_blocks + tl.program_id(0) * POWER + tl.arange(0, POWER), tl.histogram(chosen, POWER, mask=at < num_choices))


@triton.jit(do_not_specialize=["num_choices"])
def _place_blocks(indices, of_blocks, totals, row, token, table, number, starts, num_choices, CHOICES: tl.constexpr,
                  NUM_EXPERTS: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, ENTRY: tl.constexpr,
                  DEPENDENT: tl.constexpr):
    after_last(DEPENDENT)
    block, experts = tl.program_id(0), tl.arange(0, POWER)
    counts = tl.load(totals + experts)
    first = tl.cumsum(counts, 0) - counts
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_choices
    chosen = tl.load(indices + at, mask=inside, other=NUM_EXPERTS).to(tl.int32)
    at_row = tl.gather(first + tl.load(of_blocks + block * POWER + experts), tl.where(inside, chosen, 0), 0)
    at_row += tl.sum(((chosen[:, None] == chosen[None, :]) & (at[None, :] < at[:, None])).to(tl.int32), 1)
    tl.store(row + at, at_row, mask=inside)
    tl.store(token + at_row, at // CHOICES, mask=inside)
    if block == 0:
        tl.store(starts + experts, first, mask=experts < NUM_EXPERTS)
        tl.store(starts + NUM_EXPERTS, num_choices)
    tiles = (counts + HEIGHT - 1) // HEIGHT
    for own in range(block, NUM_EXPERTS, tl.num_programs(0)):
        entry = table + tl.sum(tl.where(experts < own, tiles, 0), 0) * ENTRY
        start, count = tl.sum(tl.where(experts < own, counts, 0), 0), tl.sum(tl.where(experts == own, counts, 0), 0)
        for done in range(0, count, HEIGHT):
            tl.store(entry, own)
            tl.store(entry + 1, start + done)
            tl.store(entry + 2, tl.minimum(count - done, HEIGHT))
            entry += ENTRY
        if own == 0:
            tl.store(number, tl.sum(tiles, 0))


def expert_rows(indices: Tensor, num_experts: int, height: int) -> ExpertRows:
    """The rows of routing choices int64 [T, k], in tiles of `height`. Right after the kernel that makes the choices."""
    indices = indices.contiguous()
    (num_tokens, choices), count, power = indices.shape, indices.numel(), next_power_of_2(num_experts)
    row, token = torch.empty(2, count, dtype=torch.int32, device=indices.device)
    table = row.new_empty(count // height + num_experts, ENTRY)
    number, starts, on = row.new_empty(1), row.new_empty(num_experts + 1), dependent(row.device)
    sizes = {"CHOICES": choices, "NUM_EXPERTS": num_experts, "POWER": power, "HEIGHT": height, "ENTRY": ENTRY}
    if count > MOST_CHOICES:
        blocks = triton.cdiv(count, BLOCK)
        of_blocks, totals = row.new_empty(blocks, power), row.new_empty(power)
        _count_blocks[(blocks,)](indices, of_blocks, count, POWER=power, BLOCK=BLOCK, num_warps=4, **on)
        _add_up_blocks[(power,)](of_blocks, totals, blocks, POWER=power, CHUNK=BLOCKS, num_warps=2, **on)
        _place_blocks[(blocks,)](indices, of_blocks, totals, row, token, table, number, starts, count, BLOCK=BLOCK, num_warps=4, **sizes,
                                 **on)
    else:
        chunk = max(next_power_of_2(count), LEAST_CHUNK)
        _place[(num_experts,)](indices, row, token, table, number, starts, count, CHUNK=chunk, num_warps=8, **sizes, **on)
    return ExpertRows(row.view(num_tokens, choices), token, RowTiles(table, number, starts, starts[1:], height))
