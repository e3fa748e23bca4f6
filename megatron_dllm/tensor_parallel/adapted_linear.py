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
from torch.nn import Parameter

from megatron_dllm.kernels.launch import has_large_shared_memory, takes
from megatron_dllm.parallel import MainGradient

from .live_rows import add_input_gradient, input_gradient


@dataclass(frozen=True)
class Factors:
    """y gets scale * b (a x): a [r, D], b [F, r], of a fused matrix a [P, r, D], b [P, F, r]."""

    a: Parameter
    b: Parameter
    scale: float


def adapted_linear(x: Tensor, weights: Sequence[Tensor], factors: Sequence[Factors], num_live: int | None = None) -> tuple[Tensor, ...]:
    """y_i = x @ (W_i + scale B_i A_i).T, [T, F_i] or [T, P, F_i], of x [T, D] and frozen W_i [F, D] or [P, F, D]; of one scale.

    Rows of the gradient after the first `num_live` are taken for zero (see live_rows). Saved: x, and A x of [T, r] a matrix and part.
    """
    scale = factors[0].scale
    assert all(each.scale == scale for each in factors) and not any(weight.requires_grad for weight in weights)
    a, b = [each.a for each in factors], [each.b for each in factors]
    flat_weights = [weight.flatten(0, -2) for weight in weights]
    if takes(x, *weights, *a, *b) and _suits_kernels(x, a, b):
        flat = by_kernels(x, flat_weights, a, b, scale, num_live)
    else:
        flat = _AdaptedLinear.apply(x, scale, num_live, len(weights), *flat_weights, *(each.flatten(0, -2) for each in a), *b)
    return tuple(y.unflatten(1, weight.shape[:-1]) for y, weight in zip(flat, weights, strict=True))


def _suits_kernels(x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Of CUDA tensors: whether the kernels fit the device, and are faster than torch's products."""
    from megatron_dllm.kernels import low_rank  # Triton is there with CUDA alone

    return x.itemsize == 2 and has_large_shared_memory(x.device) and low_rank.suits(a, b)


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


def by_kernels(x: Tensor, weights: Sequence[Tensor], a: Sequence[Parameter], b: Sequence[Parameter], scale: float,
               num_live: int | None) -> tuple[Tensor, ...]:
    """The y_i, flat, by kernels.low_rank. The factors' gradients go into their fp32 buffers by themselves where all of them have one."""
    mains = [each.main_gradient for each in (*a, *b)]
    if not torch.is_grad_enabled() or None in mains:
        return _ByKernels.apply(x, scale, num_live, None, len(a), *weights, *a, *b)
    tickets = [main.ticket for main in mains]
    return _ByKernels.apply(x, scale, num_live, mains, len(a), *weights, *(each.detach() for each in (*a, *b)), *tickets)


class _ByKernels(torch.autograd.Function):
    """Inputs after `count`: so many weights, A and B, and a ticket of each A and B where there are `mains`.

    Weights that lie one after the other make one product. The y_i are columns of one tensor.
    """

    @staticmethod
    def forward(ctx, x: Tensor, scale: float, num_live: int | None, mains: list[MainGradient] | None, count: int,
                *tensors: Tensor) -> tuple[Tensor, ...]:
        from megatron_dllm.kernels import low_rank

        x = x if x.stride(1) == 1 else x.contiguous()
        weights, a, b = (tensors[count * i:count * (i + 1)] for i in range(3))
        low, whole = low_rank.narrow(x, a), joined(weights, 0)
        all_y = low_rank.widen(low, b, scale)
        ys = all_y.split([len(weight) for weight in weights], 1)
        for y, weight in zip(ys, weights, strict=True) if whole is None else ((all_y, whole),):
            y.addmm_(x, weight.t())
        ctx.save_for_backward(x, low, *weights, *a, *b)
        ctx.scale, ctx.num_live, ctx.mains, ctx.count = scale, len(x) if num_live is None else num_live, mains, count
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys: Tensor):
        from megatron_dllm.kernels import low_rank

        (x, low, *tensors), count, scale, num_live = ctx.saved_tensors, ctx.count, ctx.scale, ctx.num_live
        weights, a, b = (tensors[count * i:count * (i + 1)] for i in range(3))
        dys = [dy if dy.stride(1) == 1 else dy.contiguous() for dy in dys]
        dlow, db = low_rank.outward(dys, b, low, scale, num_live)
        dx, da = low_rank.inward(dlow, a, x, scale, wants_x=ctx.needs_input_grad[0])
        if dx is not None:
            all_dy, whole = joined(dys, 1), joined(weights, 0)
            if all_dy is None or whole is None:
                add_input_gradient(dx[:num_live], dys, weights)
            else:
                add_input_gradient(dx[:num_live], [all_dy], [whole])
        if ctx.mains is None:
            totals = [torch.empty_like(each) for each in (*a, *b)]
        else:
            totals = [main.open() for main in ctx.mains]
        low_rank.add_up(da, db, totals[:count], totals[count:], adds=ctx.mains is not None)
        none = [None] * (4 + count)
        if ctx.mains is None:
            return dx, *none, *totals
        return dx, *none, *[None] * len(totals), *(main.ticket.new_empty(0) for main in ctx.mains)


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The matrix that has these side by side along `dim` as views; None where they do not lie so."""
    first, place = tensors[0], tensors[0].data_ptr()
    for each in tensors:
        if (each.stride() != first.stride() or each.data_ptr() != place
                or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()):
            return None
        place += each.shape[dim] * each.stride(dim) * each.itemsize
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return first.as_strided(shape, first.stride())
