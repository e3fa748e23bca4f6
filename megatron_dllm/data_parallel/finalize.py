"""From the last backward to finished gradients, and what is counted over them.

The one order of reductions:

    1. over data-parallel ranks, bucket by bucket, begun during the last backward: dense parameters over dp_cp, experts over edp
    2. over tp, the gradients of which each rank has a share: `partial_over_tp` and `copies` of Placement
    3. between the first and the last pipeline rank, those of the embedding, which both have (`tied_to`)
    4. then the norm, in which every element of every real parameter counts once in the world

Losses hold global denominators, so that sums are what is wanted, never means.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..parallel import Group, ParallelContext, communication
from ..pipeline.p2p import sum_between
from ..tensor_parallel import sum_shared_gradients
from .buckets import GradientBuckets, Piece


def finalize_gradients(buckets: GradientBuckets, context: ParallelContext) -> None:
    """Steps 1 to 3, in place. Every rank of the world calls it once a step, after its last backward."""
    buckets.finish()
    # The ranges of a bucket are the same on all ranks of tp, since the shards of a parameter have one shape.
    sum_shared_gradients([(piece.gradient, piece.placement) for piece in buckets.pieces()], context.tp)
    last = context.pp.size - 1
    if last > 0 and context.pp.rank in (0, last):
        for piece in buckets.pieces():
            if piece.placement.tied_to is not None:
                sum_between(piece.gradient, last - context.pp.rank, context.pp)


def gradient_norm(pieces: Iterable[Piece], world: Group) -> Tensor:
    """L2 norm of the whole gradient, fp64: the same number on every rank."""
    pieces = list(pieces)
    own = [piece.gradient for piece in pieces if piece.counted]
    squares = torch.zeros((), dtype=torch.float64, device=pieces[0].gradient.device if pieces else None)
    if own:
        squares = torch.stack(torch._foreach_norm(own)).double().square().sum()
    return communication.all_reduce(squares, world).sqrt()


def count_zeros(pieces: Iterable[Piece], world: Group) -> int:
    """Elements of real parameters, over the whole model, whose gradient is exactly zero."""
    pieces = list(pieces)
    own = torch.zeros((), dtype=torch.int64, device=pieces[0].gradient.device if pieces else None)
    for piece in pieces:
        if piece.counted:
            own += (piece.gradient == 0).sum() - piece.num_fill
    return int(communication.all_reduce(own, world).item())
