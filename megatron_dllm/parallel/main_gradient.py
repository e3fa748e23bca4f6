"""Gradients that kernels add to the fp32 buffer themselves."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class MainGradient:
    """A parameter's gradient beside autograd, which would make it in 16 bits for every use, add those, and add the sum to the buffer.

        total   the buffer, fp32, in the parameter's shape
        ticket  stands for the parameter in the graph: it has no elements and asks for a gradient, an empty one, from every use

    Uses put the parts of the gradient off until autograd has been through all of them in a backward; then the parts are added at once,
    since reading and writing the buffer is most of the work, and `then` is called.
    """

    def __init__(self, total: Tensor, then: Callable[[], None]):
        self.total, self.then = total, then
        self.ticket = torch.zeros(0, device=total.device, requires_grad=True)
        self._hook = self.ticket.register_post_accumulate_grad_hook(self._complete)
        self._parts: list[Any] = []
        self._add: Callable[[Tensor, Sequence[Any]], None] | None = None

    def put_off(self, add: Callable[[Tensor, Sequence[Any]], None], part: Any) -> None:
        """Have add(total, parts) called once with this part and all others of the backward; the ticket's gradient must follow."""
        self._add = add
        self._parts.append(part)

    def release(self) -> None:
        """Take no more parts, and be free to go: Python does not see the cycle through the ticket's hook."""
        self._hook.remove()

    def forget(self) -> None:
        """Drop parts that a backward which has failed has left."""
        self._parts = []

    @torch.no_grad()
    def _complete(self, ticket: Tensor) -> None:
        ticket.grad = None
        parts, self._parts = self._parts, []
        self._add(self.total, parts)
        self.then()
