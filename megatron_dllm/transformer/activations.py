"""gelu(gate) * up, the gated activation of every feed-forward here (gelu in its tanh form)."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..kernels.launch import takes


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up [N, I] from gate_up [N, 2, I]."""
    if takes(gate_up):
        from ..kernels import gated_gelu as kernel  # Triton is there with CUDA alone

        return kernel.gated_gelu(gate_up)
    gate, up = gate_up.unbind(1)
    return F.gelu(gate, approximate="tanh") * up
