"""The sampler's reading of logits: soft cap, temperature, argmax, entropy and one sample a position, in one read of them; and softmax."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cross_entropy import _tanh
from .launch import next_power_of_2

COLUMNS = 4096  # 8 warps, 16 logits a thread
# Of a position, that a program reads at once. One warp, which waits for no other: 2048 positions of 262144 logits took an H200 540 us, of
# which 500 are their bytes'; 4096 by 8 warps 588.
PART, POSITION_WARPS = 1024, 4
# Of a program that goes through a whole position: 8 warps; with few registers several share a processor, what they wait for is on its way.
SOFTMAX_COLUMNS, SOFTMAX_STAGES = 2048, 4


@triton.jit
def _cap(product, logits, size, softcap, COLUMNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    value, _ = _tanh(tl.load(product + place, mask=place < size, other=0.0).to(tl.float32) / softcap)
    tl.store(logits + place, value * softcap, mask=place < size)


@triton.jit
def _factors(temperature, softcap, HAS_CAP: tl.constexpr):
    """(height, slope) for `_tempered`; the temperature is read from memory, so that a recording serves every step."""
    height = (1 / tl.load(temperature)).to(tl.float32)
    if HAS_CAP:
        return height * softcap, 2.8853900817779268 / softcap
    return height, height


@triton.jit
def _tempered(value, height, slope, HAS_CAP: tl.constexpr):
    """height tanh(value log(2) slope / 2), or height value: the logits over the temperature. As near as fp32 is to `height`, the largest
    possible one: nearer, as by a series around 0, would change no probability."""
    value = value.to(tl.float32)
    if HAS_CAP:
        return height - 2 * height / (1 + tl.exp2(slope * value))
    return height * value


@triton.jit
def _read_part(logits, kept, figures, width, temperature, softcap, PARTS: tl.constexpr, COLUMNS: tl.constexpr, HAS_CAP: tl.constexpr,
               WHOLE: tl.constexpr):
    """Of each part of a position, figures fp32 [N, 3, PARTS]: the largest logit, the sum of e = exp(logit - largest), and that of e *
    (logit - largest). WHOLE: no part reaches over the end of a position."""
    position, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = position.to(tl.int64) * width + column
    height, slope = _factors(temperature, softcap, HAS_CAP)
    if WHOLE:
        value = _tempered(tl.load(logits + at), height, slope, HAS_CAP)
        tl.store(kept + at, value)
        largest = tl.max(value, 0)
        distance = value - largest
        e = tl.exp(distance)
    else:
        value = _tempered(tl.load(logits + at, mask=inside, other=0.0), height, slope, HAS_CAP)
        tl.store(kept + at, value, mask=inside)
        largest = tl.max(tl.where(inside, value, -3e38), 0)
        distance = tl.where(inside, value - largest, 0.0)
        e = tl.where(inside, tl.exp(distance), 0.0)
    figures += position.to(tl.int64) * (3 * PARTS) + part
    tl.store(figures, largest)
    tl.store(figures + PARTS, tl.sum(e, 0))
    tl.store(figures + 2 * PARTS, tl.sum(e * distance, 0))


@triton.jit
def _read_position(logits, uniforms, figures, sample, argmax, entropy, width, temperature, softcap, PARTS: tl.constexpr,
                   POWER: tl.constexpr, COLUMNS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Puts the parts of a position together, then goes through the one in which the running sum passes the target, and through the first
    that has the largest logit."""
    position, part, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, POWER), tl.arange(0, COLUMNS)
    at, is_part = figures + position * (3 * PARTS) + part, part < PARTS
    largest = tl.load(at, mask=is_part, other=-3e38)
    total, spread = tl.load(at + PARTS, mask=is_part, other=0.0), tl.load(at + 2 * PARTS, mask=is_part, other=0.0)
    overall = tl.max(largest, 0)
    distance = tl.maximum(largest - overall, -1e4)
    scale = tl.exp(distance)
    share = total * scale
    mass = tl.sum(share, 0)
    # Rounding may leave less than nothing of a sure position's.
    tl.store(entropy + position, tl.maximum(tl.log(mass) - tl.sum(scale * (spread + distance * total), 0) / mass, 0.0))
    target = tl.load(uniforms + position).to(tl.float32) * mass
    # Rounding may leave the whole sum below the target: then the last part, and in it the last token, that has any.
    running = tl.cumsum(share, 0)
    chosen = tl.min(tl.where((running > target) & (share > 0), part, POWER), 0)
    chosen = tl.where(chosen == POWER, tl.max(tl.where(share > 0, part, 0), 0), chosen)
    before = tl.sum(tl.where(part < chosen, share, 0.0), 0)
    height, slope = _factors(temperature, softcap, HAS_CAP)
    logits += position * width
    column = chosen * COLUMNS + lanes
    inside = column < width
    value = _tempered(tl.load(logits + column, mask=inside, other=0.0), height, slope, HAS_CAP)
    weight = tl.where(inside, tl.exp(value - overall), 0.0)
    past = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    found = tl.min(tl.where(past, column, 2147483647), 0)
    last = tl.max(tl.where(weight > 0, column, 0), 0)
    tl.store(sample + position, tl.where(found == 2147483647, last, found).to(tl.int64))
    column = tl.min(tl.where(is_part & (largest == overall), part, POWER), 0) * COLUMNS + lanes
    inside = column < width
    value = tl.where(inside, _tempered(tl.load(logits + column, mask=inside, other=0.0), height, slope, HAS_CAP), -3e38)
    # Its own largest, not that of `figures`: compilers may round a logit otherwise in another kernel.
    tl.store(argmax + position, tl.min(tl.where(inside & (value == tl.max(value, 0)), column, 2147483647), 0).to(tl.int64))


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
        _softmax[len(logits),](logits.contiguous(), probabilities, logits.shape[1], COLUMNS=SOFTMAX_COLUMNS, STAGES=SOFTMAX_STAGES,
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
    parts = triton.cdiv(width, PART)
    figures = torch.empty(count, 3, parts, dtype=torch.float32, device=product.device)
    shared = {"PARTS": parts, "COLUMNS": PART, "HAS_CAP": softcap is not None}
    if count:
        _read_part[(count * parts,)](product, kept, figures, width, temperature, softcap or 1.0, WHOLE=width % PART == 0,
                                     num_warps=1, **shared)
        _read_position[(count,)](product, uniforms, figures, sample, argmax, entropy, width, temperature, softcap or 1.0,
                                 POWER=next_power_of_2(parts), num_warps=POSITION_WARPS, **shared)
    return sample, argmax, entropy
