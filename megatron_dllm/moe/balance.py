"""How evenly experts are used: losses that push towards it, and figures that show it, for each kind of token apart.

Legend: T tokens of this rank, k choices, E experts, S = 3 streams: 0 clean, 1 draft (canvas rows whose result is only a signal), 2 canvas.
"""
from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..config import MoEConfig
from ..kernels.tally import ENTROPY_UNITS, Tally
from ..parallel import ParallelContext, communication
from .permute import Permutation, count_values

STREAMS = ("clean", "draft", "canvas")
PAGE_LAYERS, MOST_PASSES = 32, 16
CLEAN, DRAFT, CANVAS, FILL = range(4)  # fill: in no figure and no loss


@dataclass(frozen=True)
class RoutedTokens:
    """What routers know of the tokens of a pass, made once for all its layers. stream int64 [T]; share [T], at least fp32: 1 / (tokens that
    count in the step, over all ranks and microbatches), 0 for drafts and fill, which do not count. From these: one_hot [T, S] of the
    streams, in the dtype of `share`; num_tokens int64 [S]; totals [3]: 0, 0, and the sum of `share`, the losses of a layer without any
    (RoutingFigures). num_live: only so many tokens, the first ones, may get a gradient that is not zero (None: all). is_draft: the pass
    is of drafts alone, made without gradient though in training; its figures are noted all the same."""

    stream: Tensor
    share: Tensor
    one_hot: Tensor
    num_tokens: Tensor
    totals: Tensor
    num_live: int | None = None
    is_draft: bool = False
    note_routing: Callable[[Tensor, Permutation], None] | None = None

    @classmethod
    def of(cls, stream: Tensor, num_counted: int, dtype: torch.dtype, num_live: int | None = None, *,
           is_draft: bool = False) -> RoutedTokens:
        """Of streams [T]; `num_counted` is that global number."""
        return cls._of(stream, ((stream == CLEAN) | (stream == CANVAS)).to(dtype) / num_counted, num_live, is_draft)

    @classmethod
    def _of(cls, stream: Tensor, share: Tensor, num_live: int | None, is_draft: bool) -> RoutedTokens:
        of_stream = stream[:, None] == torch.arange(len(STREAMS), device=stream.device)
        totals = torch.nn.functional.pad(share.sum()[None], (2, 0))
        return cls(stream, share, of_stream.to(share.dtype), of_stream.sum(0), totals, num_live, is_draft)

    def with_losses(self, losses: Tensor | None) -> Tensor:
        """[3]: load and z loss [2], if there are any, and the tokens' shares, as RoutingFigures has them."""
        return self.totals if losses is None else torch.cat([losses.detach(), self.totals[2:].to(losses.dtype)])

    def map(self, function: Callable[[Tensor], Tensor]) -> RoutedTokens:
        """The tokens that the function takes out of a value a token [T]."""
        return RoutedTokens._of(function(self.stream), function(self.share), None, self.is_draft)


class BalanceLosses:
    """The auxiliary losses of a layer, whose sums over tokens, ranks and microbatches are means over all tokens that count in the step.

        load      aux_coeff * E * sum over tokens of share * sum over e of f[e] * p[e]       (Shazeer et al. 2017; Fedus et al. 2021, eq. 4)
        z         z_coeff * sum over tokens of share * logsumexp(logits)^2                   (Zoph et al. 2022, eq. 5)

    p are the router's probabilities; f[e] is the fraction of choices that went to expert e, over this microbatch on all ranks, without
    gradient. Both are 1 * coeff and the like where use is even, whatever the layout.
    """

    def __init__(self, moe: MoEConfig, context: ParallelContext, num_experts: int):
        self.aux_coeff, self.z_coeff = moe.moe_aux_loss_coeff, moe.moe_z_loss_coeff
        self.context, self.num_experts = context, num_experts

    @property
    def is_used(self) -> bool:
        """Whether there is any loss."""
        return self.aux_coeff > 0 or self.z_coeff > 0

    def fractions(self, indices: Tensor, tokens: RoutedTokens) -> Tensor | None:
        """f [E] of choices [T, k]; collective. None without an auxiliary loss."""
        if self.aux_coeff == 0:
            return None
        counts = counted_load(indices, tokens, self.num_experts)
        for group in (self.context.tp, self.context.dp_cp):
            counts = communication.all_reduce(counts, group)
        return counts.to(tokens.share.dtype) / counts.sum().clamp(min=1)

    def __call__(self, logits: Tensor | None, probabilities: Tensor, tokens: RoutedTokens, fractions: Tensor | None) -> Tensor | None:
        """[2]: our tokens' part of the load loss and of the z loss, for which alone logits are needed; None where neither is used."""
        if not self.is_used:
            return None
        share = tokens.share.to(probabilities.dtype)
        load = probabilities.new_zeros(())
        if fractions is not None:
            load = self.aux_coeff * self.num_experts * (share @ (probabilities @ fractions.to(probabilities.dtype)))
        z = probabilities.new_zeros(())
        if self.z_coeff > 0:
            z = self.z_coeff * (share @ logits.logsumexp(-1).square())
        return torch.stack([load, z])


def counted_load(indices: Tensor, tokens: RoutedTokens, num_experts: int) -> Tensor:
    """int64 [E]: choices [T, k] of each expert by the tokens that count."""
    return count_values(torch.where(tokens.share[:, None] > 0, indices, num_experts), num_experts + 1)[:-1]


class ExpertBias(nn.Module):
    """What is added to a router's probabilities when experts are chosen (not to their weights): it grows by `rate` a step for an expert
    that had fewer choices than the mean, and falls for one that had more (Wang et al. 2024, arXiv 2408.15664). value [E], at least fp32."""

    def __init__(self, num_experts: int, rate: float, dtype: torch.dtype, context: ParallelContext):
        super().__init__()
        self.rate, self.num_experts, self.load = rate, num_experts, None
        self.register_buffer("value", torch.zeros(num_experts, dtype=dtype, device=context.device))

    @torch.no_grad()
    def note(self, indices: Tensor, tokens: RoutedTokens) -> None:
        """Add to the load of this step."""
        load = counted_load(indices, tokens, self.num_experts)
        self.load = load if self.load is None else self.load + load

    @torch.no_grad()
    def end_step(self, context: ParallelContext, *, update: bool) -> None:
        """Take the step's load, over all ranks, into account, or (with a step that is skipped) drop it. Collective."""
        load, self.load = self.load, None
        if load is None or not update:
            return
        for group in (context.tp, context.dp_cp):
            load = communication.all_reduce(load, group)
        # In whole numbers: no rounding decides a sign.
        self.value += self.rate * torch.sign(load.sum() - load * self.num_experts)


class _WithLoss(torch.autograd.Function):
    """`x` as it is; in the backward, losses get the gradient 1 that they have as terms of the total loss."""

    @staticmethod
    def forward(ctx, x: Tensor, losses: Tensor) -> Tensor:
        ctx.losses = losses.shape, losses.dtype, losses.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        shape, dtype, device = ctx.losses
        return grad, torch.ones(shape, dtype=dtype, device=device)


def with_loss(x: Tensor, losses: Tensor) -> Tensor:
    """`x`, whose backward also runs that of `losses`, so that they need no way of their own to the end of the model."""
    return _WithLoss.apply(x, losses)


@dataclass(frozen=True)
class RoutingFigures:
    """What a layer's router did with this rank's tokens. load int64 [S, E]: choices of each expert; num_tokens int64 [S]; entropy [S]: sums
    over tokens of that of the router's distribution, in nats; losses [3]: load, z, and the tokens' shares, 1 in all for a whole step."""

    load: Tensor
    num_tokens: Tensor
    entropy: Tensor
    losses: Tensor

    @classmethod
    def of(cls, probabilities: Tensor, indices: Tensor, tokens: RoutedTokens, losses: Tensor | None) -> RoutingFigures:
        num_experts, num_streams = probabilities.shape[1], len(STREAMS)
        load = count_values(torch.add(indices, tokens.stream[:, None], alpha=num_experts), (num_streams + 1) * num_experts)[:-num_experts]
        entropy = tokens.one_hot.to(probabilities.dtype).T @ torch.special.entr(probabilities.detach())
        return cls(load.view(num_streams, num_experts), tokens.num_tokens, entropy.sum(1), tokens.with_losses(losses))

    def __add__(self, other: RoutingFigures) -> RoutingFigures:
        return RoutingFigures(self.load + other.load, self.num_tokens + other.num_tokens, self.entropy + other.entropy,
                              self.losses + other.losses)


class _Page:
    """What kernels count of some layers, zeros at first: load int64 [L, S, E] and entropy int64 [L, S], in one buffer."""

    def __init__(self, num_experts: int, device: torch.device):
        shape, self.layers = (PAGE_LAYERS, len(STREAMS), num_experts), []
        buffer = torch.zeros(math.prod(shape) + math.prod(shape[:2]), dtype=torch.int64, device=device)
        load, entropy = buffer.split([math.prod(shape), math.prod(shape[:2])])
        self.load, self.entropy = load.view(shape), entropy.view(shape[:2])
        self.passes: list[_Passes] = []

    def add(self, layer: str) -> None:
        """Give a layer its place."""
        self.layers.append(layer)
        self.passes.append(_Passes())

    def figures(self) -> dict[str, RoutingFigures]:
        """By layer."""
        entropy, sums = self.entropy.double() / ENTROPY_UNITS, {}
        return {layer: RoutingFigures(self.load[place], *self.passes[place].sums(sums, entropy[place]))
                for place, layer in enumerate(self.layers)}


class _Passes:
    """What the host knows of passes that were counted: num_tokens [S] and losses [3] of each, as RoutingFigures has them."""

    def __init__(self):
        self.noted: list[tuple[Tensor, Tensor]] = []

    def note(self, num_tokens: Tensor, losses: Tensor) -> None:
        """Add a pass; every now and then they are added up, so that a long run does not hold them all."""
        self.noted.append((num_tokens, losses))
        if len(self.noted) > MOST_PASSES:
            self.noted = [self._summed()]

    def sums(self, known: dict[tuple[int, ...], tuple[Tensor, Tensor]], entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(num_tokens, entropy, losses); layers that had the same passes share what is `known`."""
        key = tuple(id(tensor) for both in self.noted for tensor in both)
        if key not in known:
            known[key] = self._summed()
        num_tokens, losses = known[key]
        return num_tokens, entropy, losses

    def _summed(self) -> tuple[Tensor, Tensor]:
        first, *others = self.noted
        for num_tokens, losses in others:
            first = first[0] + num_tokens, first[1] + losses
        return first


@dataclass
class RoutingMonitor:
    """Adds up every layer's figures, on the device, until they are asked for. Several threads may note at once (recomputes in a backward
    do), but none while another drains."""

    _by_layer: dict[str, RoutingFigures] = field(default_factory=dict)
    _pages: list[_Page] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, layer: str, figures: RoutingFigures) -> None:
        """Add to a layer's figures."""
        with self._lock:
            self._by_layer[layer] = self._by_layer[layer] + figures if layer in self._by_layer else figures

    def tally(self, layer: str, tokens: RoutedTokens, num_experts: int) -> Tally:
        """What the router's kernel is to add a pass to, which `note_tallied` then completes."""
        with self._lock:
            page, place = self._place(layer, num_experts, tokens.stream.device)
        return Tally(tokens.stream, page.load[place], page.entropy[place])

    def note_tallied(self, layer: str, tokens: RoutedTokens, losses: Tensor | None) -> None:
        """Add what the kernel does not know of a pass."""
        with self._lock:
            page = next(page for page in self._pages if layer in page.layers)
            page.passes[page.layers.index(layer)].note(tokens.num_tokens, tokens.with_losses(losses))

    def _place(self, layer: str, num_experts: int, device: torch.device) -> tuple[_Page, int]:
        for page in self._pages:
            if layer in page.layers:
                return page, page.layers.index(layer)
        if not self._pages or len(self._pages[-1].layers) == PAGE_LAYERS:
            self._pages.append(_Page(num_experts, device))
        self._pages[-1].add(layer)
        return self._pages[-1], len(self._pages[-1].layers) - 1

    def drain(self) -> dict[str, RoutingFigures]:
        """Figures by layer since the last call, of this rank's tokens."""
        with self._lock:
            figures, self._by_layer = self._by_layer, {}
            pages, self._pages = self._pages, []
        for page in pages:
            for layer, own in page.figures().items():
                figures[layer] = figures[layer] + own if layer in figures else own
        return figures


def balance_metrics(by_layer: dict[str, RoutingFigures], context: ParallelContext) -> dict[str, float]:
    """Metrics over all ranks that run these layers. Collective; the one place that waits for the device.

    routing/LAYER/STREAM/...    entropy (mean over tokens, nats); max_over_mean_load of the experts; idle_experts, the share without a token
    load_balancing_loss, router_z_loss      where there is one: sums over layers, means over steps
    """
    if not by_layer:
        return {}
    parts = [part for own in by_layer.values() for part in (own.load.flatten(), own.num_tokens, own.entropy, own.losses)]
    summed = torch.cat([part.double() for part in parts])
    for group in (context.tp, context.dp_cp):
        summed = communication.all_reduce(summed, group)
    pieces = iter(summed.cpu().split([part.numel() for part in parts]))
    metrics, losses = {}, torch.zeros(2, dtype=torch.float64)
    for layer, own in by_layer.items():
        load, num_tokens, entropy, layer_losses = (next(pieces) for _ in range(4))
        losses += layer_losses[:2] / layer_losses[2]
        for name, counts, n, total in zip(STREAMS, load.view(own.load.shape), num_tokens, entropy, strict=True):
            if n > 0:
                metrics[f"routing/{layer}/{name}/entropy"] = (total / n).item()
                metrics[f"routing/{layer}/{name}/max_over_mean_load"] = (counts.max() / counts.mean()).item()
                metrics[f"routing/{layer}/{name}/idle_experts"] = (counts == 0).double().mean().item()
    return metrics | {name: loss for name, loss in zip(("load_balancing_loss", "router_z_loss"), losses.tolist(), strict=True) if loss}
