"""Whole tensors from shards: for exports, checkpoints of few ranks, and comparisons of layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import communication
from .context import ParallelContext
from .placement import Placement


def gather_whole(local: Tensor, placement: Placement, context: ParallelContext) -> Tensor:
    """The whole tensor [placement.shape] from each rank's local one (parameter, gradient or state), on every rank.

    Every rank of the axes that cut the tensor takes part; fill is left out.
    """
    for axis, dim in placement.axes.items():
        group = context.group(axis)
        if dim is None:
            continue
        pieces = communication.all_gather(local.unsqueeze(0), group)
        if axis == "tp":
            pieces = pieces[:: placement.copies]
        local = torch.cat(pieces.unbind(0), dim)
    for dim, size in enumerate(placement.shape):
        local = local.narrow(dim, 0, size)
    return local
