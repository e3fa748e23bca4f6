"""One trip of tokens through the stack: what attention and rotary need to know of them, made once and read by every layer."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..context_parallel.plan import ShardedPlan, Shards, sharded_plan
from ..moe.balance import RoutedTokens
from ..parallel import ParallelContext
from ..tensor_parallel.dropout import TokenDraws
from .core_attention import AttentionPlan, attention_plan
from .gated_delta_plan import GatedDeltaPlan, Runs, gated_delta_plan, tokens_by_rank
from .key_cache import BlockPlan
from .packed_attention import PackedPlan, packed_plan
from .rotary import RotaryTable, inverse_frequencies, rotary_table
from .rows import Rows
from .visibility import Visibility

LAYER_TYPES = ("sliding", "full")  # those that attend to keys; "linear" layers carry a state


@dataclass(frozen=True)
class LayerPass:
    """What the layers of one type share. `kept` int64 [n]: the keys handed on as the layer's context (None: nothing is). `draws`: what
    linear layers are told. `replaced`: all keys are handed on, and a later pass puts its own in the place of these.
    """

    rotary: RotaryTable
    attention: AttentionPlan | ShardedPlan | PackedPlan | BlockPlan
    kept: Tensor | None
    draws: TokenDraws | None = None
    replaced: Rows | None = None

    @cached_property
    def places(self) -> Tensor:
        """int64 [T], of a pass without a context of its own: each token's number in `kept`, or -1. Made when it is first asked for."""
        places = self.kept.new_full((len(self.rotary.cos),), -1)
        return places.index_copy_(0, self.kept, torch.arange(len(self.kept), device=places.device))


@dataclass(frozen=True)
class LayerContext:
    """Keys and values of earlier clean tokens, [n, g, d]: an output of one pass and an input of another, gradients included."""

    key: Tensor
    value: Tensor

    def followed_by(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """These keys and values and then the pass's own."""
        return torch.cat([self.key, key]), torch.cat([self.value, value])


@dataclass(frozen=True)
class ReplacedContext:
    """Keys and values of a whole pass, [T, g, d], of which a later pass puts its own in the place of `rows`, without gradient: theirs is
    made in the earlier pass (see joint_backward)."""

    key: Tensor
    value: Tensor
    rows: Rows

    @torch.no_grad()
    def followed_by(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """These keys and values with the pass's own among them."""
        self.rows.put(self.key, key)
        self.rows.put(self.value, value)
        return self.key, self.value


@dataclass(frozen=True)
class SequenceSplit:
    """Which piece of a pass's tokens this rank has outside of attention and matrix products: number `rank` of `size` equal ones.

    Under sequence parallelism tensor parallelism's own numbers; the one piece of one without it.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, context: ParallelContext) -> SequenceSplit:
        """The split that a context asks for."""
        return cls(context.tp.rank, context.tp.size) if context.sequence_parallel else cls()


@dataclass(frozen=True)
class TokenPass:
    """T tokens = num_clean clean ones, then num_canvas canvas ones; `layers` by layer type; `routed`: what routers know of the T tokens;
    `draws`: for dropout.

    A split into R pieces fills T up to a multiple of R. Attention sees all tokens, the fill too (as rows that no work list names); norms,
    residuals see our piece, and experts its rows that are no fill. With 5 clean tokens, 2 canvas tokens and R = 2:

        rank 0   clean clean clean clean      num_own 4, num_own_clean 4, num_own_fill 0
        rank 1   clean canvas canvas fill     num_own 4, num_own_clean 1, num_own_fill 1
    """

    num_clean: int
    num_canvas: int
    layers: Mapping[str, LayerPass | GatedDeltaPlan]
    split: SequenceSplit = SequenceSplit()
    routed: RoutedTokens | None = None
    draws: TokenDraws | None = None

    @property
    def num_tokens(self) -> int:
        """T, without fill."""
        return self.num_clean + self.num_canvas

    @property
    def num_own(self) -> int:
        """Rows of our piece, fill included."""
        return -(-self.num_tokens // self.split.size)

    @property
    def num_own_clean(self) -> int:
        """Clean tokens of our piece, which come first."""
        return min(max(self.num_clean - self.split.rank * self.num_own, 0), self.num_own)

    @property
    def num_own_fill(self) -> int:
        """Rows of fill in our piece, which come last."""
        return min(max((self.split.rank + 1) * self.num_own - self.num_tokens, 0), self.num_own)

    @property
    def num_own_live(self) -> int | None:
        """Rows of our piece that may get a gradient that is not zero, which come first (None: all)."""
        num_live = None if self.draws is None else self.draws.num_live
        return None if num_live is None else min(max(num_live - self.split.rank * self.num_own, 0), self.num_own)

    @property
    def is_packed(self) -> bool:
        """Whether Transformer Engine computes any attention of it."""
        return any(isinstance(own, LayerPass) and isinstance(own.attention, PackedPlan) for own in self.layers.values())

    @cached_property
    def of_canvas(self) -> TokenPass:
        """The pass of the canvas tokens alone, to which the keys of the clean ones are given (LayerContext); on one rank of a CPU, not
        packed, made when it is first asked for."""
        first = self.num_clean
        draws = None if self.draws is None else self.draws.map(lambda words: words[first:])
        routed = None if self.routed is None else self.routed.map(lambda values: values[first:])
        layers = {kind: dataclasses.replace(own, rotary=own.rotary[first:], attention=own.attention.from_query(first), draws=draws)
                  for kind, own in self.layers.items() if isinstance(own, LayerPass)}
        return TokenPass(0, self.num_canvas, layers, routed=routed, draws=draws)

    def own_tokens(self, values: Tensor) -> Tensor:
        """Of values of all T tokens those of our piece, without fill."""
        first = self.split.rank * self.num_own
        return values[first:first + self.num_own]

    def per_stream(self, scalars: Tensor) -> Tensor:
        """[num_own, 1]: of scalars [2], the first for clean tokens, the second for canvas tokens (and fill)."""
        return torch.cat([scalars[:1].expand(self.num_own_clean), scalars[1:].expand(self.num_own - self.num_own_clean)])[:, None]


@dataclass(frozen=True)
class PassTokens:
    """The T tokens that a pass is made of, and what its layers are told of each.

    visibility  by layer type (the types may hold different contexts), without the window, which sliding layers add
    positions   int64 [T]
    num_clean   the first ones are clean
    routed      what routers know of them
    draws       int64 [T], a word of each token for dropout (None: there is none)
    runs        what linear layers need, if the model has any
    shards      by layer type, who has what under context parallelism: then the visibility is that of all ranks' tokens, all else our own
    num_live    only so many, the first ones, may get a gradient that is not zero (None: all)
    """

    visibility: Mapping[str, Visibility]
    positions: np.ndarray
    num_clean: int
    routed: RoutedTokens | None = None
    draws: np.ndarray | None = None
    runs: Runs | None = None
    shards: Mapping[str, Shards] | None = None
    num_live: int | None = None


@dataclass(frozen=True)
class PassKeys:
    """What a pass has to do with the keys of another one.

    kept        int64 by layer type, the clean keys to hand on
    key_order   int64 by layer type, where the visibility's clean keys stand in [context ; clean]; without it, in this order
    replaced    the rows of which a later pass has others (LayerPass)
    replaces    this pass is one that has others of an earlier one's
    """

    kept: Mapping[str, np.ndarray] | None = None
    key_order: Mapping[str, np.ndarray] | None = None
    replaced: Rows | None = None
    replaces: bool = False

    @property
    def keeps_rows(self) -> bool:
        """Whether attention is to keep a row of each token for its backward, so that another pass's can take its place."""
        return self.replaces or self.replaced is not None


def token_pass(config: ModelConfig, tokens: PassTokens, *, device: torch.device, keys: PassKeys = PassKeys(),  # noqa: B008 (immutable)
               split: SequenceSplit = SequenceSplit(), packed: Set[str] = frozenset(), one_form: bool = False) -> TokenPass:  # noqa: B008
    """The pass of these tokens.

    packed      the layer types whose attention Transformer Engine computes; without shards
    one_form    attention's lists are filled up to their most, without shards
    """
    draws = _token_draws(tokens, split, device)
    filled = np.pad(tokens.positions, (0, -len(tokens.positions) % split.size))
    where = torch.from_numpy(filled).to(device)
    layers = {}
    for kind in LAYER_TYPES:
        window = config.window_size if kind == "sliding" else None
        order = None if keys.key_order is None else keys.key_order[kind]
        if kind in packed:
            plan = packed_plan(tokens.visibility[kind], window, device, order)
        elif tokens.shards is None:
            plan = attention_plan(tokens.visibility[kind], window, device, order, num_live=tokens.num_live, keeps_rows=keys.keeps_rows,
                                  one_form=one_form)
        else:
            plan = sharded_plan(tokens.visibility[kind], window, tokens.shards[kind], device)
        layers[kind] = LayerPass(
            rotary_table(where, layer_frequencies(config, kind, device)), plan,
            None if keys.kept is None else torch.from_numpy(keys.kept[kind]).to(device), draws, keys.replaced)
    if tokens.runs is not None:
        parts = None if tokens.shards is None else tokens_by_rank(tokens.shards["full"].clean, tokens.shards["full"].canvas)
        layers["linear"] = gated_delta_plan(tokens.runs, config.linear_conv_kernel_dim, device, parts)
    return TokenPass(tokens.num_clean, len(tokens.positions) - tokens.num_clean, layers, split, tokens.routed, draws)


def _token_draws(tokens: PassTokens, split: SequenceSplit, device: torch.device) -> TokenDraws | None:
    """The words of all tokens and of our piece, filled up; None where there are none and every token may get a gradient."""
    if tokens.draws is None:
        return None if tokens.num_live is None else TokenDraws(None, None, tokens.num_live)
    every = torch.from_numpy(np.pad(tokens.draws, (0, -len(tokens.draws) % split.size))).to(device)
    return TokenDraws(every, every.chunk(split.size)[split.rank] if len(every) else every, tokens.num_live)


def layer_frequencies(config: ModelConfig, kind: str, device: torch.device) -> Tensor:
    """The inverse frequencies of a layer type."""
    if kind == "full":
        return inverse_frequencies(config.global_kv_channels, config.rotary_base_global, config.rotary_percent_global, device)
    return inverse_frequencies(config.kv_channels, config.rotary_base, 1.0, device)
