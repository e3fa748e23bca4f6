"""A microbatch as the model reads it: device tensors, the one or two passes through the stack, and what is scored after each."""
from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..context_parallel.layout import ContextSplit
from ..context_parallel.microbatch import SharedMicrobatch
from ..moe.balance import CANVAS, CLEAN, DRAFT, FILL, RoutedTokens
from ..transformer.gated_delta_plan import first_runs, second_runs
from ..transformer.rows import Rows
from ..transformer.token_pass import LAYER_TYPES, SequenceSplit, TokenPass, token_pass
from ..transformer.visibility import CLEAN as NO_CANVAS
from ..transformer.visibility import Visibility
from .nested import map_tensors
from .streams import Streams, TokenStream

CPU = torch.device("cpu")
KEPT_MULTIPLE = 128  # a tile of the attention kernels
NOISE_BINS = 10  # metrics show the diffusion loss by tenths of the noise level
MTP_GROUP = 1 + NOISE_BINS
PassOrder = Literal["shared", "apart", "joint"]  # see training/draft_pass.py


@dataclass(frozen=True)
class StreamInputs:
    """The ids of one stream on the device, int64 [T]."""

    tokens: Tensor


@dataclass(frozen=True)
class Scored:
    """The N tokens of a pass that are scored.

    rows      int64 [N]    where they stand in the pass
    targets   int64 [N]
    weights   [N], at least fp32: each token's share of the loss, global denominators included
    group     int64 [N]    0: autoregressive; 1 + b: diffusion, noise level in tenth b; MTP_GROUP: multi-token prediction
    observed, bonus        int64 [N] and [N], or None: what is added to the logit of the noisy token that is seen
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor
    group: Tensor
    observed: Tensor | None
    bonus: Tensor | None


@dataclass(frozen=True)
class FurtherInputs:
    """What multi-token prediction needs: a pass of the clean tokens alone and, by depth, the tokens that are read and what is scored."""

    token_pass: TokenPass
    tokens: tuple[Tensor, ...]
    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class DraftInputs:
    """Drafts that are made beforehand, without gradient.

    tokens      int64, of a pass of their own: the clean tokens that drafts see, then the canvases that have a draft
    rows        int64: where the latter stand in the canvas stream; None: they are all of it
    """

    tokens: Tensor
    token_pass: TokenPass
    rows: Tensor | None


@dataclass(frozen=True)
class JointInputs:
    """Two passes that have one backward (see transformer/joint_backward.py).

    rows        int64: where the canvases that have a draft stand in the canvas stream; None: they are all of it
    places      the same in the first pass
    """

    rows: Tensor | None
    places: Rows


@dataclass(frozen=True)
class MicrobatchInputs:
    """See DiffusionGemma.forward. `second_pass` is None when no canvas of the microbatch is self-conditioned, and where drafts are made
    beforehand (`draft`): then the first pass holds clean tokens and canvases, and is the only one with a gradient. With `joint` all that is
    scored is scored after both passes, in the places of the first. `left_out` bool [T]: of the tokens that are decoded twice, all canvases
    then, those without their draft's signal (None: none)."""

    clean: StreamInputs
    canvas: StreamInputs
    uniform_null: bool
    first_pass: TokenPass
    first_scored: Scored
    draft_rows: Tensor
    second_tokens: Tensor
    second_pass: TokenPass | None
    second_scored: Scored | None
    further: FurtherInputs | None = None
    draft: DraftInputs | None = None
    joint: JointInputs | None = None
    left_out: Tensor | None = None


def to_device(value, device: torch.device):
    """`value` with every tensor in it on `device`."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def microbatch_inputs(streams: Streams, config: ModelConfig, *, dtype: torch.dtype, uniform_null: bool = False,
                      leave_one_out: bool = False, second_loop: bool = False, passes: PassOrder = "shared", mtp_scale: float = 0.1,
                      scored_multiple: int = 1, one_form: bool = False, packed: Set[str] = frozenset(),
                      device: torch.device = CPU,
                      split: SequenceSplit = SequenceSplit(),  # noqa: B008 (immutable)
                      context_split: ContextSplit = ContextSplit()) -> MicrobatchInputs:  # noqa: B008 (immutable)
    """A microbatch's streams (whole, on every rank) and the layout of its passes over our own tokens of them.

    `dtype` is that of loss weights: at least fp32.
    `second_loop`: there is one even if nothing here takes it, because a rank that shares our experts has one.
    `passes`: with "apart" drafts are made beforehand (see DraftInputs): clean tokens go forward twice; all has its backward at once. With
    "joint" that is so although they go forward once (see JointInputs).
    `scored_multiple`: each pass's scored tokens are filled up to a multiple, by some that weigh nothing.
    `one_form`: what varies with the documents is filled up to its most: all clean keys are kept, all tokens scored, some with no weight.
    `packed`: the layer types whose attention Transformer Engine computes.
    """
    shared = SharedMicrobatch.of(streams.visibility, context_split)
    clean, canvas = streams.clean.select(shared.own_clean), streams.canvas.select(shared.own_canvas)
    again, level, bonus = (x[shared.own_canvas] for x in (streams.self_conditioned, streams.noise_level, streams.observed_bonus))
    everyones_drafts = np.concatenate([np.zeros(len(streams.clean), bool), streams.self_conditioned])
    kept = _kept(streams, everyones_drafts, config, all_of_them=one_form) if second_loop or everyones_drafts.any() else None
    place = {"device": device, "dtype": dtype}
    linear, words = "linear" in config.layer_types, streams.dropout
    canvas_words, draft = None if words is None else words.canvas, None
    assert passes == "shared" or context_split.size == split.size == 1, f"{passes}: a rank has all tokens of its rows"
    joint = None if passes != "joint" or kept is None else JointInputs(
        None if again.all() else _tensor(np.flatnonzero(again), device), Rows.of(np.flatnonzero(everyones_drafts), device))
    if passes == "apart" and kept is not None:
        assert not one_form, "drafts beforehand see clean tokens by their number"
        draft, kept = _draft_inputs(streams, kept["full"], config, packed=packed, **place), None
        canvas_words = None if words is None else np.where(again, words.second, words.canvas)
        again = np.zeros_like(again)
    drafts = np.concatenate([np.zeros(len(clean), bool), again])
    score = partial(_scored, leave_one_out=leave_one_out, multiple=None if one_form else scored_multiple, **place)
    kinds = np.where(np.arange(len(streams.clean)) < len(streams.clean) - streams.num_fill, CLEAN, FILL)[shared.own_clean]
    canvas_kinds = np.where(np.arange(len(streams.canvas)) < len(streams.canvas) - streams.num_fill_canvas, CANVAS, FILL)[shared.own_canvas]
    # A draft is scored nowhere, its signal has no gradient, and no other token sees it. (In a joint backward canvases stand there.)
    num_live = len(clean) if len(canvas) and again.all() and joint is None else None
    handed_on = None if kept is None or joint else {kind: shared.own_kept(kept[kind]) for kind in LAYER_TYPES}
    canvas_group = 1 + np.minimum((level * NOISE_BINS).astype(np.int64), NOISE_BINS - 1)
    first_pass = token_pass(
        config, dict.fromkeys(LAYER_TYPES, streams.visibility), np.concatenate([clean.positions, canvas.positions]), num_clean=len(clean),
        kept=handed_on, shards=shared.first_pass(), device=device, split=split,
        routed=_routed(np.concatenate([kinds, np.where(again & (canvas_kinds == CANVAS), DRAFT, canvas_kinds)]), streams, num_live=num_live,
                       **place),
        runs=first_runs(streams.visibility, None if kept is None else streams.self_conditioned) if linear else None,
        draws=None if words is None else np.concatenate([words.clean[shared.own_clean], canvas_words[shared.own_canvas]]),
        num_live=num_live, packed=packed, replaced=joint and joint.places, one_form=one_form)
    first_scored = score([(clean, np.zeros(len(clean), np.int64), None), (canvas, canvas_group, bonus)],
                         ~drafts if joint is None else np.ones_like(drafts))
    second_pass = second_scored = None
    if kept is not None:
        if joint:
            seen = dict.fromkeys(LAYER_TYPES, streams.visibility.of_queries(everyones_drafts))
        else:
            seen = {kind: streams.visibility.against_kept(everyones_drafts, kept[kind]) for kind in LAYER_TYPES}
        second_pass = token_pass(
            config, seen, canvas.positions[again], num_clean=0, shards=shared.second_pass(kept, streams.self_conditioned), device=device,
            split=split, replaces=joint is not None, one_form=one_form, routed=_routed(canvas_kinds[again], streams, **place),
            runs=second_runs(streams.visibility, streams.self_conditioned) if linear else None,
            draws=None if words is None else words.second[shared.own_canvas][again], packed=packed)
        if not joint:
            second_scored = score([(canvas.select(again), canvas_group[again], bonus[again])], np.ones(int(again.sum()), bool))
    return MicrobatchInputs(
        clean=StreamInputs(_tensor(clean.tokens, device)), canvas=StreamInputs(_tensor(canvas.tokens, device)), uniform_null=uniform_null,
        first_pass=first_pass, first_scored=first_scored, draft_rows=_tensor(np.flatnonzero(drafts), device),
        second_tokens=_tensor(canvas.tokens[again], device), second_pass=second_pass, second_scored=second_scored,
        further=_further(streams, config, mtp_scale, context_split=context_split, split=split, one_form=one_form, packed=packed, **place)
        if config.mtp_num_layers else None, draft=draft, joint=joint,
        left_out=None if streams.left_out is None else _tensor(streams.left_out[shared.own_canvas], device))


def _draft_inputs(streams: Streams, seen: np.ndarray, config: ModelConfig, *, packed: Set[str], device: torch.device,
                  dtype: torch.dtype) -> DraftInputs:
    """The drafts of a microbatch after the clean tokens `seen` (int64, rising), of each document its first ones."""
    clean, again, words = streams.clean.select(seen), streams.self_conditioned, streams.dropout
    canvas = streams.canvas.select(again)
    chosen = np.concatenate([np.isin(np.arange(len(streams.clean)), seen), again])
    visibility = streams.visibility.against_kept(chosen, seen)
    # Clean tokens are counted where they have a gradient.
    stream = np.concatenate([np.full(len(clean), FILL), np.full(len(canvas), DRAFT)])
    draft_pass = token_pass(
        config, dict.fromkeys(LAYER_TYPES, visibility), np.concatenate([clean.positions, canvas.positions]), num_clean=len(clean),
        device=device, routed=RoutedTokens.of(_tensor(stream, device), streams.num_routed, dtype, is_draft=True),
        runs=first_runs(visibility, None) if "linear" in config.layer_types else None,
        draws=None if words is None else np.concatenate([words.clean[seen], words.canvas[again]]), packed=packed)
    return DraftInputs(_tensor(np.concatenate([clean.tokens, canvas.tokens]), device), draft_pass,
                       None if again.all() else _tensor(np.flatnonzero(again), device))


def _further(streams: Streams, config: ModelConfig, scale: float, *, context_split: ContextSplit, split: SequenceSplit,
             one_form: bool, packed: Set[str], device: torch.device, dtype: torch.dtype) -> FurtherInputs:
    """Depth d reads token i + d + 1 and predicts what that one predicts, with its weight: the same targets and denominators."""
    count, depths = len(streams.clean), config.mtp_num_layers
    nothing = np.zeros(0, np.int64)
    clean = Visibility(streams.visibility.first_key[:count], streams.visibility.past_key[:count], np.full(count, NO_CANVAS), nothing, count)
    shared = SharedMicrobatch.of(clean, context_split)
    own = shared.own_clean
    follows = [_moved(streams.clean, clean, depth + 1, scale / depths, config.pad_token_id).select(own) for depth in range(depths)]
    everywhere, group = np.ones(len(own), bool), np.full(len(own), MTP_GROUP)
    return FurtherInputs(
        token_pass(config, dict.fromkeys(LAYER_TYPES, clean), streams.clean.positions[own], num_clean=len(own), device=device,
                   shards=shared.first_pass(), split=split, packed=packed, one_form=one_form),
        tuple(_tensor(stream.tokens, device) for stream in follows),
        tuple(_scored([(stream, group, None)], everywhere, multiple=None if one_form else 1, device=device, dtype=dtype)
              for stream in follows))


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


def _routed(stream: np.ndarray, streams: Streams, *, device: torch.device, dtype: torch.dtype, num_live: int | None = None) -> RoutedTokens:
    return RoutedTokens.of(_tensor(stream, device), streams.num_routed, dtype, num_live)


def _scored(parts: list[tuple[TokenStream, np.ndarray, np.ndarray | None]], here: np.ndarray, *, leave_one_out: bool = False,
            multiple: int | None = 1, device: torch.device, dtype: torch.dtype) -> Scored:
    """Those that are `here` and have a weight, filled up by others that are here to a multiple (None: by all of them)."""
    weights = np.concatenate([stream.weights for stream, _, _ in parts])
    marked = here & (weights > 0)
    idle = np.flatnonzero(here & ~(weights > 0))
    rows = np.union1d(np.flatnonzero(marked), idle if multiple is None else idle[:-int(marked.sum()) % multiple])

    def chosen(values: list[np.ndarray]) -> Tensor:
        return _tensor(np.concatenate(values)[rows], device)

    observed = bonus = None
    if leave_one_out:
        observed = chosen([stream.tokens for stream, _, _ in parts])
        bonus = chosen([np.zeros(len(stream)) if extra is None else extra for stream, _, extra in parts]).to(dtype)
    return Scored(
        _tensor(rows, device), chosen([stream.targets for stream, _, _ in parts]),
        chosen([stream.weights for stream, _, _ in parts]).to(dtype),
        chosen([group for _, group, _ in parts]), observed, bonus)


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


