"""One layer: attention, then a dense MLP and routed experts side by side, each between norms of its own."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..config.extensions import LAYER_TYPES
from ..moe.balance import RoutedTokens
from ..moe.layer import MoELayer
from ..moe.replay import NOT_CHECKPOINTED, Call
from ..parallel import ParallelContext, communication, gather_replicated_sequence, split_sequence
from ..tensor_parallel.dropout import TokenDraws
from ..tensor_parallel.initialization import Init
from .attention import SelfAttention
from .gated_delta_net import GatedDeltaContext, GatedDeltaNet
from .hyper_connection import AsMean, HyperConnection, Norms, PlainConnection, StreamChain, Streams
from .mlp import MLP
from .norms import RMSNorm, rms_norm
from .recompute import Recompute
from .residual import NormedInput, after_attention, after_feed_forward, after_feed_forward_and_norm, of_feed_forward
from .token_pass import LayerContext, TokenPass

# Layer type -> what attends: forward(x [T, H], the pass's entry for the type, earlier context) -> y [T, H] and the context to keep.
ATTENTION = {"sliding": SelfAttention, "full": SelfAttention, "linear": GatedDeltaNet}
Context = LayerContext | GatedDeltaContext


class TransformerBlock(nn.Module):
    """x, y [T, H], tokens [clean ; canvas] (under sequence parallelism our piece of them, TokenPass):

        h   = x + post_attention_layernorm(attention(input_layernorm(x)))
        d   = post_feedforward_layernorm_1(mlp(pre_feedforward_layernorm(h)))
        m   = post_feedforward_layernorm_2(experts(pre_feedforward_layernorm_2(h), router(h)))
        y   = (h + post_feedforward_layernorm(d + m)) * the scalar of the token's stream

    With mHC, x and y are [T, n * H], and each of the two parts reads and writes the streams through a connection of its own.

    Each token's m is computed by one tp rank: with sequence parallelism the rank whose piece it is in, fill left out; without, every rank
    computes 1/R of the tokens, and they are gathered.
    """

    def __init__(self, layer: int, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype,
                 recompute: Recompute, moe_layer: Callable[..., MoELayer]):
        super().__init__()
        self.kind, added = config.layer_kinds[layer], LAYER_TYPES.rows.get(config.layer_types[layer])
        self.recompute = recompute
        self.tp, self.sequence_parallel = context.tp, context.sequence_parallel
        name, hidden, shared = f"layers.{layer}", config.hidden_size, {"context": context, "init": init, "dtype": dtype}

        def norm(which: str, *, partial: bool = False) -> RMSNorm:
            return RMSNorm(f"{name}.{which}", hidden, eps=config.norm_epsilon, context=context, dtype=dtype, partial=partial)

        def connection(which: str) -> HyperConnection | PlainConnection:
            return HyperConnection(f"{name}.{which}", config, **shared) if config.enable_mhc_connections else PlainConnection()

        shares_tokens = context.tp.size > 1

        self.attention_connection = connection("attention_connection")
        self.input_layernorm = norm("input_layernorm")
        build = ATTENTION[self.kind] if added is None else added.build
        self.attention = build(f"{name}.attention", config, layer, recompute=recompute, **shared)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.feed_forward_connection = connection("feed_forward_connection")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = MLP(f"{name}.mlp", hidden, config.ffn_hidden_size, **shared)
        self.post_feedforward_layernorm_1 = norm("post_feedforward_layernorm_1")
        self.pre_feedforward_layernorm_2 = norm("pre_feedforward_layernorm_2", partial=shares_tokens)
        self.moe = moe_layer(name, config, **shared)
        # A part that is recomputed by itself runs by itself; otherwise the dense MLP runs while tokens are on their way to the experts, and
        # its second half while they are on their way back (recomputed by itself it is one: what lies between would have to be kept).
        self.feed_forward = self._apart if "moe" in recompute.parts else self._overlapped
        self.dense_halves = (self._dense_again, _unchanged) if "mlp" in recompute.parts else (self._widen, self._narrow)
        self.post_feedforward_layernorm_2 = norm("post_feedforward_layernorm_2", partial=shares_tokens)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        # Other tp ranks have some of the tokens, and what is recomputed runs by itself.
        apart = shares_tokens or recompute.parts & {"mlp", "moe"}
        self.run = self._by_parts if apart else self._over_streams if config.enable_mhc_connections else self._fused
        # The released model scales the output of each pass by a buffer of its own: [clean, canvas].
        self.register_buffer("layer_scalars", torch.ones(2, dtype=dtype, device=context.device))

    @property
    def reader(self) -> HyperConnection | RMSNorm | None:
        """What reads this layer's input first, for the layer before; None where that cannot make use of it."""
        if isinstance(self.attention_connection, HyperConnection):
            return self.attention_connection
        norm, fits = self.input_layernorm, self.run == self._fused and "block" not in self.recompute.parts
        return norm if fits and norm.function is rms_norm and norm.weight.is_cuda else None

    def forward(self, x: Tensor | Streams | NormedInput, token_pass: TokenPass, earlier: Context | None, chain: StreamChain | None = None,
                reader: HyperConnection | AsMean | RMSNorm | None = None) -> tuple[Tensor | Streams | NormedInput, Context | None]:
        """y [T, H] and the layer's context for a later pass; recomputed in the backward where the configuration says so.

        `chain`: where mHC's streams are to be computed again from, see stream_chains. `reader`: that of the layer that reads y, if known: y
        is then Streams or NormedInput; AsMean: y [T, H] is the mean of the streams.
        """
        return self.recompute.with_moe("block", self.run, NOT_CHECKPOINTED, x, token_pass, earlier, chain, reader)

    @property
    def gives_context(self) -> bool:
        """Whether `context` may be asked for: what attends has keys, and reads no streams."""
        return isinstance(self.attention, SelfAttention) and isinstance(self.attention_connection, PlainConnection)

    def context(self, x: Tensor, token_pass: TokenPass) -> LayerContext:
        """The layer's context alone of x [T, H], the pass's first tokens."""
        return self.attention.context(self.input_layernorm(x), token_pass.layers[self.kind])

    def _fused(self, call: Call, x: Tensor | NormedInput, token_pass: TokenPass, earlier: Context | None, chain: StreamChain | None,
               reader: RMSNorm | None) -> tuple[Tensor | NormedInput, Context | None]:
        """`_by_parts` where nothing comes between the norms that meet the residual."""
        router, eps, num_live = self.moe.router, self.input_layernorm.eps, token_pass.num_own_live
        normed, x = (x.normed, x.x) if isinstance(x, NormedInput) else self.input_layernorm.beside(x, num_live)
        attended, kept = self.attention(normed, token_pass.layers[self.kind], earlier)
        readers = self.pre_feedforward_layernorm.weight, self.pre_feedforward_layernorm_2.weight, router.scale
        h, for_mlp, for_experts, scaled = after_attention(x, attended, self.post_attention_layernorm.weight, readers, router.root, eps,
                                                          num_live)
        parts = self._feed_forward(call, for_mlp, for_experts, scaled, token_pass)
        norms, scalars = self._feed_forward_norms(), self.layer_scalars
        if reader is not None:
            return after_feed_forward_and_norm(h, *parts, *norms, reader.weight, scalars, token_pass.num_clean, eps, num_live), kept
        return after_feed_forward(h, *parts, *norms, scalars, token_pass.num_clean, eps, num_live), kept

    def _over_streams(self, call: Call, x: Tensor | Streams, token_pass: TokenPass, earlier: Context | None, chain: StreamChain | None,
                      reader: HyperConnection | AsMean | None) -> tuple[Tensor | Streams, Context | None]:
        """`_by_parts` where streams are mixed between the norms, but nothing comes between those of one part."""
        router, eps, num_live = self.moe.router, self.input_layernorm.eps, token_pass.num_own_live
        norms = Norms((self.input_layernorm.weight,), eps, function=self.input_layernorm.function)
        (normed,), x, mix = self.attention_connection.read_normed(x, chain, norms, num_live=num_live)
        attended, kept = self.attention(normed, token_pass.layers[self.kind], earlier)
        x = self.attention_connection.write(x, self.post_attention_layernorm(attended), mix, chain, self.feed_forward_connection)
        norms = Norms((self.pre_feedforward_layernorm.weight, self.pre_feedforward_layernorm_2.weight, router.scale), eps, router.root)
        readers, x, mix = self.feed_forward_connection.read_normed(x, chain, norms, token_pass.per_stream(self.layer_scalars), num_live)
        parts = self._feed_forward(call, *readers, token_pass)
        y = of_feed_forward(*parts, *self._feed_forward_norms(), eps, num_live)
        return self.feed_forward_connection.write(x, y, mix, chain, reader), kept

    def _feed_forward(self, call: Call, for_mlp: Tensor, for_experts: Tensor, scaled: Tensor,
                      token_pass: TokenPass) -> tuple[Tensor, Tensor]:
        """What the dense MLP and the experts give, before their norms."""
        trip = self.moe.start(for_experts, scaled, call, token_pass.routed)
        widened = self.mlp.widen(for_mlp, token_pass.draws)
        self.moe.compute(trip)
        return self.mlp.down(widened, token_pass.draws), trip.after_combine()

    def _feed_forward_norms(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of the norms of what `_feed_forward` gives, and of their sum."""
        norms = self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2, self.post_feedforward_layernorm
        return tuple(norm.weight for norm in norms)

    def _by_parts(self, call: Call, x: Tensor | Streams, token_pass: TokenPass, earlier: Context | None, chain: StreamChain | None,
                  reader: HyperConnection | AsMean | None) -> tuple[Tensor | Streams, Context | None]:
        u, x, mix = self.attention_connection.read(x, chain, num_live=token_pass.num_own_live)
        attended, kept = self.attention(self.input_layernorm(u), token_pass.layers[self.kind], earlier)
        x = self.attention_connection.write(x, self.post_attention_layernorm(attended), mix, chain, self.feed_forward_connection)
        h, x, mix = self.feed_forward_connection.read(x, chain, token_pass.per_stream(self.layer_scalars), token_pass.num_own_live)
        y = self.post_feedforward_layernorm(self.feed_forward(call, h, token_pass))
        return self.feed_forward_connection.write(x, y, mix, chain, reader), kept

    def _apart(self, call: Call, h: Tensor, token_pass: TokenPass) -> Tensor:
        """d + m."""
        # In this order gradients are added to h's as they are in `_overlapped`, so that recompute changes no bit.
        routed = self.recompute.with_moe("moe", self._routed, call, h, token_pass)
        return self._dense_again(h, token_pass.draws) + routed

    def _overlapped(self, call: Call, h: Tensor, token_pass: TokenPass) -> Tensor:
        """d + m."""
        beside_dispatch, beside_combine = self.dense_halves
        own = self._own_tokens(h, token_pass)
        trip = self.moe.start(self.pre_feedforward_layernorm_2(own), self.moe.router.scaled(own), call, self._own_routed(token_pass))
        between = beside_dispatch(h, token_pass.draws)
        self.moe.compute(trip)
        dense = beside_combine(between, token_pass.draws)
        return dense + self._all_tokens(self.post_feedforward_layernorm_2(trip.after_combine()), token_pass)

    def _dense(self, h: Tensor, draws: TokenDraws | None) -> Tensor:
        return self._narrow(self._widen(h, draws), draws)

    def _dense_again(self, h: Tensor, draws: TokenDraws | None) -> Tensor:
        return self.recompute("mlp", self._dense, h, draws)

    def _widen(self, h: Tensor, draws: TokenDraws | None) -> Tensor:
        return self.mlp.widen(self.pre_feedforward_layernorm(h), draws)

    def _narrow(self, widened: Tensor, draws: TokenDraws | None) -> Tensor:
        return self.post_feedforward_layernorm_1(self.mlp.down(widened, draws))

    def _routed(self, call: Call, h: Tensor, token_pass: TokenPass) -> Tensor:
        own = self._own_tokens(h, token_pass)
        routed = self.moe(self.pre_feedforward_layernorm_2(own), own, call, self._own_routed(token_pass))
        return self._all_tokens(self.post_feedforward_layernorm_2(routed), token_pass)

    def _own_tokens(self, h: Tensor, token_pass: TokenPass) -> Tensor:
        """Of this rank's rows those whose experts it looks after: no other tp rank has them, and none is fill."""
        if self.sequence_parallel:
            return h[:len(h) - token_pass.num_own_fill]
        return split_sequence(h, self.tp, near_equal_counts(len(h), self.tp.size))

    def _own_routed(self, token_pass: TokenPass) -> RoutedTokens | None:
        """What the router knows of the tokens that `_own_tokens` gives."""
        if self.tp.size == 1:
            return token_pass.routed
        counts = near_equal_counts(token_pass.num_tokens, self.tp.size)
        own = token_pass.own_tokens if self.sequence_parallel else partial(communication.own_slice, group=self.tp, counts=counts)
        return None if token_pass.routed is None else token_pass.routed.map(own)

    def _all_tokens(self, own: Tensor, token_pass: TokenPass) -> Tensor:
        """The inverse of `_own_tokens`; fill is zero."""
        if self.sequence_parallel:
            return F.pad(own, (0, 0, 0, token_pass.num_own_fill))
        return gather_replicated_sequence(own, self.tp, near_equal_counts(token_pass.num_tokens, self.tp.size))


def _unchanged(x: Tensor, draws: TokenDraws | None) -> Tensor:
    return x


def near_equal_counts(total: int, pieces: int) -> list[int]:
    """`total` in so many pieces, the first ones longer by one: 7 in 3 is [3, 2, 2]."""
    return [total // pieces + (piece < total % pieces) for piece in range(pieces)]
