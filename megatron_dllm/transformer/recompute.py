"""Activation recompute: what is not kept in the forward and is computed again in the backward."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from ..config import TrainingConfig


@dataclass(frozen=True)
class Recompute:
    """Runs a part of a layer, recomputed in the backward when its name is in `parts` ("block" is the whole layer)."""

    parts: frozenset[str]

    @classmethod
    def from_config(cls, config: TrainingConfig) -> Recompute:
        """`full` recomputes whole layers, `selective` the parts that --recompute-modules names."""
        if config.recompute_granularity is None:
            return cls(frozenset())
        return cls(frozenset(["block"] if config.recompute_granularity == "full" else config.recompute_modules))

    def __call__(self, part: str, function: Callable, *inputs):
        if part in self.parts and torch.is_grad_enabled():
            # No dropout anywhere, and every draw is keyed: there is no generator state to restore.
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(*inputs)
