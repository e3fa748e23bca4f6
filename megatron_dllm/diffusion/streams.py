"""From a planned microbatch and its tokens to the two flat streams that the model reads.

    clean stream    every token of every example (prompt, response, EOS fill), one after the other
    canvas stream   the corrupted tokens of the chosen canvases

Both are numpy arrays of one value a token; `positions` restart at 0 with each example. Loss weights already hold the global denominators.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import ObjectiveConfig
from ..config.extensions import OBJECTIVES
from ..transformer.visibility import CLEAN, Visibility
from .batch_plan import Denominators, Microbatch, PlannedExample
from .random import Purpose


@dataclass(frozen=True)
class TokenStream:
    """T tokens: what they are, where they stand, what they are to predict, and how much that counts.

    tokens, positions, targets  int64 [T]
    weights                     float64 [T], 0 where nothing is scored (the target is then 0 too)
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, chosen: np.ndarray) -> TokenStream:
        """The tokens that `chosen` (bool [T], or rising places) marks."""
        return TokenStream(self.tokens[chosen], self.positions[chosen], self.targets[chosen], self.weights[chosen])


@dataclass(frozen=True)
class DropoutWords:
    """int64, a word a token: of the clean stream, of the canvas stream, and of that in the second loop."""

    clean: np.ndarray
    canvas: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, microbatch: Microbatch) -> DropoutWords:
        """By document and position, so that no layout and no packing changes them."""
        def drawn(purpose: Purpose, pieces: list[tuple[PlannedExample, int, int]], otherwise: Purpose | None = None) -> np.ndarray:
            parts = [example.key.words(purpose if otherwise is None or example.self_conditioned else otherwise, start, count)
                     for example, start, count in pieces]
            return np.concatenate([np.zeros(0, np.uint64), *parts]).view(np.int64)

        clean = [(example, 0, example.fit.total) for example in microbatch.examples]
        canvas = [(example, example.canvas_start(number), example.fit.canvas_length)
                  for example in microbatch.examples for number in example.canvases]
        return cls(drawn(Purpose.DROPOUT_CLEAN, clean), drawn(Purpose.DROPOUT_CANVAS, canvas),
                   # Without a draft's signal it is the first decoding that counts.
                   drawn(Purpose.DROPOUT_SECOND, canvas, otherwise=Purpose.DROPOUT_CANVAS))


@dataclass(frozen=True)
class Streams:
    """One microbatch. Visibility covers the clean queries, then the canvas queries.

    self_conditioned   bool [Tc], of the canvas tokens: which go through the second loop
    left_out           bool [Tc]: which of these go through it without their draft's signal (None: none)
    noise_level        float64 [Tc]: t of each canvas token's example
    observed_bonus     float64 [Tc]: what the `loo` loss adds to the logit of the noisy token that is seen; zeros otherwise
    num_routed         tokens that routers' losses count, in the whole global batch
    dropout            words for dropout, if there is any
    num_fill           how many of the clean tokens, the last ones, are fill
    num_fill_canvas    how many of the canvas tokens, the last ones, are
    """

    clean: TokenStream
    canvas: TokenStream
    visibility: Visibility
    self_conditioned: np.ndarray
    noise_level: np.ndarray
    observed_bonus: np.ndarray
    num_routed: int
    dropout: DropoutWords | None = None
    num_fill: int = 0
    num_fill_canvas: int = 0
    left_out: np.ndarray | None = None


def build_streams(microbatch: Microbatch, tokens: Sequence[np.ndarray], objective: ObjectiveConfig, denominators: Denominators, *,
                  vocab_size: int, fill_token: int, dropout: bool = False) -> Streams:
    """Lay out a microbatch; `tokens` holds prompt + response (uncut) of each of its examples, in order. `dropout`: draw its words too."""
    clean_parts, canvas_parts, first, past, canvas_ids, extras = [], [], [], [], [], []
    start = num_canvases = 0
    for example, raw in zip(microbatch.examples, tokens, strict=True):
        text = _filled(example, raw, fill_token)
        clean_parts.append(_clean(example, text, objective, denominators))
        first.append(np.full(len(text), start))
        past.append(np.arange(start + 1, start + 1 + len(text)))
        for canvas in example.canvases:
            canvas_parts.append(_canvas(example, canvas, text, objective, denominators, vocab_size))
            canvas_ids.append(np.full(example.fit.canvas_length, num_canvases))
            extras.append((start, start + example.canvas_start(canvas), example))
            num_canvases += 1
        start += len(text)
    length = [example.fit.canvas_length for _, _, example in extras]
    own = np.concatenate([np.zeros(0, np.int64), *canvas_ids])
    visibility = Visibility(
        np.concatenate([*first, np.repeat([s for s, _, _ in extras], length)]).astype(np.int64),
        np.concatenate([*past, np.repeat([p for _, p, _ in extras], length)]).astype(np.int64),
        np.concatenate([np.full(start, CLEAN), own]), own, start)
    level = np.repeat([example.noise_level for _, _, example in extras], length).astype(np.float64)
    bonus = np.zeros_like(level)
    if objective.is_leave_one_out:
        bonus = np.log1p(vocab_size * (1 - level) / level)  # arXiv 2605.22765
    coin, drafted = (np.repeat([getattr(example, name) for _, _, example in extras], length).astype(bool)
                     for name in ("self_conditioned", "has_draft"))
    return Streams(
        _join(clean_parts), _join(canvas_parts), visibility, drafted, level, bonus, denominators.routed,
        DropoutWords.of(microbatch) if dropout else None,
        left_out=~coin if any(example.always_drafted for example in microbatch.examples) else None)


def _filled(example: PlannedExample, raw: np.ndarray, fill_token: int) -> np.ndarray:
    fit = example.fit
    text = np.full(fit.total, fill_token, np.int64)
    text[:fit.prompt + fit.response] = raw[:fit.prompt + fit.response]
    return text


def _clean(example: PlannedExample, text: np.ndarray, objective: ObjectiveConfig, denominators: Denominators) -> TokenStream:
    targets, weights = np.zeros_like(text), np.zeros(len(text))
    pairs = example.num_pairs(objective)
    if pairs > 0 and denominators.encoder:
        targets[-1 - pairs:-1] = text[-pairs:]
        count = denominators.encoder * (pairs if objective.encoder_loss_normalization == "example" else 1)
        weights[-1 - pairs:-1] = objective.encoder_loss_weight / count
    return TokenStream(text, np.arange(len(text)), targets, weights)


def _canvas(example: PlannedExample, canvas: int, text: np.ndarray, objective: ObjectiveConfig, denominators: Denominators,
            vocab_size: int) -> TokenStream:
    start, length = example.canvas_start(canvas), example.fit.canvas_length
    targets = text[start:start + length]
    replacement = example.key.below(vocab_size, Purpose.REPLACEMENT, start, length)
    weights = example.scored(canvas, objective) / max(denominators.decoder, 1)
    if objective.is_reweighted:
        weights = weights / (1 - example.noise_level)
    if objective.objective in OBJECTIVES.rows:
        weights = weights * OBJECTIVES.rows[objective.objective].weights(example, canvas, objective)
    return TokenStream(
        np.where(example.corrupted(canvas), replacement, targets), np.arange(start, start + length),
        np.where(weights > 0, targets, 0), weights)


def _join(parts: Sequence[TokenStream]) -> TokenStream:
    empty = TokenStream(*(np.zeros(0, np.int64) for _ in range(3)), np.zeros(0))
    return TokenStream(*(np.concatenate([getattr(part, name) for part in (empty, *parts)])
                         for name in ("tokens", "positions", "targets", "weights")))
