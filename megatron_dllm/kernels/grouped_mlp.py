"""The experts' feed-forward over rows sorted by expert: grouped products with the gelu-gate at their ends, forward and backward.

Legend: N rows, E experts, I expert width, H hidden; a = gelu(gate) * up.

    forward   gate, up = x W_up^T and a     one kernel; x, gate and up are kept, a is not
              y = a W_down^T
    backward  d gate, d up and a again      one kernel, of dy W_down
              dx = d(gate, up) W_up
              dW_down = dy^T a, dW_up = d(gate, up)^T x
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .grouped_gemm import OuterProducts, Tiling, gated_gradient, gated_product, place_tiles, product, weight_gradient

Sink = Callable[[OuterProducts], None]


@dataclass(frozen=True)
class Tilings:
    """Of each product. Those over rows have tiles of one height."""

    gated: Tiling
    down: Tiling
    gated_gradient: Tiling
    rows_gradient: Tiling
    weight_gradient: Tiling


# Not yet chosen from a measurement.
TILINGS = Tilings(
    gated=Tiling(128, 128, 64, 8, 3, flatten=True),
    down=Tiling(128, 256, 64, 8, 3, flatten=True),
    gated_gradient=Tiling(128, 128, 64, 8, 4, flatten=True),
    rows_gradient=Tiling(128, 256, 64, 8, 3, flatten=True),
    weight_gradient=Tiling(128, 256, 64, 8, 3, flatten=True),
)


@dataclass(frozen=True)
class Deferred:
    """How a weight's gradient goes past autograd: `sink` gets its parts; `ticket` (no elements, asks for a gradient) stands for the weight
    in the graph, so that autograd knows when all parts are there."""

    ticket: Tensor
    sink: Sink


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, up_ticket: Tensor | None, down_ticket: Tensor | None,
                up_sink: Sink | None, down_sink: Sink | None) -> Tensor:
        tiles = place_tiles(counts, len(rows), TILINGS.gated.rows)
        kept, activated = gated_product(rows, gate_up, tiles, TILINGS.gated)
        ctx.save_for_backward(rows, gate_up, down, kept)
        ctx.tiles, ctx.sinks = tiles, (up_sink, down_sink)
        return product(activated, down, tiles, TILINGS.down)

    @staticmethod
    def backward(ctx, dy: Tensor):
        rows, gate_up, down, kept = ctx.saved_tensors
        needs_rows, needs_up, needs_down, _, up_ticket, down_ticket, *_ = ctx.needs_input_grad
        dy = dy.contiguous() if dy.numel() else dy.new_zeros(dy.shape)  # an empty one counts as contiguous whatever its strides
        tiles, tilings = ctx.tiles, TILINGS
        dkept, activated = gated_gradient(dy, down, kept, tiles, tilings.gated_gradient, again=needs_down or down_ticket)
        flat = dkept.flatten(1)
        grads = []
        for outer, wanted, sink, weight in ((OuterProducts(flat, rows, tiles), needs_up, ctx.sinks[0], gate_up),
                                            (OuterProducts(dy, activated, tiles), needs_down, ctx.sinks[1], down)):
            if sink is not None:
                sink(outer)
            grads.append(weight_gradient([outer], tilings.weight_gradient).view(weight.shape) if wanted else None)
        drows = product(flat, gate_up.flatten(1, 2), tiles, tilings.rows_gradient, transposed=True) if needs_rows else None
        return drows, *grads, None, *(dy.new_empty(0) if is_used else None for is_used in (up_ticket, down_ticket)), None, None


def grouped_mlp(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, *, deferred_up: Deferred | None = None,
                deferred_down: Deferred | None = None) -> Tensor:
    """y [N, H] = (gelu(gate) * up) W_down^T of each row's expert, from rows [N, H] sorted by expert; bf16.

        gate_up  [E, 2, I, H]
        down     [E, H, I]
        counts   int64 [E]; their sum may be less than N: the rows after are not read, and nothing is written for them, in y or in its
                 gradient (what is there is whatever was in that memory)

    A weight with `deferred` gets no gradient from autograd. Sizes H and I are multiples of 8.
    """
    rows, counts = rows.contiguous(), counts.contiguous()
    inputs = rows, *(weight if way is None else weight.detach() for weight, way in ((gate_up, deferred_up), (down, deferred_down)))
    tickets, sinks = zip(*((None, None) if way is None else (way.ticket, way.sink) for way in (deferred_up, deferred_down)), strict=True)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *tickets)):
        return _GroupedMLP.apply(*inputs, counts, *tickets, *sinks)
    tiles = place_tiles(counts, len(rows), TILINGS.gated.rows)
    _, activated = gated_product(rows, gate_up, tiles, TILINGS.gated, keep=False)
    return product(activated, down, tiles, TILINGS.down)


def add_weight_gradient(total: Tensor, parts: Sequence[OuterProducts]) -> None:
    """Add the gradient that `parts` make to `total` fp32, two of them at a time: reading and writing it is most of the work."""
    for first in range(0, len(parts), 2):
        weight_gradient(parts[first:first + 2], TILINGS.weight_gradient, total=total)
