"""Where a layer's parts meet the residual stream: the norms before and after, in one function, which is one kernel on CUDA."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..kernels.launch import WIDEST_ROW, takes
from . import residual_in_torch
from .norms import rms_norm
from .precision import at_least_fp32

Readers = tuple[Tensor, Tensor, Tensor]


class NormedInput(NamedTuple):
    """x [T, H] of a layer and, since what wrote x made it as well, the norm of x that the layer's attention reads."""

    x: Tensor
    normed: Tensor


def after_attention(x: Tensor, y: Tensor, weight: Tensor, readers: Readers, factor: float, eps: float,
                    num_live: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = x + rms_norm(y, weight), and what reads it: rms_norm(h, r) for three weights, the last in at least fp32 and times `factor`.

    x, y, h [T, H] of one dtype, in which the first two results are too. Gradients of rows from `num_live` on are zero, if there is one; the
    kernel does not read them.
    """
    if takes(x, y, weight, *readers) and x.shape[1] <= WIDEST_ROW:
        from ..kernels import residual as kernel  # Triton is there with CUDA alone

        return kernel.after_attention(x, y, weight, readers, factor, eps, num_live)
    return residual_in_torch.after_attention(x, y, weight, readers, factor, eps)


def before_feed_forward(h: Tensor, readers: Readers, factor: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What `after_attention` gives beside h, of an h that is there: where it has been read from several streams."""
    if takes(h, *readers) and h.shape[1] <= WIDEST_ROW:
        from ..kernels import residual as kernel  # Triton is there with CUDA alone

        return kernel.before_feed_forward(h, readers, factor, eps)
    return before_feed_forward_in_torch(h, readers, factor, eps)


def before_feed_forward_in_torch(h: Tensor, readers: Readers, factor: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`before_feed_forward` without kernels."""
    # In the order in which parts that run by themselves read h: their gradients are then added up in the same order, and to the same bits.
    second = rms_norm(h, readers[1], eps)
    third = rms_norm(at_least_fp32(h), None, eps) * readers[2] * factor
    return rms_norm(h, readers[0], eps), second, third


def after_feed_forward(h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, scalars: Tensor, num_first: int,
                       eps: float, num_live: int | None = None) -> Tensor:
    """(h + rms_norm(rms_norm(a, weight_a) + rms_norm(b, weight_b), weight)) * scalars[0] in the first `num_first` rows, scalars[1] after.

    h, a, b and the result [T, H]; `scalars` [2] has no gradient. `num_live` as in `after_attention`.
    """
    if takes(h, a, b, weight_a, weight_b, weight, scalars) and h.shape[1] <= WIDEST_ROW:
        from ..kernels import residual as kernel  # Triton is there with CUDA alone

        return kernel.after_feed_forward(h, a, b, weight_a, weight_b, weight, scalars, num_first, eps, num_live)
    return residual_in_torch.after_feed_forward(h, a, b, weight_a, weight_b, weight, scalars, num_first, eps)


def after_feed_forward_and_norm(h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, weight_next: Tensor,
                                scalars: Tensor, num_first: int, eps: float, num_live: int | None = None) -> NormedInput:
    """y, the result of `after_feed_forward`, and rms_norm(y, weight_next); on CUDA in one kernel."""
    if takes(h, a, b, weight_a, weight_b, weight, weight_next, scalars) and h.shape[1] <= WIDEST_ROW:
        from ..kernels import residual as kernel  # Triton is there with CUDA alone

        return NormedInput(*kernel.after_feed_forward_and_norm(h, a, b, weight_a, weight_b, weight, weight_next, scalars, num_first, eps,
                                                               num_live))
    y = after_feed_forward(h, a, b, weight_a, weight_b, weight, scalars, num_first, eps, num_live)
    return NormedInput(y, rms_norm(y, weight_next, eps))


def of_feed_forward(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, eps: float,
                    num_live: int | None = None) -> Tensor:
    """rms_norm(rms_norm(a, weight_a) + rms_norm(b, weight_b), weight): what `after_feed_forward` adds to h, to be written to streams;
    `num_live` as there."""
    if takes(a, b, weight_a, weight_b, weight) and a.shape[1] <= WIDEST_ROW:
        from ..kernels import residual as kernel

        return kernel.of_feed_forward(a, b, weight_a, weight_b, weight, eps, num_live)
    return of_feed_forward_in_torch(a, b, weight_a, weight_b, weight, eps)


def of_feed_forward_in_torch(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`of_feed_forward` without kernels."""
    return rms_norm(rms_norm(a, weight_a, eps) + rms_norm(b, weight_b, eps), weight, eps)
