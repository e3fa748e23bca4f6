"""Attention by the package's kernels (cuDNN's), for sequences that lie one after the other: no mask, no fill, nothing read by the host."""
from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn

from ..transformer.packed_attention import Sequences
from .engine import PACKAGE


def sequence_attention(query: Tensor, key: Tensor, value: Tensor, part: Sequences) -> Tensor:
    """[Q, h, d] from query [Q, h, d], key and value [K, g, d] of the part's sequences, bf16; scale 1."""
    module = _attention(importlib.import_module(PACKAGE), query.shape[1], key.shape[1], query.shape[2], part.causal,
                        part.window)
    out = module(*(x.contiguous() for x in (query, key, value)), cu_seqlens_q=part.query_starts, cu_seqlens_kv=part.key_starts,
                 max_seqlen_q=part.longest_query, max_seqlen_kv=part.longest_key)
    return out.view(query.shape)


@cache  # it holds no parameter: one serves all layers of a shape
def _attention(package: ModuleType, heads: int, groups: int, head_dim: int, causal: bool, window: int | None) -> nn.Module:
    module = package.DotProductAttention(
        heads, head_dim, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd", softmax_scale=1.0,
        attn_mask_type="padding_causal" if causal else "padding", attention_type="self" if causal else "cross",
        window_size=None if window is None else (window - 1, 0))
    if not isinstance(getattr(module, "unfused_attention", None), nn.Module):  # another version may name it otherwise
        raise ValueError("--attention-backend transformer_engine: this version of the package does not say what it takes where it has no "
                         "kernel, which would hold all scores; set --attention-backend local")
    module.unfused_attention = _Quadratic()
    return module


class _Quadratic(nn.Module):
    """In the place of what the package takes where it finds no kernel: all scores at once."""

    def forward(self, _: object, query: Tensor, key: Tensor, *__: object, **___: object) -> Tensor:
        raise ValueError(
            f"--attention-backend transformer_engine: for queries {tuple(query.shape)} and keys {tuple(key.shape)} the package has no "
            f"kernel with this GPU and cuDNN {torch.backends.cudnn.version()}, and would hold all scores; set --attention-backend local")
