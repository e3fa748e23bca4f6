"""Queries stay where they are and keys come to them: for the clean stream, and for canvases that are dealt out whole.

    HaloPlan     each rank sends another the keys that its windows reach, and no more; one all-to-all
    GatherPlan   all_gather: every rank gets all keys; their gradient is reduce-scattered
    RingPlan     p2p: each rank's keys go round, attention to one rank's keys hides the transfer of the next; partial results are merged

Own keys are [held clean keys ; own canvas keys]; canvas keys are on the rank of their queries and never sent.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel import Group, all_to_all, gather_sequence
from ..transformer.core_attention import AttentionPlan, attend
from ..transformer.precision import at_least_fp32
from ..transformer.rows import Rows
from .partial import PartialPlan, partial_attention, partial_gradients
from .transfers import stacked, start_pass_on, unstacked


@dataclass(frozen=True)
class HaloPlan:
    """send: by rank, those of the held keys that it reaches; send_counts, receive_counts: how many go to each rank, and come from it.

    attention: over [held ; received ; canvas].
    """

    num_held: int
    send: tuple[Rows, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    attention: AttentionPlan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]."""
        own = stacked(key, value)
        received = all_to_all(torch.cat([rows.take(own) for rows in self.send]), self.send_counts, self.receive_counts, cp)
        at_hand = torch.cat([own[:self.num_held], received, own[self.num_held:]])
        if len(query) == 0:
            # No row, but a way back to the keys: the other ranks wait for our part of the backward's exchange. A product, since it saves
            # its factors: a recompute goes as far as the last tensor saved, and has to get beyond the forward's exchange as theirs does.
            return query * at_hand[:0, :1].expand(-1, query.shape[1], -1)
        return attend(query, *unstacked(at_hand), self.attention)


@dataclass(frozen=True)
class GatherPlan:
    """counts: by rank, its held keys. order: where the j-th clean key stands among those of rank 0, 1, ..."""

    counts: tuple[int, ...]
    order: Rows
    partial: PartialPlan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]."""
        own, num_held = stacked(key, value), self.counts[cp.rank]
        everyone = self.order.take(gather_sequence(own[:num_held], cp, self.counts))
        keys, values = unstacked(torch.cat([everyone, own[num_held:]]))
        return _Local.apply(query, keys, values, self.partial)


class _Local(torch.autograd.Function):
    """Attention to keys at hand. Saved: its inputs, out and lse."""

    @staticmethod
    def forward(ctx, query, key, value, plan):
        part = partial_attention(query, key, value, plan)
        out = part.out.to(query.dtype)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, out, part.lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        delta = (at_least_fp32(grad) * out).sum(-1)
        found = partial_gradients(grad, query, key, value, lse, delta, ctx.plan)
        return found.query.to(query.dtype), found.key.to(key.dtype), found.value.to(value.dtype), None


@dataclass(frozen=True)
class RingPlan:
    """counts: by rank, its held keys. parts: by rank, own queries over the keys that it holds; for our own rank canvas keys after them."""

    counts: tuple[int, ...]
    parts: tuple[PartialPlan, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]."""
        return _Ring.apply(query, key, value, self, cp)


class _Ring(torch.autograd.Function):
    """At step i this rank has the keys of rank r - i, and passes them on while it attends to them; so R - 1 passes forward.

    Backward: keys go round once more, and each rank's dk and dv (fp32 at least) follow them, a step behind, until they are home: R passes.
    Saved: own q, k, v, merged out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, plan, cp):
        merged = None
        for source, held in _round(key, value, plan, cp):
            part = partial_attention(query, *unstacked(held), plan.parts[source])
            merged = part if merged is None else merged.merge(part)
        out = merged.out.to(query.dtype)
        ctx.plan, ctx.cp = plan, cp
        ctx.save_for_backward(query, key, value, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        plan, cp = ctx.plan, ctx.cp
        delta, dquery, num_held = (at_least_fp32(grad) * out).sum(-1), 0, plan.counts[cp.rank]
        following = None
        for source, held in _round(key, value, plan, cp):
            found = partial_gradients(grad, query, *unstacked(held), lse, delta, plan.parts[source])
            dquery = dquery + found.query
            dheld = stacked(found.key, found.value)
            if source == cp.rank:
                dheld, dcanvas = dheld.tensor_split([num_held])
            if following is not None:
                dheld = dheld + following.wait()
            # What comes next are the gradients of the keys that come next.
            after = plan.counts[(source - 1) % cp.size]
            following = start_pass_on(dheld, cp, (after, *dheld.shape[1:]))
        dkey, dvalue = unstacked(torch.cat([following.wait(), dcanvas]))
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None


def _round(key: Tensor, value: Tensor, plan: RingPlan, cp: Group):
    """(rank, its keys and values [K, 2g, d]) from our own backwards; the next ones are under way while these are used."""
    held = stacked(key, value)
    passing = held[:plan.counts[cp.rank]]
    for step in range(cp.size):
        source = (cp.rank - step) % cp.size
        if step == cp.size - 1:
            yield source, held
            return
        pending = start_pass_on(passing, cp, (plan.counts[(source - 1) % cp.size], *held.shape[1:]))
        yield source, held
        held = passing = pending.wait()
