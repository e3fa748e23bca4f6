"""An all-to-all in two autograd nodes, start and finish, with whatever is computed between them running beside it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel import Group, communication


@dataclass
class Exchange:
    """Rows to and from the ranks of `group`: rank r gets send[r] of ours and gives us receive[r], in rank order.

    In the backward, finish starts the gradient's way back and start waits for it.
    """

    group: Group
    send: Sequence[int]
    receive: Sequence[int]
    _coming: communication.Pending | None = None
    _returning: communication.Pending | None = None
    _rows: Tensor | None = None

    def start(self, x: Tensor) -> None:
        """Begin to send x [sum(send), H]."""
        self._rows = x if self.group.size == 1 else _Start.apply(x, self)

    def finish(self) -> Tensor:
        """[sum(receive), H]; called once."""
        rows, self._rows = self._rows, None
        return rows if self.group.size == 1 else _Finish.apply(rows, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange._coming = communication.start_all_to_all(x, exchange.send, exchange.receive, exchange.group)
        return exchange._coming.result

    @staticmethod
    def backward(ctx, _: Tensor):
        # The argument is a stand-in of the right shape; the gradient itself is on its way.
        pending, ctx.exchange._returning = ctx.exchange._returning, None
        return pending.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        pending, exchange._coming = exchange._coming, None
        pending.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        exchange = ctx.exchange
        exchange._returning = communication.start_all_to_all(grad, exchange.receive, exchange.send, exchange.group)
        return grad, None
