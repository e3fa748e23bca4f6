"""Gradients of weights with several uses in a backward, made of all of them at once: in the fp32 buffer, or as one tensor for autograd."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernels:
    """What makes a gradient of the parts that its uses have put off.

        add(total, parts, is_fresh, squares)  adds the parts' sum, or puts it in the place of a fresh total
        clear(total, is_fresh, squares)       puts zeros into a fresh total, and leaves another as it is
        num_sums(total)                       sums of the total's squares that both leave in `squares`, fp32, of so many elements
        make(parts)                           the parts' sum in the weight's dtype; None where it never is without a buffer

    The first two leave a total not fresh; `add` may leave it as it is where the sum is zero.
    """

    add: Callable[[Tensor, Sequence[Any], Tensor, Tensor], None]
    clear: Callable[[Tensor, Tensor, Tensor], None]
    num_sums: Callable[[Tensor], int]
    make: Callable[[Sequence[Any]], Tensor] | None = None


class MainGradient:
    """A parameter's gradient beside autograd, which would make it in 16 bits for every use, add those, and add the sum to the buffer.

        total     the buffer, fp32, in the parameter's shape
        is_fresh  int32 [1], on the device, so that a CUDA graph can ask it: 1 if the buffer counts as zeros, whatever is in it
        ticket    stands for the parameter in the graph: it has no elements and asks for a gradient, an empty one, from every use

    Uses put the parts of the gradient off until autograd has been through all of them in a backward; then the parts are added at once,
    since reading and writing the buffer is most of the work, and `then` is called. Uses may also add to the opened buffer themselves.
    """

    def __init__(self, total: Tensor, then: Callable[[], None]):
        self.total, self.then = total, then
        self.is_fresh = torch.zeros(1, dtype=torch.int32, device=total.device)
        self.ticket = torch.zeros(0, device=total.device, requires_grad=True)
        self._hook = self.ticket.register_post_accumulate_grad_hook(self._complete)
        self._parts: list[Any] = []
        self._kernels: Kernels | None = None
        self._squares: Tensor | None = None
        self._is_mixed = False

    @property
    def is_used(self) -> bool:
        """Whether kernels have ever added to it."""
        return self._kernels is not None

    @property
    def squares(self) -> Tensor | None:
        """Sums of the settled buffer's squares, fp32, so that nobody has to read it for its norm; None if others than kernels add to it.

        What changes the buffer otherwise (a sum over ranks, a factor) is not seen in them.
        """
        return None if self._is_mixed else self._squares

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """(total, squares, is_fresh) where it `is_used`."""
        return self.total, self._squares, self.is_fresh

    def put_off(self, kernels: Kernels, part: Any) -> None:
        """Have the kernels add this part together with all others of the backward; the ticket's gradient must follow."""
        self._use(kernels)
        self._parts.append(part)

    def add(self, kernels: Kernels, part: Any) -> None:
        """Have the kernels add this part now, which is all of a backward's."""
        self._use(kernels)
        self._add([part])

    def release(self) -> None:
        """Take no more parts, and be free to go: Python does not see the cycle through the ticket's hook."""
        self._hook.remove()

    def drop_parts(self) -> None:
        """Forget what a failed backward has put off."""
        self._parts = []

    def settle(self) -> None:
        """Have zeros in the buffer if it counts as zeros: before anything but the kernels reads it."""
        if self.is_used:
            self._kernels.clear(self.total, self.is_fresh, self._squares)

    def open(self) -> Tensor:
        """The buffer, for others to add to."""
        self.settle()
        self._is_mixed = True
        return self.total

    @torch.no_grad()
    def _complete(self, ticket: Tensor) -> None:
        ticket.grad = None
        parts, self._parts = self._parts, []
        if parts:
            self._add(parts)
        else:  # uses have added to the opened buffer
            self.then()

    def _use(self, kernels: Kernels) -> None:
        if self._squares is None:
            self._squares = torch.zeros(kernels.num_sums(self.total), device=self.total.device)
        self._kernels = kernels

    def _add(self, parts: Sequence[Any]) -> None:
        self._kernels.add(self.total, parts, self.is_fresh, self._squares)
        self.then()


class SummedGradient:
    """The gradient of a weight without a buffer, which autograd gets once for all uses: it would add up a tensor from each."""

    def __init__(self):
        self._ticket: Tensor | None = None
        self._parts: list[Any] = []
        self._kernels: Kernels | None = None

    def ticket(self, weight: Tensor) -> Tensor:
        """Stands for the weight in the graph of the uses until a backward has made the gradient; as `MainGradient.ticket`."""
        if self._ticket is None:
            self._ticket = _Ticket.apply(weight, self)
        return self._ticket

    def put_off(self, kernels: Kernels, part: Any) -> None:
        """As `MainGradient.put_off`."""
        self._kernels = kernels
        self._parts.append(part)

    def make(self) -> Tensor:
        """The sum of what has been put off."""
        parts, self._parts, self._ticket = self._parts, [], None
        return self._kernels.make(parts)


class _Ticket(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, gradient: SummedGradient) -> Tensor:
        ctx.gradient, ctx.shape = gradient, weight.shape
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx, _: Tensor):
        return ctx.gradient.make().view(ctx.shape), None
