"""Moving tokens into expert order and back, deterministic in both directions (gathers only, no atomic adds).

Legend: T tokens, k experts a token, N <= T * k rows in expert order, H hidden, E experts.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.launch import WIDEST_ROW, takes
from ..transformer.plain_function import PlainFunction


@dataclass(frozen=True)
class Permutation:
    """slot int64 [N]: the (token, choice) slot t * k + c that row n holds, rows sorted by expert, then by slot; row int64 [T, k]: its
    inverse, N for a choice that has no row; counts int64 [E]: rows of each expert. `is_partial`: some choice has no row."""

    slot: Tensor
    row: Tensor
    counts: Tensor
    is_partial: bool = False


def sort_by_expert(indices: Tensor, num_experts: int) -> Permutation:
    """The permutation of routing choices `indices` [T, k]."""
    if indices.is_cuda:
        from ..kernels.expert_order import expert_order  # Triton is there with CUDA alone

        return Permutation(*expert_order(indices, num_experts))
    experts = indices.reshape(-1)
    slot = experts.argsort(stable=True)
    return Permutation(slot, _inverse(slot).view(indices.shape), experts.bincount(minlength=num_experts))


def sort_each_by_expert(indices: Tensor, num_experts: int) -> list[Permutation]:
    """The permutation of each layer's choices, of [L, T, k]; on a GPU in the launches of one."""
    if indices.is_cuda:
        from ..kernels.expert_order import expert_order

        return [Permutation(*parts) for parts in zip(*(x.unbind(0) for x in expert_order(indices, num_experts)), strict=True)]
    return [sort_by_expert(own, num_experts) for own in indices.unbind(0)]


def sort_by_local_expert(indices: Tensor, num_experts: int, num_rows: int) -> Permutation:
    """The same where some of the choices [T, k] are not of these experts: they are -1 and get no row. There are `num_rows` rows, at least
    as many as the others; those left over stand last and belong to no expert."""
    if indices.is_cuda:
        from ..kernels.expert_order import expert_order

        return Permutation(*expert_order(indices, num_experts, num_rows), is_partial=True)
    flat = indices.reshape(-1)
    absent = flat < 0
    experts = torch.where(absent, num_experts, flat)
    slot = experts.argsort(stable=True)
    row = torch.where(absent, num_rows, _inverse(slot)).view(indices.shape)
    return Permutation(slot[:num_rows], row, experts.bincount(minlength=num_experts + 1)[:num_experts], is_partial=True)


def count_choices(indices: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many of the choices [T, k] are of each expert."""
    if indices.is_cuda:
        from ..kernels import expert_order as kernel  # Triton is there with CUDA alone

        return kernel.count_choices(indices, num_experts)
    return count_values(indices, num_experts)


def count_values(values: Tensor, size: int) -> Tensor:
    """int64 [size]: how often each of 0 to size - 1 comes in `values`. On a GPU nobody waits, as for bincount; whole numbers add up to the
    same in any order."""
    flat = values.reshape(-1)
    if not values.is_cuda:
        return flat.bincount(minlength=size)
    return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def _taken(rows: Tensor, row: Tensor, is_partial: bool) -> Tensor:
    """[T, k, ...]: the row of each choice, zero where it has none."""
    filled = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) if is_partial else rows
    # On a CPU a fifth of the time of filled[row].
    return filled.index_select(0, row.reshape(-1)).view(*row.shape, *rows.shape[1:])


def _sum_of_choices(x: Tensor) -> Tensor:
    """[T, H] of [T, k, H]. Over two choices torch's sum takes several times as long as an addition."""
    return x[:, 0] + x[:, 1] if x.shape[1] == 2 else x.sum(1)


def _of_slots(x: Tensor, slot: Tensor, num_choices: int) -> Tensor:
    """x[slot[n] // k] for each row; without tokens every row is left over."""
    # shape[0], since len of a tensor takes as long as a small operation.
    if not x.shape[0]:
        return x.new_zeros(slot.shape[0], x.shape[1])
    return x.index_select(0, slot if num_choices == 1 else slot // num_choices)


class _Permute(PlainFunction):
    """rows[n] = x[slot[n] // k]; backward: dx[t] = sum over choices of drows[row[t, c]], zero from `num_live` on."""

    @staticmethod
    def forward(ctx, x: Tensor, slot: Tensor, row: Tensor, is_partial: bool, num_live: int | None = None) -> Tensor:
        ctx.save_for_backward(row)
        ctx.is_partial, ctx.num_live = is_partial, num_live
        return _of_slots(x, slot, row.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor):
        row, = ctx.saved_tensors
        dx = _sum_of_choices(_taken(grad, row[:ctx.num_live], ctx.is_partial))
        return dx if ctx.num_live is None else F.pad(dx, (0, 0, 0, len(row) - len(dx))), None, None, None, None


class _Sum(PlainFunction):
    """y[t] = sum over choices of rows[row[t, c]], in at least fp32; backward: drows[n] = dy[slot[n] // k]."""

    @staticmethod
    def forward(ctx, rows: Tensor, slot: Tensor, row: Tensor, is_partial: bool) -> Tensor:
        ctx.save_for_backward(slot, row)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return _sum_of_choices(_taken(rows, row, is_partial).to(wide)).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        slot, row = ctx.saved_tensors
        return _of_slots(grad, slot, row.shape[1]), None, None, None


class _Unpermute(PlainFunction):
    """y[t] = sum over choices of weights[t, c] * rows[row[t, c]], in the dtype of the weights, cast to the rows' dtype."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, slot: Tensor, row: Tensor, is_partial: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, slot, row)
        ctx.is_partial = is_partial
        return _sum_of_choices(_taken(rows, row, is_partial) * weights[:, :, None]).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weights, slot, row = ctx.saved_tensors
        of_rows = _of_slots(grad.to(weights.dtype), slot, row.shape[1])
        grad_rows = (of_rows * _of_slots(weights.reshape(-1, 1), slot, 1)).to(rows.dtype)
        return grad_rows, _taken((rows * of_rows).sum(1), row, ctx.is_partial), None, None, None


class _Reorder(torch.autograd.Function):
    """rows[n] = x[order[n]], a permutation, so its gradient is a gather by the inverse."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        inverse, = ctx.saved_tensors
        return grad[inverse], None, None


@dataclass(frozen=True)
class RowOrder:
    """A permutation of rows: `order` int64 [N] says which row comes to place n, `inverse` [N] where row n goes."""

    order: Tensor
    inverse: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> RowOrder:
        """Rows by their keys [N]; equal keys keep their order."""
        order = torch.argsort(keys, stable=True)
        return cls(order, _inverse(order))

    def apply(self, x: Tensor) -> Tensor:
        """x [N, H] in this order."""
        return _Reorder.apply(x, self.order, self.inverse)

    def undo(self, rows: Tensor) -> Tensor:
        """The inverse of `apply`."""
        return _Reorder.apply(rows, self.inverse, self.order)


def permute(x: Tensor, permutation: Permutation, num_live: int | None = None) -> Tensor:
    """[N, H] in expert order from x [T, H]. Only the first `num_live` tokens (None: all) get a gradient that is not zero."""
    if takes(x):
        from ..kernels import permute as kernel  # Triton is there with CUDA alone

        return kernel.permute(x, permutation.row, len(permutation.slot), num_live)
    return _Permute.of(x, permutation.slot, permutation.row, permutation.is_partial, num_live)


def unpermute(rows: Tensor, weights: Tensor | None, permutation: Permutation, num_live: int | None = None) -> Tensor:
    """[T, H]: each token's rows [N, H], weighted by `weights` [T, k] and summed; without weights they are only summed.

    num_live: whoever made the rows does not read the gradient of those of later tokens, and nothing need be written there.
    """
    if takes(rows, weights) and rows.shape[1] <= WIDEST_ROW:
        from ..kernels import permute as kernel

        return kernel.unpermute(rows, weights, permutation.row, num_live)
    if weights is None:
        return _Sum.of(rows, permutation.slot, permutation.row, permutation.is_partial)
    return _Unpermute.of(rows, weights, permutation.slot, permutation.row, permutation.is_partial)
