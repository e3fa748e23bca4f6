"""The head's work between its matrix products: soft cap, bonus, softmax statistics and the gradient, one read of the product each."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
WARPS = 4  # 16 logits a thread
PARTS = 4  # a token's vocabulary is read by so many programs, so that a chunk's last ones end near each other
STAGES = 4
# A soft cap up to which exp(logit - cap) is summed without the largest logit: the least such number, exp(-80), is far from fp32's.
LARGEST_KNOWN_PEAK = 40.0


@triton.jit
def _tanh(x):
    """(tanh, its derivative) from exp(-2 |x|); near 0, where 1 - exp cancels, the series."""
    size = tl.abs(x)
    small = tl.exp2(-2.8853900817779268 * size)
    part = 1 / (1 + small)
    square = x * x
    series = size * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    value = tl.where(size < 0.2, series, (1 - small) * part)
    return tl.where(x < 0, -value, value), 4 * small * part * part


@triton.jit
def _logits(values, column, softcap, seen, extra, HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr):
    """(logits with the bonus, their derivative by the product)."""
    slope = values * 0 + 1
    if HAS_CAP:
        values, slope = _tanh(values * (1 / softcap))  # a division a logit would take as long as an exponential
        values *= softcap
    if HAS_BONUS:
        values += tl.where(column == seen, extra, 0.0)
    return values, slope


@triton.jit
def _below_cap(values, softcap):
    """softcap - softcap * tanh(values / softcap), to an error of some units of softcap in fp32."""
    return 2 * softcap / (1 + tl.exp2(values * (2.8853900817779268 / softcap)))


@triton.jit
def _statistics(product, target, observed, bonus, own, num_tokens, width, softcap, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
                HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_PEAK: tl.constexpr, IS_WHOLE: tl.constexpr, STAGES: tl.constexpr):
    """With HAS_PEAK no logit is above the soft cap, which is then taken off before exp instead of the largest so far. IS_WHOLE: each part
    is a multiple of COLUMNS."""
    token, part = tl.program_id(0), tl.program_id(1)
    product += token.to(tl.int64) * width
    per_part = tl.cdiv(tl.cdiv(width, PARTS), COLUMNS) * COLUMNS
    wanted = tl.load(target + token).to(tl.int32)
    seen, extra = 0, 0.0
    if HAS_BONUS:
        seen, extra = tl.load(observed + token).to(tl.int32), tl.load(bonus + token).to(tl.float32)
    end = tl.minimum((part + 1) * per_part, width)
    # Each lane has its own largest so far, the sum of exp(logit - largest), and where the largest came first.
    largest = tl.full((COLUMNS,), -3e38, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    first = tl.full((COLUMNS,), 2147483647, tl.int32)
    # In stages: what a program has read ahead is what keeps the memory busy.
    for at in tl.range(part * per_part, end, COLUMNS, num_stages=STAGES):
        column = at + tl.arange(0, COLUMNS)
        inside = None if IS_WHOLE else column < end
        values = tl.load(product + column, mask=inside).to(tl.float32)
        if HAS_PEAK:
            # A larger product has the larger logit, so that the products alone are compared.
            share = tl.exp2(-1.4426950408889634 * _below_cap(values, softcap))
            total += share if IS_WHOLE else tl.where(inside, share, 0.0)
            if not IS_WHOLE:
                values = tl.where(inside, values, -3e38)
        else:
            values, _ = _logits(values, column, softcap, seen, extra, HAS_CAP, HAS_BONUS)
            if not IS_WHOLE:
                values = tl.where(inside, values, -float("inf"))
            small = tl.exp(-tl.abs(values - largest))
            total = tl.where(values > largest, total * small + 1, total + small)
        first = tl.where(values > largest, column, first)
        largest = tl.maximum(values, largest)
    overall = tl.max(largest, 0)
    best = tl.min(tl.where(largest == overall, first, 2147483647), 0)
    if HAS_PEAK:
        # A part without tokens has a sum of zero and no largest logit.
        capped, _ = _logits(tl.maximum(overall, -1e4 * softcap), 0, softcap, 0, 0.0, HAS_CAP, False)
        overall = tl.where(overall > -3e38, capped, overall)
        sum_exp = tl.sum(total, 0) * tl.exp(tl.minimum(softcap - overall, 2 * softcap))
    else:
        sum_exp = tl.sum(total * tl.exp(largest - overall), 0)
    ours = (wanted >= part * per_part) & (wanted < end)
    value = tl.load(product + wanted, mask=ours, other=0.0).to(tl.float32)
    logit, _ = _logits(value, wanted, softcap, seen, extra, HAS_CAP, HAS_BONUS)
    own += part.to(tl.int64) * 4 * num_tokens + token
    tl.store(own, overall)
    tl.store(own + num_tokens, sum_exp)
    tl.store(own + 2 * num_tokens, tl.where(ours, logit, 0.0))
    tl.store(own + 3 * num_tokens, (best == wanted).to(tl.float32))


@triton.jit
def _gradient(product, target, token_weights, observed, bonus, largest, scale, grad, width, softcap, COLUMNS: tl.constexpr,
              HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = token.to(tl.int64) * width
    seen, extra = 0, 0.0
    if HAS_BONUS:
        seen, extra = tl.load(observed + token).to(tl.int32), tl.load(bonus + token).to(tl.float32)
    values = tl.load(product + start + column, mask=column < width, other=0.0).to(tl.float32)
    logits, slope = _logits(values, column, softcap, seen, extra, HAS_CAP, HAS_BONUS)
    probability = tl.exp(logits - tl.load(largest + token)) * tl.load(scale + token)
    wanted = tl.load(target + token).to(tl.int32)
    out = (probability - tl.where(column == wanted, 1.0, 0.0)) * tl.load(token_weights + token).to(tl.float32) * slope
    tl.store(grad + start + column, out.to(grad.dtype.element_ty), mask=column < width)


@triton.jit
def _probabilities(product, largest, scale, probability, width, softcap, COLUMNS: tl.constexpr, HAS_CAP: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = token.to(tl.int64) * width + column
    values = tl.load(product + at, mask=column < width, other=0.0).to(tl.float32)
    logits, _ = _logits(values, column, softcap, 0, 0.0, HAS_CAP, False)
    out = tl.exp(logits - tl.load(largest + token)) * tl.load(scale + token)
    tl.store(probability + at, out.to(probability.dtype.element_ty), mask=column < width)


def softmax_statistics(product: Tensor, target: Tensor, softcap: float | None, observed: Tensor | None, bonus: Tensor | None) -> Tensor:
    """fp32 [PARTS, 4, n], a part of the vocabulary each, lowest tokens first: the largest logit, the sum of exp(logit - largest), the logit
    at `target` (0 where it is elsewhere), and 1 where the first of the largest is at `target`.

        product   [n, v]   hidden @ W.T, before the soft cap
        target    [n]      column; -1 where the token is not in [0, v)
        observed  [n]      column whose logit gets `bonus` [n] after the soft cap; -1 as above
    """
    num_tokens, width = product.shape
    own = product.new_zeros(PARTS, 4, num_tokens, dtype=torch.float32)
    if not width:
        own[:, 0] = -torch.inf
    elif num_tokens:
        _statistics[(num_tokens, PARTS)](product, target, observed, bonus, own, num_tokens, width, softcap or 1.0, PARTS=PARTS,
                                         COLUMNS=COLUMNS, HAS_CAP=softcap is not None, HAS_BONUS=observed is not None,
                                         HAS_PEAK=observed is None and softcap is not None and softcap <= LARGEST_KNOWN_PEAK,
                                         IS_WHOLE=width % (PARTS * COLUMNS) == 0, STAGES=STAGES, num_warps=WARPS)
    return own


def logit_gradient(product: Tensor, target: Tensor, token_weights: Tensor, largest: Tensor, scale: Tensor, softcap: float | None,
                   observed: Tensor | None, bonus: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, v] in `dtype`: token_weights * (p - 1 at target) * d(logit)/d(product), with p = exp(logit - largest) * scale; largest, scale and
    token_weights fp32 [n], the others as in `softmax_statistics`. In fp32 it overwrites `product`."""
    num_tokens, width = product.shape
    grad = product if dtype == product.dtype else torch.empty_like(product, dtype=dtype)
    if grad.numel():
        _gradient[(num_tokens, triton.cdiv(width, COLUMNS))](
            product, target, token_weights, observed, bonus, largest, scale, grad, width, softcap or 1.0, COLUMNS=COLUMNS,
            HAS_CAP=softcap is not None, HAS_BONUS=observed is not None, num_warps=WARPS)
    return grad


def probabilities(product: Tensor, largest: Tensor, scale: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """[n, v] in `dtype`: exp(logit - largest) * scale, with fp32 largest and scale [n] (contiguous). In fp32 it overwrites `product`."""
    num_tokens, width = product.shape
    result = product if dtype == product.dtype else torch.empty_like(product, dtype=dtype)
    if result.numel():
        _probabilities[(num_tokens, triton.cdiv(width, COLUMNS))](product, largest, scale, result, width, softcap or 1.0, COLUMNS=COLUMNS,
                                                                  HAS_CAP=softcap is not None, num_warps=WARPS)
    return result
