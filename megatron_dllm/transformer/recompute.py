"""Activation recompute: what is not kept in the forward and is computed again in the backward."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint

from ..config import MoEConfig, TrainingConfig
from ..moe.replay import Call, CallLog, ReplayMonitor


@dataclass(frozen=True)
class Recompute:
    """Runs a part of a layer, recomputed in the backward when its name is in `parts` ("block" is the whole layer).

    `replays`: MoE layers follow in the recompute what they decided in the forward (see moe.replay); `monitor` counts how often.
    `mhc_layers`: layers whose streams are computed again together (None: all of one trip).
    """

    parts: frozenset[str]
    replays: bool = True
    mhc_layers: int | None = None
    monitor: ReplayMonitor = field(default_factory=ReplayMonitor, compare=False)

    @classmethod
    def from_config(cls, config: TrainingConfig, moe: MoEConfig = MoEConfig()) -> Recompute:  # noqa: B008 (immutable)
        """`full` recomputes whole layers, `selective` the parts that --recompute-modules names."""
        if config.recompute_granularity is None:
            return cls(frozenset())
        parts = ["block"] if config.recompute_granularity == "full" else config.recompute_modules
        return cls(frozenset(parts), replays=moe.moe_recompute_replay, mhc_layers=config.mhc_recompute_layer_num)

    def __call__(self, part: str, function: Callable, *inputs):
        """function(*inputs), for parts without MoE layers."""
        if part in self.parts and torch.is_grad_enabled():
            # No dropout anywhere, and every draw is keyed: there is no generator state to restore.
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(*inputs)

    def with_moe(self, part: str, function: Callable, call: Call, *inputs):
        """function(call, *inputs), for parts that hold MoE layers; where the part is checkpointed, they get its own call instead."""
        if part in self.parts and torch.is_grad_enabled():
            log = CallLog(self.monitor, replays=self.replays)
            return checkpoint(lambda *again: function(log.next_run(), *again), *inputs, use_reentrant=False, preserve_rng_state=False)
        return function(call, *inputs)
