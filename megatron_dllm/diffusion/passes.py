"""Lays out the passes of a microbatch through the stack: which tokens are in each, what they see, and what of them is scored."""
from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..context_parallel.layout import ContextSplit
from ..context_parallel.microbatch import SharedMicrobatch
from ..context_parallel.plan import Shards
from ..moe.balance import CANVAS, CLEAN, DRAFT, FILL, RoutedTokens
from ..transformer.gated_delta_plan import first_runs, second_runs
from ..transformer.rows import Rows
from ..transformer.token_pass import LAYER_TYPES, PassKeys, PassTokens, SequenceSplit, TokenPass, token_pass
from ..transformer.visibility import CLEAN as NO_CANVAS
from ..transformer.visibility import Visibility
from .inputs import MTP_GROUP, NOISE_BINS, DraftInputs, FurtherInputs, JointInputs, MicrobatchInputs, PassOrder, Scored, StreamInputs
from .streams import DropoutWords, Streams, TokenStream

CPU = torch.device("cpu")
KEPT_MULTIPLE = 128  # a tile of the attention kernels


@dataclass(frozen=True)
class PassOptions:
    """What all microbatches of a run have in common on this rank.

    dtype             of loss weights: at least fp32
    uniform_null      what stands for no draft is the mean embedding, not zero
    leave_one_out     the noisy token that is seen is kept for the loss (Scored.observed)
    mtp_scale         what multi-token prediction weighs beside the autoregressive loss
    scored_multiple   each pass's scored tokens are filled up to a multiple, by some that weigh nothing
    one_form          what varies with the documents is filled up to its most: all clean keys are kept, all tokens scored
    packed            the layer types whose attention Transformer Engine computes
    split             the pieces of a pass under sequence parallelism
    context_split     the ranks that share the tokens of rows
    """

    dtype: torch.dtype
    uniform_null: bool = False
    leave_one_out: bool = False
    mtp_scale: float = 0.1
    scored_multiple: int = 1
    one_form: bool = False
    packed: Set[str] = frozenset()
    split: SequenceSplit = SequenceSplit()
    context_split: ContextSplit = ContextSplit()


def microbatch_inputs(streams: Streams, config: ModelConfig, options: PassOptions, *, second_loop: bool = False,
                      passes: PassOrder = "shared") -> MicrobatchInputs:
    """A microbatch's streams (whole, on every rank) and the layout of its passes over our own tokens of them, on the CPU.

    `second_loop`: there is one even if nothing here takes it, because a rank that shares our experts has one.
    `passes`: with "apart" drafts are made beforehand (see DraftInputs): clean tokens go forward twice; all has its backward at once. With
    "joint" that is so although they go forward once (see JointInputs).
    """
    is_whole = options.context_split.size == options.split.size == 1
    assert passes == "shared" or is_whole, f"{passes}: a rank has all tokens of its rows"
    layout = _Layout.of(streams, config, options)
    if not (second_loop or streams.self_conditioned.any()):
        return layout.one_pass()
    return {"shared": layout.shared, "apart": layout.apart, "joint": layout.joint}[passes]()


@dataclass(frozen=True)
class _OwnTokens:
    """Our tokens of both streams: Tc clean ones, then Tv of canvases.

    kinds   int64 [Tc + Tv], balance's, as if no canvas had a draft
    again   bool [Tv]: which go through the second loop
    level   int64 [Tv]: the tenth of the noise level
    bonus   float64 [Tv]: see Streams.observed_bonus
    words   for dropout, if there is any
    """

    clean: TokenStream
    canvas: TokenStream
    kinds: np.ndarray
    again: np.ndarray
    level: np.ndarray
    bonus: np.ndarray
    words: DropoutWords | None

    @classmethod
    def of(cls, streams: Streams, clean: np.ndarray, canvas: np.ndarray) -> _OwnTokens:
        """Those at these places (int64, rising) in the streams."""
        kinds = [np.where(np.arange(len(stream)) < len(stream) - num_fill, kind, FILL)[own] for stream, num_fill, kind, own in (
            (streams.clean, streams.num_fill, CLEAN, clean), (streams.canvas, streams.num_fill_canvas, CANVAS, canvas))]
        level = np.minimum((streams.noise_level[canvas] * NOISE_BINS).astype(np.int64), NOISE_BINS - 1)
        words = streams.dropout
        return cls(
            streams.clean.select(clean), streams.canvas.select(canvas), np.concatenate(kinds), streams.self_conditioned[canvas], level,
            streams.observed_bonus[canvas],
            None if words is None else DropoutWords(words.clean[clean], words.canvas[canvas], words.second[canvas]))

    @property
    def drafts(self) -> np.ndarray:
        """bool [Tc + Tv]: which tokens of the first pass are drafts."""
        return np.concatenate([np.zeros(len(self.clean), bool), self.again])

    def decoded_once(self) -> _OwnTokens:
        """These where drafts are made beforehand: what was to go through the second loop counts in the first."""
        words = self.words
        if words is not None:
            words = replace(words, canvas=np.where(self.again, words.second, words.canvas))
        return replace(self, again=np.zeros_like(self.again), words=words)


@dataclass(frozen=True)
class _Layout:
    """Lays out the passes over our `own` tokens of a microbatch, with a method for each order of passes."""

    streams: Streams
    config: ModelConfig
    options: PassOptions
    over_ranks: SharedMicrobatch
    own: _OwnTokens

    @classmethod
    def of(cls, streams: Streams, config: ModelConfig, options: PassOptions) -> _Layout:
        """Of a whole microbatch."""
        over_ranks = SharedMicrobatch.of(streams.visibility, options.context_split)
        return cls(streams, config, options, over_ranks, _OwnTokens.of(streams, over_ranks.own_clean, over_ranks.own_canvas))

    def one_pass(self) -> MicrobatchInputs:
        """[clean ; canvas], no canvas decoded twice."""
        return self._inputs(self._first_pass(PassKeys()), self._first_scored(~self.own.drafts))

    def shared(self) -> MicrobatchInputs:
        """[clean ; draft], whose clean keys are handed on, and [canvas]."""
        own, kept = self.own, _kept(self.streams, self._everyones_drafts, self.config, all_of_them=self.options.one_form)
        # A draft is scored nowhere, its signal has no gradient, and no other token sees it.
        num_live = len(own.clean) if len(own.canvas) and own.again.all() else None
        handed_on = PassKeys({kind: self.over_ranks.own_kept(kept[kind]) for kind in LAYER_TYPES})
        seen = {kind: self.streams.visibility.against_kept(self._everyones_drafts, kept[kind]) for kind in LAYER_TYPES}
        shards = self.over_ranks.second_pass(kept, self.streams.self_conditioned)
        first = self._inputs(self._first_pass(handed_on, num_live=num_live, is_followed=True), self._first_scored(~own.drafts))
        return replace(first, second_pass=self._second_pass(seen, PassKeys(), shards), second_scored=self._second_scored())

    def apart(self) -> MicrobatchInputs:
        """[seen ; draft] beforehand, and [clean ; canvas]."""
        assert not self.options.one_form, "drafts beforehand see clean tokens by their number"
        draft = _draft_inputs(self.streams, _kept(self.streams, self._everyones_drafts, self.config)["full"], self.config, self.options)
        return replace(replace(self, own=self.own.decoded_once()).one_pass(), draft=draft)

    def joint(self) -> MicrobatchInputs:
        """[clean ; draft], all of whose keys are handed on, and [canvas], which puts its own in the places of the drafts'."""
        own, drafts = self.own, self.own.drafts
        joint = JointInputs(None if own.again.all() else _tensor(np.flatnonzero(own.again)), Rows.of(np.flatnonzero(drafts), CPU))
        seen = dict.fromkeys(LAYER_TYPES, self.streams.visibility.of_queries(drafts))
        first = self._inputs(self._first_pass(PassKeys(replaced=joint.places), is_followed=True), self._first_scored(np.ones_like(drafts)))
        return replace(first, second_pass=self._second_pass(seen, PassKeys(replaces=True)), joint=joint)

    @property
    def _everyones_drafts(self) -> np.ndarray:
        """bool [T], of all ranks' clean and canvas tokens: which are drafts in the first pass."""
        return np.concatenate([np.zeros(len(self.streams.clean), bool), self.streams.self_conditioned])

    def _inputs(self, first_pass: TokenPass, first_scored: Scored) -> MicrobatchInputs:
        """With what is the same in all orders of passes."""
        own, left_out = self.own, self.streams.left_out
        return MicrobatchInputs(
            clean=StreamInputs(_tensor(own.clean.tokens)), canvas=StreamInputs(_tensor(own.canvas.tokens)),
            uniform_null=self.options.uniform_null, first_pass=first_pass, first_scored=first_scored,
            draft_rows=_tensor(np.flatnonzero(own.drafts)), second_tokens=_tensor(own.canvas.tokens[own.again]),
            further=_further(self.streams, self.config, self.options) if self.config.mtp_num_layers else None,
            left_out=None if left_out is None else _tensor(left_out[self.over_ranks.own_canvas]))

    def _first_pass(self, keys: PassKeys, *, num_live: int | None = None, is_followed: bool = False) -> TokenPass:
        """That of clean tokens and canvases; `is_followed`: by one that goes on from states at the starts of canvases."""
        own, streams = self.own, self.streams
        kinds = np.where(own.drafts & (own.kinds == CANVAS), DRAFT, own.kinds)
        return self._pass(PassTokens(
            dict.fromkeys(LAYER_TYPES, streams.visibility), np.concatenate([own.clean.positions, own.canvas.positions]), len(own.clean),
            routed=self._routed(kinds, num_live), draws=None if own.words is None else np.concatenate([own.words.clean, own.words.canvas]),
            runs=first_runs(streams.visibility, streams.self_conditioned if is_followed else None) if self._has_linear else None,
            shards=self.over_ranks.first_pass(), num_live=num_live), keys)

    def _second_pass(self, seen: Mapping[str, Visibility], keys: PassKeys, shards: Mapping[str, Shards] | None = None) -> TokenPass:
        """That of the canvases which are decoded again; `seen`: by layer type, their visibility."""
        own, streams = self.own, self.streams
        return self._pass(PassTokens(
            seen, own.canvas.positions[own.again], num_clean=0, routed=self._routed(own.kinds[own.drafts]),
            draws=None if own.words is None else own.words.second[own.again],
            runs=second_runs(streams.visibility, streams.self_conditioned) if self._has_linear else None, shards=shards), keys)

    @property
    def _has_linear(self) -> bool:
        return "linear" in self.config.layer_types

    def _pass(self, tokens: PassTokens, keys: PassKeys) -> TokenPass:
        return _token_pass(self.config, self.options, tokens, keys)

    def _routed(self, kinds: np.ndarray, num_live: int | None = None) -> RoutedTokens:
        return RoutedTokens.of(_tensor(kinds), self.streams.num_routed, self.options.dtype, num_live)

    def _first_scored(self, here: np.ndarray) -> Scored:
        """Of the tokens of the first pass those that are `here`."""
        own = self.own
        return _scored([_Scorable.alike(own.clean, group=0), _Scorable(own.canvas, 1 + own.level, own.bonus)], here, self.options)

    def _second_scored(self) -> Scored:
        own = self.own
        canvas = _Scorable(own.canvas.select(own.again), 1 + own.level[own.again], own.bonus[own.again])
        return _scored([canvas], np.ones(len(canvas.stream), bool), self.options)


def _token_pass(config: ModelConfig, options: PassOptions, tokens: PassTokens, keys: PassKeys = PassKeys()) -> TokenPass:  # noqa: B008
    return token_pass(config, tokens, device=CPU, keys=keys, split=options.split, packed=options.packed, one_form=options.one_form)


def _draft_inputs(streams: Streams, seen: np.ndarray, config: ModelConfig, options: PassOptions) -> DraftInputs:
    """The drafts of a microbatch after the clean tokens `seen` (int64, rising), of each document its first ones."""
    clean, again, words = streams.clean.select(seen), streams.self_conditioned, streams.dropout
    canvas = streams.canvas.select(again)
    chosen = np.concatenate([np.isin(np.arange(len(streams.clean)), seen), again])
    visibility = streams.visibility.against_kept(chosen, seen)
    # Clean tokens are counted where they have a gradient.
    kinds = np.concatenate([np.full(len(clean), FILL), np.full(len(canvas), DRAFT)])
    draft_pass = _token_pass(config, options, PassTokens(
        dict.fromkeys(LAYER_TYPES, visibility), np.concatenate([clean.positions, canvas.positions]), len(clean),
        routed=RoutedTokens.of(_tensor(kinds), streams.num_routed, options.dtype, is_draft=True),
        draws=None if words is None else np.concatenate([words.clean[seen], words.canvas[again]]),
        runs=first_runs(visibility, None) if "linear" in config.layer_types else None))
    return DraftInputs(_tensor(np.concatenate([clean.tokens, canvas.tokens])), draft_pass,
                       None if again.all() else _tensor(np.flatnonzero(again)))


def _further(streams: Streams, config: ModelConfig, options: PassOptions) -> FurtherInputs:
    """Depth d reads token i + d + 1 and predicts what that one predicts, with its weight: the same targets and denominators."""
    count, depths = len(streams.clean), config.mtp_num_layers
    nothing = np.zeros(0, np.int64)
    clean = Visibility(streams.visibility.first_key[:count], streams.visibility.past_key[:count], np.full(count, NO_CANVAS), nothing, count)
    over_ranks = SharedMicrobatch.of(clean, options.context_split)
    own = over_ranks.own_clean
    follows = [_moved(streams.clean, clean, depth + 1, options.mtp_scale / depths, config.pad_token_id).select(own)
               for depth in range(depths)]
    tokens = PassTokens(dict.fromkeys(LAYER_TYPES, clean), streams.clean.positions[own], len(own), shards=over_ranks.first_pass())
    everywhere, as_it_is = np.ones(len(own), bool), replace(options, leave_one_out=False, scored_multiple=1)
    return FurtherInputs(
        _token_pass(config, options, tokens), tuple(_tensor(stream.tokens) for stream in follows),
        tuple(_scored([_Scorable.alike(stream, group=MTP_GROUP)], everywhere, as_it_is) for stream in follows))


def _moved(clean: TokenStream, visibility: Visibility, places: int, scale: float, pad: int) -> TokenStream:
    """For each token the one so many places after it in its document; where there is none a pad token that predicts nothing."""
    later = np.arange(len(clean)) + places
    inside = later < len(clean)
    later = np.where(inside, later, 0)
    inside &= visibility.first_key[later] == visibility.first_key
    return TokenStream(np.where(inside, clean.tokens[later], pad), clean.positions, np.where(inside, clean.targets[later], 0),
                       np.where(inside, clean.weights[later] * scale, 0.0))


def _kept(streams: Streams, queries: np.ndarray, config: ModelConfig, *, all_of_them: bool = False) -> dict[str, np.ndarray]:
    """By layer type, the clean keys that the second loop reads: all before a canvas, or its last window - 1.

    Some that it does not read are kept with them, as far as there are any, so that their numbers, and with them the launches, are few.
    """
    if all_of_them:
        return dict.fromkeys(LAYER_TYPES, np.arange(len(streams.clean)))
    seen = {"full": streams.visibility, "sliding": streams.visibility.windowed(config.window_size)}
    return {kind: _filled_up(visibility.kept_keys(queries), len(streams.clean)) for kind, visibility in seen.items()}


def _filled_up(keys: np.ndarray, num_clean: int) -> np.ndarray:
    """`keys`, rising, and the first others up to a multiple of KEPT_MULTIPLE: with one of 4, [5, 6] of 9 keys is [0, 1, 5, 6]."""
    others = np.setdiff1d(np.arange(num_clean), keys, assume_unique=True)
    return np.union1d(keys, others[:-len(keys) % KEPT_MULTIPLE])


@dataclass(frozen=True)
class _Scorable:
    """Tokens of a stream [N] with the groups of their losses, int64 [N], and what leave-one-out adds, float64 [N]."""

    stream: TokenStream
    group: np.ndarray
    bonus: np.ndarray

    @classmethod
    def alike(cls, stream: TokenStream, *, group: int) -> _Scorable:
        """All of one group, without a bonus."""
        return cls(stream, np.full(len(stream), group), np.zeros(len(stream)))


def _scored(parts: list[_Scorable], here: np.ndarray, options: PassOptions) -> Scored:
    """Of the tokens of the parts, one after the other, those that are `here` and have a weight, filled up by others that are here."""
    weights = np.concatenate([part.stream.weights for part in parts])
    marked = here & (weights > 0)
    idle = np.flatnonzero(here & ~(weights > 0))
    fill = idle if options.one_form else idle[:-int(marked.sum()) % options.scored_multiple]
    rows = np.union1d(np.flatnonzero(marked), fill)

    def chosen(values: list[np.ndarray]) -> Tensor:
        return _tensor(np.concatenate(values)[rows])

    observed = bonus = None
    if options.leave_one_out:
        observed = chosen([part.stream.tokens for part in parts])
        bonus = chosen([part.bonus for part in parts]).to(options.dtype)
    return Scored(
        _tensor(rows), chosen([part.stream.targets for part in parts]), chosen([part.stream.weights for part in parts]).to(options.dtype),
        chosen([part.group for part in parts]), observed, bonus)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
