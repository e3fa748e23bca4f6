"""The default: each row goes to the rank of its expert and back, by all-to-all over ep; over etp rows are gathered, results summed.

The host waits for the numbers of rows that go to each rank; `roomy` is what stands in for this where it must not.

Legend: as in `interface`; M rows that arrive (over all etp ranks), a etp rank, b ep rank.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.row_weights import LiveRows, RowWeights
from ...parallel import Group, ParallelContext, communication, gather_sequence, scatter_sum_sequence
from ..permute import Permutation, RowOrder, permute, sort_by_expert, unpermute
from .interface import LAYOUT_EXCHANGE, check_tokens
from .transfer import all_to_all


@dataclass(frozen=True)
class AllToAllPlan:
    """permutation: our tokens' rows as they are sent, by rank and expert; send, receive [ep]: rows to and from each rank; gathered [etp]:
    rows of each etp rank after the exchange; order: from arrival (a, b, expert) to expert order, None where that is the same; counts int64
    [L]."""

    permutation: Permutation
    send: tuple[int, ...]
    receive: tuple[int, ...]
    gathered: tuple[int, ...]
    order: RowOrder | None
    counts: Tensor


class AllToAllDispatcher:
    """See the module's docstring. Without ranks to share experts with, nothing is sent and the host waits for nothing; `max_tokens` is then
    all the same what the flags allow."""

    def __init__(self, context: ParallelContext, num_experts: int, max_tokens: int | None = None):
        self.ep, self.etp, self.num_experts, self.max_tokens = context.ep, context.etp, num_experts, max_tokens
        self.num_local = num_experts // context.ep.size

    def prepare(self, indices: Tensor) -> AllToAllPlan:
        check_tokens(len(indices), self.max_tokens)
        permutation = sort_by_expert(indices, self.num_experts)
        if self.ep.size == self.etp.size == 1:
            rows = (len(permutation.slot),)
            return AllToAllPlan(permutation, rows, rows, rows, None, permutation.counts)
        layout = exchange_layout(permutation.counts, self.ep, self.etp).cpu()
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
    """int64 [etp, ep, E]: how many rows each rank has for each expert, from our counts [E]."""
    ep.log.start(LAYOUT_EXCHANGE, ep.name, 0, f"layout of a dispatch over ep {ep.ranks}, etp {etp.ranks}")()
    return communication.all_gather(communication.all_gather(counts[None], ep)[None], etp)


class AllToAllTrip:
    """Phases as in `interface.Trip`."""

    def __init__(self, dispatcher: AllToAllDispatcher, plan: AllToAllPlan, weights: Tensor):
        self.etp, self.plan, self.weights = dispatcher.etp, plan, weights
        self.live: LiveRows | None = None
        self.there_are_others = dispatcher.ep.size * dispatcher.etp.size > 1
        self.there = all_to_all(dispatcher.ep, plan.send, plan.receive)
        self.back = all_to_all(dispatcher.ep, plan.receive, plan.send)

    def dispatch(self, x: Tensor) -> None:
        live = None if self.there_are_others else self.live
        self.there.start(permute(x, self.plan.permutation, live and live.num_tokens))

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        rows, = self.there.finish()
        rows = gather_sequence(rows, self.etp, self.plan.gathered)
        return rows if self.plan.order is None else self.plan.order.apply(rows), self.plan.counts

    def take_weights(self) -> RowWeights | None:
        if self.there_are_others:
            return None
        weights, self.weights = self.weights, None
        return RowWeights(weights, self.plan.permutation.slot, self.live)

    def combine(self, rows: Tensor) -> None:
        arrived = rows if self.plan.order is None else self.plan.order.undo(rows)
        self.back.start(scatter_sum_sequence(arrived, self.etp, self.plan.gathered))

    def after_combine(self) -> Tensor:
        rows, = self.back.finish()
        live = None if self.there_are_others or self.weights is not None else self.live
        return unpermute(rows, self.weights, self.plan.permutation, live and live.num_tokens)
