"""Queries stay where they are and keys come to them: for the clean stream, and for canvases that are dealt out whole.

    HaloPlan     each rank sends another the keys that its windows reach, and no more; one all-to-all
    GatherPlan   all_gather: every rank gets all keys; their gradient is reduce-scattered
    PairsPlan    p2p: rank after rank gives the keys that ours reach, attention to them hides the transfer of the next; results are merged

Own keys are [held clean keys ; own canvas keys]; canvas keys are on the rank of their queries and never sent.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel import Group, all_to_all, gather_sequence
from ..parallel.communication import Pending
from ..transformer.core_attention import AttentionPlan, attend
from ..transformer.precision import at_least_fp32
from ..transformer.rows import Rows
from .partial import PartialPlan, partial_attention, partial_gradients
from .transfers import stacked, start_shift, unstacked


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
class Meeting:
    """What is done i ranks away: rank r sends those of its held keys that the queries of rank r + i reach, and gets such from rank r - i.

    partial: own queries over what is received, `num_received` keys.
    """

    send: Rows
    num_sent: int
    num_received: int
    partial: PartialPlan


@dataclass(frozen=True)
class PairsPlan:
    """own: own queries over [held ; canvas]; meetings: with the keys of the ranks 1, 2, ..., R - 1 before ours."""

    num_held: int
    own: PartialPlan
    meetings: tuple[Meeting, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]."""
        return _Pairs.apply(query, key, value, self, cp)


class _Pairs(torch.autograd.Function):
    """Attention to one rank's keys hides the transfer of the next one's.

    Backward: the same keys come once more, and their dk and dv go straight home, in the keys' dtype, where they are added up in fp32 at
    least. Saved: own q, k, v, merged out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, plan, cp):
        coming = _coming(key, value, plan, cp)
        merged = partial_attention(query, key, value, plan.own)
        for meeting, received in coming:
            if meeting.num_received:
                merged = merged.merge(partial_attention(query, *unstacked(received), meeting.partial))
        out = merged.out.to(query.dtype)
        ctx.plan, ctx.cp = plan, cp
        ctx.save_for_backward(query, key, value, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        plan, cp = ctx.plan, ctx.cp
        delta = (at_least_fp32(grad) * out).sum(-1)
        coming = _coming(key, value, plan, cp)
        own = partial_gradients(grad, query, key, value, lse, delta, plan.own)
        dquery, dkeys, home = own.query, stacked(own.key, own.value), None
        for distance, (meeting, received) in enumerate(coming, start=1):
            dreceived = torch.zeros_like(received)
            if meeting.num_received:
                found = partial_gradients(grad, query, *unstacked(received), lse, delta, meeting.partial)
                dquery, dreceived = dquery + found.query, stacked(found.key, found.value).to(key.dtype)
            if home is not None:
                _add(dkeys, *home)
            # Back the way that the keys came.
            home = meeting, start_shift(dreceived, cp, -distance, (meeting.num_sent, *dreceived.shape[1:]))
        _add(dkeys, *home)
        dkey, dvalue = unstacked(dkeys)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None


def _coming(key: Tensor, value: Tensor, plan: PairsPlan, cp: Group) -> Iterator[tuple[Meeting, Tensor]]:
    """(meeting, keys and values [K, 2g, d] that come for it), one by one; the next ones are under way while these are used."""
    held = stacked(key[:plan.num_held], value[:plan.num_held])

    def start(distance: int) -> Pending:
        meeting = plan.meetings[distance - 1]
        return start_shift(meeting.send.take(held), cp, distance, (meeting.num_received, *held.shape[1:]))

    def each(pending: Pending) -> Iterator[tuple[Meeting, Tensor]]:
        for distance, meeting in enumerate(plan.meetings, start=1):
            received = pending.wait()
            if distance < len(plan.meetings):
                pending = start(distance + 1)
            yield meeting, received

    return each(start(1))  # the first ones are under way before anything is asked for


def _add(total: Tensor, meeting: Meeting, pending: Pending) -> None:
    """Adds what has come home to the rows of the held keys."""
    gradient = pending.wait().to(total.dtype)
    if isinstance(meeting.send.index, slice):
        total[meeting.send.index] += gradient
    else:
        total.index_add_(0, meeting.send.index, gradient)
