"""Choices of experts in expert order: a counting sort in one launch, or in three where choices are many; a sort by parts takes a dozen.

In one, a program an expert reads all choices twice, first to count those of the experts before its own. In three, a program a block counts
its choices, a program an expert adds up its counts over the blocks, and a program a block puts its choices in their places.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last
from .launch import next_power_of_2

CHUNK = 2048  # choices at a time
BLOCK = 64  # choices of a block, each of which is compared with each
BLOCKS = 256  # whose counts are added up at a time
COUNTED = 1024  # choices of a block that are only counted
# Each program of the one launch reads all choices. An H200 orders those of 128 experts in one launch or in three, which have two gaps more:
# 2048 in 4.1 or 6.3 us, 8192 in 10.2 or 7.3, 10240 in 12.5 or 7.8, 40960 in 46.5 or 15.0.
MOST_CHOICES = 8192


@triton.jit
def _of_layer(pointer, size, BATCHED: tl.constexpr):
    """Where this program's layer begins, of so many numbers each. Not added where there is one, since nothing is known of the sum."""
    return pointer + tl.program_id(1).to(tl.int64) * size if BATCHED else pointer


@triton.jit
def _of_chunk(indices, start, num_slots, ABSENT: tl.constexpr, CHUNK: tl.constexpr):
    """(slots, their experts; ABSENT for none, more where there is no slot)."""
    slots = start + tl.arange(0, CHUNK)
    experts = tl.load(indices + slots, mask=slots < num_slots, other=ABSENT + 1).to(tl.int32)
    return slots, tl.where(experts < 0, ABSENT, experts)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _order(indices, slot, row, counts, num_slots, num_rows, NUM_EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BATCHED: tl.constexpr):
    indices, slot = _of_layer(indices, num_slots, BATCHED), _of_layer(slot, num_rows, BATCHED)
    row, counts = _of_layer(row, num_slots, BATCHED), _of_layer(counts, NUM_EXPERTS, BATCHED)
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


@triton.jit(do_not_specialize=["num_slots"])
def _count_blocks(indices, of_blocks, num_slots, NUM_EXPERTS: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
                  BATCHED: tl.constexpr):
    """of_blocks [B, POWER]: how many of a block's choices are of each expert, or of none (NUM_EXPERTS)."""
    indices, of_blocks = _of_layer(indices, num_slots, BATCHED), _of_layer(of_blocks, tl.num_programs(0) * POWER, BATCHED)
    block = tl.program_id(0)
    slots, experts = _of_chunk(indices, block * BLOCK, num_slots, NUM_EXPERTS, BLOCK)
    counts = tl.histogram(experts, POWER, mask=slots < num_slots)
    tl.store(of_blocks + block * POWER + tl.arange(0, POWER), counts)


@triton.jit(do_not_specialize=["num_blocks"])
def _add_up_blocks(of_blocks, totals, num_blocks, POWER: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr = False,
                   BATCHED: tl.constexpr = False):
    """A program an expert: of_blocks becomes the number in the blocks before; totals [POWER] that in all of them."""
    after_last(DEPENDENT)
    of_blocks, totals = _of_layer(of_blocks, num_blocks * POWER, BATCHED), _of_layer(totals, POWER, BATCHED)
    before = 0
    for start in range(0, num_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        place, inside = of_blocks + block * POWER + tl.program_id(0), block < num_blocks
        counts = tl.load(place, mask=inside, other=0)
        tl.store(place, before + tl.cumsum(counts, 0) - counts, mask=inside)
        before += tl.sum(counts, 0)
    tl.store(totals + tl.program_id(0), before)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _place_blocks(indices, of_blocks, totals, slot, row, counts, num_slots, num_rows, NUM_EXPERTS: tl.constexpr, POWER: tl.constexpr,
                  BLOCK: tl.constexpr, BATCHED: tl.constexpr):
    indices, of_blocks = _of_layer(indices, num_slots, BATCHED), _of_layer(of_blocks, tl.num_programs(0) * POWER, BATCHED)
    totals, counts = _of_layer(totals, POWER, BATCHED), _of_layer(counts, NUM_EXPERTS, BATCHED)
    slot, row = _of_layer(slot, num_rows, BATCHED), _of_layer(row, num_slots, BATCHED)
    block, every = tl.program_id(0), tl.arange(0, POWER)
    total = tl.load(totals + every)
    first = tl.cumsum(total, 0) - total + tl.load(of_blocks + block * POWER + every)
    slots, experts = _of_chunk(indices, block * BLOCK, num_slots, NUM_EXPERTS, BLOCK)
    inside = slots < num_slots
    place = tl.gather(first, tl.where(inside, experts, 0), 0)
    earlier = (experts[:, None] == experts[None, :]) & (slots[None, :] < slots[:, None])
    place += tl.sum(earlier.to(tl.int32), 1)
    tl.store(slot + place, slots.to(tl.int64), mask=inside & (place < num_rows))
    tl.store(row + slots, tl.where(experts < NUM_EXPERTS, place, num_rows).to(tl.int64), mask=inside)
    if block == 0:
        tl.store(counts + every, total.to(tl.int64), mask=every < NUM_EXPERTS)


def expert_order(indices: Tensor, num_experts: int, num_rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(slot int64 [N], row int64 [T, k], counts int64 [E]) of choices int64 [T, k], as moe.permute's Permutation has them; of those of
    several layers [L, T, k], which are sorted each by itself, [L, N], [L, T, k] and [L, E].

    num_rows: N where negative choices are of no expert; at least as many as the others, at most as many as all. None: there are none.
    """
    indices, (*layers, num_tokens, choices) = indices.contiguous(), indices.shape
    num_slots, known = num_tokens * choices, {"NUM_EXPERTS": num_experts, "BATCHED": bool(layers)}
    rows = num_slots if num_rows is None else num_rows
    slot, row, counts = indices.new_empty(*layers, rows), torch.empty_like(indices), indices.new_empty(*layers, num_experts)
    if num_slots > MOST_CHOICES:
        num_blocks, power = triton.cdiv(num_slots, BLOCK), next_power_of_2(num_experts + 1)
        of_blocks = torch.empty(*layers, num_blocks, power, dtype=torch.int32, device=indices.device)
        totals, sizes = of_blocks.new_empty(*layers, power), {"POWER": power, "BLOCK": BLOCK}
        _count_blocks[(num_blocks, *layers)](indices, of_blocks, num_slots, **known, **sizes, num_warps=4)
        _add_up_blocks[(power, *layers)](of_blocks, totals, num_blocks, POWER=power, CHUNK=BLOCKS, BATCHED=bool(layers), num_warps=2)
        _place_blocks[(num_blocks, *layers)](indices, of_blocks, totals, slot, row, counts, num_slots, rows, **known, **sizes, num_warps=4)
        return slot, row, counts
    _order[(num_experts + (num_rows is not None), *layers)](indices, slot, row, counts, num_slots, rows, CHUNK=CHUNK, num_warps=8, **known)
    return slot, row, counts


def count_choices(indices: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many of the choices int64 [T, k] are of each expert."""
    indices = indices.contiguous()
    num_blocks, power = triton.cdiv(indices.numel(), COUNTED), next_power_of_2(num_experts + 1)
    of_blocks = torch.empty(num_blocks, power, dtype=torch.int32, device=indices.device)
    if num_blocks:
        _count_blocks[(num_blocks,)](indices, of_blocks, indices.numel(), NUM_EXPERTS=num_experts, POWER=power, BLOCK=COUNTED,
                                     BATCHED=False, num_warps=4)
    return of_blocks[:, :num_experts].sum(0)
