"""Moving tokens into expert order and back, deterministic in both directions (gathers only, no atomic adds).

Legend: T tokens, k experts a token, N = T * k rows in expert order, H hidden, E experts.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """slot int64 [N]: the (token, choice) slot t * k + c that row n holds, rows sorted by expert, then by slot; row int64 [T, k]: its
    inverse; counts int64 [E]: rows of each expert."""

    slot: Tensor
    row: Tensor
    counts: Tensor


def sort_by_expert(indices: Tensor, num_experts: int) -> Permutation:
    """The permutation of routing choices `indices` [T, k]."""
    flat = indices.reshape(-1)
    slot = torch.argsort(flat, stable=True)
    row = torch.empty_like(slot)
    row[slot] = torch.arange(len(slot), device=slot.device)
    return Permutation(slot, row.view(indices.shape), torch.bincount(flat, minlength=num_experts))


class _Permute(torch.autograd.Function):
    """rows[n] = x[slot[n] // k]; backward: dx[t] = sum over choices of drows[row[t, c]]."""

    @staticmethod
    def forward(ctx, x: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return x[slot // row.shape[1]]

    @staticmethod
    def backward(ctx, grad: Tensor):
        row, = ctx.saved_tensors
        return grad[row].sum(1), None, None


class _Unpermute(torch.autograd.Function):
    """y[t] = sum over choices of weights[t, c] * rows[row[t, c]], in the dtype of the weights, cast to the rows' dtype."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, slot, row)
        return torch.einsum("tkh,tk->th", rows[row].to(weights.dtype), weights).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weights, slot, row = ctx.saved_tensors
        wide = grad.to(weights.dtype)
        grad_rows = (wide[slot // row.shape[1]] * weights.reshape(-1)[slot][:, None]).to(rows.dtype)
        grad_weights = torch.einsum("tkh,th->tk", rows[row].to(weights.dtype), wide)
        return grad_rows, grad_weights, None, None


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """[N, H] in expert order from x [T, H]."""
    return _Permute.apply(x, permutation.slot, permutation.row)


def unpermute(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    """[T, H]: each token's rows [N, H], weighted by `weights` [T, k] and summed."""
    return _Unpermute.apply(rows, weights, permutation.slot, permutation.row)
