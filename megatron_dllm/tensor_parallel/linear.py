"""Linear layers cut over `tp`, by output feature (column) or by input feature (row)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dllm.parallel import communication
from megatron_dllm.parallel.collectives import gather_sequence, scatter_sum_sequence, sum_grad_over, sum_over
from megatron_dllm.parallel.context import Group, ParallelContext
from megatron_dllm.parallel.placement import place

from .adapted_linear import Factors, adapted_linear
from .dropout import TokenDraws
from .initialization import Init, make_parameter
from .live_rows import live_linear

LinearProduct = Callable[[Tensor, Tensor], Tensor]  # x [T, D] and W [F, D] -> x @ W.T, [T, F]


def column_linear(x: Tensor, weights: Sequence[Tensor], *, tp: Group, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """y_i = x @ W_i.T for several weights that read the same x, each cut by output feature over the R ranks of `tp`.

        x           [T, D]        equal on every rank; with sequence_parallel [T/R, D], our piece of the tokens
        weights[i]  [..., F, D]   our rows of W_i (leading dimensions: the parts of a fused matrix)
        result[i]   [T, ..., F]   all tokens, our columns of y_i

    Forward: x is gathered once for all weights. Input gradient: sum of dy_i @ W_i, summed over `tp` (scattered with
    sequence_parallel), under way while the weight gradients dy_i.T @ x are computed. Saved: the weights and x as given;
    with sequence_parallel the tokens are gathered again in backward, behind the input gradient's product, so that what
    is kept does not grow with R.
    """
    assert x.dim() == 2, f"tokens are flat, [T, D]; got {tuple(x.shape)}"
    if tp.size == 1:
        flat = [F.linear(x, weight.flatten(0, -2)) for weight in weights]
    else:
        flat = _ColumnLinear.apply(x, tp, sequence_parallel, *(weight.flatten(0, -2) for weight in weights))
    # A view takes a node of autograd, also one of the same shape.
    return tuple(y if weight.dim() == 2 else y.unflatten(1, weight.shape[:-1]) for y, weight in zip(flat, weights, strict=True))


def row_linear(x: Tensor, weight: Tensor, *, tp: Group, sequence_parallel: bool, product: LinearProduct = F.linear) -> Tensor:
    """y = x @ W.T, with W cut by input feature over the R ranks of `tp`.

        x       [T, D/R]   our columns of the whole x
        weight  [F, D/R]   the same columns of W
        y       [T, F]     summed over `tp`, equal on every rank; with sequence_parallel [T/R, F], our piece of the tokens

    Input and weight gradient: as of a plain linear on this rank, from the whole dy (gathered with sequence_parallel).
    Saved: x and weight, or what `product` saves.
    """
    y = product(x, weight)
    # Another package's result may be a view that its autograd function has made, or something it keeps: not ours to write to.
    return scatter_sum_sequence(y, tp) if sequence_parallel else sum_over(y, tp, overwrite=product is F.linear)


def column_layers(x: Tensor, layers: Sequence[ColumnParallelLinear], draws: TokenDraws | None = None) -> tuple[Tensor, ...]:
    """What each of the layers, adapter included, makes of the x that all of them read; x is gathered once. See `column_linear`.

    Layers whose product is not torch's save the gathered x, or what their product makes of it.
    """
    tp, sequence_parallel = layers[0].tp, layers[0].sequence_parallel
    factors = [layer.factors for layer in layers if layer.factors is not None and layer.product is F.linear]
    if len(factors) == len(layers):
        return adapted_linear(x, [layer.weight for layer in layers], factors, _num_live(x, tp, draws))
    if all(layer.product is F.linear for layer in layers):
        weights, num_live = [layer.weight for layer in layers], _num_live(x, tp, draws)
        if num_live is None and not _have_buffers(x, tp, weights):
            ys = column_linear(x, weights, tp=tp, sequence_parallel=sequence_parallel)
        else:
            ys = live_linear(x, weights, num_live)
    else:
        tokens = gather_sequence(x, tp) if sequence_parallel else sum_grad_over(x, tp)
        flat = (layer.product(tokens, layer.weight.flatten(0, -2)) for layer in layers)
        ys = tuple(y.unflatten(1, layer.weight.shape[:-1]) for y, layer in zip(flat, layers, strict=True))
    return tuple(layer.adapter(y, x, draws) for y, layer in zip(ys, layers, strict=True))


def _num_live(x: Tensor, tp: Group, draws: TokenDraws | None) -> int | None:
    """How many of the rows get a gradient, where that is made use of: on one tensor-parallel rank, and not on CPUs, whose results are held
    to bits that other cuts of the sums over rows would change."""
    return draws.num_live if draws is not None and tp.size == 1 and x.is_cuda else None


def _have_buffers(x: Tensor, tp: Group, weights: Sequence[nn.Parameter]) -> bool:
    """Whether gradients of weights are added up in fp32 buffers beside autograd: on one tensor-parallel rank, and not on CPUs, as above."""
    return x.is_cuda and tp.size == 1 and torch.is_grad_enabled() and any(
        weight.requires_grad and weight.main_gradient is not None for weight in weights)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp, sequence_parallel, *weights):
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.save_for_backward(x, *weights)
        tokens = communication.all_gather(x, tp) if sequence_parallel else x
        return tuple(F.linear(tokens, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[3:]
        gathering = summing = None
        if any(wants_weight) and ctx.sequence_parallel:
            gathering = communication.start_all_gather(x, ctx.tp)
        if ctx.needs_input_grad[0]:
            dx = dys[0] @ weights[0]
            for dy, weight in zip(dys[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
            if ctx.sequence_parallel:
                summing = communication.start_reduce_scatter(dx, ctx.tp)
            else:
                summing = communication.start_all_reduce(dx, ctx.tp, overwrite=True)
        tokens = gathering.wait() if gathering is not None else x
        dws = [dy.t() @ tokens if wanted else None for dy, wanted in zip(dys, wants_weight, strict=True)]
        return (summing.wait() if summing is not None else None), None, None, *dws


def unadapted(y: Tensor, *inputs: Tensor | TokenDraws | None) -> Tensor:
    """What stands in for a low-rank adapter where there is none: y, of the layer's result and inputs."""
    return y


class ColumnParallelLinear(nn.Module):
    """y = x @ W.T, with W [F, D] (or fused [parts, F, D]) cut by output feature over `tp`; see `column_linear`.

    `adapter` may add to y (see adapters.py), where `draws` are for its dropout; `product` multiplies. With `factors` both are one function
    (see adapted_linear). Several layers that read the same x: `column_layers`.

    With `copies` c > 1, c consecutive ranks hold the same rows (KV heads fewer than ranks): W is cut into R / c pieces.
    """

    def __init__(self, name: str, shape: tuple[int, ...], *, context: ParallelContext, init: Init, dtype: torch.dtype, copies: int = 1):
        super().__init__()
        self.tp = context.tp
        self.sequence_parallel = context.sequence_parallel
        self.adapter = unadapted
        self.factors: Factors | None = None
        self.product: LinearProduct = F.linear
        placement = place(shape, context, cut={"tp": len(shape) - 2}, copies=copies)
        self.weight = make_parameter(name, placement, init=init, dtype=dtype, device=context.device)

    def forward(self, x: Tensor, draws: TokenDraws | None = None) -> Tensor:
        return column_layers(x, (self,), draws)[0]


class RowParallelLinear(nn.Module):
    """y = x @ W.T, with W [F, D] cut by input feature over `tp`; see `row_linear`. `adapter` may add to y (see adapters.py); `product`
    multiplies; with `factors` both are one function (see adapted_linear)."""

    def __init__(self, name: str, shape: tuple[int, int], *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.tp = context.tp
        self.sequence_parallel = context.sequence_parallel
        self.adapter = unadapted
        self.factors: Factors | None = None
        self.product: LinearProduct = F.linear
        placement = place(shape, context, cut={"tp": 1})
        self.weight = make_parameter(name, placement, init=init, dtype=dtype, device=context.device)

    def forward(self, x: Tensor, draws: TokenDraws | None = None) -> Tensor:
        num_live = _num_live(x, self.tp, draws)
        if self.factors is not None and self.product is F.linear:
            return adapted_linear(x, [self.weight], [self.factors], num_live)[0]
        if self.product is F.linear and (num_live is not None or _have_buffers(x, self.tp, [self.weight])):
            return self.adapter(live_linear(x, [self.weight], num_live)[0], x, draws)
        y = row_linear(x, self.weight, tp=self.tp, sequence_parallel=self.sequence_parallel, product=self.product)
        return self.adapter(y, x, draws)


@dataclass(frozen=True)
class LocalHeads:
    """The attention heads of one tp rank: query heads [first_query, +num_query), KV heads [first_kv, +num_kv).

    `kv_copies` consecutive ranks hold the same KV heads.
    """

    num_query: int
    first_query: int
    num_kv: int
    first_kv: int
    kv_copies: int


def local_heads(num_heads: int, num_kv_heads: int, tp: Group) -> LocalHeads:
    """Deal query heads and KV heads over `tp`; fewer KV heads than ranks are copied, so that a query finds its own.

    ValueError where query heads do not divide over the ranks, or neither of ranks and KV heads divides the other.
    """
    fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide over {num_kv_heads} KV heads; make one a multiple of the other")
    if tp.size not in fits:
        raise ValueError(
            f"{num_heads} query heads and {num_kv_heads} KV heads cannot be dealt over {tp.size} tensor-parallel ranks; "
            f"set --tensor-model-parallel-size to one of {fits}"
        )
    num_query, num_kv = num_heads // tp.size, max(1, num_kv_heads // tp.size)
    copies = max(1, tp.size // num_kv_heads)
    return LocalHeads(num_query, tp.rank * num_query, num_kv, tp.rank // copies * num_kv, copies)
