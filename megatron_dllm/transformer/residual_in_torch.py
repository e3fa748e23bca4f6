"""transformer.residual's functions in plain torch, each with a backward of its own: at toy sizes on a CPU it is the number of operations,
and of autograd's nodes, that takes the time."""
from __future__ import annotations

import torch
from torch import Tensor

from .norms import gradient_of_normed, gradient_of_weighted, inverse_root
from .plain_function import PlainFunction
from .precision import at_least_fp32


def after_attention(x: Tensor, y: Tensor, weight: Tensor, readers: tuple[Tensor, Tensor, Tensor], factor: float,
                    eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See residual.after_attention."""
    return _AfterAttention.of(x, y, weight, *readers, factor, eps)


def after_feed_forward(h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, scalars: Tensor, num_first: int,
                       eps: float) -> Tensor:
    """See residual.after_feed_forward."""
    return _AfterFeedForward.of(h, a, b, weight_a, weight_b, weight, scalars, num_first, eps)


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x * r, r) in at least fp32, r as of `inverse_root`."""
    x = at_least_fp32(x)
    root = inverse_root(x, eps)
    return x * root, root


def _of_weight(grad: Tensor, normed: Tensor, weight: Tensor, wanted: bool) -> Tensor | None:
    """The gradient of `weight` from that of normed * weight, where it is wanted."""
    return (grad * normed).sum(0).to(weight.dtype) if wanted else None


def _through_norm(grad: Tensor, normed: Tensor, root: Tensor, weight: Tensor, wanted: bool,
                  dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The gradients in `dtype` of what was normed, and of the weight, where it is wanted."""
    dx, of_weight = gradient_of_weighted(grad, normed, root, weight, wants_weight=wanted)
    return dx.to(dtype), None if of_weight is None else of_weight.to(weight.dtype)


class _AfterAttention(PlainFunction):
    """h = x + y * r(y) * weight, and h * r(h) * reader for each of three readers. Saved: y and h times their r, and r."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, weight: Tensor, first: Tensor, second: Tensor, third: Tensor, factor: float, eps: float):
        added, root = _normed(y, eps)
        h = (added * weight).to(x.dtype).add_(x)
        normed, root_h = _normed(h, eps)
        ctx.save_for_backward(added, root, normed, root_h, weight, first, second, third)
        ctx.dtype, ctx.factor = x.dtype, factor
        return h, (normed * first).to(x.dtype), (normed * second).to(x.dtype), (normed * third).mul_(factor)

    @staticmethod
    def backward(ctx, dh: Tensor, *grads: Tensor):
        added, root, normed, root_h, weight, *readers = ctx.saved_tensors
        total, of_readers = at_least_fp32(dh), [None] * 3
        # As, and in the order in which, autograd makes and adds them up where the readers are apart, so that a recompute of the experts or
        # of the MLP changes no bit.
        for n in (0, 2, 1):
            if n < 2:
                inner, of_readers[n] = _through_norm(at_least_fp32(grads[n]), normed, root_h, readers[n], ctx.needs_input_grad[3 + n],
                                                     total.dtype)
            else:
                grad = grads[2] * ctx.factor
                of_readers[2] = _of_weight(grad, normed, readers[2], ctx.needs_input_grad[5])
                inner = gradient_of_normed(grad * readers[2], normed, root_h)
            total = inner.add_(total) if n == 0 else total.add_(inner)
        dy, of_weight = _through_norm(total, added, root, weight, ctx.needs_input_grad[2], ctx.dtype)
        return total.to(ctx.dtype), dy, of_weight, *of_readers, None, None


class _AfterFeedForward(PlainFunction):
    """(h + s * r(s) * weight) * scale with s = a * r(a) * weight_a + b * r(b) * weight_b. Saved: a, b and s times their r, and r."""

    @staticmethod
    def forward(ctx, h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, scalars: Tensor, num_first: int,
                eps: float) -> Tensor:
        normed_a, root_a = _normed(a, eps)
        normed_b, root_b = _normed(b, eps)
        total, root = _normed((normed_a * weight_a).add_(normed_b * weight_b), eps)
        first, second = scalars.split(1)
        scale = torch.cat([first.expand(num_first, 1), second.expand(h.shape[0] - num_first, 1)])
        ctx.save_for_backward(normed_a, root_a, normed_b, root_b, total, root, weight_a, weight_b, weight, scale)
        return (total * weight).add_(h).mul_(scale).to(h.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        normed_a, root_a, normed_b, root_b, total, root, weight_a, weight_b, weight, scale = ctx.saved_tensors
        wanted, dtype = ctx.needs_input_grad, grad.dtype
        dh = at_least_fp32(grad) * scale
        inner, of_weight = _through_norm(dh, total, root, weight, wanted[5], dh.dtype)
        da, of_weight_a = _through_norm(inner, normed_a, root_a, weight_a, wanted[3], dtype)
        db, of_weight_b = _through_norm(inner, normed_b, root_b, weight_b, wanted[4], dtype)
        return dh.to(dtype), da, db, of_weight_a, of_weight_b, of_weight, None, None, None
