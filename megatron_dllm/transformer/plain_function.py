"""Functions of plain torch with a backward of their own, cheap to call where no gradient is recorded."""
from __future__ import annotations

import torch
from torch import Tensor


class PlainFunction(torch.autograd.Function):
    """An autograd function that is called by `of`. Drafts and generation on a CPU call thousands of them without gradient, where `apply`
    takes as long as three small operations."""

    @classmethod
    def of(cls, *inputs):
        """As `apply`; without gradient the forward alone."""
        return cls.apply(*inputs) if torch.is_grad_enabled() else cls.forward(_Nothing(), *inputs)


class _Nothing:
    """The context of a forward that no backward follows: it takes what it is told and keeps only what is set."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Nothing is."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """None has a gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are none."""
