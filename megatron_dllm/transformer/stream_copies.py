"""mHC's residual streams as copies of one tensor, and their mean: where a model enters and leaves them."""
from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.launch import takes
from .precision import at_least_fp32


def expand_streams(x: Tensor, num_streams: int) -> Tensor:
    """[T, n*C]: x [T, C] in every stream, each a copy."""
    return x if num_streams == 1 else _Expand.apply(x, num_streams, 1.0)


def contract_streams(x: Tensor, num_streams: int) -> Tensor:
    """[T, C]: the mean of the streams."""
    return x if num_streams == 1 else _Sum.apply(x, num_streams, 1 / num_streams)


class _Expand(torch.autograd.Function):
    """x times a factor in every stream."""

    @staticmethod
    def forward(ctx, x, num_streams, factor):
        ctx.of = num_streams, factor
        return spread(x, num_streams, factor)

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, *ctx.of), None, None


class _Sum(torch.autograd.Function):
    """The sum of the streams times a factor."""

    @staticmethod
    def forward(ctx, x, num_streams, factor):
        ctx.of = num_streams, factor
        return sum_streams(x, num_streams, factor)

    @staticmethod
    def backward(ctx, grad):
        return _Expand.apply(grad, *ctx.of), None, None


def spread(x: Tensor, num_streams: int, factor: float) -> Tensor:
    """[T, n*C]: x [T, C] times a factor in every stream."""
    if takes(x):
        from ..kernels import hyper_connection_streams as kernel  # Triton is there with CUDA alone

        return kernel.spread(x.contiguous(), num_streams, factor)
    return (at_least_fp32(x) * factor).to(x.dtype).repeat(1, num_streams)


def sum_streams(x: Tensor, num_streams: int, factor: float) -> Tensor:
    """[T, C]: the sum of the streams of x [T, n*C], in at least fp32, times a factor."""
    if takes(x):
        from ..kernels import hyper_connection_streams as kernel

        return kernel.sum_streams(x.contiguous(), num_streams, factor)
    return (at_least_fp32(x).unflatten(1, (num_streams, -1)).sum(1) * factor).to(x.dtype)
