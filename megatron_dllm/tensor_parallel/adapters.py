"""Low-rank adapters beside frozen linear layers: y + alpha / rank * B A x (Hu et al. 2021, arXiv 2106.09685), cut as the layers are.

    y, x         what the layer gave and what it was given, on this rank
    column       A equal on every rank, B cut as the layer's weight
    row          A cut as the layer's weight, B equal on every rank
What crosses ranks is [T, rank], in both directions.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_dllm.parallel.collectives import gather_sequence, sum_grad_over
from megatron_dllm.parallel.context import ParallelContext
from megatron_dllm.parallel.placement import place

from .adapted_linear import Factors
from .dropout import Dropout, TokenDraws, undropped
from .initialization import Constant, Init, make_parameter
from .linear import ColumnParallelLinear, RowParallelLinear, row_linear

ZERO = Constant(0.0)


@dataclass(frozen=True)
class LowRank:
    """What all adapters of a model have in common. `init` draws A; B starts at zero, so that nothing changes at first."""

    rank: int
    alpha: float
    init: Init
    context: ParallelContext
    dtype: torch.dtype
    dropout: float = 0.0

    def drop_for(self, name: str, size: int, *, first: int = 0, count: int | None = None) -> Callable[[Tensor, Tensor | None], Tensor]:
        """What A's input of `size` features, of which this rank has `count`, goes through."""
        if not self.dropout:
            return undropped
        return Dropout(name, self.dropout, size, first=first, count=size if count is None else count, device=self.context.device)

    def factors(self, a: Tensor, b: Tensor) -> Factors | None:
        """What makes one function of a layer and its adapter; None where something comes between: other ranks' parts, or dropout."""
        return None if self.context.tp.size > 1 or self.dropout else Factors(a, b, self.scale)

    @property
    def scale(self) -> float:
        """What B A x is multiplied with."""
        return self.alpha / self.rank

    def init_for(self, in_features: int) -> Init:
        """A's draws: as wide as those of PEFT, which are uniform within in_features^-0.5."""
        return self.init.with_std((3 * in_features) ** -0.5)


class ColumnAdapter(nn.Module):
    """Of a layer W [F, D], or a fused one [parts, F, D], cut by output feature over the R ranks of `tp`.

        x  [T, D]              with sequence parallelism [T/R, D], our piece of the tokens
        a  [parts * rank, D]   the parts' one after the other; its gradient under sequence parallelism is that of our tokens, summed over tp
        b  [parts, F/R, rank]  without parts [F/R, rank]
        y  [T, parts, F/R]     all tokens

    Forward: A x of our tokens is gathered. Its gradient, a share of each rank's columns, is summed over tp (or scattered).
    """

    def __init__(self, name: str, linear: ColumnParallelLinear, common: LowRank):
        super().__init__()
        self.tp, self.sequence_parallel, self.scale = linear.tp, linear.sequence_parallel, common.scale
        placement, context = linear.weight.placement, common.context
        *parts, width, depth = placement.shape
        shared = {"dtype": common.dtype, "device": context.device}
        of_a = place((*parts, common.rank, depth), context, partial_over_tp=context.sequence_parallel)
        of_b = place((*parts, width, common.rank), context, cut={"tp": len(parts)}, copies=placement.copies)
        self.a = make_parameter(f"{name}.a", of_a, init=common.init_for(depth), **shared)
        self.b = make_parameter(f"{name}.b", of_b, init=ZERO, **shared)
        self.drop = common.drop_for(name, depth)

    def forward(self, y: Tensor, x: Tensor, draws: TokenDraws | None = None) -> Tensor:
        """y with the adapter's part added, in a tensor of its own."""
        low = self.drop(x, draws and draws.own) @ self.a.flatten(0, -2).t()
        low = gather_sequence(low, self.tp) if self.sequence_parallel else sum_grad_over(low, self.tp)
        # One product for all parts: at such ranks their zeros beside each other cost nothing.
        b = self.b if self.b.dim() == 2 else torch.block_diag(*self.b.unbind(0))
        return torch.addmm(y.flatten(1), low, b.t(), alpha=self.scale).view(y.shape)


class RowAdapter(nn.Module):
    """Of a layer W [F, D] cut by input feature over the R ranks of `tp`.

        x  [T, D/R]
        a  [rank, D/R]
        b  [F, rank]   its gradient under sequence parallelism is that of our tokens, summed over tp
        y  [T, F]      with sequence parallelism [T/R, F], our piece of the tokens

    Forward: the ranks' A x are summed (and scattered), as the layer's own products are.
    """

    def __init__(self, name: str, linear: RowParallelLinear, common: LowRank):
        super().__init__()
        self.tp, self.sequence_parallel, self.scale = linear.tp, linear.sequence_parallel, common.scale
        width, depth = linear.weight.placement.shape
        context, shared = common.context, {"dtype": common.dtype, "device": common.context.device}
        self.a = make_parameter(f"{name}.a", place((common.rank, depth), context, cut={"tp": 1}), init=common.init_for(depth), **shared)
        of_b = place((width, common.rank), context, partial_over_tp=context.sequence_parallel)
        self.b = make_parameter(f"{name}.b", of_b, init=ZERO, **shared)
        self.drop = common.drop_for(name, depth, first=self.a.placement.offset[1], count=self.a.placement.extent[1])

    def forward(self, y: Tensor, x: Tensor, draws: TokenDraws | None = None) -> Tensor:
        """y with the adapter's part added, in a tensor of its own."""
        low = row_linear(self.drop(x, draws and draws.every), self.a, tp=self.tp, sequence_parallel=self.sequence_parallel)
        return torch.addmm(y, low, self.b.t(), alpha=self.scale)
