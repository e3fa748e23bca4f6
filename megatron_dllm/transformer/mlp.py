"""The gated feed-forward: down(gelu_tanh(gate(x)) * up(x))."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..parallel import ParallelContext
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.dropout import TokenDraws
from ..tensor_parallel.initialization import Init
from .activations import gated_gelu


class MLP(nn.Module):
    """x, y [T, H]; gate_up [2, I, H] and down [H, I] are cut along I over tp."""

    def __init__(self, name: str, hidden: int, inner: int, *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.gate_up = ColumnParallelLinear(f"{name}.gate_up.weight", (2, inner, hidden), context=context, init=init, dtype=dtype)
        self.down = RowParallelLinear(f"{name}.down.weight", (hidden, inner), context=context, init=init, dtype=dtype)

    def forward(self, x: Tensor, draws: TokenDraws | None = None) -> Tensor:
        return self.down(self.widen(x, draws), draws)

    def widen(self, x: Tensor, draws: TokenDraws | None = None) -> Tensor:
        """What `down` narrows: our columns of gelu_tanh(gate(x)) * up(x), [T, I / R]."""
        return gated_gelu(self.gate_up(x, draws))
