"""Products of rows of which only the first ones get a gradient: the rows of drafts ride with the clean tokens' and have none.

Legend: T rows, of which the first n are live, D inputs, F outputs.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from megatron_dllm.kernels.launch import takes
from megatron_dllm.parallel import MainGradient
from megatron_dllm.parallel.main_gradient import Kernels

from .shared_gradient import clear_fresh


def live_linear(x: Tensor, weights: Sequence[Parameter], num_live: int | None) -> tuple[Tensor, ...]:
    """y_i = x @ W_i.T of x [T, D] and W_i [..., F, D]; rows of dy_i after the first `num_live` (None: all are live) are taken for zero, and
    not read. Gradients of weights that have an fp32 buffer go there by themselves, those of all uses at once."""
    mains = [weight.main_gradient if weight.requires_grad and torch.is_grad_enabled() else None for weight in weights]
    flat = (weight.flatten(0, -2) if main is None else weight.detach().flatten(0, -2) for weight, main in zip(weights, mains, strict=True))
    tickets = (None if main is None else main.ticket for main in mains)
    ys = _LiveLinear.apply(x, num_live, mains, *flat, *tickets)
    return tuple(y.unflatten(1, weight.shape[:-1]) for y, weight in zip(ys, weights, strict=True))


class _LiveLinear(torch.autograd.Function):
    """Inputs after `mains`: the weights, and a ticket of each that has a buffer. Saved: x and the weights."""

    @staticmethod
    def forward(ctx, x: Tensor, num_live: int | None, mains: Sequence[MainGradient | None], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights = tensors[:len(mains)]
        # A weight without gradient is all that the input's gradient needs.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        ctx.num_live, ctx.mains = num_live, mains
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys: Tensor):
        x, *weights = ctx.saved_tensors
        num_live, mains = ctx.num_live, ctx.mains
        dx = input_gradient(dys, weights, num_live) if ctx.needs_input_grad[0] else None
        dws: list[Tensor | None] = []
        for dy, main, wanted in zip(dys, mains, ctx.needs_input_grad[3:3 + len(mains)], strict=True):
            dw = dy[:num_live].t() @ x[:num_live] if wanted or main is not None else None
            if main is not None:
                main.put_off(SUMMED, dw)
            dws.append(None if main is not None else dw)
        return dx, None, None, *dws, *(None if main is None else main.ticket.new_empty(0) for main in mains)


def _add_parts(total: Tensor, parts: Sequence[Tensor], is_fresh: Tensor, squares: Tensor) -> None:
    """total = total + the sum of the parts; a fresh total counts as zeros."""
    if takes(total, *parts) and total.dtype == torch.float32:
        from megatron_dllm.kernels import add_gradients as kernel  # Triton is there with CUDA alone

        kernel.add_gradients(total, parts, is_fresh, squares)
    else:
        clear_fresh(total, is_fresh, squares)
        for part in parts:
            total.add_(part.view_as(total))
        squares.copy_(total.square().sum())


def _num_sums(total: Tensor) -> int:
    if takes(total) and total.dtype == torch.float32:
        from megatron_dllm.kernels import add_gradients as kernel

        return kernel.num_sums(total)
    return 1


SUMMED = Kernels(_add_parts, clear_fresh, _num_sums)


def input_gradient(dys: Sequence[Tensor], weights: Sequence[Tensor], num_live: int | None) -> Tensor:
    """The sum of dy_i @ W_i, [T, D]; zero after the first `num_live` rows (None: all are live)."""
    dx = dys[0].new_empty(len(dys[0]), weights[0].shape[1])
    live = dx[:num_live]
    torch.mm(dys[0][:num_live], weights[0], out=live)
    add_input_gradient(live, dys[1:], weights[1:])
    if num_live is not None:
        dx[num_live:].zero_()
    return dx


def add_input_gradient(dx: Tensor, dys: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Add dy_i @ W_i to dx [n, D], of the first n rows of each dy_i."""
    for dy, weight in zip(dys, weights, strict=True):
        dx.addmm_(dy[:len(dx)], weight)
