"""The simple oracle: every rank of the expert group gets all tokens and computes what its own experts owe them; the sums are shared out.

Written with plain indexing, apart from the code of the other dispatchers, which are held to it.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel import Group, ParallelContext, communication, gather_sequence, scatter_sum_sequence
from .interface import LAYOUT_EXCHANGE


@dataclass(frozen=True)
class AllGatherPlan:
    """lengths [etp][ep]: tokens of each rank; token, choice int64 [N]: what our experts' rows are, in their order; counts int64 [L]."""

    lengths: tuple[tuple[int, ...], ...]
    token: Tensor
    choice: Tensor
    counts: Tensor


class AllGatherDispatcher:
    """See the module's docstring."""

    def __init__(self, context: ParallelContext, num_experts: int):
        self.ep, self.etp = context.ep, context.etp
        self.num_local = num_experts // context.ep.size

    def prepare(self, indices: Tensor) -> AllGatherPlan:
        lengths = ((len(indices),),)
        if self.ep.size * self.etp.size > 1:
            self.ep.log.start(LAYOUT_EXCHANGE, self.ep.name, 0, f"layout of a dispatch over ep {self.ep.ranks}, etp {self.etp.ranks}")()
            own = torch.tensor([len(indices)], device=indices.device)
            table = communication.all_gather(communication.all_gather(own, self.ep)[None], self.etp)
            lengths = tuple(map(tuple, table.tolist()))
        local = gather_all(indices, lengths, self.ep, self.etp) - self.ep.rank * self.num_local
        token, choice = ((local >= 0) & (local < self.num_local)).nonzero(as_tuple=True)
        expert = local[token, choice]
        order = expert.argsort(stable=True)
        return AllGatherPlan(lengths, token[order], choice[order], expert.bincount(minlength=self.num_local))

    def trip(self, plan: AllGatherPlan, weights: Tensor) -> AllGatherTrip:
        return AllGatherTrip(self.ep, self.etp, plan, weights)


def gather_all(x: Tensor, lengths: tuple[tuple[int, ...], ...], ep: Group, etp: Group) -> Tensor:
    """The rows of all ranks: over ep, then over etp."""
    return gather_sequence(gather_sequence(x, ep, lengths[etp.rank]), etp, [sum(row) for row in lengths])


class AllGatherTrip:
    """Phases as in `interface.Trip`; nothing is left under way between them."""

    def __init__(self, ep: Group, etp: Group, plan: AllGatherPlan, weights: Tensor):
        self.ep, self.etp, self.plan, self.weights = ep, etp, plan, weights

    def dispatch(self, x: Tensor) -> None:
        self.tokens = gather_all(x, self.plan.lengths, self.ep, self.etp)

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        return self.tokens[self.plan.token], self.plan.counts

    def take_weights(self) -> None:
        return None

    def combine(self, rows: Tensor) -> None:
        plan, num_tokens = self.plan, sum(map(sum, self.plan.lengths))
        weights = gather_all(self.weights, plan.lengths, self.ep, self.etp)[plan.token, plan.choice]
        zeros = weights.new_zeros(num_tokens, rows.shape[1])
        # In the dtype of the weights, at least fp32, through the sum over ranks too.
        sums = zeros.index_put((plan.token,), rows.to(weights.dtype) * weights[:, None], accumulate=True)
        mine = scatter_sum_sequence(sums, self.etp, [sum(row) for row in plan.lengths])
        self.result = scatter_sum_sequence(mine, self.ep, plan.lengths[self.etp.rank]).to(rows.dtype)

    def after_combine(self) -> Tensor:
        return self.result
