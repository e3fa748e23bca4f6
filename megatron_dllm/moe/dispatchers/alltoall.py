"""The default: each row goes to the rank of its expert and back, by all-to-all over ep; over etp rows are gathered, results summed.

Legend: as in `interface`; M rows that arrive (over all etp ranks), a etp rank, b ep rank.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel import Group, ParallelContext, communication, gather_sequence, scatter_sum_sequence
from ..permute import Permutation, RowOrder, permute, sort_by_expert, unpermute
from .interface import LAYOUT_EXCHANGE
from .transfer import all_to_all


@dataclass(frozen=True)
class AllToAllPlan:
    """permutation: our tokens' rows in expert order; send, receive [ep]: rows to and from each rank; gathered [etp]: rows of each etp rank
    after the exchange; order: from arrival (a, b, expert) to expert order, None where that is the same; counts int64 [L]."""

    permutation: Permutation
    send: tuple[int, ...]
    receive: tuple[int, ...]
    gathered: tuple[int, ...]
    order: RowOrder | None
    counts: Tensor


class AllToAllDispatcher:
    """See the module's docstring. Without ranks to share experts with, nothing is sent and the host waits for nothing."""

    def __init__(self, context: ParallelContext, num_experts: int):
        self.ep, self.etp, self.num_experts = context.ep, context.etp, num_experts
        self.num_local = num_experts // context.ep.size

    def prepare(self, indices: Tensor) -> AllToAllPlan:
        permutation = sort_by_expert(indices, self.num_experts)
        if self.ep.size == self.etp.size == 1:
            rows = (len(permutation.slot),)
            return AllToAllPlan(permutation, rows, rows, rows, None, permutation.counts)
        layout = exchange_layout(permutation.counts, self.ep, self.etp)
        first = self.ep.rank * self.num_local
        here = layout[:, :, first:first + self.num_local]
        send = layout[self.etp.rank, self.ep.rank].view(self.ep.size, self.num_local).sum(1)
        receive, gathered = here[self.etp.rank].sum(1), here.sum((1, 2))
        chunks = here.flatten().to(indices.device)
        experts = torch.arange(self.num_local, device=indices.device).repeat(self.etp.size * self.ep.size)
        order = RowOrder.sorting(experts.repeat_interleave(chunks, output_size=int(gathered.sum())))
        return AllToAllPlan(permutation, tuple(send.tolist()), tuple(receive.tolist()), tuple(gathered.tolist()), order,
                            here.sum((0, 1)).to(indices.device))

    def trip(self, plan: AllToAllPlan, weights: Tensor) -> AllToAllTrip:
        return AllToAllTrip(self, plan, weights)


def exchange_layout(counts: Tensor, ep: Group, etp: Group) -> Tensor:
    """int64 [etp, ep, E] on the host: how many rows each rank has for each expert, from our counts [E]. The one host synchronisation."""
    ep.log.start(LAYOUT_EXCHANGE, ep.name, 0, f"layout of a dispatch over ep {ep.ranks}, etp {etp.ranks}")()
    return communication.all_gather(communication.all_gather(counts[None], ep)[None], etp).cpu()


class AllToAllTrip:
    """Phases as in `interface.Trip`."""

    def __init__(self, dispatcher: AllToAllDispatcher, plan: AllToAllPlan, weights: Tensor):
        self.etp, self.plan, self.weights = dispatcher.etp, plan, weights
        self.there = all_to_all(dispatcher.ep, plan.send, plan.receive)
        self.back = all_to_all(dispatcher.ep, plan.receive, plan.send)

    def dispatch(self, x: Tensor) -> None:
        self.there.start(permute(x, self.plan.permutation))

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        rows, = self.there.finish()
        rows = gather_sequence(rows, self.etp, self.plan.gathered)
        return rows if self.plan.order is None else self.plan.order.apply(rows), self.plan.counts

    def combine(self, rows: Tensor) -> None:
        arrived = rows if self.plan.order is None else self.plan.order.undo(rows)
        self.back.start(scatter_sum_sequence(arrived, self.etp, self.plan.gathered))

    def after_combine(self) -> Tensor:
        rows, = self.back.finish()
        return unpermute(rows, self.weights, self.plan.permutation)
