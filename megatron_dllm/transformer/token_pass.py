"""One trip of tokens through the stack: what attention and rotary need to know of them, made once and read by every layer."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from .core_attention import AttentionPlan, attention_plan
from .rotary import RotaryTable, inverse_frequencies, rotary_table
from .visibility import Visibility

LAYER_TYPES = ("sliding", "full")


@dataclass(frozen=True)
class LayerPass:
    """What the layers of one type share. `kept` int64 [n]: the keys handed on as the layer's context (None: nothing is)."""

    rotary: RotaryTable
    attention: AttentionPlan
    kept: Tensor | None


@dataclass(frozen=True)
class LayerContext:
    """Keys and values of earlier clean tokens, [n, g, d]: an output of one pass and an input of another, gradients included."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class TokenPass:
    """T tokens = num_clean clean ones, then num_canvas canvas ones; `layers` by layer type."""

    num_clean: int
    num_canvas: int
    layers: Mapping[str, LayerPass]

    def per_stream(self, scalars: Tensor) -> Tensor:
        """[T, 1]: of scalars [2], the first for clean tokens, the second for canvas tokens."""
        return torch.cat([scalars[:1].expand(self.num_clean), scalars[1:].expand(self.num_canvas)])[:, None]


def token_pass(config: ModelConfig, visibility: Mapping[str, Visibility], positions: np.ndarray, *, device: torch.device, num_clean: int,
               kept: Mapping[str, np.ndarray] | None = None, key_order: Mapping[str, np.ndarray] | None = None) -> TokenPass:
    """The pass of tokens at `positions` [T], of which the first `num_clean` are clean.

    visibility  by layer type (the types may hold different contexts), without the window, which sliding layers add
    kept        by layer type, the clean keys to hand on
    key_order   by layer type, where the visibility's clean keys stand in [context ; clean]; without it, in this order
    """
    where = torch.from_numpy(positions).to(device)
    layers = {}
    for kind in LAYER_TYPES:
        window = config.window_size if kind == "sliding" else None
        plan = attention_plan(visibility[kind], window, device, None if key_order is None else key_order[kind])
        layers[kind] = LayerPass(
            rotary_table(where, layer_frequencies(config, kind, device)), plan,
            None if kept is None else torch.from_numpy(kept[kind]).to(device))
    return TokenPass(num_clean, len(positions) - num_clean, layers)


def layer_frequencies(config: ModelConfig, kind: str, device: torch.device) -> Tensor:
    """The inverse frequencies of a layer type."""
    if kind == "full":
        return inverse_frequencies(config.global_kv_channels, config.rotary_base_global, config.rotary_percent_global, device)
    return inverse_frequencies(config.kv_channels, config.rotary_base, 1.0, device)
