"""One layer: attention, then a dense MLP and routed experts side by side, each between norms of its own."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..moe.layer import MoELayer
from ..parallel import ParallelContext
from ..tensor_parallel.initialization import Init
from .attention import SelfAttention
from .mlp import MLP
from .norms import RMSNorm
from .recompute import Recompute
from .token_pass import LayerContext, TokenPass


class TransformerBlock(nn.Module):
    """x, y [T, H], tokens [clean ; canvas]:

        h   = x + post_attention_layernorm(attention(input_layernorm(x)))
        d   = post_feedforward_layernorm_1(mlp(pre_feedforward_layernorm(h)))
        m   = post_feedforward_layernorm_2(experts(pre_feedforward_layernorm_2(h), router(h)))
        y   = (h + post_feedforward_layernorm(d + m)) * the scalar of the token's stream
    """

    def __init__(self, layer: int, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype,
                 recompute: Recompute):
        super().__init__()
        self.kind = config.layer_types[layer]
        self.recompute = recompute
        name, hidden, shared = f"layers.{layer}", config.hidden_size, {"context": context, "init": init, "dtype": dtype}

        def norm(which: str) -> RMSNorm:
            return RMSNorm(f"{name}.{which}", hidden, eps=config.norm_epsilon, context=context, dtype=dtype)

        self.input_layernorm = norm("input_layernorm")
        self.attention = SelfAttention(f"{name}.attention", config, layer, recompute=recompute, **shared)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = MLP(f"{name}.mlp", hidden, config.ffn_hidden_size, **shared)
        self.post_feedforward_layernorm_1 = norm("post_feedforward_layernorm_1")
        self.pre_feedforward_layernorm_2 = norm("pre_feedforward_layernorm_2")
        self.moe = MoELayer(name, config, **shared)
        self.post_feedforward_layernorm_2 = norm("post_feedforward_layernorm_2")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        # The released model scales the output of each pass by a buffer of its own: [clean, canvas].
        self.register_buffer("layer_scalars", torch.ones(2, dtype=dtype, device=context.device))

    def forward(self, x: Tensor, token_pass: TokenPass, earlier: LayerContext | None) -> tuple[Tensor, LayerContext | None]:
        """y [T, H] and the layer's context for a later pass; recomputed in the backward where the configuration says so."""
        return self.recompute("block", self._forward, x, token_pass, earlier)

    def _forward(self, x: Tensor, token_pass: TokenPass, earlier: LayerContext | None) -> tuple[Tensor, LayerContext | None]:
        attended, kept = self.attention(self.input_layernorm(x), token_pass.layers[self.kind], earlier)
        h = x + self.post_attention_layernorm(attended)
        dense = self.recompute("mlp", self._dense, h)
        routed = self.recompute("moe", self._routed, h)
        y = h + self.post_feedforward_layernorm(dense + routed)
        return y * token_pass.per_stream(self.layer_scalars), kept

    def _dense(self, h: Tensor) -> Tensor:
        return self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(h)))

    def _routed(self, h: Tensor) -> Tensor:
        return self.post_feedforward_layernorm_2(self.moe(self.pre_feedforward_layernorm_2(h), h))
