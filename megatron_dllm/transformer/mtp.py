"""Multi-token prediction (MTP) for clean tokens: depth d predicts the token d + 2 places on, a depth after the other.

    h_0 = the stack's final hidden states;  h_{d+1}[i] = norm(block(W [norm(h_d[i]) ; norm(embedding of token i + d + 1)]))

and h_{d+1} goes through the model's own head. All blocks are full layers, causal over the clean tokens of a document; canvas tokens,
which are not predicted from what stands before them, have no part in it. With mHC a block takes contracted states and runs streams of
its own.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Init, make_parameter
from .hyper_connection import AsMean, as_copies, stream_chains
from .norms import RMSNorm
from .token_pass import TokenPass


def with_mtp_layers(config: ModelConfig) -> ModelConfig:
    """The configuration in which MTP's blocks are layers num_layers, num_layers + 1, ..."""
    depth = config.mtp_num_layers
    return replace(config, num_layers=config.num_layers + depth, layer_types=(*config.layer_types, *["full"] * depth))


class MultiTokenPrediction(nn.Module):
    """One depth. `projection` [H, 2H] is equal on every tp rank; under sequence parallelism each rank has its own tokens, so that its
    gradient is summed over tp. `block(layer, config=...)` makes a layer.
    """

    def __init__(self, depth: int, config: ModelConfig, *, block: Callable[..., nn.Module], context: ParallelContext, init: Init,
                 dtype: torch.dtype):
        super().__init__()
        name, hidden, self.num_streams = f"mtp.{depth}", config.hidden_size, config.num_residual_streams

        def norm(which: str) -> RMSNorm:
            return RMSNorm(f"{name}.{which}", hidden, eps=config.norm_epsilon, context=context, dtype=dtype)

        self.hidden_norm, self.embedding_norm = norm("hidden_norm"), norm("embedding_norm")
        placement = place((hidden, 2 * hidden), context, partial_over_tp=context.sequence_parallel)
        self.projection = make_parameter(f"{name}.projection", placement, init=init, dtype=dtype, device=context.device)
        self.block = block(config.num_layers + depth, config=with_mtp_layers(config))
        self.final_norm = norm("final_norm")

    def forward(self, hidden: Tensor, embedded: Tensor, token_pass: TokenPass) -> Tensor:
        """h_{d+1} [T, H] from h_d and the embeddings of the tokens that follow, both [T, H], of a pass of clean tokens.

        ValueError for a pass with canvas tokens.
        """
        if token_pass.num_canvas:
            raise ValueError(f"multi-token prediction is for clean tokens, and the pass has {token_pass.num_canvas} canvas tokens")
        x = F.linear(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embedded)], -1), self.projection)
        wanted = AsMean() if self.num_streams > 1 else None
        x, _ = self.block(as_copies(x, self.num_streams), token_pass, None, next(stream_chains(self.block.recompute)), wanted)
        return self.final_norm(x)
