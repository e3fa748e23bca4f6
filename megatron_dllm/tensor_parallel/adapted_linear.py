"""Frozen matrices with low-rank adapters beside them, on one tensor-parallel rank, as one function that autograd sees.

By itself each adapter would write y again, read x once more, and have its gradient of x added to that of the matrix; what is added here
is added by the products themselves.

Legend: T tokens, D inputs, P parts of a fused matrix (1: it is none), F outputs of a part, r rank.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .live_rows import input_gradient


@dataclass(frozen=True)
class Factors:
    """y gets scale * b (a x): a [r, D], b [F, r], of a fused matrix a [P, r, D], b [P, F, r]."""

    a: Tensor
    b: Tensor
    scale: float


def adapted_linear(x: Tensor, weights: Sequence[Tensor], factors: Sequence[Factors], num_live: int | None = None) -> tuple[Tensor, ...]:
    """y_i = x @ (W_i + scale B_i A_i).T, [T, F_i] or [T, P, F_i], of x [T, D] and frozen W_i [F, D] or [P, F, D]; of one scale.

    Rows of the gradient after the first `num_live` are taken for zero (see live_rows). Saved: x, and A x of [T, r] a matrix and part.
    """
    scale = factors[0].scale
    assert all(each.scale == scale for each in factors) and not any(weight.requires_grad for weight in weights)
    flat = _AdaptedLinear.apply(x, scale, num_live, len(weights), *(w.flatten(0, -2) for w in weights),
                                *(each.a.flatten(0, -2) for each in factors), *(each.b for each in factors))
    return tuple(y.unflatten(1, weight.shape[:-1]) for y, weight in zip(flat, weights, strict=True))


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: float, num_live: int | None, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, a, b = tensors[:count], tensors[count:2 * count], tensors[2 * count:]
        low = x @ _stacked(a).t()
        ys = tuple(x @ weight.t() for weight in weights)
        for y, own, low_columns, columns in _parts(ys, b):
            y[:, columns].addmm_(low[:, low_columns], own.t(), alpha=scale)
        ctx.save_for_backward(x, low, *tensors)
        ctx.scale, ctx.num_live, ctx.count = scale, num_live, count
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys: Tensor):
        (x, low, *tensors), count, scale, live = ctx.saved_tensors, ctx.count, ctx.scale, slice(ctx.num_live)
        weights, a, b = tensors[:count], tensors[count:2 * count], tensors[2 * count:]
        x, low, stacked, db = x[live], low[live], _stacked(a), [torch.empty_like(own) for own in b]
        dlow, flat_db = torch.empty_like(low), iter([part for each in db for part in (each.unbind(0) if each.dim() == 3 else (each,))])
        for dy, own, low_columns, columns in _parts(dys, b):
            torch.mm(dy[live, columns], own, out=dlow[:, low_columns])
            next(flat_db).addmm_(dy[live, columns].t(), low[:, low_columns], beta=0, alpha=scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dys, weights, ctx.num_live)
            dx[live].addmm_(dlow, stacked, alpha=scale)
        da = torch.empty_like(stacked).addmm_(dlow.t(), x, beta=0, alpha=scale)
        return dx, None, None, None, *[None] * count, *da.split([len(own) for own in a]), *db


def _stacked(a: Sequence[Tensor]) -> Tensor:
    return a[0] if len(a) == 1 else torch.cat(list(a))


def _parts(ys: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, slice, slice]]:
    """For each part of each matrix: its y or dy, its b [F, r], its columns of A x, and its columns of y."""
    first_low = 0
    for y, whole in zip(ys, b, strict=True):
        first = 0
        for own in whole.unbind(0) if whole.dim() == 3 else (whole,):
            width, rank = own.shape
            yield y, own, slice(first_low, first_low + rank), slice(first, first + width)
            first, first_low = first + width, first_low + rank
