"""DiffusionGemma: one stack of layers that runs as a causal encoder over clean tokens and as a bidirectional decoder over canvases.

A microbatch goes through the stack once, clean and canvas tokens together; rows whose canvas is self-conditioned take a second loop, the canvas
alone, reading the keys and values that the first loop kept.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import ModelConfig
from ...diffusion.inputs import MicrobatchInputs
from ...diffusion.losses import LossTerms, loss_terms
from ...parallel import ParallelContext, sum_over
from ...tensor_parallel import VocabularyParallelEmbedding, linear_cross_entropy, soft_embedding
from ...tensor_parallel.initialization import Init
from ...transformer.block import TransformerBlock
from ...transformer.mlp import MLP
from ...transformer.norms import RMSNorm, rms_norm
from ...transformer.precision import accumulation_dtype, at_least_fp32
from ...transformer.recompute import Recompute
from ...transformer.token_pass import LayerContext, TokenPass

Contexts = Mapping[int, LayerContext]


class SelfConditioning(nn.Module):
    """What a canvas token enters the stack as: norm(embedding + mlp(pre_norm(signal))), the outer norm without a weight."""

    def __init__(self, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.eps = config.norm_epsilon
        self.pre_norm = RMSNorm("self_conditioning.pre_norm", config.hidden_size, eps=self.eps, context=context, dtype=dtype)
        self.mlp = MLP("self_conditioning.mlp", config.hidden_size, config.ffn_hidden_size, context=context, init=init, dtype=dtype)

    def forward(self, embedded: Tensor, signal: Tensor | None) -> Tensor:
        """[T, H] from embedded and signal [T, H]. No signal is the zero signal, for which norm and MLP give exactly zero."""
        if signal is not None:
            embedded = embedded + self.mlp(self.pre_norm(signal))
        return rms_norm(embedded, None, self.eps)


class DiffusionGemma(nn.Module):
    """The model whole. Parameter names are global: layers carry their number in the model, not in a stage."""

    def __init__(self, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype = torch.float32,
                 recompute: Recompute = Recompute(frozenset())):  # noqa: B008 (immutable)
        super().__init__()
        self.config, self.context, self.dtype = config, context, dtype
        shared = {"context": context, "init": init, "dtype": dtype}
        self.embedding = VocabularyParallelEmbedding("embedding.weight", (config.vocab_size, config.hidden_size), **shared)
        self.self_conditioning = SelfConditioning(config, **shared)
        self.layers = nn.ModuleDict(
            {str(layer): TransformerBlock(layer, config, recompute=recompute, **shared) for layer in range(config.num_layers)})
        self.final_norm = RMSNorm("final_norm", config.hidden_size, eps=config.norm_epsilon, context=context, dtype=dtype)

    @property
    def embedding_scale(self) -> float:
        """hidden^0.5, rounded to the compute dtype as the released model does (53.0 in bf16, 53.066 in fp32)."""
        return torch.tensor(self.config.hidden_size ** 0.5, dtype=self.dtype).item()

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, H] of token ids [T]."""
        return self.embedding(tokens) * self.embedding_scale

    def run_layers(self, x: Tensor, token_pass: TokenPass, earlier: Contexts | None = None) -> tuple[Tensor, Contexts]:
        """Final hidden states [T, H], normed, and every layer's context where the pass keeps any."""
        contexts = {}
        for number, layer in self.layers.items():
            x, kept = layer(x, token_pass, None if earlier is None else earlier[int(number)])
            if kept is not None:
                contexts[int(number)] = kept
        return self.final_norm(x), contexts

    def null_signal(self, like: Tensor, uniform: bool) -> Tensor | None:
        """The signal of a canvas without a draft: zero (None), or that of a uniform distribution over the vocabulary."""
        if not uniform:
            return None
        mean = sum_over(at_least_fp32(self.embedding.weight).sum(0), self.context.tp) / self.config.vocab_size
        return mean.to(like.dtype).expand_as(like) * self.embedding_scale

    def soft_signal(self, draft: Tensor) -> Tensor:
        """softmax(logits of the draft) @ E * scale, [T, H] from the draft's hidden states; only E gets a gradient."""
        return soft_embedding(
            draft, self.embedding.weight, softcap=self.config.final_logit_softcapping, scale=self.embedding_scale, tp=self.context.tp,
            vocab_size=self.config.vocab_size)

    def soft_signal_of(self, logits: Tensor) -> Tensor:
        """The same from logits [T, V] at hand, as the sampler has them (already soft-capped and scaled by its temperature)."""
        weights = logits.softmax(-1, dtype=accumulation_dtype(logits.dtype)).to(self.embedding.weight.dtype)
        return weights @ self.embedding.weight * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits [T, V] of final hidden states, at least fp32. For generation: training never holds them."""
        raw, cap = at_least_fp32(F.linear(hidden, self.embedding.weight)), self.config.final_logit_softcapping
        return torch.tanh(raw / cap) * cap

    def forward(self, inputs: MicrobatchInputs) -> LossTerms:
        """Both losses of a microbatch, already divided by the global denominators."""
        clean, canvas = self.embed(inputs.clean.tokens), self.embed(inputs.canvas.tokens)
        canvas = self.self_conditioning(canvas, self.null_signal(canvas, inputs.uniform_null))
        hidden, contexts = self.run_layers(torch.cat([clean, canvas]), inputs.first_pass)
        terms = loss_terms(self.cross_entropy, hidden, inputs.first_scored)
        if inputs.second_pass is not None:
            signal = self.soft_signal(hidden[inputs.draft_rows].detach())
            second = self.self_conditioning(self.embed(inputs.second_tokens), signal)
            hidden, _ = self.run_layers(second, inputs.second_pass, contexts)
            terms = terms + loss_terms(self.cross_entropy, hidden, inputs.second_scored)
        return terms

    def cross_entropy(self, hidden: Tensor, **scored):
        """The fused output layer and cross entropy; see linear_cross_entropy."""
        return linear_cross_entropy(
            hidden, self.embedding.weight, softcap=self.config.final_logit_softcapping, tp=self.context.tp,
            vocab_size=self.config.vocab_size, **scored)
