"""Queries go to the keys: for canvases, whose queries are few while the keys before them are many.

Every rank gets the queries of all canvas parts, attends to the keys that it has, and gives each rank the partial results of its queries,
which merges them by log-sum-exp. What is sent grows with the canvases, and not with the sequence.

    forward     all-gather q; partial attention; all-to-all (out, lse); merge
    backward    all-gather q, d(out), lse, delta; dk and dv are whole where they arise; reduce-scatter dq
    saved       own q, k, v, merged out and lse; the other ranks' queries are gathered again
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel import Group, communication
from ..transformer.precision import at_least_fp32
from .partial import Partial, PartialPlan, partial_attention, partial_gradients


@dataclass(frozen=True)
class ReplicatedPlan:
    """counts: by rank, its queries. partial: those of all ranks, in rank order, over this rank's keys."""

    counts: tuple[int, ...]
    partial: PartialPlan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] of own queries [Q, h, d] over the keys of all ranks, of which own key and value [K, g, d] hold a share."""
        return _Replicated.apply(query, key, value, self, cp)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, plan, cp):
        everyone = communication.all_gather(query, cp, plan.counts)
        part = partial_attention(everyone, key, value, plan.partial)
        merged = _merged_parts(part, plan.counts, cp)
        ctx.plan, ctx.cp = plan, cp
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        plan, cp = ctx.plan, ctx.cp
        delta = (at_least_fp32(grad) * out).sum(-1)
        everyone, upstream = communication.all_gather(torch.cat([query, grad], -1), cp, plan.counts).chunk(2, -1)
        all_lse, all_delta = communication.all_gather(torch.stack([lse, delta]).transpose(0, 1), cp, plan.counts).unbind(1)
        gradients = partial_gradients(upstream, everyone, key, value, all_lse, all_delta, plan.partial)
        dquery = communication.reduce_scatter(gradients.query, cp, plan.counts)
        return dquery.to(query.dtype), gradients.key.to(key.dtype), gradients.value.to(value.dtype), None, None


def _merged_parts(part: Partial, counts: tuple[int, ...], cp: Group) -> Partial:
    """Of all ranks' parts for our queries the merged result: each of R ranks sends (R - 1) / R of its part."""
    own = counts[cp.rank]
    parts = communication.exchange(torch.cat([part.out, part.lse[..., None]], -1), counts, [own] * cp.size, cp)
    merged, *others = (Partial(piece[..., :-1], piece[..., -1]) for piece in parts.split(own)) if own else [part_of_none(part)]
    for other in others:
        merged = merged.merge(other)
    return merged


def part_of_none(part: Partial) -> Partial:
    """The result of no queries."""
    return Partial(part.out[:0], part.lse[:0])
