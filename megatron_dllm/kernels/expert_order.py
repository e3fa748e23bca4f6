"""Choices of experts in expert order: a counting sort in one launch, where a sort by parts takes a dozen.

A program an expert reads all choices twice, first to count those of the experts before its own. Choices are few enough to stay in the
cache of the second level, where the programs find each other's reading.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # choices at a time


@triton.jit
def _of_chunk(indices, start, num_slots, ABSENT: tl.constexpr, CHUNK: tl.constexpr):
    """(slots, their experts; ABSENT for none, more where there is no slot)."""
    slots = start + tl.arange(0, CHUNK)
    experts = tl.load(indices + slots, mask=slots < num_slots, other=ABSENT + 1).to(tl.int32)
    return slots, tl.where(experts < 0, ABSENT, experts)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _order(indices, slot, row, counts, num_slots, num_rows, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    expert = tl.program_id(0)  # the last program has those without one
    before = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_slots, CHUNK):
        slots, experts = _of_chunk(indices, start, num_slots, NUM_EXPERTS, CHUNK)
        before += (experts < expert).to(tl.int32)
    number = tl.sum(before, 0)
    first = number
    for start in range(0, num_slots, CHUNK):
        slots, experts = _of_chunk(indices, start, num_slots, NUM_EXPERTS, CHUNK)
        own = experts == expert
        place = number + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(slot + place, slots.to(tl.int64), mask=own & (place < num_rows))
        tl.store(row + slots, tl.where(expert < NUM_EXPERTS, place, num_rows).to(tl.int64), mask=own)
        number += tl.sum(own.to(tl.int32), 0)
    if expert < NUM_EXPERTS:
        tl.store(counts + expert, (number - first).to(tl.int64))


def expert_order(indices: Tensor, num_experts: int, num_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(slot int64 [N], row int64 [T, k], counts int64 [E]) of choices int64 [T, k], as moe.permute's Permutation has them.

    num_rows: N where negative choices are of no expert; at least as many as the others, at most as many as all. None: there are none.
    """
    indices, rows = indices.contiguous(), indices.numel() if num_rows is None else num_rows
    slot, row, counts = indices.new_empty(rows), torch.empty_like(indices), indices.new_empty(num_experts)
    _order[(num_experts + (num_rows is not None),)](
        indices, slot, row, counts, indices.numel(), rows, NUM_EXPERTS=num_experts, CHUNK=CHUNK, num_warps=8)
    return slot, row, counts
