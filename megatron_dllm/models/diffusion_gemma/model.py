"""DiffusionGemma: one stack of layers that runs as a causal encoder over clean tokens and as a bidirectional decoder over canvases.

A microbatch goes through the stack once, clean and canvas tokens together; rows whose canvas is self-conditioned take a second loop, the
canvas alone, reading the keys and values that the first loop kept. Or their drafts are made beforehand, without gradient, and all takes one
loop: clean tokens then go forward twice, but weights are read, and kernels started, once less. Or both loops have one backward, where
their layers allow it (training/draft_pass.py decides).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import ModelConfig, MoEConfig
from ...diffusion.inputs import DraftInputs, JointInputs, MicrobatchInputs
from ...diffusion.losses import LossTerms, loss_terms
from ...kernels.launch import takes
from ...moe.balance import BalanceLosses, RoutingMonitor
from ...moe.dispatchers.build import build_dispatcher
from ...moe.layer import MoELayer
from ...parallel import ParallelContext, communication, gather_sequence, split_sequence, sum_grad_over, sum_over
from ...pipeline.layout import Stage
from ...tensor_parallel import SharedWeight, VocabularyParallelEmbedding, linear_cross_entropy, soft_embedding
from ...tensor_parallel.initialization import Init
from ...tensor_parallel.vocabulary import VocabularyRange
from ...transformer.block import TransformerBlock
from ...transformer.hyper_connection import AsMean, Streams, as_copies, stream_chains
from ...transformer.mlp import MLP
from ...transformer.mtp import MultiTokenPrediction
from ...transformer.norms import RMSNorm, rms_norm
from ...transformer.precision import accumulation_dtype, at_least_fp32
from ...transformer.recompute import Recompute
from ...transformer.stream_copies import contract_streams, expand_streams
from ...transformer.token_pass import TokenPass
from .kept_pass import Contexts, KeptPass


class SelfConditioning(nn.Module):
    """What a canvas token enters the stack as: norm(embedding + mlp(pre_norm(signal))), the outer norm without a weight.

    Under sequence parallelism every rank gives as many signals: the MLP gathers them.
    """

    def __init__(self, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        self.eps = config.norm_epsilon
        self.pre_norm = RMSNorm("self_conditioning.pre_norm", config.hidden_size, eps=self.eps, context=context, dtype=dtype)
        self.mlp = MLP("self_conditioning.mlp", config.hidden_size, config.ffn_hidden_size, context=context, init=init, dtype=dtype)

    def forward(self, embedded: Tensor, signal: Tensor | None) -> Tensor:
        """[T, H] from embedded [T, H] and signal [T, H], or [1, H] for all. None is the zero signal, for which norm and MLP give zero."""
        if signal is not None:
            embedded = embedded + self.mlp(self.pre_norm(signal))
        return rms_norm(embedded, None, self.eps)


class DiffusionGemma(nn.Module):
    """The model, or what of it one pipeline rank holds (`part`). Parameter names are global: layers carry their number in the model.

    The first and the last rank both hold the embedding, with equal values; their gradients are to be summed (`Placement.tied_to`).
    """

    def __init__(self, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype = torch.float32,
                 recompute: Recompute = Recompute(frozenset()), moe: MoEConfig = MoEConfig(),  # noqa: B008 (immutable)
                 part: Stage | None = None):
        super().__init__()
        part = part or Stage.whole(config.num_layers)
        self.config, self.context, self.dtype, self.recompute = config, context, dtype, recompute
        shared = {"context": context, "init": init, "dtype": dtype}
        if part.has_embedding or part.has_loss:
            self.embedding = VocabularyParallelEmbedding("embedding.weight", (config.vocab_size, config.hidden_size), **shared)
            if not (part.has_embedding and part.has_loss):
                weight = self.embedding.weight
                counted = weight.placement.first and part.has_embedding
                weight.placement = dataclasses.replace(weight.placement, tied_to="embedding.weight", first=counted)
        if part.has_embedding:
            self.self_conditioning = SelfConditioning(config, **shared)
        self.routing = RoutingMonitor()
        moe_layer = partial(MoELayer, dispatcher=build_dispatcher(moe, context, config, dtype), grouped=moe.moe_grouped_gemm,
                            losses=BalanceLosses(moe, context, config.num_experts), monitor=self.routing,
                            bias_rate=moe.moe_router_bias_update_rate if moe.moe_router_enable_expert_bias else 0.0)
        block = partial(TransformerBlock, config=config, recompute=recompute, moe_layer=moe_layer, **shared)
        self.layers = nn.ModuleDict({str(layer): block(layer) for layer in part.layers})
        if part.has_loss:
            self.final_norm = RMSNorm("final_norm", config.hidden_size, eps=config.norm_epsilon, context=context, dtype=dtype)
        self.mtp = nn.ModuleList(
            MultiTokenPrediction(depth, config, block=block, **shared) for depth in range(config.mtp_num_layers * part.has_loss))

    @property
    def embedding_scale(self) -> float:
        """hidden^0.5, rounded to the compute dtype as the released model does (53.0 in bf16, 53.066 in fp32)."""
        return torch.tensor(self.config.hidden_size ** 0.5, dtype=self.dtype).item()

    def embed(self, tokens: Tensor, shared: SharedWeight | None = None) -> Tensor:
        """[T, H] of token ids [T]; under sequence parallelism our piece, T filled up to a multiple of the ranks.

        Here and below `shared` is the embedding with one gradient sum for all its uses.
        """
        if self.context.sequence_parallel:
            tokens = F.pad(tokens, (0, -len(tokens) % self.context.tp.size))
        return self.embedding(tokens, shared) * self.embedding_scale

    def whole(self, x: Tensor, token_pass: TokenPass) -> Tensor:
        """[T, H], without fill, of our piece; the gradients of the ranks are shares."""
        return gather_sequence(x, self.context.tp)[:token_pass.num_tokens] if self.context.sequence_parallel else x

    def own(self, x: Tensor) -> Tensor:
        """Our piece of [T, H] that all ranks have, filled up as in `embed`; the whole gradient goes back to all."""
        if not self.context.sequence_parallel:
            return x
        return split_sequence(F.pad(x, (0, 0, 0, -len(x) % self.context.tp.size)), self.context.tp)

    def run_layers(self, x: Tensor, token_pass: TokenPass, earlier: Contexts | None = None) -> tuple[Tensor, Contexts]:
        """Final hidden states, normed, of what `embed` gave (see `whole`), and every layer's context where the pass keeps any."""
        streams = self.config.num_residual_streams
        if not self.layers or streams == 1:
            x, contexts = self.run_blocks(x, map(int, self.layers), token_pass, earlier)
        else:
            x, contexts = self.run_blocks(as_copies(x, streams), map(int, self.layers), token_pass, earlier, AsMean())
        return self.final_norm(x), contexts

    def expand(self, x: Tensor) -> Tensor:
        """[T, H] in every residual stream, [T, n * H]."""
        return expand_streams(x, self.config.num_residual_streams)

    def run_blocks(self, x: Tensor | Streams, numbers: Iterable[int], token_pass: TokenPass, earlier: Contexts | None,
                   wanted: AsMean | None = None) -> tuple[Tensor, Contexts]:
        """Residual streams [T, n * H] after the layers of these numbers, or what is wanted of them, and these layers' contexts where the
        pass keeps any."""
        contexts, numbers = {}, list(numbers)
        readers = [*(self.layers[str(number)].reader for number in numbers[1:]), wanted]
        for number, reader, chain in zip(numbers, readers, stream_chains(self.recompute), strict=False):
            x, kept = self.layers[str(number)](x, token_pass, None if earlier is None else earlier[number], chain, reader)
            if kept is not None:
                contexts[number] = kept
        return x, contexts

    def leave(self, x: Tensor) -> Tensor:
        """Final hidden states [T, H], normed, of residual streams."""
        return self.final_norm(contract_streams(x, self.config.num_residual_streams))

    def null_signal(self, *, of_all_tokens: bool = False) -> Tensor:
        """The signal [1, H] of a uniform distribution over the vocabulary; `of_all_tokens`: every rank has the gradient of all tokens."""
        rows = self.embedding.weight.placement.region(self.embedding.weight)
        mean = sum_over(at_least_fp32(rows).sum(0, keepdim=True), self.context.tp) / self.config.vocab_size
        if self.context.sequence_parallel and not of_all_tokens:
            mean = sum_grad_over(mean, self.context.tp)  # each rank has the gradient of its own tokens
        return mean.to(rows.dtype) * self.embedding_scale

    def soft_signal(self, draft: Tensor, shared: SharedWeight | None = None) -> Tensor:
        """softmax(logits of the draft) @ E * scale, [T, H] from the draft's hidden states; only E gets a gradient."""
        return soft_embedding(
            draft, self.embedding.weight, softcap=self.config.final_logit_softcapping, scale=self.embedding_scale, tp=self.context.tp,
            vocab_size=self.config.vocab_size, shared=shared)

    def soft_signal_of(self, logits: Tensor) -> Tensor:
        """The same from logits [T, V] at hand, as the sampler has them (already soft-capped and scaled by its temperature)."""
        embedding = self.embedding.weight
        own = VocabularyRange.of(embedding, self.config.vocab_size, self.context.tp)
        if takes(logits, embedding) and not logits.requires_grad:
            from ...kernels import sampling as kernel  # Triton is there with CUDA alone

            weights = kernel.softmax(logits, embedding.dtype)
        else:
            weights = logits.softmax(-1, dtype=accumulation_dtype(logits.dtype)).to(embedding.dtype)
        signal = weights[:, own.start:own.start + own.size] @ embedding[:own.size]
        return sum_over(signal, self.context.tp) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits [T, V] of final hidden states [T, H], at least fp32, without gradient over several ranks. For generation:
        training never holds them."""
        product, cap = F.linear(hidden, self.embedding.weight), self.config.final_logit_softcapping
        if takes(product) and self.context.tp.size == 1 and not product.requires_grad:
            from ...kernels import sampling as kernel  # Triton is there with CUDA alone

            return kernel.soft_capped(product, cap)
        raw = at_least_fp32(product)
        if self.context.tp.size > 1:
            raw = communication.all_gather(raw.T, self.context.tp)[:self.config.vocab_size].T
        return torch.tanh(raw / cap) * cap

    def forward(self, inputs: MicrobatchInputs) -> LossTerms:
        """Both losses of a microbatch, already divided by the global denominators."""
        # The uniform signal reads the embedding beside these.
        shared = SharedWeight.of(self.embedding.weight, has_others=inputs.uniform_null)
        if inputs.joint is not None:
            return self.first_terms(self.joint_states(inputs, inputs.joint, shared), inputs, shared)
        signal = None if inputs.draft is None else self.signal_beforehand(inputs, inputs.draft, shared)
        x, contexts = self.run_layers(self.enter(inputs, shared, signal), inputs.first_pass)
        hidden = self.whole(x, inputs.first_pass)
        terms = self.first_terms(hidden, inputs, shared)
        if inputs.second_pass is not None:
            entered = self.enter_again(inputs, self.draft_signal(hidden, inputs, shared), shared)
            x, _ = self.run_layers(entered, inputs.second_pass, contexts)
            cross_entropy = partial(self.cross_entropy, shared=shared)
            terms = terms + loss_terms(cross_entropy, self.whole(x, inputs.second_pass), inputs.second_scored)
        return terms

    def first_terms(self, hidden: Tensor, inputs: MicrobatchInputs, shared: SharedWeight | None = None) -> LossTerms:
        """The losses of the first pass's final hidden states [T, H], multi-token prediction's among them."""
        cross_entropy = partial(self.cross_entropy, shared=shared)
        terms, further = loss_terms(cross_entropy, hidden, inputs.first_scored), inputs.further
        if further is None:
            return terms
        states = self._own_share(hidden[:further.token_pass.num_clean])
        for depth, tokens, scored in zip(self.mtp, further.tokens, further.scored, strict=True):
            states = depth(states, self.embed(tokens, shared), further.token_pass)
            terms = terms + loss_terms(cross_entropy, self.whole(states, further.token_pass), scored)
        return terms

    def _own_share(self, x: Tensor) -> Tensor:
        """Our piece of [T, H] as in `own`, but what goes back is the piece's gradient alone: our share, as `whole` wants it."""
        if not self.context.sequence_parallel:
            return x
        tp = self.context.tp
        return F.pad(x, (0, 0, 0, -len(x) % tp.size)).chunk(tp.size)[tp.rank]

    def signal_beforehand(self, inputs: MicrobatchInputs, draft: DraftInputs, shared: SharedWeight | None = None) -> Tensor:
        """The signal [T, H] of all canvas tokens, from drafts without gradient; canvases without a draft have what stands for none."""
        with torch.no_grad():
            entered = self.enter_canvas(self.embed(draft.tokens), inputs, draft.token_pass)
            hidden = self._canvas_states(entered, draft.token_pass)
        return self.of_all_canvases(self.soft_signal(hidden, shared), draft.rows, inputs)

    def _canvas_states(self, x: Tensor, token_pass: TokenPass) -> Tensor:
        """Final hidden states, normed, of a pass's canvas tokens. On a CPU the last layer makes keys and values alone of the others."""
        *others, last = map(int, self.layers)
        layer, num_clean = self.layers[str(last)], token_pass.num_clean
        if x.is_cuda or num_clean == 0 or not layer.gives_context or token_pass.is_packed:
            return self.run_layers(x, token_pass)[0][num_clean:]
        x, _ = self.run_blocks(x, others, token_pass, None)
        x, _ = layer(x[num_clean:], token_pass.of_canvas, layer.context(x[:num_clean], token_pass))
        return self.final_norm(x)

    def of_all_canvases(self, signal: Tensor, rows: Tensor | None, inputs: MicrobatchInputs) -> Tensor:
        """Signals of the canvas tokens `rows` (None: all), and for the others what stands for none."""
        if rows is None:
            return self._without_left_out(signal, inputs)
        return self._no_signal(signal, inputs).expand(len(inputs.canvas.tokens), -1).index_copy(0, rows, signal)

    def joint_states(self, inputs: MicrobatchInputs, joint: JointInputs, shared: SharedWeight | None = None) -> Tensor:
        """Final hidden states [T, H], normed, of clean tokens and of canvases, those with a draft as the second pass makes them, with one
        backward for both passes."""
        embedded = self.embed(torch.cat([inputs.clean.tokens, inputs.canvas.tokens]), shared)
        first = KeptPass.of(self.run_layers, self.joint_leaf(embedded, inputs), inputs.first_pass)
        signal = self.of_all_canvases(self.joint_signal(first, joint, shared), joint.rows, inputs)
        entered = self.enter_canvas(embedded, inputs, signal=signal)
        again = joint.places.take(entered.detach()).requires_grad_(first.leaf.requires_grad)
        second = KeptPass.of(self.run_layers, again, inputs.second_pass, first.contexts)
        first.put(second, joint.places)
        return first.joined(second, joint.places, entered)

    def joint_leaf(self, embedded: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """What the first pass of a joint backward enters the stack as, from the embedding of its tokens; a leaf, since the second pass's
        signal is where its gradient goes on."""
        is_trained = any(weight.requires_grad for weight in (self.embedding.weight, *self.self_conditioning.parameters()))
        with torch.no_grad():
            leaf = self.enter_canvas(embedded, inputs)
        return leaf.requires_grad_(is_trained and torch.is_grad_enabled())

    def joint_signal(self, first: KeptPass, joint: JointInputs, shared: SharedWeight | None = None) -> Tensor:
        """The signal of the drafts in a first pass's final hidden states; others will soon stand there."""
        return self.soft_signal(joint.places.take(first.result.detach()).clone(), shared)

    def enter(self, inputs: MicrobatchInputs, shared: SharedWeight | None = None, signal: Tensor | None = None) -> Tensor:
        """What the first pass enters the stack as; with the `signal` of its canvases where they have one already."""
        # One call for both streams: under sequence parallelism each call deals its own tokens over the ranks.
        entered = self.embed(torch.cat([inputs.clean.tokens, inputs.canvas.tokens]), shared)
        return self.enter_canvas(entered, inputs, inputs.first_pass, signal)

    def enter_again(self, inputs: MicrobatchInputs, signal: Tensor, shared: SharedWeight | None = None) -> Tensor:
        """What the second pass enters the stack as, from the signal of its draft."""
        return self.self_conditioning(self.embed(inputs.second_tokens, shared), signal)

    def draft_signal(self, hidden: Tensor, inputs: MicrobatchInputs, shared: SharedWeight | None = None) -> Tensor:
        """The second pass's signal from the first one's final hidden states, [T, H] of it (see `own`)."""
        return self.own(self._without_left_out(self.soft_signal(hidden[inputs.draft_rows].detach(), shared), inputs))

    def _without_left_out(self, signal: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """Signals [T, H] of all canvas tokens, of which some have what stands for no draft in place of theirs."""
        if inputs.left_out is None:
            return signal
        return torch.where(inputs.left_out[:, None], self._no_signal(signal, inputs), signal)

    def _no_signal(self, signal: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """What stands for no draft [1, H], beside signals that every rank has of all tokens."""
        return self.null_signal(of_all_tokens=True) if inputs.uniform_null else signal.new_zeros(1, signal.shape[1])

    def enter_canvas(self, x: Tensor, inputs: MicrobatchInputs, token_pass: TokenPass | None = None,
                     signal: Tensor | None = None) -> Tensor:
        """The tokens of a pass (None: the first), those of canvases through the self-conditioning module with their `signal`; None: the one
        that stands for no draft."""
        num_clean = (token_pass or inputs.first_pass).num_own_clean
        if signal is None and inputs.uniform_null:
            signal = self.null_signal()
        return torch.cat([x[:num_clean], self.self_conditioning(x[num_clean:], signal)])

    def cross_entropy(self, hidden: Tensor, **scored):
        """The fused output layer and cross entropy; see linear_cross_entropy."""
        return linear_cross_entropy(
            hidden, self.embedding.weight, softcap=self.config.final_logit_softcapping, tp=self.context.tp,
            # What comes from a gathered sequence is summed by the gather's backward.
            vocab_size=self.config.vocab_size, sum_hidden_grad=not self.context.sequence_parallel,
            logit_loss=self.embedding.logit_loss, **scored)
