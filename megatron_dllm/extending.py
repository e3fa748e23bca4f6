"""What a module of your own calls to add to the tables behind the flags; `--extension your.module` imports it. See docs/extending.md.

A name that is taken is a ValueError.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from .config import DataConfig, ObjectiveConfig
from .config.extensions import DATA_SOURCES, LAYER_TYPES, NOISE_SCHEDULES, OBJECTIVES, AddedLayer, AddedObjective, AddedSource

if TYPE_CHECKING:
    from .data.build import Sources
    from .data.tokenizers import Tokenizer
    from .diffusion.batch_plan import PlannedExample

__all__ = ["add_data_source", "add_layer_type", "add_noise_schedule", "add_objective"]


def add_data_source(name: str, *, tokenizer: Callable[[DataConfig], Tokenizer], sources: Callable[[DataConfig, int], Sources]) -> None:
    """`--data-source NAME` opens `sources(data flags, seed)`, whose tokens `tokenizer(data flags)` spells.

    Every rank calls both; they must give the same examples in the same order.
    """
    DATA_SOURCES.add(name, AddedSource(tokenizer, sources))


def add_layer_type(name: str, build: Callable, *, like: Literal["sliding", "full"]) -> None:
    """`--layer-types NAME,...` builds `build(parameter name, model flags, layer, recompute=, context=, init=, dtype=)` in such a layer.

    A module with forward(x [T, H], entry, earlier) -> (y [T, H], context). `entry`, what it attends to, and `earlier`, a context that it
    gave before, are those of a layer `like` that one; its sizes count as that one's in the plan and in operation counts.
    """
    LAYER_TYPES.add(name, AddedLayer(build, like))


def add_noise_schedule(name: str, level: Callable[[float], float]) -> None:
    """`--noise-schedule NAME` draws the noise level level(u), from 0 to 1, for u drawn evenly from --noise-min to 1."""
    NOISE_SCHEDULES.add(name, level)


def add_objective(name: str, weights: Callable[[PlannedExample, int, ObjectiveConfig], np.ndarray]) -> None:
    """`--objective NAME` is block diffusion whose canvas tokens count `weights(example, canvas, objective flags)` times as much.

    The weights, float64 [canvas length] and none negative, follow from the plan alone (lengths, draws, noise level), never from tokens, so
    that every layout knows them.
    """
    OBJECTIVES.add(name, AddedObjective(weights))
