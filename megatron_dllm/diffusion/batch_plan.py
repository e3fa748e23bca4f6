"""The batch plan: everything about a global batch that is known before any forward, on every rank alike.

It is made from the lengths of the examples and from their keys, never from their tokens: which canvas, which noise level, which coin, which
row goes to which (data-parallel rank, microbatch), and the global denominators of both losses.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config import ObjectiveConfig
from ..config.extensions import NOISE_SCHEDULES
from .random import DrawKey, Purpose

NOISE_RANGE = 1 << 32  # noise levels are integers in this range, so that corruption compares integers


@dataclass(frozen=True)
class Fit:
    """How an example lies in the sequence: its prompt, the kept response, and the canvases that cover it."""

    prompt: int
    response: int
    canvas_length: int

    @property
    def num_canvases(self) -> int:
        return -(-self.response // self.canvas_length)

    @property
    def total(self) -> int:
        """Clean tokens, the EOS fill included."""
        return self.prompt + self.num_canvases * self.canvas_length


def fit_example(prompt: int, response: int, *, seq_length: int, canvas_length: int) -> Fit | None:
    """Cut the response after the last whole canvas that the sequence holds; None when not even one canvas fits, or none is needed."""
    room = (seq_length - prompt) // canvas_length * canvas_length
    if room <= 0 or response <= 0:
        return None
    return Fit(prompt, min(response, room), canvas_length)


@dataclass(frozen=True)
class PlannedExample:
    """One example of a batch with its draws made. `index` is its place in the source."""

    index: int
    key: DrawKey
    fit: Fit
    canvases: tuple[int, ...]
    noise: int  # floor(t * 2^32): a token is replaced when its 32-bit draw is below
    self_conditioned: bool
    scored_fill: bool
    always_drafted: bool = False  # decoded twice whatever its coin says, which then says whether the draft is used

    @property
    def has_draft(self) -> bool:
        """Whether its canvases go through the second loop."""
        return self.self_conditioned or self.always_drafted

    @property
    def noise_level(self) -> float:
        """t, the probability that a canvas token is replaced."""
        return self.noise / NOISE_RANGE

    def canvas_start(self, canvas: int) -> int:
        """The example's position at which the canvas begins."""
        return self.fit.prompt + canvas * self.fit.canvas_length

    def corrupted(self, canvas: int) -> np.ndarray:
        """bool [C]: the canvas positions that are replaced."""
        return self.key.uint32(Purpose.CORRUPTION, self.canvas_start(canvas), self.fit.canvas_length) < self.noise

    def scored(self, canvas: int, objective: ObjectiveConfig) -> np.ndarray:
        """bool [C]: the canvas positions that enter the diffusion loss."""
        scored = np.ones(self.fit.canvas_length, bool)
        if objective.score_tokens == "corrupted":
            scored = self.corrupted(canvas)
        if not self.scored_fill:
            position = np.arange(self.fit.canvas_length) + canvas * self.fit.canvas_length
            scored = scored & (position < self.fit.response)
        return scored

    def num_pairs(self, objective: ObjectiveConfig) -> int:
        """(token, next token) pairs of the autoregressive loss; under `response` the next token lies in the response or its fill."""
        if objective.encoder_loss_tokens == "response":
            return self.fit.total - max(self.fit.prompt, 1)
        return self.fit.total - 1


@dataclass(frozen=True)
class Microbatch:
    """The rows of one (data-parallel rank, microbatch) slot; a row is one example or several packed ones."""

    rows: tuple[tuple[PlannedExample, ...], ...]

    @property
    def examples(self) -> tuple[PlannedExample, ...]:
        return tuple(example for row in self.rows for example in row)

    @property
    def self_conditioned(self) -> bool:
        """Whether any canvas takes a second loop."""
        return any(example.has_draft for example in self.examples)


@dataclass(frozen=True)
class Denominators:
    """Global counts, over data-parallel ranks and accumulation: examples (or pairs) of the first loss, tokens of the second, and tokens
    that routers' losses count (all clean and all canvas tokens, drafts left out)."""

    encoder: int
    decoder: int
    routed: int


@dataclass(frozen=True)
class BatchPlan:
    """microbatches[d][m] is what data-parallel rank d runs as its microbatch m."""

    microbatches: tuple[tuple[Microbatch, ...], ...]
    denominators: Denominators

    def second_loop(self, microbatch: int) -> bool:
        """Whether any rank has a self-conditioned row in its microbatch of this number: then all of them run the second loop."""
        return any(rank[microbatch].self_conditioned for rank in self.microbatches)

    def with_every_draft(self) -> BatchPlan:
        """The same batch and losses with every canvas decoded twice, so that microbatches are alike; drafts that no coin asks for are not
        used."""
        def drafted(microbatch: Microbatch) -> Microbatch:
            return Microbatch(tuple(tuple(replace(example, always_drafted=True) for example in row) for row in microbatch.rows))

        return replace(self, microbatches=tuple(tuple(map(drafted, rank)) for rank in self.microbatches))


@dataclass(frozen=True)
class RowRequest:
    """A row of the global batch before its draws: places in the source, draw keys, fits and truncation marks, a value an example."""

    indices: Sequence[int]
    keys: Sequence[DrawKey]
    fits: Sequence[Fit]
    truncated: Sequence[bool]


def plan_batch(rows: Sequence[RowRequest], objective: ObjectiveConfig, *, micro_batch_size: int, data_parallel_size: int = 1) -> BatchPlan:
    """Make every draw of a global batch and deal its rows to slots.

    Rows with a self-conditioned example go to the lowest microbatch numbers on every rank, so that few second loops are run (the loss is a
    global mean, so the order inside a global batch is free).
    """
    if len(rows) % (micro_batch_size * data_parallel_size):
        raise ValueError(f"{len(rows)} rows do not divide into slots of {micro_batch_size} on {data_parallel_size} data-parallel ranks; "
                         f"give a multiple of {micro_batch_size * data_parallel_size}")
    planned = [
        tuple(_draw(request, place, objective, slot=slot, num_slots=len(rows)) for place in range(len(request.indices)))
        for slot, request in enumerate(rows)]
    planned.sort(key=lambda row: not any(example.self_conditioned for example in row))  # stable
    slots = [Microbatch(tuple(planned[s:s + micro_batch_size])) for s in range(0, len(planned), micro_batch_size)]
    microbatches = tuple(tuple(slots[rank::data_parallel_size]) for rank in range(data_parallel_size))
    return BatchPlan(microbatches, _count([example for row in planned for example in row], objective))


def _draw(request: RowRequest, place: int, objective: ObjectiveConfig, *, slot: int, num_slots: int) -> PlannedExample:
    key, fit = request.keys[place], request.fits[place]
    if not objective.has_canvases:
        canvases, noise, coin = (), 0, False
    else:
        one = (int(key.below(fit.num_canvases, Purpose.CANVAS)[0]),)
        canvases = one if objective.canvases_scored == "one" else tuple(range(fit.num_canvases))
        noise = _noise(key, objective, slot=slot, num_slots=num_slots)
        coin = int(key.uint32(Purpose.SELF_CONDITIONING)[0]) < int(objective.self_conditioning_prob * NOISE_RANGE)
    return PlannedExample(
        index=request.indices[place], key=key, fit=fit, canvases=canvases, noise=noise, self_conditioned=coin,
        scored_fill=objective.score_eos_fill == "all" or not request.truncated[place])


def _noise(key: DrawKey, objective: ObjectiveConfig, *, slot: int, num_slots: int) -> int:
    """floor(t * 2^32) for t uniform in (noise_min, 1), and then as a schedule of a user's own bends it; `antithetic` spreads the levels of
    a batch evenly over that range."""
    draw = int(key.uint32(Purpose.NOISE_LEVEL)[0])
    if objective.noise_sampling == "antithetic":
        draw = (draw // num_slots + slot * NOISE_RANGE // num_slots) % NOISE_RANGE
    least = int(objective.noise_min * NOISE_RANGE)
    noise = least + (draw * (NOISE_RANGE - least) >> 32)
    if objective.noise_schedule in NOISE_SCHEDULES.rows:
        level = NOISE_SCHEDULES.rows[objective.noise_schedule](noise / NOISE_RANGE)
        noise = min(max(int(level * NOISE_RANGE), least), NOISE_RANGE)
    if objective.is_reweighted:
        noise = min(noise, NOISE_RANGE - least)  # 1 / (1 - t) stays at most 1 / noise_min
    return noise


def _count(examples: Sequence[PlannedExample], objective: ObjectiveConfig) -> Denominators:
    pairs = [example.num_pairs(objective) for example in examples]
    encoder = sum(n > 0 for n in pairs) if objective.encoder_loss_normalization == "example" else sum(pairs)
    decoder = sum(int(example.scored(canvas, objective).sum()) for example in examples for canvas in example.canvases)
    routed = sum(example.fit.total + len(example.canvases) * example.fit.canvas_length for example in examples)
    return Denominators(encoder, decoder, routed)
