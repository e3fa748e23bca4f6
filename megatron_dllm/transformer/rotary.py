"""Rotary positions: "default" turns every dimension, "proportional" only the first pairs, spread over the whole head.

inv_freq, cos and sin are fp32, always. Rotate-half pairs dimension i with i + d/2. Proportional (docs/model.md section 2): inv_freq[i] =
theta^(-2i/d) for i < fraction * d/2 and 0 beyond, so with d = 512 and fraction 0.25 the dimensions 0..63 and 256..319 turn. It is not the
usual partial rotary, which would turn the first 128 dimensions with frequencies of a head of 128.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.launch import takes
from .norms import rms_norm
from .precision import at_least_fp32


@dataclass(frozen=True)
class RotaryTable:
    """cos, sin: fp32 [T, 1, d/2], a row a token."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(head_dim: int, theta: float, fraction: float, device: torch.device) -> Tensor:
    """fp32 [d/2]; the last (1 - fraction) of them are zero."""
    turning = int(fraction * head_dim // 2)
    exponent = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device=device) / head_dim
    return torch.cat([1.0 / theta ** exponent, torch.zeros(head_dim // 2 - turning, device=device)])


def rotary_table(positions: Tensor, inv_freq: Tensor) -> RotaryTable:
    """The table of tokens at `positions` (integers [T])."""
    angles = positions[:, None].float() * inv_freq
    return RotaryTable(angles.cos()[:, None], angles.sin()[:, None])


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """x [T, heads, d] turned by its tokens' angles; the dtype of `x`."""
    low, high = at_least_fp32(x).chunk(2, dim=-1)
    return torch.cat([low * table.cos - high * table.sin, high * table.cos + low * table.sin], dim=-1).to(x.dtype)


def norm_and_rotate(x: Tensor, weight: Tensor | None, table: RotaryTable, eps: float) -> Tensor:
    """rotate(rms_norm(x)) of x [T, heads, d]; the dtype of `x`."""
    if takes(x, weight, table.cos):
        from ..kernels import norm_and_rotate as kernel  # Triton is there with CUDA alone

        return kernel.norm_and_rotate(x, weight, table.cos[:, 0], table.sin[:, 0], eps)
    return rotate(rms_norm(x, weight, eps), table)


def norm_and_rotate_pair(query: Tensor, key: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, table: RotaryTable,
                         eps: float) -> tuple[Tensor, Tensor]:
    """Both of queries [T, h, d] and keys [T, g, d]."""
    return norm_and_rotate(query, query_weight, table, eps), norm_and_rotate(key, key_weight, table, eps)
