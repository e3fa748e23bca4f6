"""A transfer between ranks in two autograd nodes, start and finish, with whatever is computed between them running beside it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel import Group, communication


@dataclass(frozen=True)
class UnderWay:
    """What a transfer will have delivered into `results` once `wait` has returned."""

    results: tuple[Tensor, ...]
    wait: Callable[[], object]


class Transfer:
    """`there` starts to send tensors; `back` starts to send the gradients of what arrived, and gives those of what was sent.

    In the backward, the node of `finish` starts the gradients' way back and the node of `start` waits for them.
    """

    def __init__(self, there: Callable[..., UnderWay], back: Callable[..., UnderWay]):
        self.there, self.back = there, back
        self.coming: UnderWay | None = None
        self.returning: UnderWay | None = None
        self._arriving: tuple[Tensor, ...] = ()

    def start(self, *sent: Tensor) -> None:
        """Begin; called once."""
        self._arriving = _Start.apply(self, *sent)

    def finish(self) -> tuple[Tensor, ...]:
        """What arrived; called once."""
        arriving, self._arriving = self._arriving, ()
        return _Finish.apply(self, *arriving)


class Stay:
    """What stands in for a transfer between this rank and itself: without nodes of autograd."""

    def __init__(self):
        self._kept: tuple[Tensor, ...] = ()

    def start(self, *kept: Tensor) -> None:
        """As Transfer's."""
        self._kept = kept

    def finish(self) -> tuple[Tensor, ...]:
        """As Transfer's."""
        kept, self._kept = self._kept, ()
        return kept


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transfer: Transfer, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        transfer.coming = transfer.there(*sent)
        return transfer.coming.results

    @staticmethod
    def backward(ctx, *_: Tensor):
        # The arguments are stand-ins of the right shape; the gradients themselves are on their way.
        under_way, ctx.transfer.returning = ctx.transfer.returning, None
        under_way.wait()
        return None, *under_way.results


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transfer: Transfer, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        under_way, transfer.coming = transfer.coming, None
        under_way.wait()
        return tuple(x.view_as(x) for x in arriving)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.transfer.returning = ctx.transfer.back(*grads)
        return None, *grads


def all_to_all(group: Group, send: Sequence[int], receive: Sequence[int]) -> Transfer | Stay:
    """Rows [sum(send), H] to [sum(receive), H]: rank r gets the next send[r] of ours and gives us receive[r], in rank order."""
    if group.size == 1:
        return Stay()

    def start(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> UnderWay:
        pending = communication.start_all_to_all(x, sent, received, group)
        return UnderWay((pending.result,), pending.wait)

    return Transfer(lambda x: start(x, send, receive), lambda grad: start(grad, receive, send))
