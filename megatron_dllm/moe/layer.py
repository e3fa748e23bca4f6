"""Router and experts of one layer."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..parallel import ParallelContext
from ..tensor_parallel.initialization import Init
from .experts import Experts
from .permute import permute, sort_by_expert, unpermute
from .router import Router


class MoELayer(nn.Module):
    """y = sum over a token's k experts of weight * expert(x); x, y [T, H]. The router reads `residual`, not the experts' normed input."""

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.num_experts = config.num_experts
        self.router = Router(f"{name}.router", config, context=context, init=init, dtype=dtype)
        self.experts = Experts(f"{name}.experts", config, context=context, init=init, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        routing = self.router(residual)
        permutation = sort_by_expert(routing.indices, self.num_experts)
        rows = self.experts(permute(x, permutation), permutation.counts)
        return unpermute(rows, routing.weights, permutation)
