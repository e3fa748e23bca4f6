"""Where the parts of a layer that keeps nothing for a backward meet the residual stream, a launch each: after attention, as in
kernels.residual; and at the end, the experts' results put together, the norms, and the norm that the next layer begins with.

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
# On an H200, us for 256 and for 2048 tokens: 4.2 and 26.9; by 8 warps 4.1 and 32.3.
WARPS_ATTENDED = 4


@triton.jit(do_not_specialize=["num_tokens"])
def _attended(x, y, weight, weight_1, weight_2, weight_3, h, out_1, out_2, parts, num_tokens, factor, eps, WIDTH: tl.constexpr,
              COLUMNS: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    at = token * WIDTH + column
    wide, residual = _load(y, at, inside), _load(x, at, inside)
    # Rounded before its norm is taken, as it is stored.
    total = (residual + wide * _inverse_root(wide, eps, WIDTH) * _load(weight, column, inside)).to(h.dtype.element_ty)
    tl.store(h + at, total, mask=inside)
    total = total.to(tl.float32)
    normed = total * _inverse_root(total, eps, WIDTH)
    tl.store(out_1 + at, (normed * _load(weight_1, column, inside)).to(out_1.dtype.element_ty), mask=inside)
    tl.store(out_2 + at, (normed * _load(weight_2, column, inside)).to(out_2.dtype.element_ty), mask=inside)
    rest = normed * _load(weight_3, column, inside) * factor
    for part in tl.static_range(3):
        rounded = rest.to(parts.dtype.element_ty)
        tl.store(parts + part * num_tokens.to(tl.int64) * WIDTH + at, rounded, mask=inside)
        rest -= rounded.to(tl.float32)


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


def after_attention(x: Tensor, y: Tensor, weight: Tensor, readers: tuple[Tensor, Tensor, Tensor], factor: float,
                    eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As residual.after_attention, but that the last result comes in parts: bf16 [3, T, W], as router_logits.in_parts gives them."""
    h, out_1, out_2 = (torch.empty_like(x) for _ in range(3))
    parts, columns = x.new_empty(3, *x.shape, dtype=torch.bfloat16), next_power_of_2(x.shape[1])
    if len(x):
        _attended[(len(x),)](x, y, weight, *readers, h, out_1, out_2, parts, len(x), factor, eps, WIDTH=x.shape[1], COLUMNS=columns,
                             num_warps=WARPS_ATTENDED)
    return h, out_1, out_2, parts


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
