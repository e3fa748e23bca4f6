"""The norms where a layer's two parts meet the residual stream, one kernel a meeting: each tensor is read once, a row in registers.

Where there are several streams (mHC), which are read and written by kernels of their own, the same norms without the residual.

Legend: T rows, W width, n(v) = v * (mean(v^2) + eps)^-0.5.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_large_shared_memory, next_power_of_2, persistent_programs, processors
from .rms_norm import sum_partials

# Of 5120 rows on an H200, us of forward and backward of after_attention and after_feed_forward. With sums of the weights' gradients, by 16
# warps that read a row while they work on another two, one program a processor: 145 and 110; without reading ahead 153 and 124, with an
# exchange between warps for every sum 179 and 152. Without the sums, a row a program, by 8 warps 121 and 103, by 4 warps 121 and 91, with
# an exchange for every sum 141 and 106.
WARPS_OF_SUMS, STAGES = 16, 3
WARPS, WARPS_FED = 8, 4
MOST_SHARED = 200 * 1024  # bytes of shared memory for what is read ahead


@triton.jit
def _load(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _inverse_root(v, eps, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)


@triton.jit
def _two_sums(a, b):
    """The sums of two rows, by one exchange between warps: each exchange costs as much as reading a row."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def _four_sums(a, b, c, d):
    """Of four rows, by one exchange too."""
    first, second = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 0))
    sum_a, sum_b = tl.split(first)
    sum_c, sum_d = tl.split(second)
    return sum_a, sum_b, sum_c, sum_d


@triton.jit
def _attended(x, y, weight, weight_1, weight_2, weight_3, h, out_1, out_2, out_3, roots, factor, eps, WIDTH: tl.constexpr,
              COLUMNS: tl.constexpr, MEETS: tl.constexpr):
    """Without MEETS, h is there already, and is not written; then neither are y, its weight and x."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    at = row * WIDTH + column
    if MEETS:
        wide, residual = _load(y, at, inside), _load(x, at, inside)
        root_y = _inverse_root(wide, eps, WIDTH)
        tl.store(roots + 2 * row, root_y)
        # Rounded as it is stored, so that the backward, which reads it again, has the same norms.
        total = (residual + wide * root_y * _load(weight, column, inside)).to(h.dtype.element_ty)
        tl.store(h + at, total, mask=inside)
        total = total.to(tl.float32)
    else:
        total = _load(h, at, inside)
    root_h = _inverse_root(total, eps, WIDTH)
    tl.store(roots + 2 * row + 1, root_h)
    normed = total * root_h
    tl.store(out_1 + at, (normed * _load(weight_1, column, inside)).to(out_1.dtype.element_ty), mask=inside)
    tl.store(out_2 + at, (normed * _load(weight_2, column, inside)).to(out_2.dtype.element_ty), mask=inside)
    tl.store(out_3 + at, (normed * _load(weight_3, column, inside) * factor).to(out_3.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_live"])
def _attended_backward(y, h, weight, weight_1, weight_2, weight_3, roots, dh, dout_1, dout_2, dout_3, dx, dy, partial, partial_3, factor,
                       num_rows, num_live, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WANTS_WEIGHTS: tl.constexpr, MEETS: tl.constexpr,
                       STAGES: tl.constexpr):
    """Rows from `num_live` on have gradients of zero, and are not read."""
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    dweight, dweight_1 = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    dweight_2, dweight_3 = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in tl.range(0, tl.cdiv(num_rows - tl.program_id(0), step), num_stages=STAGES):
        row = first + turn * step
        at, seen = row * WIDTH + column, inside & (row < num_live)
        root_h = tl.load(roots + 2 * row + 1)
        normed = _load(h, at, seen) * root_h
        grad_1, grad_2, grad_3 = _load(dout_1, at, seen), _load(dout_2, at, seen), _load(dout_3, at, seen) * factor
        if MEETS:
            root_y, beside = tl.load(roots + 2 * row), _load(dh, at, seen)
            normed_y, factor_y = _load(y, at, seen) * root_y, _load(weight, column, inside)
        if WANTS_WEIGHTS:
            dweight_1 += grad_1 * normed
            dweight_2 += grad_2 * normed
            dweight_3 += grad_3 * normed
        grad = grad_1 * _load(weight_1, column, inside) + grad_2 * _load(weight_2, column, inside)
        grad += grad_3 * _load(weight_3, column, inside)
        if MEETS:
            # dh = root_h (grad - normed share) + beside; its product with y's norm and weight is that of each part.
            part = normed_y * factor_y
            along, of_grad, of_normed, of_beside = _four_sums(grad * normed, grad * part, normed * part, beside * part)
            share = along / WIDTH
            total = root_h * (grad - normed * share) + beside
            along_y = root_h * (of_grad - share * of_normed) + of_beside
            if WANTS_WEIGHTS:
                dweight += total * normed_y
            tl.store(dy + at, (root_y * (total * factor_y - normed_y * (along_y / WIDTH))).to(dy.dtype.element_ty), mask=inside)
        else:
            total = root_h * (grad - normed * (tl.sum(grad * normed, 0) / WIDTH))
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
    if WANTS_WEIGHTS:
        at = partial + tl.program_id(0).to(tl.int64) * (3 * WIDTH) + column
        tl.store(at, dweight, mask=inside)
        tl.store(at + WIDTH, dweight_1, mask=inside)
        tl.store(at + 2 * WIDTH, dweight_2, mask=inside)
        tl.store(partial_3 + tl.program_id(0).to(tl.int64) * WIDTH + column, dweight_3, mask=inside)


@triton.jit(do_not_specialize=["num_first"])
def _fed_forward(h, a, b, weight_a, weight_b, weight, scalars, weight_next, y, normed_next, roots, num_first, eps, WIDTH: tl.constexpr,
                 COLUMNS: tl.constexpr, MEETS: tl.constexpr):
    """Without MEETS, y is the norm alone: there is no h, and nothing is scaled. weight_next: of the norm of y beside it, or None."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    at = row * WIDTH + column
    wide_a, wide_b = _load(a, at, inside), _load(b, at, inside)
    if MEETS:
        residual = _load(h, at, inside)
    square_a, square_b = _two_sums(wide_a * wide_a, wide_b * wide_b)
    root_a, root_b = tl.rsqrt(square_a / WIDTH + eps), tl.rsqrt(square_b / WIDTH + eps)
    total = wide_a * root_a * _load(weight_a, column, inside) + wide_b * root_b * _load(weight_b, column, inside)
    root = _inverse_root(total, eps, WIDTH)
    tl.store(roots + 4 * row, root_a)
    tl.store(roots + 4 * row + 1, root_b)
    tl.store(roots + 4 * row + 2, root)
    out = total * root * _load(weight, column, inside)
    if MEETS:
        out = (residual + out) * tl.load(scalars + (row >= num_first).to(tl.int32)).to(tl.float32)
    rounded = out.to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=inside)
    if weight_next is not None:
        # Of y as it is stored, so that the backward, which reads it again, has the same norm.
        total = rounded.to(tl.float32)
        root_next = _inverse_root(total, eps, WIDTH)
        tl.store(roots + 4 * row + 3, root_next)
        total *= root_next * _load(weight_next, column, inside)
        tl.store(normed_next + at, total.to(normed_next.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_live", "num_first"])
def _fed_forward_backward(a, b, weight_a, weight_b, weight, scalars, weight_next, y, roots, dy, dnext, dh, da, db, partial, num_first,
                          num_rows, num_live, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WANTS_WEIGHTS: tl.constexpr,
                          MEETS: tl.constexpr, STAGES: tl.constexpr):
    """Rows from `num_live` on have gradients of zero, and are not read. weight_next, y and dnext: None where y has no norm beside it."""
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    dweight_a, dweight_b = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    dweight, dweight_next = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in tl.range(0, tl.cdiv(num_rows - tl.program_id(0), step), num_stages=STAGES):
        row = first + turn * step
        at, seen = row * WIDTH + column, inside & (row < num_live)
        root_a, root_b, root = tl.load(roots + 4 * row), tl.load(roots + 4 * row + 1), tl.load(roots + 4 * row + 2)
        factor_a, factor_b = _load(weight_a, column, inside), _load(weight_b, column, inside)
        normed_a, normed_b = _load(a, at, seen) * root_a, _load(b, at, seen) * root_b
        normed = (normed_a * factor_a + normed_b * factor_b) * root
        grad = _load(dy, at, seen)
        if weight_next is not None:
            root_next, grad_next = tl.load(roots + 4 * row + 3), _load(dnext, at, seen)
            normed_next = _load(y, at, seen) * root_next
            if WANTS_WEIGHTS:
                dweight_next += grad_next * normed_next
            grad_next *= _load(weight_next, column, inside)
            grad += root_next * (grad_next - normed_next * (tl.sum(grad_next * normed_next, 0) / WIDTH))
        if MEETS:
            grad *= tl.load(scalars + (row >= num_first).to(tl.int32)).to(tl.float32)
            tl.store(dh + at, grad.to(dh.dtype.element_ty), mask=inside)
        if WANTS_WEIGHTS:
            dweight += grad * normed
        grad *= _load(weight, column, inside)
        # The gradient of the sum is root (grad - normed share); its products with the norms of a and b are those of both parts.
        part_a, part_b = normed_a * factor_a, normed_b * factor_b
        grad_a, grad_b, own_a, own_b = _four_sums(grad * part_a, grad * part_b, normed * part_a, normed * part_b)
        share = root * (grad_a + grad_b) / WIDTH
        grad = root * (grad - normed * share)
        if WANTS_WEIGHTS:
            dweight_a += grad * normed_a
            dweight_b += grad * normed_b
        along_a, along_b = root * (grad_a - share * own_a) / WIDTH, root * (grad_b - share * own_b) / WIDTH
        tl.store(da + at, (root_a * (grad * factor_a - normed_a * along_a)).to(da.dtype.element_ty), mask=inside)
        tl.store(db + at, (root_b * (grad * factor_b - normed_b * along_b)).to(db.dtype.element_ty), mask=inside)
    if WANTS_WEIGHTS:
        COUNT: tl.constexpr = 3 if weight_next is None else 4
        at = partial + tl.program_id(0).to(tl.int64) * (COUNT * WIDTH) + column
        tl.store(at, dweight_a, mask=inside)
        tl.store(at + WIDTH, dweight_b, mask=inside)
        tl.store(at + 2 * WIDTH, dweight, mask=inside)
        if weight_next is not None:
            tl.store(at + 3 * WIDTH, dweight_next, mask=inside)


def _columns(width: int, warps: int) -> dict[str, int]:
    columns = next_power_of_2(width)
    return {"WIDTH": width, "COLUMNS": columns, "num_warps": max(1, min(warps, columns // 128))}


def _loop(rows: Tensor, wants: bool, inputs: Sequence[Tensor | None]) -> tuple[int, int]:
    """(programs, stages) of a backward that reads a row of each of the inputs; with sums (`wants`) programs share the rows."""
    num_rows, width = rows.shape
    if not wants:
        return num_rows, 1
    shared = (STAGES - 1) * next_power_of_2(width) * sum(x.itemsize for x in inputs if x is not None)
    if shared > MOST_SHARED or rows.is_cuda and not has_large_shared_memory(rows.device):
        return persistent_programs(rows.device, num_rows), 1
    return min(num_rows, processors(rows.device)), STAGES


def _room(programs: int, wants: bool, width: int, device: torch.device) -> Tensor | None:
    """For the sums of each program, [programs, width]."""
    return torch.empty(programs, width, dtype=torch.float32, device=device) if wants else None


def _zeros(weights: tuple[Tensor, ...], wants: tuple[bool, ...]) -> list[Tensor | None]:
    return [torch.zeros_like(weight) if wanted else None for weight, wanted in zip(weights, wants, strict=True)]


class _Attended(torch.autograd.Function):
    """Saved: y and h as they are, and two numbers a row. Without x and y (None), h is given in the place of x."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor | None, weight: Tensor | None, weight_1: Tensor, weight_2: Tensor, weight_3: Tensor,
                factor: float, eps: float, num_live: int | None):
        x, meets = x.contiguous(), y is not None
        num_rows, width = x.shape
        y = y.contiguous() if meets else None
        h, out_1, out_2 = torch.empty_like(x) if meets else x, torch.empty_like(x), torch.empty_like(x)
        out_3 = torch.empty_like(x, dtype=torch.float32)
        roots = torch.empty(num_rows, 2, dtype=torch.float32, device=x.device)
        if num_rows:
            _attended[(num_rows,)](x, y, weight, weight_1, weight_2, weight_3, h, out_1, out_2, out_3, roots, factor, eps, MEETS=meets,
                                   **_columns(width, WARPS))
        ctx.save_for_backward(y, h, weight, weight_1, weight_2, weight_3, roots)
        ctx.factor, ctx.num_live = factor, num_rows if num_live is None else num_live
        return (h, out_1, out_2, out_3) if meets else (out_1, out_2, out_3)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        y, h, weight, weight_1, weight_2, weight_3, roots = ctx.saved_tensors
        meets, wants = y is not None, ctx.needs_input_grad[2:6]
        dh, dout_1, dout_2, dout_3 = (grad.contiguous() for grad in grads) if meets else (None, *(grad.contiguous() for grad in grads))
        num_rows, width = h.shape
        dx, dy = torch.empty_like(h), torch.empty_like(y) if meets else None
        if not num_rows:
            return dx, dy, *_zeros((weight, weight_1, weight_2, weight_3), wants), None, None, None
        inputs = y, h, weight, weight_1, weight_2, weight_3, dh, dout_1, dout_2, dout_3
        programs, stages = _loop(h, any(wants), inputs)
        partial, partial_3 = (_room(programs, any(wants), count * width, h.device) for count in (3, 1))
        _attended_backward[(programs,)](y, h, weight, weight_1, weight_2, weight_3, roots, dh, dout_1, dout_2, dout_3, dx, dy, partial,
                                        partial_3, ctx.factor, num_rows, ctx.num_live, WANTS_WEIGHTS=any(wants), MEETS=meets,
                                        STAGES=stages, **_columns(width, WARPS_OF_SUMS if any(wants) else WARPS))
        if not any(wants):
            return dx, dy, *[None] * 7
        sums = *sum_partials(partial, weight_1.dtype).split(width), sum_partials(partial_3, weight_3.dtype)
        return dx, dy, *(total if wanted else None for total, wanted in zip(sums, wants, strict=True)), None, None, None


class _FedForward(torch.autograd.Function):
    """Saved: a and b as they are, four numbers a row and, where y has a norm beside it, y. Without h and scalars (None) the norm alone."""

    @staticmethod
    def forward(ctx, h: Tensor | None, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, weight_next: Tensor | None,
                scalars: Tensor | None, num_first: int, eps: float, num_live: int | None) -> Tensor | tuple[Tensor, Tensor]:
        a, b, meets, is_normed = a.contiguous(), b.contiguous(), h is not None, weight_next is not None
        h = h.contiguous() if meets else None
        num_rows, width = a.shape
        y, roots = torch.empty_like(h if meets else a), torch.empty(num_rows, 4, dtype=torch.float32, device=a.device)
        normed = torch.empty_like(y) if is_normed else None
        if num_rows:
            _fed_forward[(num_rows,)](h, a, b, weight_a, weight_b, weight, scalars, weight_next, y, normed, roots, num_first, eps,
                                      MEETS=meets, **_columns(width, WARPS_FED))
        ctx.save_for_backward(a, b, weight_a, weight_b, weight, weight_next, scalars, y if is_normed else None, roots)
        ctx.num_first, ctx.num_live = num_first, num_rows if num_live is None else num_live
        return (y, normed) if is_normed else y

    @staticmethod
    def backward(ctx, dy: Tensor, dnext: Tensor | None = None):
        a, b, weight_a, weight_b, weight, weight_next, scalars, y, roots = ctx.saved_tensors
        meets, wants = scalars is not None, ctx.needs_input_grad[3:7]
        num_rows, width = a.shape
        dh = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if meets else None
        da, db, weights = torch.empty_like(a), torch.empty_like(b), (weight_a, weight_b, weight, weight_next)
        if not num_rows:
            return dh, da, db, *_zeros(weights, wants), *[None] * 4
        programs, stages = _loop(a, any(wants), (a, b, *weights, y, dy, dnext))
        partial = _room(programs, any(wants), (3 if weight_next is None else 4) * width, a.device)
        _fed_forward_backward[(programs,)](a, b, weight_a, weight_b, weight, scalars, weight_next, y, roots, dy.contiguous(),
                                           None if y is None else dnext.contiguous(), dh, da, db, partial, ctx.num_first, num_rows,
                                           ctx.num_live, WANTS_WEIGHTS=any(wants), MEETS=meets, STAGES=stages,
                                           **_columns(width, WARPS_OF_SUMS if any(wants) else WARPS_FED))
        if not any(wants):
            return dh, da, db, *[None] * 8
        sums = (*sum_partials(partial, weight.dtype).split(width), None)[:4]
        return dh, da, db, *(total if wanted else None for total, wanted in zip(sums, wants, strict=True)), *[None] * 4


def after_attention(x: Tensor, y: Tensor, weight: Tensor, readers: tuple[Tensor, Tensor, Tensor], factor: float, eps: float,
                    num_live: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, n(h) * readers[0], n(h) * readers[1], n(h) * readers[2] * factor) with h = x + n(y) * weight; x, y [T, W].

    All in fp32; the last in fp32, the others in the dtype of `x`, to which h is rounded before its norm is taken. Gradients of rows from
    `num_live` on (None: of none) are taken for zero.
    """
    return _Attended.apply(x, y, weight, *readers, factor, eps, num_live)


def after_feed_forward(h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, scalars: Tensor, num_first: int,
                       eps: float, num_live: int | None = None) -> Tensor:
    """(h + n(n(a) * weight_a + n(b) * weight_b) * weight) * scalars[0 in the first `num_first` rows, then 1]; h, a, b [T, W].

    In fp32; the dtype of `h`. `scalars` [2] has no gradient. Gradients of rows from `num_live` on (None: of none) are taken for zero.
    """
    return _FedForward.apply(h, a, b, weight_a, weight_b, weight, None, scalars, num_first, eps, num_live)


def after_feed_forward_and_norm(h: Tensor, a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, weight_next: Tensor,
                                scalars: Tensor, num_first: int, eps: float, num_live: int | None = None) -> tuple[Tensor, Tensor]:
    """y as `after_feed_forward` gives it, and n(y) * weight_next, of y as it is rounded; the weights are of one dtype."""
    return _FedForward.apply(h, a, b, weight_a, weight_b, weight, weight_next, scalars, num_first, eps, num_live)


def before_feed_forward(h: Tensor, readers: tuple[Tensor, Tensor, Tensor], factor: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What `after_attention` gives beside h, of an h [T, W] that is there."""
    return _Attended.apply(h, None, None, *readers, factor, eps, None)


def of_feed_forward(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, weight: Tensor, eps: float,
                    num_live: int | None = None) -> Tensor:
    """n(n(a) * weight_a + n(b) * weight_b) * weight, in fp32; the dtype of a; a, b [T, W]. `num_live` as in `after_feed_forward`."""
    return _FedForward.apply(None, a, b, weight_a, weight_b, weight, None, None, 0, eps, num_live)
