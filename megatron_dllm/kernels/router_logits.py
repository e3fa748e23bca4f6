"""The router's product in fp32 by matrix units: each factor is a sum of three bf16 numbers, of whose products the six largest are taken,
which is as near as fp32 itself. The factors come in these parts: the weights are cut once, a token where its norm is made.

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


# With the choices, us on an H200: 9.3 for 256 tokens, by 8 warps 10.2, by 64 rows 10.7; cut in the kernel, 15.7.
FEW_TILING = LogitsTiling(32, 64, 16, warps=4, stages=3, programs=1)
# 2048 tokens in 4 splits 24.3 us, by 8 warps 35.1; cut in the kernel, 36.4. In more splits, since the matrix units cut sums off where fp32
# rounds: over 704 columns a weight was 6.3e-7 off float64's, over 352 3.3e-7, over 192 2.0e-7 (256 tokens; torch's fp32 product: 2.5e-7).
TILING = LogitsTiling(64, 64, 8, warps=4, stages=3, programs=2)


@triton.jit
def _part(pointer, number, row, rows, inner, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """[., DEPTH] of rows of part `number` of [3, rows, WIDTH]."""
    inside = (row < rows)[:, None]
    if WIDTH % DEPTH != 0:
        inside = inside & (inner < WIDTH)[None, :]
    return tl.load(pointer + (number * rows + row).to(tl.int64)[:, None] * WIDTH + inner[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _partial(x, weight, partial, num_tokens, WIDTH: tl.constexpr, SPAN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr, DEPTH: tl.constexpr, DEPENDENT: tl.constexpr):
    """partial [S, T, E]: the product of x [3, T, H] and weight [3, E, H] over SPAN of the H columns."""
    after_last(DEPENDENT)
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    start = tl.program_id(1) * SPAN
    # The weights stand on the left: the matrix units take 64 rows of them for as few as 16 of ours.
    large, small = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
    for at in tl.range(start, tl.minimum(start + SPAN, WIDTH), DEPTH):
        inner = at + tl.arange(0, DEPTH)
        x_1, w_1 = _part(x, 0, row, num_tokens, inner, WIDTH, DEPTH).T, _part(weight, 0, expert, EXPERTS, inner, WIDTH, DEPTH)
        x_2, w_2 = _part(x, 1, row, num_tokens, inner, WIDTH, DEPTH).T, _part(weight, 1, expert, EXPERTS, inner, WIDTH, DEPTH)
        x_3, w_3 = _part(x, 2, row, num_tokens, inner, WIDTH, DEPTH).T, _part(weight, 2, expert, EXPERTS, inner, WIDTH, DEPTH)
        small = tl.dot(w_3, x_1, small)
        small = tl.dot(w_1, x_3, small)
        small = tl.dot(w_2, x_2, small)
        small = tl.dot(w_2, x_1, small)
        small = tl.dot(w_1, x_2, small)
        large = tl.dot(w_1, x_1, large)
    place = (tl.program_id(1) * num_tokens + row).to(tl.int64)[None, :] * EXPERTS + expert[:, None]
    tl.store(partial + place, large + small, mask=(row < num_tokens)[None, :] & (expert < EXPERTS)[:, None])


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


def in_parts(x: Tensor) -> Tensor:
    """bf16 [3, ...] that add up to x fp32 [...], but for what is under 2^-24 of a number."""
    parts, rest = [], x
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1]
    return torch.stack(parts)


def choose_experts(x: Tensor, weight: Tensor, scale: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, k], indices int64 [T, k]) of x [3, T, H] and weight [3, E, H], parts of fp32 as `in_parts` gives them, and scale
    fp32 [E]: see kernels.router.route."""
    (_, num_tokens, width), num_experts = x.shape, weight.shape[1]
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
            x, weight, partial, num_tokens, WIDTH=width, SPAN=span, EXPERTS=num_experts, ROWS=tiling.rows, COLUMNS=max(columns, 64),
            DEPTH=tiling.depth, num_warps=tiling.warps, num_stages=tiling.stages, **dependent(x.device, early=False))
        some = max(1, 512 // columns)
        _choose[(triton.cdiv(num_tokens, some),)](
            partial, scale, indices, weights, num_tokens, SPLITS=splits, EXPERTS=num_experts, CHOICES=choices, ROWS=some, COLUMNS=columns,
            WIDE_CHOICES=next_power_of_2(choices), num_warps=4, **dependent(x.device))
    return weights, indices
