"""Collectives with gradients, each named for what it does to the value and to the gradient; identity over one rank.

    function                    value            gradient
    sum_over                    all-reduce       identity (every rank goes on with the same computation)
    sum_grad_over               identity         all-reduce (every rank has computed its share of it)
    gather_sequence             all-gather       reduce-scatter (shares: e.g. into a column-parallel linear)
    gather_replicated_sequence  all-gather       own slice (every rank has the whole gradient)
    scatter_sum_sequence        reduce-scatter   all-gather
    split_sequence              own slice        all-gather (each rank has the gradient of its slice)
    all_to_all                  all-to-all       all-to-all back

Sequences lie along dimension 0. `counts` [R] gives the lengths of the ranks' pieces where they are not equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import communication
from .context import Group


def sum_over(x: Tensor, group: Group, *, overwrite: bool = False) -> Tensor:
    """Sum of the ranks' `x`, with `overwrite` in its place; the gradient passes as it is."""
    return x if _alone(group) else _SumOver.apply(x, group, overwrite)


def sum_grad_over(x: Tensor, group: Group) -> Tensor:
    """`x` as it is; its gradient is the sum of the ranks'."""
    return x if _alone(group) else _SumGradOver.apply(x, group)


def gather_sequence(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """The ranks' `x` one after the other; the gradient is summed over the ranks and cut."""
    return x if _alone(group) else _GatherSequence.apply(x, group, counts)


def gather_replicated_sequence(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """The ranks' `x` one after the other; the gradient, equal on all ranks, is cut."""
    return x if _alone(group) else _GatherReplicatedSequence.apply(x, group, counts)


def scatter_sum_sequence(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """Our piece of the sum of the ranks' `x`; the gradient is gathered."""
    return x if _alone(group) else _ScatterSumSequence.apply(x, group, counts)


def split_sequence(x: Tensor, group: Group, counts: Sequence[int] | None = None) -> Tensor:
    """Our piece of `x`, which is equal on all ranks; the gradient is gathered."""
    return x if _alone(group) else _SplitSequence.apply(x, group, counts)


def all_to_all(x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group) -> Tensor:
    """What the ranks sent us, in rank order: rank r gets the next send_counts[r] rows of `x`; the gradient goes back."""
    if _alone(group) and list(send_counts) == list(receive_counts) == [x.shape[0]]:
        return x
    return _AllToAll.apply(x, send_counts, receive_counts, group)


def _alone(group: Group) -> bool:
    if not isinstance(group, Group):
        raise TypeError(f"expected a Group, got {group!r}; a collective over one rank takes Group.single(name), never None")
    return group.size == 1


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, overwrite):
        if overwrite:
            ctx.mark_dirty(x)
        return communication.all_reduce(x, group, overwrite=overwrite)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _SumGradOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return communication.all_reduce(grad, ctx.group), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, counts):
        ctx.group, ctx.counts = group, counts
        return communication.all_gather(x, group, counts)

    @staticmethod
    def backward(ctx, grad):
        return communication.reduce_scatter(grad, ctx.group, ctx.counts), None, None


class _GatherReplicatedSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, counts):
        ctx.group, ctx.counts = group, counts
        return communication.all_gather(x, group, counts)

    @staticmethod
    def backward(ctx, grad):
        return communication.own_slice(grad, ctx.group, ctx.counts), None, None


class _ScatterSumSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, counts):
        ctx.group, ctx.counts = group, counts
        return communication.reduce_scatter(x, group, counts)

    @staticmethod
    def backward(ctx, grad):
        return communication.all_gather(grad, ctx.group, ctx.counts), None, None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, counts):
        ctx.group, ctx.counts = group, counts
        # A copy: a slice would keep the whole tensor alive.
        return communication.own_slice(x, group, counts).clone()

    @staticmethod
    def backward(ctx, grad):
        return communication.all_gather(grad, ctx.group, ctx.counts), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send_counts, receive_counts, group):
        ctx.send_counts, ctx.receive_counts, ctx.group = send_counts, receive_counts, group
        return communication.exchange(x, send_counts, receive_counts, group)

    @staticmethod
    def backward(ctx, grad):
        return communication.exchange(grad, ctx.receive_counts, ctx.send_counts, ctx.group), None, None, None
