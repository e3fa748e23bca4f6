"""Dispatch with room for the worst case, of which the host knows every size and waits for none: alltoall with a bound on the tokens.

With rows, each choice of an expert one, that room would be sent, N * k rows to every rank. So tokens are sent instead, N to every rank
whatever it does with them, with their weights; each rank applies these and gives back a sum for each token. What is fill belongs to no
expert: nothing is computed for it.

Legend: as in `interface`; N tokens of a rank at most, R ranks of ep, A of etp.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...parallel import Group, ParallelContext, communication, gather_sequence, scatter_sum_sequence
from ..permute import Permutation, permute, sort_by_local_expert, unpermute
from .interface import LAYOUT_EXCHANGE, check_tokens
from .transfer import Transfer, UnderWay


@dataclass(frozen=True)
class RoomyPlan:
    """num_tokens: T; permutation: of the A * R * N tokens that arrive, to the rows of our experts."""

    num_tokens: int
    permutation: Permutation


class RoomyDispatcher:
    """See the module's docstring."""

    def __init__(self, context: ParallelContext, num_experts: int, *, max_tokens: int):
        self.ep, self.etp, self.max_tokens = context.ep, context.etp, max_tokens
        self.num_local = num_experts // context.ep.size

    def prepare(self, indices: Tensor) -> RoomyPlan:
        check_tokens(len(indices), self.max_tokens)
        self.ep.log.start(LAYOUT_EXCHANGE, self.ep.name, 0, f"layout of a dispatch over ep {self.ep.ranks}, etp {self.etp.ranks}")()
        filled = torch.nn.functional.pad(indices, (0, 0, 0, self.max_tokens - len(indices)), value=-1)
        everyone = communication.all_gather(communication.all_gather(filled, self.ep), self.etp)
        local = everyone - self.ep.rank * self.num_local
        local = torch.where((local >= 0) & (local < self.num_local) & (everyone >= 0), local, -1)
        # A token's choices are different experts: no more of them are ours than we have.
        num_rows = len(everyone) * min(indices.shape[1], self.num_local)
        return RoomyPlan(len(indices), sort_by_local_expert(local, self.num_local, num_rows))

    def trip(self, plan: RoomyPlan, weights: Tensor) -> RoomyTrip:
        return RoomyTrip(self, plan, weights)


class RoomyTrip:
    """Phases as in `interface.Trip`."""

    def __init__(self, dispatcher: RoomyDispatcher, plan: RoomyPlan, weights: Tensor):
        self.plan, self.weights, self.etp = plan, weights, dispatcher.etp
        room, num_tokens = dispatcher.max_tokens, plan.num_tokens
        self.everyone = (dispatcher.ep.size * room,) * dispatcher.etp.size
        to_all, sums = partial(send_to_all, dispatcher.ep, room), partial(sum_from_all, dispatcher.ep, num_tokens)
        self.there, self.back = Transfer(to_all, sums), Transfer(sums, to_all)

    def dispatch(self, x: Tensor) -> None:
        self.there.start(x, self.weights)

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        tokens, self.received = (gather_sequence(part, self.etp, self.everyone) for part in self.there.finish())
        return permute(tokens, self.plan.permutation), self.plan.permutation.counts

    def take_weights(self) -> None:
        return None

    def combine(self, rows: Tensor) -> None:
        sums = unpermute(rows, self.received, self.plan.permutation)
        self.back.start(scatter_sum_sequence(sums, self.etp, self.everyone))

    def after_combine(self) -> Tensor:
        y, = self.back.finish()
        return y


def send_to_all(group: Group, room: int, *own: Tensor) -> UnderWay:
    """Our tensors [T, ...] to every rank: the ranks' own, [R * room, ...] each, those of a rank from a multiple of `room` on. What follows
    them there is anything."""
    pending = [communication.start_all_gather(_in_room(x, room), group) for x in own]
    return UnderWay(tuple(p.result for p in pending), lambda: [p.wait() for p in pending])


def sum_from_all(group: Group, num_tokens: int, *parts: Tensor) -> UnderWay:
    """The way back of `send_to_all`: each rank's parts [R * room, ...] go to the ranks that the tokens are of, which sum them, in at least
    fp32: [T, ...], T = `num_tokens`."""
    ranks = group.size
    pending = [communication.start_all_to_all(x, (len(x) // ranks,) * ranks, (len(x) // ranks,) * ranks, group) for x in parts]
    sums = tuple(x.new_empty(num_tokens, *x.shape[1:]) for x in parts)

    def wait() -> None:
        for total, arriving in zip(sums, pending, strict=True):
            arrived = arriving.wait()
            torch.sum(arrived.unflatten(0, (ranks, -1))[:, :num_tokens], 0, out=total)

    return UnderWay(sums, wait)


def _in_room(x: Tensor, room: int) -> Tensor:
    """`x` [T, ...] at the start of [room, ...]."""
    if len(x) == room:
        return x
    filled = x.new_empty(room, *x.shape[1:])
    filled[:len(x)] = x
    return filled
