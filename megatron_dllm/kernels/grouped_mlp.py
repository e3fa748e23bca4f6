"""The experts' feed-forward over rows sorted by expert, forward and backward, of grouped products.

Legend: N rows, E experts, I expert width, H hidden; h = gate and up, a = gelu(gate) * up.

    forward   h = x W_up^T;  a of h;  y = a W_down^T              h is kept, x for a W_up that is trained; a is not
    backward  da = dy W_down;  dh, and a again;  dx = dh W_up
              dW_down = dy^T a;  dW_up = dh^T x

Rows may be weighted: y = w (a W_down^T) as (w a) W_down^T, so that w's gradient is that of w a times a, and y is not kept for it.

The gelu-gate has passes of its own, since it made the products whose ends it was in longer than by such a pass (H200, 128 experts of
2816 x 704, 32768 rows: h 0.446 ms for 0.399 and a pass of 0.036, da 0.457 for 0.223 and 0.072).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import gated_gelu
from .grouped_gemm import OuterProducts, RowTiles, Tiling, add_weight_gradient, num_tiles, pairs, place_tiles, product, weight_gradient
from .live_tiles import place_live_tiles
from .row_weights import LiveRows, RowWeights

Sink = Callable[[OuterProducts], None]

# Measured on an H200 with 128 experts of 2816 x 704, 8192 to 40960 rows, evenly and randomly dealt: the best, or within 4 % of it. For
# weights the best of many rows and where gradients are added: gate and up of 32768 + 8192 rows take 855 us, added 1553, where tiles of
# 128 x 256 take 919 and 1763; written for 10240 rows they take 676 for 588.
ROWS_TILING = Tiling(128, 256, 64, warps=8, stages=4, flatten=True, pieces=2)
WEIGHTS_TILING = Tiling(128, 128, 32, warps=4, stages=5, programs=2, pieces=4)


@dataclass(frozen=True)
class Deferred:
    """How a weight's gradient goes past autograd: `sink` gets its parts; `ticket` (no elements, asks for a gradient) stands for the weight
    in the graph, so that autograd knows when all parts are there."""

    ticket: Tensor
    sink: Sink


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, up_ticket: Tensor | None, down_ticket: Tensor | None,
                up_sink: Sink | None, down_sink: Sink | None, weights: Tensor | None, slot: Tensor | None,
                live: LiveRows | None) -> Tensor:
        tiles = place_tiles(counts, len(rows), ROWS_TILING.rows)
        hidden, keeps_rows = _to_hidden(rows, gate_up, tiles), ctx.needs_input_grad[1] or up_sink is not None
        ctx.save_for_backward(rows if keeps_rows else None, gate_up, down, hidden, weights, slot, counts)
        ctx.sinks, ctx.live = (up_sink, down_sink), live
        return product(gated_gelu.value(hidden, _weighted(weights, slot)), down, tiles, ROWS_TILING)

    @staticmethod
    def backward(ctx, dy: Tensor):
        rows, gate_up, down, hidden, weights, slot, counts = ctx.saved_tensors
        needs_rows, needs_up, needs_down, _, up_ticket, down_ticket, _, _, needs_weights, *_ = ctx.needs_input_grad
        up_sink, down_sink = ctx.sinks
        dy = dy.contiguous() if dy.numel() else dy.new_zeros(dy.shape)  # an empty one counts as contiguous whatever its strides
        # Placed again, in two microseconds: a joint backward has other counts than the forward (transformer/joint_backward.py).
        tiles = place_tiles(counts, len(hidden), ROWS_TILING.rows)
        if ctx.live is not None:
            tiles = place_live_tiles(counts, ctx.live.counts, tiles)
        dactivated = product(dy, down, tiles, ROWS_TILING, transposed=True)
        grads = gated_gelu.gradient(hidden, dactivated, with_value=needs_down or down_sink is not None,
                                    weighted=_weighted(weights, slot, ctx.live))
        flat = grads.gate_up.flatten(1)
        drows = product(flat, gate_up.flatten(1, 2), tiles, ROWS_TILING, transposed=True) if needs_rows else None
        dup = _weight_gradient(lambda: OuterProducts(flat, rows, tiles), needs_up, up_sink, gate_up)
        ddown = _weight_gradient(lambda: OuterProducts(dy, grads.value, tiles), needs_down, down_sink, down)
        tickets = (dy.new_empty(0) if is_used else None for is_used in (up_ticket, down_ticket))
        return drows, dup, ddown, None, *tickets, None, None, grads.weights if needs_weights else None, None, None


def _weight_gradient(part: Callable[[], OuterProducts], wanted: bool, sink: Sink | None, weight: Tensor) -> Tensor | None:
    """For autograd, if that wants it; the `sink` gets the part instead."""
    if sink is not None:
        sink(part())
    return weight_gradient([part()], WEIGHTS_TILING).view(weight.shape) if wanted else None


def _weighted(weights: Tensor | None, slot: Tensor | None, live: LiveRows | None = None) -> RowWeights | None:
    return None if weights is None else RowWeights(weights, slot, live)


def _to_hidden(rows: Tensor, gate_up: Tensor, tiles: RowTiles) -> Tensor:
    """[N, 2, I]"""
    return product(rows, gate_up.flatten(1, 2), tiles, ROWS_TILING).view(len(rows), *gate_up.shape[1:3])


def grouped_mlp(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, *, deferred_up: Deferred | None = None,
                deferred_down: Deferred | None = None, weighted: RowWeights | None = None) -> Tensor:
    """y [N, H] = (gelu(gate) * up) W_down^T of each row's expert, from rows [N, H] sorted by expert; bf16.

        gate_up  [E, 2, I, H]
        down     [E, H, I]
        counts   int64 [E]; their sum may be less than N: the rows after are not read, and nothing is written for them, in y or in its
                 gradient (what is there is whatever was in that memory)

    A weight with `deferred` gets no gradient from autograd. `weighted`: each row of y is multiplied by its weight; every row then belongs
    to an expert, and every weight to a row. Where it says which rows are live, the gradient of y has to be zero in the others, and nothing
    is written for them in that of `rows`. Sizes H and I are multiples of 8.
    """
    rows, counts = rows.contiguous(), counts.contiguous()
    inputs = rows, *(weight if way is None else weight.detach() for weight, way in ((gate_up, deferred_up), (down, deferred_down)))
    tickets, sinks = zip(*((None, None) if way is None else (way.ticket, way.sink) for way in (deferred_up, deferred_down)), strict=True)
    weights, slot = (None, None) if weighted is None else (weighted.weights.contiguous(), weighted.slot)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *tickets, weights)):
        return _GroupedMLP.apply(*inputs, counts, *tickets, *sinks, weights, slot, weighted and weighted.live)
    tiles = place_tiles(counts, len(rows), ROWS_TILING.rows)
    return product(gated_gelu.value(_to_hidden(rows, gate_up, tiles), _weighted(weights, slot)), down, tiles, ROWS_TILING)


def sum_parts(parts: Sequence[OuterProducts]) -> Tensor:
    """The gradient [E, F, D] that `parts` make, in their dtype."""
    first, *others = pairs(parts) or [parts[:1]]
    total = weight_gradient(first, WEIGHTS_TILING)
    for pair in others:
        total += weight_gradient(pair, WEIGHTS_TILING)
    return total


def add_parts(total: Tensor, parts: Sequence[OuterProducts], is_fresh: Tensor, squares: Tensor | None = None) -> None:
    """Add the gradient that `parts` make to `total` fp32, two of them at a time: reading and writing it is most of the work.

    Where `is_fresh` int32 [1] is 1 they replace what is there; then it becomes 0 (not where no part has rows).
    squares: fp32 [num_sums(total)], gets sums of the total's squares.
    """
    for pair in pairs(parts):
        add_weight_gradient(pair, WEIGHTS_TILING, total, is_fresh, squares)


def num_sums(total: Tensor) -> int:
    """How many sums `add_parts` makes of the squares of a weight's gradient."""
    return num_tiles(total, WEIGHTS_TILING)
