"""gelu(gate) * up, the gated activation of every feed-forward here (gelu in its tanh form)."""
from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..kernels.launch import takes
from .plain_function import PlainFunction
from .precision import at_least_fp32

# gelu_tanh(x) = x * sigmoid(SLOPE * x + CUBE * x^3): a CPU's sigmoid takes a fifth of the time of its tanh, and of its gelu's.
SLOPE = 2 * math.sqrt(2 / math.pi)
CUBE = 0.044715 * SLOPE


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up [N, I] from gate_up [N, 2, I]."""
    if takes(gate_up):
        from ..kernels import gated_gelu as kernel  # Triton is there with CUDA alone

        return kernel.gated_gelu(gate_up)
    return _GatedGelu.of(gate_up)


@functools.cache
def _slope(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(SLOPE, dtype=dtype, device=device)


def gated_gelu_in_torch(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gelu_tanh(gate) * up [N, I] from gate_up [N, 2, I], at least fp32, and the sigmoid of which gelu is gate times."""
    gate, up = gate_up.unbind(1)
    sigmoid = torch.addcmul(_slope(gate.dtype, gate.device), gate, gate, value=CUBE).mul_(gate).sigmoid_()
    return (gate * sigmoid).mul_(up), sigmoid


def gradient_of_gated_gelu(grad: Tensor, gate_up: Tensor, sigmoid: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """[N, 2, I] from what `gated_gelu_in_torch` had and gave and its result's gradient [N, I]. With `weights` [N, 1] that is the gradient
    of the result times these; their own [N] is then given too."""
    gate, up = gate_up.unbind(1)
    of_both = torch.empty_like(gate_up)
    of_gate, of_up = of_both.unbind(1)
    through_gelu, through_sigmoid = grad * sigmoid, grad * gate
    torch.ops.aten.sigmoid_backward.grad_input(through_sigmoid, sigmoid, grad_input=through_sigmoid)
    if weights is None:
        of_weights = None
        torch.mul(through_gelu, gate, out=of_up)
    else:
        of_value = through_gelu * gate
        torch.mul(of_value, weights, out=of_up)
        of_weights, up = of_value.mul_(up).sum(1), up * weights
    through_gelu.addcmul_(through_sigmoid, torch.addcmul(_slope(gate.dtype, gate.device), gate, gate, value=3 * CUBE))
    torch.mul(through_gelu, up, out=of_gate)
    return of_both, of_weights


class _GatedGelu(PlainFunction):
    """Saved: gate_up, and the sigmoid."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        y, sigmoid = gated_gelu_in_torch(at_least_fp32(gate_up))
        ctx.save_for_backward(gate_up, sigmoid)
        return y.to(gate_up.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate_up, sigmoid = ctx.saved_tensors
        of_both, _ = gradient_of_gated_gelu(at_least_fp32(grad), at_least_fp32(gate_up), sigmoid)
        return of_both.to(gate_up.dtype)
