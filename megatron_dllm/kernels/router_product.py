"""The router's product in training, and the gradient of its input: fp32 by matrix units of 16 bits, on which it is several times faster.

A number of fp32 is the sum of three of bf16, whose products are exact in fp32. Of the nine products of two such sums six are taken, without
those below 2^-24 of the whole; a weight that is held in bf16 is one part, and three products are all. A matrix unit rounds towards zero
when it adds to what it has, so what a step of the contraction gives is summed up outside of it.

Legend: T tokens, H hidden, E experts, S splits of H, P parts of the weight.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2, processors

SPLIT_BLOCK = 1024  # numbers of the weight that a program splits
LEAST = 16  # rows and columns of the smallest product of tiles
MOST_SPLITS = 8


@dataclass(frozen=True)
class Shape:
    """rows x columns of a program's result, `depth` of the contraction a step; `tiles` of columns a program, one after the other."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tiles: int = 1


# Measured on an H200 with 5120 tokens, 128 experts, H = 2816: the weight in bf16 42 us forward and 40 back, in three parts 61 and 76, where
# cuBLAS in fp32 takes 92 and 101; in one split 62 to 125 forward, other shapes back 47 to 104.
FORWARD = Shape(64, 128, 64, warps=4, stages=2)
BACKWARD = {1: Shape(64, 64, 128, warps=4, stages=3, tiles=4), 3: Shape(128, 64, 128, warps=8, stages=2, tiles=4)}  # by parts


@triton.jit
def _parts(x):
    """Three tensors of bf16 whose sum is x, the largest first."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(a_1, a_2, a_3, b_1, b_2, b_3, PARTS: tl.constexpr):
    """The product of two sums, of which the second may have one part. The small products first."""
    total = tl.dot(a_3, b_1)
    if PARTS == 3:
        total = tl.dot(a_1, b_3, total)
        total = tl.dot(a_2, b_2, total)
    total = tl.dot(a_2, b_1, total)
    if PARTS == 3:
        total = tl.dot(a_1, b_2, total)
    return tl.dot(a_1, b_1, total)


@triton.jit
def _split(x, parts, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, second, third = _parts(tl.load(x + at, mask=at < size, other=0.0))
    tl.store(parts + at, first, mask=at < size)
    tl.store(parts + size + at, second, mask=at < size)
    tl.store(parts + 2 * size + at, third, mask=at < size)


@triton.jit(do_not_specialize=["num_tokens"])
def _logits(x, weight, partial, num_tokens, WIDTH: tl.constexpr, SPAN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr):
    """partial [S, T, E]: the product over SPAN of the H columns."""
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(2) * SPAN
    left, right = x + row.to(tl.int64)[:, None] * WIDTH, weight + expert[:, None] * WIDTH
    is_token, is_expert = (row < num_tokens)[:, None], (expert < EXPERTS)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in tl.range(start, tl.minimum(start + SPAN, WIDTH), DEPTH):
        inner = (at + tl.arange(0, DEPTH))[None, :]
        a_1, a_2, a_3 = _parts(tl.load(left + inner, mask=is_token & (inner < WIDTH), other=0.0))
        inside = is_expert & (inner < WIDTH)
        b_1 = tl.load(right + inner, mask=inside, other=0.0).T
        b_2 = b_1
        b_3 = b_1
        if PARTS == 3:
            b_2 = tl.load(right + EXPERTS * WIDTH + inner, mask=inside, other=0.0).T
            b_3 = tl.load(right + 2 * EXPERTS * WIDTH + inner, mask=inside, other=0.0).T
        total += _product(a_1, a_2, a_3, b_1, b_2, b_3, PARTS)
    place = (tl.program_id(2).to(tl.int64) * num_tokens + row)[:, None] * EXPERTS + expert[None, :]
    tl.store(partial + place, total, mask=is_token & (expert < EXPERTS)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _input_gradient(dy, weight, dx, num_tokens, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    DEPTH: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr):
    """dx [T, H] = dy [T, E] W; DEPTH is at least E."""
    row, expert = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    is_token, is_expert = (row < num_tokens)[:, None], (expert < EXPERTS)[:, None]
    a_1, a_2, a_3 = _parts(tl.load(dy + row[:, None] * EXPERTS + expert[None, :], mask=is_token & (expert < EXPERTS)[None, :], other=0.0))
    for tile in tl.range(TILES):
        column = ((tl.program_id(1) * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside, right = is_expert & (column < WIDTH), weight + expert[:, None] * WIDTH + column
        b_1 = tl.load(right, mask=inside, other=0.0)
        b_2 = b_1
        b_3 = b_1
        if PARTS == 3:
            b_2 = tl.load(right + EXPERTS * WIDTH, mask=inside, other=0.0)
            b_3 = tl.load(right + 2 * EXPERTS * WIDTH, mask=inside, other=0.0)
        total = _product(a_1, a_2, a_3, b_1, b_2, b_3, PARTS)
        tl.store(dx + row[:, None] * WIDTH + column, total, mask=is_token & (column < WIDTH))


def parts_of(weight: Tensor) -> Tensor:
    """bf16 [P, E, H]: what weight [E, H] is the sum of, itself if it is bf16."""
    if weight.dtype == torch.bfloat16:
        return weight.contiguous()[None]
    parts = torch.empty(3, *weight.shape, dtype=torch.bfloat16, device=weight.device)
    _split[(triton.cdiv(weight.numel(), SPLIT_BLOCK),)](weight.contiguous(), parts, weight.numel(), BLOCK=SPLIT_BLOCK)
    return parts


def partial_logits(x: Tensor, parts: Tensor, shape: Shape = FORWARD, splits: int | None = None) -> Tensor:
    """fp32 [S, T, E], whose sum over S is x W^T of x fp32 [T, H] and the weight's parts."""
    (num_tokens, width), (num_parts, num_experts, _) = x.shape, parts.shape
    columns = min(shape.columns, max(LEAST, next_power_of_2(num_experts)))
    blocks = triton.cdiv(num_tokens, shape.rows), triton.cdiv(num_experts, columns)
    if splits is None:
        # Two programs share a processor; a further one would make all wait for it.
        splits = max(1, min(MOST_SPLITS, 2 * processors(x.device) // max(blocks[0] * blocks[1], 1)))
    span = triton.cdiv(triton.cdiv(width, splits), shape.depth) * shape.depth
    splits = triton.cdiv(width, span)
    partial = torch.empty(splits, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    if num_tokens:
        _logits[(*blocks, splits)](
            x.contiguous(), parts, partial, num_tokens, WIDTH=width, SPAN=span, EXPERTS=num_experts, ROWS=shape.rows, COLUMNS=columns,
            DEPTH=shape.depth, PARTS=num_parts, num_warps=shape.warps, num_stages=shape.stages)
    return partial


def input_gradient(dy: Tensor, parts: Tensor, shape: Shape | None = None) -> Tensor:
    """fp32 [T, H]: dy W of dy fp32 [T, E]."""
    (num_tokens, num_experts), width, shape = dy.shape, parts.shape[2], shape or BACKWARD[len(parts)]
    dx = torch.empty(num_tokens, width, dtype=torch.float32, device=dy.device)
    if num_tokens:
        _input_gradient[(triton.cdiv(num_tokens, shape.rows), triton.cdiv(width, shape.columns * shape.tiles))](
            dy.contiguous(), parts, dx, num_tokens, WIDTH=width, EXPERTS=num_experts, ROWS=shape.rows, COLUMNS=shape.columns,
            DEPTH=max(LEAST, next_power_of_2(num_experts)), TILES=shape.tiles, PARTS=len(parts), num_warps=shape.warps,
            num_stages=shape.stages)
    return dx
