"""Residual connections: the plain one, and manifold-constrained hyper-connections (mHC), which run n residual streams side by side.

Legend: T tokens, n streams, C hidden; the streams of a token lie one after the other, x [T, n*C]. Of each token (docs/design.md section 6)

    r = 1 / (|x| / sqrt(nC) + 1e-6);  h = r * (x W^T) * alpha + b, with an alpha for each of the three parts
    H_pre = sigmoid(h[:n]);  H_post = 2 sigmoid(h[n:2n]);  H_res = Sinkhorn(h[2n:]), n x n

A part of a layer reads u = H_pre x, [T, C], and its output y is written to all streams: x = H_res x + H_post^T y. All mappings are computed
in at least fp32; streams have the compute dtype.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..config import ModelConfig
from ..kernels.launch import WIDEST_ROW, takes
from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Constant, Init, make_parameter
from .norms import NormFunction, rms_norm
from .precision import accumulation_dtype, at_least_fp32
from .recompute import Recompute
from .residual import before_feed_forward
from .stream_copies import contract_streams, expand_streams

MOST_STREAMS = 4  # that kernels take: a tile of more, with what multiplies it, does not fit a processor
EPSILON = 1e-6  # beside the norm of x, and the least denominator of Sinkhorn's rounds


@dataclass(frozen=True)
class Mix:
    """How the output of a part is written: post [T, n] and res [T, n, n], at least fp32; `scale` [T, 1] or None, without gradient.
    num_live: only so many tokens, the first ones, may get a gradient that is not zero (None: all). back: where the backward of a write
    leaves the read's a gradient that has not the shape of x; None: that read wants none."""

    post: Tensor
    res: Tensor
    scale: Tensor | None
    num_live: int | None = None
    back: list[Tensor] | None = None

    def send_back(self, grad: Tensor, x: Tensor) -> Tensor:
        """What a write's backward gives for x: `grad`, or zeros of x's shape, without memory, where `back` gets it."""
        if grad.shape == x.shape:
            return grad
        self.back.append(grad.contiguous())
        return grad.new_zeros(1).expand(x.shape)


class AsMean:
    """A reader of streams who wants their mean alone."""


class Streams(NamedTuple):
    """x [T, n*C] and, where kernels made it when they wrote x, what the connection that reads x next projects them to; or `copies`, of
    x [T, C] in every stream."""

    x: Tensor
    projection: Tensor | None
    copies: bool = False


@dataclass(frozen=True)
class Norms:
    """Norms of what a part reads: by one weight, or by the three of residual.before_feed_forward, the last times `factor`. `function`
    computes a single one."""

    weights: tuple[Tensor, ...]
    eps: float
    factor: float = 1.0
    function: NormFunction = rms_norm

    def of(self, u: Tensor) -> tuple[Tensor, ...]:
        """The norms of u [T, C]."""
        if len(self.weights) == 1:
            return (self.function(u, *self.weights, self.eps),)
        return before_feed_forward(u, self.weights, self.factor, self.eps)


class PlainConnection:
    """One stream: a part reads x, and its output is added to x."""

    def read(self, x: Tensor, chain: None, scale: Tensor | None = None,
             num_live: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the part reads, x, and the scale of what `write` gives."""
        return x, x, scale

    def write(self, x: Tensor, y: Tensor, scale: Tensor | None, chain: None, reader: None = None) -> Tensor:
        """(x + y) * scale."""
        return x + y if scale is None else (x + y) * scale


class HyperConnection(nn.Module):
    """One of a layer's two mHC modules.

        weight [n^2 + 2n, nC], alpha [3] (pre, post, res), bias [n^2 + 2n]: at least fp32, equal on every tp rank

    Under sequence parallelism each rank has streams of its own tokens, so the weights' gradients are summed over tp.
    """

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.num_streams, self.iterations = config.mhc_num_residual_streams, config.mhc_sinkhorn_iterations
        self.hidden_size = config.hidden_size
        width, outputs = self.num_streams * config.hidden_size, self.num_streams ** 2 + 2 * self.num_streams

        def parameter(which: str, shape: tuple[int, ...], how: Init) -> nn.Parameter:
            placement = place(shape, context, hold_fp32=True, partial_over_tp=context.sequence_parallel)
            return make_parameter(f"{name}.{which}", placement, init=how, dtype=accumulation_dtype(dtype), device=context.device)

        # Xavier: as wide as keeps the size of activations and of gradients.
        self.weight = parameter("weight", (outputs, width), init.with_std((2 / (outputs + width)) ** 0.5))
        self.alpha = parameter("alpha", (3,), Constant(config.mhc_init_gating_factor))
        self.bias = parameter("bias", (outputs,), Constant(0.0))

    def read(self, x: Tensor | Streams, chain: StreamChain | None, scale: Tensor | None = None,
             num_live: int | None = None) -> tuple[Tensor, Tensor, Mix]:
        """u = H_pre x [T, C]; x, for `write` alone; and the mix with which that puts the part's output back, times `scale`.

        The gradient that comes back with that x is the one of what `write` gives: this read's backward multiplies it by H_res and adds it
        to its own. Multiplied by the write's backward and added by itself it would move 4 n C numbers a token more.
        """
        x, projection, copies = x if isinstance(x, Streams) else Streams(x, None)
        x = expand_streams(x, self.num_streams) if copies else x
        u, x, post, res = _Read.apply(x, self.weight, self.alpha, self.bias, self.num_streams, self.iterations, chain, scale, num_live,
                                      projection)
        return u, x, Mix(post, res, scale, num_live)

    def read_normed(self, x: Tensor | Streams, chain: StreamChain | None, norms: Norms, scale: Tensor | None = None,
                    num_live: int | None = None) -> tuple[tuple[Tensor, ...], Tensor, Mix]:
        """`read`, with norms of u in the place of u: on CUDA the same kernels make them, forwards and backwards."""
        streams, projection, _ = x if isinstance(x, Streams) else Streams(x, None)
        takes_all = by_kernels(self.num_streams, streams, self.weight, *norms.weights) and self.hidden_size <= WIDEST_ROW
        if norms.function is not rms_norm or not takes_all:
            u, streams, mix = self.read(x, chain, scale, num_live)
            return norms.of(u), streams, mix
        *normed, streams, post, res = _ReadNormed.apply(
            streams, self.weight, self.alpha, self.bias, self.num_streams, self.iterations, chain, scale, num_live, projection,
            norms.factor, norms.eps, back := [], *norms.weights)
        return tuple(normed), streams, Mix(post, res, scale, num_live, back)

    def write(self, x: Tensor, y: Tensor, mix: Mix, chain: StreamChain | None,
              reader: HyperConnection | AsMean | None = None) -> Tensor | Streams:
        """(H_res x + H_post^T y) * scale [T, nC], for the x that `read` gave and y [T, C]; Streams for a `reader`, who reads them next; or
        [T, C] for AsMean."""
        if isinstance(reader, AsMean):
            if mix.back is None:
                return contract_streams(self.write(x, y, mix, chain), self.num_streams)
            return _WriteMean.apply(x, y, mix, mix.post, mix.res, chain)
        new, projection = _Write.apply(x, y, mix, mix.post, mix.res, chain, None if reader is None else reader.weight.detach())
        return new if reader is None else Streams(new, projection)


def by_kernels(num_streams: int, *tensors: Tensor) -> bool:
    """Whether kernels take `tensors` of so many streams: all functions of a connection, or none."""
    return num_streams <= MOST_STREAMS and takes(*tensors)


def as_copies(x: Tensor, num_streams: int) -> Tensor | Streams:
    """`expand_streams` for layers that read it next: where kernels run no copy is made."""
    return Streams(x.contiguous(), None, copies=True) if num_streams > 1 and by_kernels(num_streams, x) else expand_streams(x, num_streams)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """[..., n, n], nearly doubly stochastic: so many rounds of rows, then columns, on exp(logits - the row's maximum)."""
    matrix = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True).clamp(min=EPSILON)
        matrix = matrix / matrix.sum(-2, keepdim=True).clamp(min=EPSILON)
    return matrix


def mappings(projected: Tensor, inverse: Tensor, alpha: Tensor, bias: Tensor, num_streams: int, iterations: int) -> tuple[Tensor, ...]:
    """H_pre [T, n], H_post [T, n] and H_res [T, n, n] of projected = x W^T [T, n^2 + 2n] and inverse = r [T, 1]."""
    n = num_streams
    gates = torch.cat([alpha[0].expand(n), alpha[1].expand(n), alpha[2].expand(n * n)])
    h = inverse * projected * gates + bias
    return torch.sigmoid(h[:, :n]), 2 * torch.sigmoid(h[:, n:2 * n]), sinkhorn(h[:, 2 * n:].unflatten(1, (n, n)), iterations)


class StreamChain:
    """The streams of some layers that follow each other, of which only the first is kept; the others are written again in the backward.

    Streams i + 1 are made of streams i by the i-th write, whose y [T, C] is kept: one n-th of what it makes. Backwards go from the last
    read to the first, and what they have passed is let go.
    """

    @dataclass(frozen=True)
    class Write:
        """A call of `write`: see there."""

        y: Tensor
        post: Tensor
        res: Tensor
        scale: Tensor | None

    def __init__(self):
        self._writes: list[StreamChain.Write] = []
        self._streams: dict[int, Tensor] = {}

    def place(self, x: Tensor) -> int:
        """The number of the streams `x`, which are the newest."""
        if not self._writes:
            self._streams[0] = x.detach()
        return len(self._writes)

    def add(self, y: Tensor, mix: Mix) -> None:
        """Remember how the newest streams are written. Detached: the chain belongs to the graph, and may not hold it."""
        self._writes.append(StreamChain.Write(y.detach(), mix.post.detach(), mix.res.detach(), mix.scale))

    def streams(self, number: int) -> Tensor:
        """Streams `number`, computed again from those before; later ones are dropped."""
        if number > len(self._writes) or 0 not in self._streams:
            raise RuntimeError("the streams of a recomputed mHC module were let go by an earlier backward; call backward once")
        del self._writes[number:]
        self._streams = {at: x for at, x in self._streams.items() if at <= number}
        for at in range(max(self._streams), number):
            write = self._writes[at]
            self._streams[at + 1] = mixed(self._streams[at], write.y, write.post, write.res, write.scale)
        return self._streams[number]


def stream_chains(recompute: Recompute) -> Iterator[StreamChain | None]:
    """For each layer of one trip the chain that its streams belong to; None: they are kept."""
    if "mhc" not in recompute.parts or not torch.is_grad_enabled():
        yield from itertools.repeat(None)
    if recompute.mhc_layers is None:
        yield from itertools.repeat(StreamChain())
    while True:
        yield from itertools.repeat(StreamChain(), recompute.mhc_layers)


def mixed(x: Tensor, y: Tensor, post: Tensor, res: Tensor, scale: Tensor | None) -> Tensor:
    """(H_res x + H_post^T y) * scale, computed in at least fp32."""
    if by_kernels(post.shape[1], x, y):
        from ..kernels import hyper_connection_streams as kernel  # Triton is there with CUDA alone

        return kernel.merge(x.contiguous(), y.contiguous(), post, res, scale)
    return mixed_in_torch(x, y, post, res, scale)


def mixed_in_torch(x: Tensor, y: Tensor, post: Tensor, res: Tensor, scale: Tensor | None) -> Tensor:
    """`mixed` without kernels."""
    streams = at_least_fp32(x).unflatten(1, (post.shape[1], -1))
    new = torch.baddbmm(post[:, :, None] * at_least_fp32(y)[:, None], res, streams).flatten(1)
    return (new if scale is None else new * at_least_fp32(scale)).to(x.dtype)


def mixed_and_projected(x: Tensor, y: Tensor, mix: Mix, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`mixed`, and what `weight` projects it to where kernels run and it is given."""
    if weight is not None and by_kernels(mix.post.shape[1], x, y, weight):
        from ..kernels import hyper_connection_projection as kernel

        return kernel.merge_and_project(x.contiguous(), y.contiguous(), mix.post, mix.res, mix.scale, weight)
    return mixed(x, y, mix.post, mix.res, mix.scale), None


def mixed_backward(x: Tensor, y: Tensor, post: Tensor, scale: Tensor | None, grad: Tensor,
                   num_live: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, post and res, from that of `mixed`'s result; that of x is part of `read_backward`. Rows of `grad` from
    `num_live` on (None: none) are zero; of those the gradients of post and res are anything."""
    if by_kernels(post.shape[1], x, y):
        from ..kernels import hyper_connection_streams as kernel

        num_live = len(x) if num_live is None else num_live
        return kernel.merge_backward(x.contiguous(), y.contiguous(), post, scale, grad.contiguous(), num_live)
    return mixed_backward_in_torch(x, y, post, scale, grad)


def mixed_backward_in_torch(x: Tensor, y: Tensor, post: Tensor, scale: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`mixed_backward` without kernels."""
    grad, streams = _scaled_streams(grad, scale, post.shape[1]), at_least_fp32(x).unflatten(1, (post.shape[1], -1))
    dy, dpost = (post[:, :, None] * grad).sum(1), (grad @ at_least_fp32(y)[:, :, None]).squeeze(-1)
    return dy.to(y.dtype), dpost, grad @ streams.mT


def _scaled_streams(grad: Tensor, scale: Tensor | None, num_streams: int) -> Tensor:
    """[T, n, C] of [T, nC], times the scale of each token, at least fp32."""
    return (at_least_fp32(grad) if scale is None else at_least_fp32(grad) * at_least_fp32(scale)).unflatten(1, (num_streams, -1))


@dataclass(frozen=True)
class Weights:
    """What the mappings are made with: see HyperConnection."""

    weight: Tensor
    alpha: Tensor
    bias: Tensor
    num_streams: int
    iterations: int


class Mapped(NamedTuple):
    """The mappings of some tokens, and what their backward needs: projected = x W^T [T, n^2 + 2n] and root = |x| / sqrt(nC) [T]."""

    pre: Tensor
    post: Tensor
    res: Tensor
    projected: Tensor
    root: Tensor


def read(x: Tensor, weights: Weights, projection: Tensor | None = None) -> tuple[Tensor, Mapped]:
    """u = H_pre x, [T, C]; `projection`: what kernels project x to, if that is there already."""
    if by_kernels(weights.num_streams, x, weights.weight):
        from ..kernels import hyper_connection_mappings, hyper_connection_projection

        x, w = x.contiguous(), weights
        if projection is None:
            projection = hyper_connection_projection.project(x, w.weight, w.num_streams)
        (u, *mapped), _, _ = hyper_connection_mappings.read(x, projection, w.alpha, w.bias, w.num_streams, w.iterations)
        return u, Mapped(*mapped)
    return read_in_torch(x, weights)


def read_in_torch(x: Tensor, weights: Weights) -> tuple[Tensor, Mapped]:
    """`read` without kernels."""
    wide, n = at_least_fp32(x), weights.num_streams
    projected = F.linear(wide, at_least_fp32(weights.weight))
    root = wide.norm(dim=1) / wide.shape[1] ** 0.5
    pre, post, res = mappings(projected, 1 / (root[:, None] + EPSILON), at_least_fp32(weights.alpha), at_least_fp32(weights.bias), n,
                              weights.iterations)
    return (pre[:, :, None] * wide.unflatten(1, (n, -1))).sum(1).to(x.dtype), Mapped(pre, post, res, projected, root)


def read_backward(x: Tensor, weights: Weights, mapped: Mapped, du: Tensor, grad: Tensor, scale: Tensor | None, dpost: Tensor,
                  dres: Tensor, num_live: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, alpha and bias, from those of what `read` gives and from `grad` [T, nC], that of the streams which were
    written to x with H_res and `scale`. Rows from `num_live` on (None: none) have gradients of zero, and are not read."""
    if by_kernels(weights.num_streams, x, weights.weight):
        from ..kernels import hyper_connection_streams

        x, du = x.contiguous(), du.contiguous()
        dpre = hyper_connection_streams.read_products(x, du, len(x) if num_live is None else num_live)
        return _read_backward(x, weights, mapped, du, dpre, grad, scale, dpost, dres)
    return read_backward_in_torch(x, weights, mapped, du, grad, scale, dpost, dres)


def _read_backward(x: Tensor, weights: Weights, mapped: Mapped, du: Tensor, dpre: Tensor, grad: Tensor, scale: Tensor | None, dpost: Tensor,
                   dres: Tensor, norm_weights: Sequence[Tensor] = (), of_norms: Tensor | None = None) -> tuple[Tensor, ...]:
    """`read_backward` by kernels, with the gradient of H_pre; then those of the norms' weights, of which `of_norms` has the parts."""
    from ..kernels import hyper_connection_mappings, hyper_connection_streams

    through = hyper_connection_mappings.mappings_backward(
        mapped.projected, mapped.root, weights.alpha, weights.bias, mapped.res, scale, dpre, dpost.contiguous(), dres.contiguous(),
        weights.weight.shape[1], weights.iterations, x.dtype)
    return hyper_connection_streams.read_backward(x, weights.weight, mapped.pre, through, du, grad.contiguous(), norm_weights, of_norms)


def read_backward_in_torch(x: Tensor, weights: Weights, mapped: Mapped, du: Tensor, grad: Tensor, scale: Tensor | None, dpost: Tensor,
                           dres: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`read_backward` without kernels."""
    wide, du = at_least_fp32(x), at_least_fp32(du)
    inverse = 1 / (mapped.root[:, None] + EPSILON)
    with torch.enable_grad():
        leaves = [at_least_fp32(t.detach()).requires_grad_() for t in (mapped.projected, inverse, weights.alpha, weights.bias)]
        made = mappings(*leaves, weights.num_streams, weights.iterations)
    dpre = (wide.unflatten(1, (weights.num_streams, -1)) @ du[:, :, None]).squeeze(-1)
    dprojected, dinverse, dalpha, dbias = torch.autograd.grad(made, leaves, (dpre, dpost, dres))
    through = (mapped.res.mT @ _scaled_streams(grad, scale, weights.num_streams)).flatten(1).to(x.dtype)
    dx = torch.addmm((mapped.pre[:, :, None] * du[:, None]).flatten(1) + through, dprojected, at_least_fp32(weights.weight))
    # d r / d x = -r^2 x / (|x| sqrt(nC)), and nothing where x is zero (rows of fill may be).
    size = mapped.root[:, None] * wide.shape[1]
    dx -= (dinverse * inverse.square() / size).masked_fill(size == 0, 0.0) * wide
    return dx.to(x.dtype), (dprojected.T @ wide).to(weights.weight.dtype), dalpha.to(weights.alpha.dtype), dbias.to(weights.bias.dtype)


class _Read(torch.autograd.Function):
    """u, x, H_post, H_res of x. Saved: x (or its place in a chain), x W^T, the norm, H_pre and H_res, from which the rest is made again.

    The gradient of the x that is given on is not its own, see HyperConnection.read.
    """

    @staticmethod
    def forward(ctx, x, weight, alpha, bias, num_streams, iterations, chain, scale, num_live, projection):
        u, mapped = read(x, Weights(weight, alpha, bias, num_streams, iterations), projection)
        ctx.shape, ctx.num_live = (num_streams, iterations), num_live
        ctx.source = _Source.of(ctx, x, chain, mapped.pre, mapped.res, mapped.projected, mapped.root, scale, weight, alpha, bias)
        return u, x, mapped.post, mapped.res

    @staticmethod
    @once_differentiable
    def backward(ctx, du, grad, dpost, dres):
        x, pre, res, projected, root, scale, *parameters = ctx.source.tensors(ctx)
        mapped = Mapped(pre, None, res, projected, root)
        gradients = read_backward(x, Weights(*parameters, *ctx.shape), mapped, du, grad, scale, dpost, dres, ctx.num_live)
        return *gradients, None, None, None, None, None, None


class _ReadNormed(torch.autograd.Function):
    """`_Read` by kernels, with norms of u in its place. Saved beside that: the norms' inverse root."""

    @staticmethod
    def forward(ctx, x, weight, alpha, bias, num_streams, iterations, chain, scale, num_live, projection, factor, eps, back, *norm_weights):
        from ..kernels import hyper_connection_mappings, hyper_connection_projection

        x, norms = x.contiguous(), hyper_connection_mappings.Norms(norm_weights, eps, factor)
        if projection is None:
            projection = hyper_connection_projection.project(x, weight, num_streams)
        (_, pre, post, res, projected, root), normed, inverse_root = hyper_connection_mappings.read(
            x, projection, alpha, bias, num_streams, iterations, norms, copies=x.shape[1] < weight.shape[1])
        ctx.shape, ctx.num_live, ctx.of_norms = (num_streams, iterations), len(x) if num_live is None else num_live, (eps, factor)
        ctx.back = back
        ctx.source = _Source.of(ctx, x, chain, inverse_root, pre, res, projected, root, scale, weight, alpha, bias, *norm_weights)
        return *normed, x, post, res

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        from ..kernels import hyper_connection_mappings, hyper_connection_streams

        *dnormed, grad, dpost, dres = grads
        dnormed, grad = [d.contiguous() for d in dnormed], ctx.back.pop() if ctx.back else grad
        x, inverse_root, pre, res, projected, root, scale, weight, alpha, bias, *norm_weights = ctx.source.tensors(ctx)
        norms, wants = hyper_connection_mappings.Norms(tuple(norm_weights), *ctx.of_norms), ctx.needs_input_grad[13:]
        du, dpre, of_norms = hyper_connection_streams.normed_products(
            x, pre, inverse_root, norms, dnormed, ctx.num_live, num_streams=ctx.shape[0], wants_weights=any(wants))
        gradients = _read_backward(x, Weights(weight, alpha, bias, *ctx.shape), Mapped(pre, None, res, projected, root), du, dpre, grad,
                                   scale, dpost, dres, norm_weights, of_norms)
        of_weights = gradients[4:] or [None] * len(wants)
        return *gradients[:4], *[None] * 9, *(grad if wanted else None for grad, wanted in zip(of_weights, wants, strict=True))


class _Write(torch.autograd.Function):
    """The new streams of x and y, and what `weight` projects them to (see Streams), which has no gradient: that of the streams, which the
    read makes, has all of it. Saved: x (or its place in a chain), y, H_post and the scale.

    Back with x goes the gradient of the new streams as it is, see HyperConnection.read.
    """

    @staticmethod
    def forward(ctx, x, y, mix, post, res, chain, weight):
        ctx.source, ctx.mix = _Source.of(ctx, x, chain, y, post, mix.scale), mix
        if chain is not None:
            chain.add(y, mix)
        new, projection = mixed_and_projected(x, y, mix, weight)
        if projection is not None:
            ctx.mark_non_differentiable(projection)
            ctx.set_materialize_grads(False)  # it has none, and zeros in its place would be as large
        return new, projection

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        x, y, post, scale = ctx.source.tensors(ctx)
        dy, dpost, dres = mixed_backward(x, y, post, scale, grad, ctx.mix.num_live)
        return ctx.mix.send_back(grad, x), dy, None, dpost, dres, None, None


class _WriteMean(torch.autograd.Function):
    """The mean of the new streams of x and y, by kernels. What goes back with x is nothing: see Mix."""

    @staticmethod
    def forward(ctx, x, y, mix, post, res, chain):
        from ..kernels import hyper_connection_streams as kernel

        ctx.source, ctx.mix = _Source.of(ctx, x, chain, y, post, mix.scale), mix
        if chain is not None:
            chain.add(y, mix)
        return kernel.merge(x.contiguous(), y.contiguous(), post, res, mix.scale, mean=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, y, post, scale = ctx.source.tensors(ctx)
        dy, dpost, dres = mixed_backward(x, y, post, scale, grad, ctx.mix.num_live)
        return ctx.mix.send_back(grad, x), dy, None, dpost, dres, None


@dataclass(frozen=True)
class _Source:
    """Where a backward has the streams from: its own saved tensors, or a place in a chain."""

    chain: StreamChain | None
    number: int = field(default=0)

    @classmethod
    def of(cls, ctx, x: Tensor, chain: StreamChain | None, *others: Tensor | None) -> _Source:
        """Save what the backward needs."""
        source = cls(chain, 0 if chain is None else chain.place(x))
        ctx.save_for_backward(x if source.number == 0 else None, *others)
        return source

    def tensors(self, ctx) -> tuple[Tensor, ...]:
        """The streams, then the others that were saved."""
        saved, *others = ctx.saved_tensors
        return (saved if self.chain is None else self.chain.streams(self.number), *others)
