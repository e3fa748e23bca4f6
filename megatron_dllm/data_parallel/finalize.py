"""From the last backward to finished gradients, and what is counted over them.

The one order of reductions:

    1. over data-parallel ranks, bucket by bucket, begun during the last backward: dense parameters over dp_cp, experts over edp
    2. over tp, the gradients of which each rank has a share: `partial_over_tp` and `copies` of Placement
    3. between the first and the last pipeline rank, those of the embedding, which both have (`tied_to`)
    4. then the norm

Losses hold global denominators, so that sums are what is wanted, never means.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.launch import takes
from ..parallel import ParallelContext, communication
from ..pipeline.p2p import sum_between
from ..tensor_parallel import sum_shared_gradients
from .buckets import GradientBuckets, Piece

if TYPE_CHECKING:
    from ..kernels.pieces import Pieces as KernelPieces


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


class GradientSums:
    """What is summed over the whole finished gradient, in which every element of every real parameter counts once in the world.

    pieces  what this rank has the sum of, in buckets that stay where they are
    """

    def __init__(self, pieces: Iterable[Piece], context: ParallelContext):
        self.world, self.device = context.world, context.device  # also of a rank without pieces, whose stages are empty
        self.own = [piece for piece in pieces if piece.counted]
        gradients = [piece.gradient for piece in self.own]
        self.by_kernel = takes(*gradients) and all(gradient.dtype == torch.float32 for gradient in gradients)
        self._tables: dict[tuple[str, ...], KernelPieces] = {}  # by the parameters that are read
        self._zeros: Tensor | None = None  # of all pieces, if they have just been read, until they are asked for

    def norm(self) -> Tensor:
        """L2 norm, fp64: the same number on every rank. Gradients whose squares were summed up as they were made are not read again."""
        known = [piece.main_gradient.squares for piece in self.own if _has_squares(piece)]
        unknown = [piece for piece in self.own if not _has_squares(piece)]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if known:
            squares += torch.cat(known).double().sum()
        if unknown and self.by_kernel:
            read, zeros = self._sums(unknown)
            squares += read
            self._zeros = None if known else zeros
        elif unknown:
            squares += torch.stack(torch._foreach_norm([piece.gradient for piece in unknown])).double().square().sum()
        return communication.all_reduce(squares, self.world).sqrt()

    def num_zeros(self) -> int:
        """Elements of real parameters that are exactly zero; as `norm` has just read them, if it has."""
        zeros, self._zeros = self._zeros, None
        if zeros is None and self.own and self.by_kernel:
            zeros = self._sums(self.own)[1]
        elif zeros is None:
            zeros = torch.zeros((), dtype=torch.int64, device=self.device)
            for piece in self.own:
                zeros += (piece.gradient == 0).sum()
        return int(communication.all_reduce(zeros - sum(piece.num_fill for piece in self.own), self.world).item())

    def _sums(self, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        from ..kernels.gradient_sums import sums  # Triton is there with CUDA alone
        from ..kernels.pieces import Pieces

        names = tuple(piece.name for piece in pieces)
        if names not in self._tables:
            self._tables[names] = Pieces.of([[piece.gradient] for piece in pieces])
        return sums(self._tables[names])


def _has_squares(piece: Piece) -> bool:
    return piece.main_gradient is not None and piece.main_gradient.squares is not None
