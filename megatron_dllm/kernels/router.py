"""From router logits to a token's experts and weights: softmax, the k largest and their renormalisation in one read, and back; what the
choices count up to on the way.

Legend: T tokens, E experts, k choices a token, H hidden, S streams of tokens, P splits of the product that makes the logits.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_2, persistent_programs
from .rms_norm import sum_partials
from .router_product import input_gradient, partial_logits, parts_of
from .tally import ENTROPY_UNITS, Tally

TINY = tl.constexpr(1e-30)  # the least divisor: of rows outside, and of experts that a replay has chosen and that have come to nothing
NUMBERS = 1024  # of a tile of tokens x experts: with 128 experts 8 tokens a program, so that 1280 tokens fill 132 processors


@triton.jit
def _count(probability, expert, inside, row, num_tokens, stream, load, entropy, EXPERTS: tl.constexpr, STREAMS: tl.constexpr,
           UNITS: tl.constexpr):
    """Add a tile's choices (expert [R, k], inside) and entropies (of probability [R, E])."""
    kind = tl.load(stream + row, mask=row < num_tokens, other=STREAMS)
    tl.atomic_add(load + kind[:, None] * EXPERTS + expert, tl.full(expert.shape, 1, tl.int64), mask=inside & (kind < STREAMS)[:, None],
                  sem="relaxed")
    own = -tl.sum(tl.where(probability > 0, probability * tl.log(tl.maximum(probability, TINY)), 0.0), 1)
    own = (own.to(tl.float64) * UNITS).to(tl.int64)
    for number in tl.static_range(STREAMS):
        total = tl.sum(tl.where(kind == number, own, 0), 0)
        # Additions to one place wait for each other, and a tile mostly has tokens of one stream.
        tl.atomic_add(entropy + number, total, mask=total != 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def _forward(logits, scale, bias, given, probabilities, indices, weights, stream, load, entropy, num_tokens, SPLITS: tl.constexpr,
             EXPERTS: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE_CHOICES: tl.constexpr,
             HAS_BIAS: tl.constexpr, HAS_INDICES: tl.constexpr, STREAMS: tl.constexpr, UNITS: tl.constexpr):
    """logits [P, T, E], to be summed up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, choice = tl.arange(0, COLUMNS)[None, :], tl.arange(0, WIDE_CHOICES)[None, :]
    at, inside = row[:, None] * EXPERTS + column, (row < num_tokens)[:, None] & (column < EXPERTS)
    values = tl.load(logits + at, mask=inside, other=-1e30)  # finite: rows outside would give inf - inf
    for split in tl.static_range(1, SPLITS):
        values += tl.load(logits + split * num_tokens.to(tl.int64) * EXPERTS + at, mask=inside, other=0.0)
    values = tl.where(inside, tl.exp(values - tl.max(values, 1)[:, None]), 0.0)
    probability = values / tl.maximum(tl.sum(values, 1), TINY)[:, None]
    tl.store(probabilities + at, probability, mask=inside)
    score = probability
    if HAS_BIAS:
        score += tl.load(bias + column, mask=column < EXPERTS, other=0.0)
    score = tl.where(inside, score, -float("inf"))
    at, inside = row[:, None] * CHOICES + choice, (row < num_tokens)[:, None] & (choice < CHOICES)
    expert, chosen = tl.zeros((ROWS, WIDE_CHOICES), tl.int64), tl.zeros((ROWS, WIDE_CHOICES), tl.float32)
    if HAS_INDICES:
        expert = tl.load(given + at, mask=inside, other=0)
    for number in tl.static_range(CHOICES):
        if HAS_INDICES:
            best = tl.sum(tl.where(choice == number, expert, 0), 1)[:, None]
        else:
            best = tl.min(tl.where(score == tl.max(score, 1)[:, None], column, EXPERTS - 1), 1)[:, None].to(tl.int64)
            expert = tl.where(choice == number, best, expert)
            score = tl.where(column == best, -float("inf"), score)
        chosen = tl.where(choice == number, tl.sum(tl.where(column == best, probability, 0.0), 1)[:, None], chosen)
    factor = tl.load(scale + expert, mask=inside, other=0.0)
    if not HAS_INDICES:
        tl.store(indices + at, expert, mask=inside)
    tl.store(weights + at, chosen * factor / tl.maximum(tl.sum(chosen, 1), TINY)[:, None], mask=inside)
    if STREAMS > 0:
        _count(probability, expert, inside, row, num_tokens, stream, load, entropy, EXPERTS, STREAMS, UNITS)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _backward(probabilities, indices, scale, dweights, dprobabilities, dlogits, partial, num_tokens, num_tiles, EXPERTS: tl.constexpr,
              CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
              HAS_PROBABILITIES: tl.constexpr):
    column = tl.arange(0, COLUMNS)[None, :]
    factor = tl.load(scale + column, mask=column < EXPERTS, other=0.0)
    dscale = tl.zeros((ROWS, COLUMNS), tl.float32)
    number = tl.program_id(0)
    while number < num_tiles:
        row = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        at, inside = row[:, None] * EXPERTS + column, (row < num_tokens)[:, None] & (column < EXPERTS)
        probability = tl.load(probabilities + at, mask=inside, other=0.0)
        grad = tl.zeros((ROWS, COLUMNS), tl.float32)
        if HAS_WEIGHTS:
            # By expert instead of by choice: whether it is chosen, and the gradient of its weight. An expert is chosen once.
            for choice in tl.static_range(CHOICES):
                expert = tl.load(indices + row * CHOICES + choice, mask=row < num_tokens, other=-1)[:, None]
                dweight = tl.load(dweights + row * CHOICES + choice, mask=row < num_tokens, other=0.0)[:, None]
                grad += tl.where(column == expert, dweight, 0.0)
                if choice == 0:
                    chosen = column == expert
                else:
                    chosen = chosen | (column == expert)
            share = tl.where(chosen, probability, 0.0)
            total = tl.maximum(tl.sum(share, 1), TINY)[:, None]
            share /= total
            dscale += grad * share
            grad *= factor
            grad = tl.where(chosen, (grad - tl.sum(grad * share, 1)[:, None]) / total, 0.0)
        if HAS_PROBABILITIES:
            grad += tl.load(dprobabilities + at, mask=inside, other=0.0)
        tl.store(dlogits + at, probability * (grad - tl.sum(probability * grad, 1)[:, None]), mask=inside)
        number += tl.num_programs(0)
    if HAS_WEIGHTS:
        column = tl.arange(0, COLUMNS)
        tl.store(partial + tl.program_id(0) * EXPERTS + column, tl.sum(dscale, 0), mask=column < EXPERTS)


def _tile(num_experts: int) -> tuple[int, int]:
    columns = next_power_of_2(num_experts)
    return max(1, NUMBERS // columns), columns


def _choose(partial: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None,
            tally: Tally | None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, indices, probabilities) of logits [P, T, E]."""
    splits, num_tokens, num_experts = partial.shape
    probabilities, weights = partial.new_empty(num_tokens, num_experts), partial.new_empty(num_tokens, choices)
    indices = torch.empty(num_tokens, choices, dtype=torch.int64, device=partial.device) if given is None else given.contiguous()
    rows, columns = _tile(num_experts)
    counted = (None, None, None) if tally is None else (tally.stream, tally.load, tally.entropy)
    if num_tokens:
        _forward[(triton.cdiv(num_tokens, rows),)](
            partial, scale, bias, indices, probabilities, indices, weights, *counted, num_tokens, SPLITS=splits, EXPERTS=num_experts,
            CHOICES=choices, ROWS=rows, COLUMNS=columns, WIDE_CHOICES=next_power_of_2(choices), HAS_BIAS=bias is not None,
            HAS_INDICES=given is not None, STREAMS=0 if tally is None else len(tally.load), UNITS=ENTROPY_UNITS)
    return weights, indices if given is None else given.view_as(given), probabilities


def _gradients(probabilities: Tensor, indices: Tensor, scale: Tensor, dweights: Tensor | None, dprobabilities: Tensor | None, *,
               wants_scale: bool) -> tuple[Tensor | None, Tensor | None]:
    """(of the logits, of the scale if it is wanted)."""
    (num_tokens, num_experts), choices = probabilities.shape, indices.shape[1]
    if dweights is None and dprobabilities is None:
        return None, None
    dlogits = torch.empty_like(probabilities)
    if not num_tokens:
        return dlogits, torch.zeros_like(scale) if wants_scale else None
    rows, columns = _tile(num_experts)
    tiles = triton.cdiv(num_tokens, rows)
    programs = persistent_programs(scale.device, tiles)
    partial = None if dweights is None else scale.new_empty(programs, num_experts)
    _backward[(programs,)](
        probabilities, indices, scale, None if dweights is None else dweights.contiguous(),
        None if dprobabilities is None else dprobabilities.contiguous(), dlogits, partial, num_tokens, tiles, EXPERTS=num_experts,
        CHOICES=choices, ROWS=rows, COLUMNS=columns, HAS_WEIGHTS=dweights is not None, HAS_PROBABILITIES=dprobabilities is not None)
    return dlogits, sum_partials(partial, scale.dtype) if wants_scale and partial is not None else None


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None):
        weights, indices, probabilities = _choose(logits.contiguous()[None], scale, bias, choices, given, None)
        ctx.save_for_backward(probabilities, indices, scale)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return weights, indices, probabilities

    @staticmethod
    def backward(ctx, dweights: Tensor | None, _, dprobabilities: Tensor | None):
        return *_gradients(*ctx.saved_tensors, dweights, dprobabilities, wants_scale=ctx.needs_input_grad[1]), None, None, None


class _RouteTokens(torch.autograd.Function):
    """Saved beside what `_Route` saves: the weight's parts, and x for a weight that is trained."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None,
                tally: Tally | None):
        parts = parts_of(weight)
        weights, indices, probabilities = _choose(partial_logits(x, parts), scale, bias, choices, given, tally)
        ctx.save_for_backward(probabilities, indices, scale, parts, x if ctx.needs_input_grad[1] else None)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return weights, indices, probabilities

    @staticmethod
    def backward(ctx, dweights: Tensor | None, _, dprobabilities: Tensor | None):
        *saved, parts, x = ctx.saved_tensors
        needs_x, needs_weight, needs_scale, *_ = ctx.needs_input_grad
        dlogits, dscale = _gradients(*saved, dweights, dprobabilities, wants_scale=needs_scale)
        if dlogits is None:
            return (None,) * 7
        dx = input_gradient(dlogits, parts) if needs_x else None
        return dx, (dlogits.t() @ x).to(ctx.dtype) if needs_weight else None, dscale, None, None, None, None


def route(logits: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k], indices int64 [T, k], probabilities [T, E]) of logits [T, E], all numbers fp32.

    probabilities are the softmax; indices the k largest of them (plus `bias` [E]), by falling value, of equal ones the lowest, or `given`
    [T, k]; a choice's weight is its share of the chosen probabilities times scale [E] of its expert.
    """
    return _Route.apply(logits, scale, bias, choices, given)


def route_tokens(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None = None,
                 tally: Tally | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`route` of the logits x W^T of x fp32 [T, H] and weight [E, H], fp32 or bf16; counted where there is a `tally`."""
    return _RouteTokens.apply(x, weight, scale, bias, choices, given, tally)
