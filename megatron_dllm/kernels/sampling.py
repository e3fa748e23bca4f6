"""The sampler's reading of logits: soft cap, temperature, argmax, entropy and one sample a position, in two reads of them; and softmax."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cross_entropy import _tanh

COLUMNS = 4096  # 8 warps, 16 logits a thread
# Of a program that reads a whole position: 8 warps; with few registers several share a processor, and what they wait for is on its way.
READ_COLUMNS, READ_STAGES = 2048, 4


@triton.jit
def _cap(product, logits, size, softcap, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    value, _ = _tanh(tl.load(product + place, mask=place < size, other=0.0).to(tl.float32) / softcap)
    tl.store(logits + place, value * softcap, mask=place < size)


@triton.jit
def _tempered(value, temperature, softcap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        value, _ = _tanh(value.to(tl.float32) / softcap)
        value *= softcap
    return value / temperature


@triton.jit
def _read(logits, uniforms, kept, sample, argmax, entropy, width, temperature, softcap, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
          HAS_CAP: tl.constexpr):
    """temperature float64 []: read from memory, so that a recording serves every step."""
    position = tl.program_id(0)
    temperature = tl.load(temperature).to(tl.float32)
    logits += position.to(tl.int64) * width
    kept += position.to(tl.int64) * width
    lanes = tl.arange(0, COLUMNS)
    # Each lane: its largest so far and where that came first, the sum of e = exp(logit - largest), and that of e * (logit - largest).
    largest = tl.full((COLUMNS,), -3e38, tl.float32)
    first = tl.zeros((COLUMNS,), tl.int32)
    total = tl.zeros((COLUMNS,), tl.float32)
    spread = tl.zeros((COLUMNS,), tl.float32)
    for at in tl.range(0, width, COLUMNS, num_stages=STAGES):
        column = at + lanes
        inside = column < width
        value = _tempered(tl.load(logits + column, mask=inside, other=0.0), temperature, softcap, HAS_CAP)
        tl.store(kept + column, value, mask=inside)
        value = tl.where(inside, value, largest)
        share = tl.where(inside, 1.0, 0.0)
        above = value > largest
        distance = tl.where(above, largest - value, value - largest)  # never above 0
        small = tl.exp(distance)
        # The first value of a lane meets no sum, so that its distance to nothing must not count.
        moved = tl.where(total > 0, small * (spread + distance * total), 0.0)
        spread = tl.where(above, moved, spread + share * small * distance)
        total = tl.where(above, small * total + 1, total + share * small)
        first = tl.where(above, column, first)
        largest = tl.where(above, value, largest)
    overall = tl.max(largest, 0)
    best = tl.min(tl.where(largest == overall, first, 2147483647), 0)
    distance = tl.maximum(largest - overall, -1e4)  # lanes without a value
    scale = tl.exp(distance)
    mass = tl.sum(total * scale, 0)
    tl.store(argmax + position, best.to(tl.int64))
    tl.store(entropy + position, tl.log(mass) - tl.sum(scale * (spread + distance * total), 0) / mass)
    target = tl.load(uniforms + position).to(tl.float32) * mass
    # The token at which the running sum passes the target. Rounding may leave the whole sum below it: then the last that has any.
    before = 0.0
    chosen = -1
    last = best
    at = 0
    while (at < width) & (chosen < 0):
        column = at + lanes
        value = _tempered(tl.load(logits + column, mask=column < width, other=0.0), temperature, softcap, HAS_CAP)
        weight = tl.where(column < width, tl.exp(value - overall), 0.0)
        here = tl.sum(weight, 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, column, 0), 0))
        if before + here > target:
            past = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
            found = tl.min(tl.where(past, column, 2147483647), 0)
            chosen = tl.where(found < 2147483647, found, -1)
        before += here
        at += COLUMNS
    tl.store(sample + position, tl.where(chosen < 0, last, chosen).to(tl.int64))


@triton.jit
def _softmax(logits, probabilities, width, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    logits += tl.program_id(0).to(tl.int64) * width
    probabilities += tl.program_id(0).to(tl.int64) * width
    lanes = tl.arange(0, COLUMNS)
    largest, total = tl.full((COLUMNS,), -3e38, tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for at in tl.range(0, width, COLUMNS, num_stages=STAGES):
        inside = at + lanes < width
        value = tl.load(logits + at + lanes, mask=inside, other=-3e38).to(tl.float32)
        now_largest = tl.maximum(largest, value)
        total = total * tl.exp(largest - now_largest) + tl.where(inside, tl.exp(value - now_largest), 0.0)
        largest = now_largest
    overall = tl.max(largest, 0)
    factor = 1 / tl.sum(total * tl.exp(tl.maximum(largest - overall, -1e4)), 0)
    # Backwards: what was read last is still near.
    last = (width - 1) // COLUMNS * COLUMNS
    for back in tl.range(0, width, COLUMNS, num_stages=STAGES):
        at = last - back
        inside = at + lanes < width
        value = tl.load(logits + at + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(probabilities + at + lanes, (tl.exp(value - overall) * factor).to(probabilities.dtype.element_ty), mask=inside)


def softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """softmax of each row of logits [N, V], computed in fp32, in `dtype`."""
    probabilities = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if len(logits):
        _softmax[len(logits),](logits.contiguous(), probabilities, logits.shape[1], COLUMNS=READ_COLUMNS, STAGES=READ_STAGES,
                              num_warps=8)
    return probabilities


def soft_capped(product: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(product / softcap), fp32, of a product [T, V] of any floating dtype."""
    logits = torch.empty(product.shape, dtype=torch.float32, device=product.device)
    _cap[triton.cdiv(product.numel(), COLUMNS),](product, logits, product.numel(), softcap, COLUMNS=COLUMNS, num_warps=8)
    return logits


def read_logits(logits: Tensor, temperature: float, uniforms: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits / temperature in `dtype` [N, V], sample int64 [N], argmax int64 [N], entropy fp32 [N]) of logits fp32 [N, V].

    The sample is the token at quantile `uniforms` [N] in [0, 1), never one of probability zero.
    """
    kept = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    return kept, *read_product(logits, None, torch.full((), temperature, dtype=torch.float64, device=logits.device), uniforms, kept)


def read_product(product: Tensor, softcap: float | None, temperature: Tensor, uniforms: Tensor,
                 kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sample int64 [N], argmax int64 [N], entropy fp32 [N]) of the logits softcap * tanh(product / softcap), or product itself, [N, V],
    over the temperature, float64 []; `kept` [N, V] gets these."""
    count, width = product.shape
    sample, argmax = (torch.empty(count, dtype=torch.int64, device=product.device) for _ in range(2))
    entropy = torch.empty(count, dtype=torch.float32, device=product.device)
    if count:
        _read[count,](product, uniforms, kept, sample, argmax, entropy, width, temperature, softcap or 1.0, COLUMNS=READ_COLUMNS,
                      STAGES=READ_STAGES, HAS_CAP=softcap is not None, num_warps=8)
    return sample, argmax, entropy
