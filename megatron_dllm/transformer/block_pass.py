"""Passes of blocks of new tokens over caches at fixed addresses (key_cache), made on the device."""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import ModelConfig
from ..kernels.attention_tiles import suits_attention
from .key_cache import block_plan
from .rotary import rotary_table
from .token_pass import LAYER_TYPES, LayerPass, TokenPass, layer_frequencies


def block_pass(config: ModelConfig, rows: Tensor, held: Tensor, counts: Tensor, slots: Mapping[str, int], dtype: torch.dtype, *,
               length: int, is_clean: bool) -> TokenPass:
    """Blocks of `length` tokens after what `rows` int64 [A] hold of `held` int64 [R]: clean ones, of which `counts` int64 [A] are no fill,
    or canvases. slots: of a cache's row, by layer type."""
    positions = (held[rows][:, None] + torch.arange(length, device=rows.device)).flatten()
    layers = {}
    for kind in LAYER_TYPES:
        window = config.window_size if kind == "sliding" else None
        head_dim = config.global_kv_channels if kind == "full" else config.kv_channels
        tiles = None
        if window is None and not is_clean and suits_attention(head_dim, dtype, rows.device):
            from ..kernels import block_attention  # Triton is there with CUDA alone

            if block_attention.suits_wide(head_dim, length, slots[kind]):
                tiles = block_attention.wide_tiles(rows, held, slots[kind], length)
        plan = block_plan(rows, held, counts, slots=slots[kind], length=length, window=window, is_causal=is_clean, tiles=tiles)
        layers[kind] = LayerPass(rotary_table(positions, layer_frequencies(config, kind, rows.device)), plan, None)
    num_tokens = len(positions)
    return TokenPass(num_tokens if is_clean else 0, 0 if is_clean else num_tokens, layers)
