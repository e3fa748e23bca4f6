"""Taking rows of a tensor by number, with a cheap gradient where no row is taken twice."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class _TakeDistinct(torch.autograd.Function):
    """y = x[index]; dx is dy put in place. Plain indexing would sort and add up, which on a GPU costs far more than attention itself."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, index, grad), None


def take_distinct(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for int64 `index` [n] in which no row comes twice."""
    return _TakeDistinct.apply(x, index)


@dataclass(frozen=True)
class Rows:
    """Which rows: a run of them (a slice, so that no copy is made), or an index, `distinct` when no row comes twice in it."""

    index: Tensor | slice
    distinct: bool

    @classmethod
    def of(cls, values: np.ndarray, device: torch.device) -> Rows:
        """The rows `values` (int64, flattened), in this order."""
        flat = values.reshape(-1)
        if len(flat) and bool((np.diff(flat) == 1).all()):
            return cls(slice(int(flat[0]), int(flat[-1]) + 1), True)
        return cls(torch.from_numpy(flat).to(device), len(np.unique(flat)) == len(flat))

    def take(self, x: Tensor) -> Tensor:
        """x[rows]."""
        return take_distinct(x, self.index) if self.distinct and isinstance(self.index, Tensor) else x[self.index]

    def put(self, x: Tensor, values: Tensor) -> None:
        """x[rows] = values, in place."""
        if isinstance(self.index, slice):
            x[self.index].copy_(values)
        else:
            x.index_copy_(0, self.index, values)
