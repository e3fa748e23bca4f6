"""The gradient of a matrix as large as the vocabulary, which a microbatch uses up to five times: added up in one buffer.

Autograd would have every use make a gradient of its own in 16 bits, and add them in turn: with 262144 x 2816 numbers some 9 ms of a step.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_dllm.kernels.launch import takes
from megatron_dllm.parallel import MainGradient
from megatron_dllm.parallel.main_gradient import Kernels

from .vocabulary import add_product_, product


@dataclass
class GradientSum:
    """`total`, at least fp32, times `scale` is the gradient; None: nothing was added, the scale is 1.

    Losses add in the forward what a gradient of 1 at the loss makes of them, and tell in the backward what it was: the scale. All losses
    that share a sum must be terms of one total, so that they have one scale. What comes after them in the backward divides by it.
    """

    total: Tensor | None = None
    scale: Tensor | None = None

    def room(self, like: Tensor) -> Tensor:
        """The total, in the shape of the matrix `like`, to be added to in place."""
        if self.total is None:
            self.total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        return self.total

    def add_product(self, like: Tensor, a: Tensor, b: Tensor) -> None:
        """Add a @ b to the first rows."""
        if self.total is None and len(a) == len(like):
            self.total = product(a, b)  # instead of zeros that would be written and read
        else:
            add_product_(self.room(like)[:len(a)], a, b)

    def set_scale(self, scale: Tensor) -> None:
        """Note a loss's gradient; a second one that differs stops the process (on a GPU without waiting for the answer)."""
        if self.scale is not None:
            torch._assert_async(self.scale == scale, "losses that share a gradient sum have different gradients")
        self.scale = scale

    def unscaled(self, x: Tensor) -> Tensor:
        """`x` as it is to be added: divided by the scale."""
        return x if self.scale is None else x / self.scale


@dataclass(frozen=True)
class SharedWeight:
    """A matrix for the uses of one forward. `ticket` stands for it in the graph: it has no elements and asks for a gradient, an empty one,
    from every use, after which the sum is the matrix's gradient."""

    weight: Tensor
    ticket: Tensor
    gradient: GradientSum = field(compare=False)

    @classmethod
    def of(cls, weight: nn.Parameter, *, has_others: bool = False) -> SharedWeight:
        """Without gradient where `weight` has none, or none is recorded.

        The sum goes into the weight's fp32 buffer by itself if it has one (see MainGradient), but not if it `has_others`: uses in the same
        backward that autograd gives a gradient of their own.
        """
        gradient, main = GradientSum(), None if has_others else weight.main_gradient
        # A parameter that gets no gradient from autograd would all the same have its hooks called.
        source = weight if main is None else weight.new_zeros(0).requires_grad_(weight.requires_grad)
        return cls(weight.detach(), _Ticket.apply(source, gradient, main), gradient)

    @property
    def wants_gradient(self) -> bool:
        """Whether uses have to add to the sum."""
        return self.ticket.requires_grad and torch.is_grad_enabled()

    def rows(self, numbers: Tensor) -> Tensor:
        """[T, H]: the matrix's rows of these numbers [T]."""
        return _Rows.apply(numbers, self.weight, self.ticket, self.gradient)


class _Ticket(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, gradient: GradientSum, main: MainGradient | None) -> Tensor:
        ctx.gradient, ctx.dtype, ctx.main = gradient, weight.dtype, main
        return weight.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor):
        total, scale = ctx.gradient.total, ctx.gradient.scale
        ctx.gradient.total = None
        if total is None or scale is None:
            return None if total is None else total.to(ctx.dtype), None, None
        if ctx.main is None:
            return scale_and_round(total, scale, ctx.dtype), None, None
        ctx.main.add(SCALED, (total, scale))
        return None, None, None


def scale_and_round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in `dtype`, in one pass over a matrix of the vocabulary's size; scale []."""
    if takes(x, scale) and x.dtype == scale.dtype == torch.float32:
        from megatron_dllm.kernels import scale as kernel  # Triton is there with CUDA alone

        return kernel.scaled(x, scale, dtype)
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def _add_scaled(total: Tensor, parts: Sequence[tuple[Tensor, Tensor]], is_fresh: Tensor, squares: Tensor) -> None:
    """total = total + x * scale of (x, scale), in one pass too; a fresh total is not read."""
    for x, scale in parts:
        if takes(total, x, scale) and total.dtype == x.dtype == scale.dtype == torch.float32:
            from megatron_dllm.kernels import scale as kernel

            kernel.add_scaled_(total, x, scale, is_fresh, squares)
        else:
            clear_fresh(total, is_fresh, squares)
            total.addcmul_(x, scale)
            squares.copy_(total.square().sum())


def clear_fresh(total: Tensor, is_fresh: Tensor, squares: Tensor) -> None:
    """Zeros in a fresh total and its squares; then it is not fresh any more."""
    if takes(total) and total.dtype == torch.float32:
        from megatron_dllm.kernels import grouped_gemm

        grouped_gemm.clear_fresh(total, is_fresh, squares)
    else:
        for x in (total, squares):
            x.masked_fill_(is_fresh.bool(), 0)
        is_fresh.zero_()


def _num_sums(total: Tensor) -> int:
    if takes(total) and total.dtype == torch.float32:
        from megatron_dllm.kernels import scale as kernel

        return kernel.num_sums(total)
    return 1


SCALED = Kernels(_add_scaled, clear_fresh, _num_sums)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers: Tensor, weight: Tensor, ticket: Tensor, gradient: GradientSum) -> Tensor:
        ctx.save_for_backward(numbers, weight)
        ctx.gradient = gradient
        return F.embedding(numbers, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        numbers, weight = ctx.saved_tensors
        room = ctx.gradient.room(weight)
        # Sorts the numbers first: the same sum on every run, in place.
        room.index_put_((numbers,), ctx.gradient.unscaled(dy.to(room.dtype)), accumulate=True)
        return None, None, dy.new_zeros(0), None
