"""The end of a layer that keeps nothing for a backward: the experts' results put together, the norms where they meet the residual stream,
and the norm that the next layer begins with; one launch.

Legend: T tokens, k choices a token, N rows, W width, n(v) = v * (mean(v^2) + eps)^-0.5.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import after_last, dependent
from .launch import next_power_of_2
from .residual import _inverse_root, _load

WARPS = 8  # few, so that three programs share a processor: each waits for its token's rows


@triton.jit
def _finish(h, a, rows, row, choice_weights, weight_a, weight_b, weight, scalar, next_weight, y, normed, eps, CHOICES: tl.constexpr,
            WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):
    after_last(DEPENDENT)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    at = token * WIDTH + column
    b = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(CHOICES):
        number = tl.load(row + token * CHOICES + choice).to(tl.int64)
        b += _load(rows, number * WIDTH + column, inside) * tl.load(choice_weights + token * CHOICES + choice).to(tl.float32)
    b = b.to(rows.dtype.element_ty).to(tl.float32)  # rounded as where it is stored
    a = _load(a, at, inside)
    total = a * _inverse_root(a, eps, WIDTH) * _load(weight_a, column, inside)
    total += b * _inverse_root(b, eps, WIDTH) * _load(weight_b, column, inside)
    out = _load(h, at, inside) + total * _inverse_root(total, eps, WIDTH) * _load(weight, column, inside)
    out = (out * tl.load(scalar).to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + at, out, mask=inside)
    out = out.to(tl.float32)
    tl.store(normed + at, (out * _inverse_root(out, eps, WIDTH) * _load(next_weight, column, inside)).to(y.dtype.element_ty), mask=inside)


def finish_layer(h: Tensor, a: Tensor, rows: Tensor, row: Tensor, choice_weights: Tensor, weight_a: Tensor, weight_b: Tensor,
                 weight: Tensor, scalar: Tensor, next_weight: Tensor, eps: float, *, early: bool = True) -> tuple[Tensor, Tensor]:
    """(y, n(y) * next_weight) with y = (h + n(n(a) * weight_a + n(b) * weight_b) * weight) * scalar; h, a, y [T, W].

    b [T, W] is the sum over choices of choice_weights[t, c] * rows[row[t, c]], rows [N, W]; scalar []. `early`: right after the kernel
    that makes `rows`, and waiting for nothing else.
    """
    y, normed = torch.empty_like(h), torch.empty_like(h)
    if len(h):
        _finish[(len(h),)](h, a, rows, row, choice_weights, weight_a, weight_b, weight, scalar, next_weight, y, normed, eps,
                           CHOICES=row.shape[1], WIDTH=h.shape[1], COLUMNS=next_power_of_2(h.shape[1]), num_warps=WARPS,
                           **dependent(h.device, early=early))
    return y, normed
