"""RMSNorm with a plain weight (not 1 + w), computed in at least fp32 and cast back."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels.launch import WIDEST_ROW, takes
from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Constant, make_parameter
from .precision import at_least_fp32

NormFunction = Callable[[Tensor, Tensor, float], Tensor]  # of x, weight and eps


class _RMSNorm(torch.autograd.Function):
    """y = n * w with n = x * r, r = (mean(x^2) + eps)^-0.5. Saved: x as given and r, a value a row.

    dw = sum over rows of dy * n;  dx = r * (g - n * mean(g * n)) with g = dy * w.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        inverse_root = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_root)
        y = wide * inverse_root
        return (y if weight is None else y.mul_(weight.to(y.dtype))).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, inverse_root = ctx.saved_tensors
        normed, grad = at_least_fp32(x) * inverse_root, at_least_fp32(grad)
        grad_weight = None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
            grad = grad * weight.to(grad.dtype)
        projection = (grad * normed).mean(-1, keepdim=True)
        return (grad - normed.mul_(projection)).mul_(inverse_root).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dimension; the dtype of `x`."""
    if takes(x, weight) and x.shape[-1] <= WIDEST_ROW:
        from ..kernels import rms_norm as kernel  # Triton is there with CUDA alone

        return kernel.rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """y = rms_norm(x) * weight; x, y [..., size], weight [size], equal on every rank.

    With `partial`, x is this tp rank's share of all there is (its heads, or its tokens), and so is the weight's gradient. `function`
    computes it where it is called as a module; what is fused with its neighbours reads `weight` and `eps`.
    """

    def __init__(self, name: str, size: int, *, eps: float, context: ParallelContext, dtype: torch.dtype, partial: bool = False):
        super().__init__()
        self.eps = eps
        self.function: NormFunction = rms_norm
        placement = place((size,), context, partial_over_tp=partial or context.sequence_parallel)
        self.weight = make_parameter(f"{name}.weight", placement, init=Constant(1.0), dtype=dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.eps)
