"""gelu(gate) * up, the gated activation of every feed-forward here (gelu in its tanh form)."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.launch import takes
from .plain_function import PlainFunction


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up [N, I] from gate_up [N, 2, I]."""
    if takes(gate_up):
        from ..kernels import gated_gelu as kernel  # Triton is there with CUDA alone

        return kernel.gated_gelu(gate_up)
    return _GatedGelu.of(gate_up)


def gradient_of_gated_gelu(grad: Tensor, gate_up: Tensor, activated: Tensor) -> Tensor:
    """[N, 2, I] from the gradient [N, I] of gelu_tanh(gate) * up and `activated`, gelu_tanh(gate), in plain torch."""
    gate, up = gate_up.unbind(1)
    of_both = torch.empty_like(gate_up)
    of_gate, of_up = of_both.unbind(1)
    torch.mul(grad, activated, out=of_up)
    torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=of_gate)
    return of_both


class _GatedGelu(PlainFunction):
    """Saved: gate_up, and gelu_tanh(gate)."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unbind(1)
        activated = F.gelu(gate, approximate="tanh")
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx, grad: Tensor):
        return gradient_of_gated_gelu(grad, *ctx.saved_tensors)
