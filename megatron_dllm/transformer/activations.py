"""gelu(gate) * up, the gated activation of every feed-forward here (gelu in its tanh form)."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up, element by element."""
    return F.gelu(gate, approximate="tanh") * up
