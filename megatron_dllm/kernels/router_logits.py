"""The router's product in fp32 by matrix units: each factor is a sum of three bf16 numbers, of whose products the six largest are taken,
which is as near as fp32 itself. On an H200, 64 columns at a time, it took 15 us for 256 tokens, as torch's fp32 product does with its
reduction; beside the dense MLP of 2048 tokens, whose products fill the device, 63 us against 115.

Legend: T tokens, E experts, H hidden, S splits of H.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .launch import next_power_of_2, processors

FEW_TOKENS = 512


@dataclass(frozen=True)
class LogitsTiling:
    """rows of a program, `depth` of H at a time, at most so many splits of H; warps, stages; programs for each processor."""

    rows: int
    depth: int
    splits: int
    warps: int
    stages: int
    programs: int


FEW_TILING = LogitsTiling(16, 32, 16, warps=8, stages=3, programs=2)
# 2048 tokens with their choices: 36 us on an H200; by 8 warps, a program a processor, 64, by 128 rows 37.
TILING = LogitsTiling(64, 32, 16, warps=4, stages=3, programs=2)


@triton.jit(do_not_specialize=["num_tokens"])
def _partial(x, weight, partial, num_tokens, WIDTH: tl.constexpr, SPAN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr):
    """partial [S, T, E]: the product over SPAN of the H columns."""
    after_last(DEPENDENT)
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    start = tl.program_id(1) * SPAN
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(start, tl.minimum(start + SPAN, WIDTH), DEPTH):
        inner = at + tl.arange(0, DEPTH)
        inside = (inner < WIDTH)[None, :]
        left = tl.load(x + row.to(tl.int64)[:, None] * WIDTH + inner[None, :], mask=(row < num_tokens)[:, None] & inside, other=0.0)
        right = tl.load(weight + expert[:, None] * WIDTH + inner[None, :], mask=(expert < EXPERTS)[:, None] & inside, other=0.0)
        total = tl.dot(left, right.T, total, input_precision=PRECISION)
    place = (tl.program_id(1) * num_tokens + row).to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(partial + place, total, mask=(row < num_tokens)[:, None] & (expert < EXPERTS)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(partial, scale, indices, weights, num_tokens, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE_CHOICES: tl.constexpr, DEPENDENT: tl.constexpr):
    """As kernels.router's forward, without what a backward and replays need."""
    after_last(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, choice = tl.arange(0, COLUMNS)[None, :], tl.arange(0, WIDE_CHOICES)[None, :]
    at, inside = row.to(tl.int64)[:, None] * EXPERTS + column, (row < num_tokens)[:, None] & (column < EXPERTS)
    logit = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(partial + split * num_tokens.to(tl.int64) * EXPERTS + at, mask=inside, other=0.0)
    logit = tl.where(inside, logit, -1e30)
    score = tl.where(inside, tl.exp(logit - tl.max(logit, 1)[:, None]), 0.0)
    probability = score / tl.maximum(tl.sum(score, 1), 1e-30)[:, None]
    score = tl.where(inside, probability, -float("inf"))
    expert, chosen = tl.zeros((ROWS, WIDE_CHOICES), tl.int64), tl.zeros((ROWS, WIDE_CHOICES), tl.float32)
    for number in tl.static_range(CHOICES):
        largest = tl.max(score, 1)[:, None]
        best = tl.min(tl.where(score == largest, column, EXPERTS - 1), 1)[:, None]
        expert = tl.where(choice == number, best.to(tl.int64), expert)
        chosen = tl.where(choice == number, tl.maximum(largest, 0.0), chosen)  # rows outside: 0
        score = tl.where(column == best, -float("inf"), score)
    at, inside = row.to(tl.int64)[:, None] * CHOICES + choice, (row < num_tokens)[:, None] & (choice < CHOICES)
    factor = tl.load(scale + expert, mask=inside, other=0.0)
    tl.store(indices + at, expert, mask=inside)
    tl.store(weights + at, chosen * factor / tl.maximum(tl.sum(chosen, 1), 1e-30)[:, None], mask=inside)


def choose_experts(x: Tensor, weight: Tensor, scale: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, k], indices int64 [T, k]) of x [T, H], weight [E, H], scale [E], all fp32: see kernels.router.route."""
    (num_tokens, width), num_experts = x.shape, len(weight)
    columns = next_power_of_2(num_experts)
    tiling = FEW_TILING if num_tokens <= FEW_TOKENS else TILING
    blocks = triton.cdiv(num_tokens, tiling.rows)
    room = processors(x.device) * tiling.programs
    splits = max(1, min(tiling.splits, room // max(blocks, 1), triton.cdiv(width, tiling.depth)))
    span = triton.cdiv(triton.cdiv(width, splits), tiling.depth) * tiling.depth
    splits = triton.cdiv(width, span)
    partial = torch.empty(splits, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    indices = torch.empty(num_tokens, choices, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_tokens, choices, dtype=torch.float32, device=x.device)
    if num_tokens:
        _partial[(blocks, splits)](
            x, weight, partial, num_tokens, WIDTH=width, SPAN=span, EXPERTS=num_experts, ROWS=tiling.rows, COLUMNS=max(columns, 16),
            DEPTH=tiling.depth, PRECISION="bf16x6" if x.is_cuda else "ieee", num_warps=tiling.warps, num_stages=tiling.stages,
            **dependent(x.device, early=False))
        some = max(1, 512 // columns)
        _choose[(triton.cdiv(num_tokens, some),)](
            partial, scale, indices, weights, num_tokens, SPLITS=splits, EXPERTS=num_experts, CHOICES=choices, ROWS=some, COLUMNS=columns,
            WIDE_CHOICES=next_power_of_2(choices), num_warps=4, **dependent(x.device))
    return weights, indices
