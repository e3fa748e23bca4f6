"""RMSNorm with a plain weight (not 1 + w), computed in at least fp32 and cast back."""
from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels.launch import WIDEST_ROW, takes
from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Constant, make_parameter
from .plain_function import PlainFunction
from .precision import at_least_fp32

NormFunction = Callable[[Tensor, Tensor, float], Tensor]  # of x, weight and eps


def inverse_root(x: Tensor, eps: float) -> Tensor:
    """(mean(x^2) + eps)^-0.5 over the last dimension of x, at least fp32; a value a row."""
    size = x.shape[-1]
    if x.is_cuda:
        return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    # On a CPU the number of operations counts, and what they write.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps, x.dtype), norm, norm, value=1 / size).rsqrt_()


@functools.cache
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def gradient_of_normed(grad: Tensor, normed: Tensor, root: Tensor) -> Tensor:
    """dx = r * (g - n * mean(g * n)) of n = x * r, r = inverse_root(x), from g, the gradient of n."""
    projection = (grad * normed).sum(-1, keepdim=True)
    return torch.addcmul(grad, normed, projection, value=-1 / normed.shape[-1]).mul_(root)


def gradient_of_weighted(grad: Tensor, normed: Tensor, root: Tensor, weight: Tensor, *, wants_weight: bool) -> tuple[Tensor, Tensor | None]:
    """dx as of `gradient_of_normed`, and dw where it is wanted, of n * w from the gradient of that, all but w [H] in at least fp32.

    On a CPU the rows' sums of g * n, g being grad * w, are products of w with grad * n, which dw is the sum of.
    """
    product, weight = grad * normed, weight.to(grad.dtype)
    projection = (product * weight).sum(-1, keepdim=True) if grad.is_cuda else (product @ weight).unsqueeze(-1)
    dx = torch.addcmul(grad * weight, normed, projection, value=-1 / normed.shape[-1]).mul_(root)
    return dx, product.flatten(0, -2).sum(0) if wants_weight else None


class _RMSNorm(PlainFunction):
    """y = n * w with n = x * r, r = (mean(x^2) + eps)^-0.5. Saved: x as given and r, a value a row.

    dw = sum over rows of dy * n;  dn = dy * w.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        root = inverse_root(wide, eps)
        ctx.save_for_backward(x, weight, root)
        y = wide * root
        return (y if weight is None else y.mul_(weight.to(y.dtype))).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, root = ctx.saved_tensors
        normed, grad = at_least_fp32(x) * root, at_least_fp32(grad)
        if weight is None:
            return gradient_of_normed(grad, normed, root).to(x.dtype), None, None
        dx, of_weight = gradient_of_weighted(grad, normed, root, weight, wants_weight=ctx.needs_input_grad[1])
        return dx.to(x.dtype), None if of_weight is None else of_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^-0.5 * weight over the last dimension; the dtype of `x`."""
    if takes(x, weight) and x.shape[-1] <= WIDEST_ROW:
        from ..kernels import rms_norm as kernel  # Triton is there with CUDA alone

        return kernel.rms_norm(x, weight, eps)
    return _RMSNorm.of(x, weight, eps)


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

    def beside(self, x: Tensor, num_live: int | None = None) -> tuple[Tensor, Tensor]:
        """(self(x), x): for two readers of x, whose gradients our kernel adds up in its own pass; it takes those of rows from `num_live` on
        for zero."""
        if self.function is rms_norm and takes(x, self.weight) and x.shape[-1] <= WIDEST_ROW and x.is_contiguous():
            from ..kernels import rms_norm as kernel  # Triton is there with CUDA alone

            return kernel.rms_norm_beside(x, self.weight, self.eps, num_live)
        return self(x), x
