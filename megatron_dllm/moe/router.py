"""The router: which experts a token goes to, and with what weight. At least fp32 throughout."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..kernels.launch import has_large_shared_memory, takes
from ..kernels.tally import Tally
from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Constant, Init, make_parameter
from ..tensor_parallel.linear import unadapted
from ..transformer.norms import rms_norm
from ..transformer.plain_function import PlainFunction
from ..transformer.precision import accumulation_dtype, at_least_fp32
from .balance import ExpertBias

# That kernels multiply by: the backward holds a tile with all of them, 224 of an H200's 227 KiB for a weight in three parts.
MOST_MULTIPLIED = 128
VECTOR = 16  # numbers of fp32 that a CPU takes at once


@dataclass(frozen=True)
class Routing:
    """indices int64 [T, k], by falling probability; weights [T, k], renormalised to 1, scaled by expert; probabilities, logits [T, E] (None
    where nobody asked for them)."""

    indices: Tensor
    weights: Tensor
    probabilities: Tensor
    logits: Tensor | None


class Router(nn.Module):
    """softmax(proj(norm(x) * scale * H^-0.5)), the k largest (with `bias` added, if there is one), renormalised, times per_expert_scale.

    Reads the raw residual, not the experts' normed input. Its parameters are held in at least fp32 and equal on every rank. Each tp rank
    routes tokens of its own (see MoELayer), so their gradients are summed over tp.
    """

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype,
                 bias_rate: float = 0.0):
        super().__init__()
        self.bias = ExpertBias(config.num_experts, bias_rate, accumulation_dtype(dtype), context) if bias_rate else None
        self.topk, self.eps, self.root = config.moe_router_topk, config.norm_epsilon, config.hidden_size ** -0.5
        self.adapter = unadapted
        self.multiplies_by_kernel = config.num_experts <= MOST_MULTIPLIED and has_large_shared_memory(context.device)
        held = accumulation_dtype(dtype)

        def parameter(which: str, shape: tuple[int, ...], how: Init) -> nn.Parameter:
            placement = place(shape, context, hold_fp32=True, partial_over_tp=context.tp.size > 1)
            return make_parameter(f"{name}.{which}", placement, init=how, dtype=held, device=context.device)

        self.weight = parameter("weight", (config.num_experts, config.hidden_size), init)
        self.scale = parameter("scale", (config.hidden_size,), Constant(1.0))
        self.per_expert_scale = parameter("per_expert_scale", (config.num_experts,), Constant(1.0))

    def scaled(self, x: Tensor) -> Tensor:
        """norm(x) * scale * H^-0.5 of the residual x [T, H], at least fp32."""
        return rms_norm(at_least_fp32(x), None, self.eps) * self.scale * self.root

    def route(self, x: Tensor) -> Routing:
        """The routing of the residual x [T, H]."""
        return self(self.scaled(x))

    @property
    def backend(self) -> str:
        """The name of what makes the logits: kernels take at most MOST_MULTIPLIED experts."""
        return "kernels" if self.multiplies_by_kernel and self.adapter is unadapted and takes(self.weight) else "torch"

    def is_one_function(self, scaled: Tensor) -> bool:
        """Whether kernels take what `scaled` gives all the way, so that they can count (see Tally), unless somebody needs the logits."""
        is_alone = self.multiplies_by_kernel and self.adapter is unadapted
        return is_alone and scaled.dtype == torch.float32 and takes(scaled, self.weight, self.per_expert_scale)

    def forward(self, scaled: Tensor, indices: Tensor | None = None, *, needs_logits: bool = True, tally: Tally | None = None) -> Routing:
        """The routing of what `scaled` gives; with `indices` [T, k], which a recompute has from its forward, the weights at these."""
        bias = None if self.bias is None else self.bias.value
        if not needs_logits and self.is_one_function(scaled):
            from ..kernels import router as kernel  # Triton is there with CUDA alone

            weights, indices, probabilities = kernel.route_tokens(
                scaled, self.weight, self.per_expert_scale, bias, self.topk, indices, tally)
            return Routing(indices, weights, probabilities, None)
        assert tally is None, "only kernels count, and only where nobody needs the logits"
        logits = self.adapter(F.linear(scaled, at_least_fp32(self.weight)), scaled)
        weights, indices, probabilities = route(logits, self.per_expert_scale, bias, self.topk, indices)
        return Routing(indices, weights, probabilities, logits)


def route(logits: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k], indices int64 [T, k], probabilities [T, E]) of logits [T, E]; the k largest with `bias` [E], or `given` indices."""
    if takes(logits, scale, bias) and logits.dtype == torch.float32:
        from ..kernels import router as kernel  # Triton is there with CUDA alone

        return kernel.route(logits, scale, bias, choices, given)
    return route_in_torch(logits, scale, bias, choices, given)


def route_in_torch(logits: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`route` without kernels."""
    return _Route.of(logits, scale, bias, choices, given)


def _softmax(logits: Tensor) -> Tensor:
    """Over the last dimension. On a CPU torch's own takes four times as long where a row is less than a vector."""
    if logits.is_cuda or logits.shape[-1] >= VECTOR:
        return logits.softmax(-1)
    exp = (logits - logits.amax(-1, keepdim=True)).exp_()
    return exp.div_(exp.sum(-1, keepdim=True))


class _Route(PlainFunction):
    """w = s * scale of chosen experts, with s = p / sum of the chosen p. Saved: p, s, w and the indices.

    ds at the logits: dw * w - s * sum of dw * w at the chosen, zero at the others.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, scale: Tensor, bias: Tensor | None, choices: int, given: Tensor | None):
        probabilities = _softmax(logits)
        if given is None:
            indices = (probabilities if bias is None else probabilities + bias).topk(choices, dim=-1).indices
        else:
            indices = given.view_as(given)
        # Read by index in both cases, so that a replay computes exactly what the forward did.
        chosen = probabilities.gather(-1, indices)
        total = chosen.sum(-1, keepdim=True)
        weights = (chosen * scale.index_select(0, indices.reshape(-1)).view_as(indices)).div_(total)
        ctx.save_for_backward(probabilities, chosen.div_(total), weights, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return weights, indices, probabilities

    @staticmethod
    def backward(ctx, dweights: Tensor | None, _, dprobabilities: Tensor | None):
        probabilities, share, weights, indices = ctx.saved_tensors
        dlogits = dscale = None
        if dweights is not None:
            products = dweights * weights
            of_chosen = products - share * products.sum(-1, keepdim=True)
            dlogits = torch.zeros_like(probabilities).scatter_(1, indices, of_chosen)
            if ctx.needs_input_grad[1]:
                # Placed and summed, not added up in E places: on a GPU these would be in no fixed order.
                dscale = torch.zeros_like(probabilities).scatter_(1, indices, dweights * share).sum(0)
        if dprobabilities is not None:
            inner = (dprobabilities * probabilities).sum(-1, keepdim=True)
            of_all = (dprobabilities - inner).mul_(probabilities)
            dlogits = of_all if dlogits is None else dlogits.add_(of_all)
        return dlogits, dscale, None, None, None
