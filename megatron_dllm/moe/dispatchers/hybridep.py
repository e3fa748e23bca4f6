"""Dispatch by deep_ep's HybridEPBuffer, which also brings rows into expert order.

How many rows it delivers is not settled by the routing: each dispatch may add padding behind the last expert's rows. So a recompute can
only follow its forward with the forward's handle and row count, that is with replay.

Legend: as in `interface`; P >= N rows as delivered.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parallel import ParallelContext
from .deepep import check_use
from .interface import LAYOUT_EXCHANGE
from .transfer import Transfer, UnderWay


@dataclass(frozen=True)
class HybridArrival:
    """What the first dispatch of a plan found: the backend's handle, P, and rows of each expert, int64 [L] on the device and their sum."""

    handle: Any
    num_delivered: int
    counts: Tensor
    num_rows: int

    def again(self) -> dict[str, Any]:
        """What tells the buffer to deliver rows as it did."""
        return {"handle": self.handle, "num_permuted_tokens": self.num_delivered}


@dataclass
class HybridEPPlan:
    """indices int64 [T, k]; `arrival` is filled in by the first dispatch."""

    indices: Tensor
    arrival: HybridArrival | None = None


class HybridEPDispatcher:
    """See the module's docstring. The buffer is made with the first dispatch, for as many tokens as that has, and grows by itself."""

    def __init__(self, context: ParallelContext, num_experts: int, *, hidden_size: int, dtype: torch.dtype, package: Any):
        check_use("hybridep", context, dtype)
        self.ep, self.num_experts, self.num_local = context.ep, num_experts, num_experts // context.ep.size
        self.package, self.hidden_size, self.buffer = package, hidden_size, None

    def prepare(self, indices: Tensor) -> HybridEPPlan:
        return HybridEPPlan(indices)

    def trip(self, plan: HybridEPPlan, weights: Tensor) -> HybridEPTrip:
        return HybridEPTrip(self, plan, weights)

    def buffer_for(self, num_tokens: int) -> Any:
        """The one buffer of all layers that share the dispatcher."""
        if self.buffer is None:
            self.buffer = self.package.HybridEPBuffer(
                group=self.ep.handle, hidden_dim=self.hidden_size, max_num_of_tokens_per_rank=max(num_tokens, 1),
                num_local_experts=self.num_local, use_fp8=False)
        return self.buffer


    def dispatch(self, plan: HybridEPPlan, x: Tensor, probabilities: Tensor) -> UnderWay:
        """Rows [P, H] and their weights [P] from tokens and their weights by expert [T, E]."""
        arrival = plan.arrival
        if arrival is None:
            self.ep.log.start(LAYOUT_EXCHANGE, self.ep.name, 0, f"layout of a dispatch by HybridEP over ep {self.ep.ranks}")()
            nowhere = torch.zeros(len(x), self.num_experts, dtype=torch.bool, device=x.device)
            where = {"routing_map": nowhere.scatter(1, plan.indices, True)}
        else:
            where = arrival.again()
        rows, weights, _, counts, handle = self.buffer_for(len(x)).dispatch_with_permute(
            hidden=x.contiguous(), probs=probabilities.contiguous(), scaling_factor=None, num_of_experts_per_rank=self.num_local, **where)
        if arrival is None:
            counts = counts.to(torch.int64)
            plan.arrival = HybridArrival(handle, len(rows), counts.to(x.device), int(counts.sum()))
        return UnderWay((rows, weights), _nothing_to_wait_for)

    def collect_gradients(self, plan: HybridEPPlan, grad_rows: Tensor, grad_weights: Tensor) -> UnderWay:
        """The way back of `dispatch`."""
        gradients = self.buffer.combine_with_unpermute(
            hidden=grad_rows.contiguous(), probs=grad_weights.contiguous(), handle=plan.arrival.handle)
        return UnderWay(tuple(gradients), _nothing_to_wait_for)

    def collect(self, plan: HybridEPPlan, rows: Tensor) -> UnderWay:
        """For each token the sum of its rows, of all ranks."""
        y, _ = self.buffer.combine_with_unpermute(hidden=rows.contiguous(), probs=None, handle=plan.arrival.handle)
        return UnderWay((y,), _nothing_to_wait_for)

    def send_gradients(self, plan: HybridEPPlan, grad: Tensor) -> UnderWay:
        """The way back of `collect`."""
        rows, *_ = self.buffer.dispatch_with_permute(
            hidden=grad.contiguous(), probs=None, scaling_factor=None, num_of_experts_per_rank=self.num_local, **plan.arrival.again())
        return UnderWay((rows,), _nothing_to_wait_for)


class HybridEPTrip:
    """Phases as in `interface.Trip`. The buffer's calls return when the current stream may read the result: nothing is left under way."""

    def __init__(self, dispatcher: HybridEPDispatcher, plan: HybridEPPlan, weights: Tensor):
        self.plan, self.weights, self.num_experts = plan, weights, dispatcher.num_experts
        self.there = Transfer(partial(dispatcher.dispatch, plan), partial(dispatcher.collect_gradients, plan))
        self.back = Transfer(partial(dispatcher.collect, plan), partial(dispatcher.send_gradients, plan))

    def dispatch(self, x: Tensor) -> None:
        indices = self.plan.indices
        self.there.start(x, self.weights.new_zeros(len(indices), self.num_experts).scatter(1, indices, self.weights))

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        rows, weights = self.there.finish()
        arrival = self.plan.arrival
        self.row_weights = weights[:arrival.num_rows]
        return rows[:arrival.num_rows], arrival.counts

    def take_weights(self) -> None:
        return None

    def combine(self, rows: Tensor) -> None:
        weighted = (rows.to(self.row_weights.dtype) * self.row_weights[:, None]).to(rows.dtype)
        self.back.start(F.pad(weighted, (0, 0, 0, self.plan.arrival.num_delivered - self.plan.arrival.num_rows)))

    def after_combine(self) -> Tensor:
        y, = self.back.finish()
        return y


def _nothing_to_wait_for() -> None:
    """The transfer is done."""
