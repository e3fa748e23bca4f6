"""Rows in expert order from routing choices, and the tiles of these rows, in one launch: a stable counting sort, a program an expert.

Legend: T tokens, k choices a token, E experts.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .grouped_gemm import ENTRY, RowTiles
from .launch import next_power_of_2

LEAST_CHUNK, LARGEST_CHUNK = 256, 8192  # choices at a time


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


def expert_rows(indices: Tensor, num_experts: int, height: int) -> ExpertRows:
    """The rows of routing choices int64 [T, k], in tiles of `height`. Right after the kernel that makes the choices."""
    num_tokens, choices = indices.shape
    row, token = torch.empty(2, indices.numel(), dtype=torch.int32, device=indices.device)
    table = row.new_empty(indices.numel() // height + num_experts, ENTRY)
    number, starts = row.new_empty(1), row.new_empty(num_experts + 1)
    _place[(num_experts,)](
        indices.contiguous(), row, token, table, number, starts, indices.numel(), CHOICES=choices, NUM_EXPERTS=num_experts,
        POWER=next_power_of_2(num_experts), CHUNK=min(max(next_power_of_2(indices.numel()), LEAST_CHUNK), LARGEST_CHUNK), HEIGHT=height,
        ENTRY=ENTRY, num_warps=8, **dependent(row.device))
    return ExpertRows(row.view(num_tokens, choices), token, RowTiles(table, number, starts, starts[1:], height))
