"""RMSNorm by the package's kernels."""
from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transformer.norms import NormFunction, rms_norm


def engine_rms_norm() -> NormFunction:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dimension of bf16 tensors; others, and none at all, go to ours."""
    kernels = importlib.import_module("transformer_engine_torch")  # the package has loaded it
    dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            rows = x.contiguous().view(-1, x.shape[-1])
            # No room for the result, no quantizer; all processors; the weight as it is, not 1 + weight.
            y, _, inverse_root = kernels.rmsnorm_fwd(rows, weight, eps, None, None, dtypes[x.dtype], 0, False)
            ctx.save_for_backward(rows, weight, inverse_root)
            return y.view(x.shape)

        @staticmethod
        @once_differentiable
        def backward(ctx, grad: Tensor):
            rows, weight, inverse_root = ctx.saved_tensors
            grad_rows, grad_weight = kernels.rmsnorm_bwd(grad.contiguous().view(rows.shape), rows, inverse_root, weight, 0, False)
            return grad_rows.view(grad.shape), grad_weight if ctx.needs_input_grad[1] else None, None

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.numel() and x.dtype == weight.dtype == torch.bfloat16:
            return Norm.apply(x, weight, eps)
        return rms_norm(x, weight, eps)

    return norm
