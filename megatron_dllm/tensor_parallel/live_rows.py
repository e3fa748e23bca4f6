"""Products of rows of which only the first ones get a gradient: the rows of drafts ride with the clean tokens' and have none.

Legend: T rows, of which the first n are live, D inputs, F outputs.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def live_linear(x: Tensor, weights: Sequence[Tensor], num_live: int) -> tuple[Tensor, ...]:
    """y_i = x @ W_i.T of x [T, D] and W_i [..., F, D]; rows of dy_i after the first `num_live` are taken for zero, and not read."""
    flat = _LiveLinear.apply(x, num_live, *(weight.flatten(0, -2) for weight in weights))
    return tuple(y.unflatten(1, weight.shape[:-1]) for y, weight in zip(flat, weights, strict=True))


class _LiveLinear(torch.autograd.Function):
    """Saved: x and the weights."""

    @staticmethod
    def forward(ctx, x: Tensor, num_live: int, *weights: Tensor) -> tuple[Tensor, ...]:
        # A weight without gradient is all that the input's gradient needs.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, *weights)
        ctx.num_live = num_live
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys: Tensor):
        x, *weights = ctx.saved_tensors
        num_live = ctx.num_live
        dx = input_gradient(dys, weights, num_live) if ctx.needs_input_grad[0] else None
        dws = (dy[:num_live].t() @ x[:num_live] if wanted else None for dy, wanted in zip(dys, ctx.needs_input_grad[2:], strict=True))
        return dx, None, *dws


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
