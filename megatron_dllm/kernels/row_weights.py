"""Weights of rows, where they are applied to rows and not to what these are summed into."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowWeights:
    """weights at least fp32 [T, k]; slot int64 [N]: row n is weighted by number slot[n] of them, counted t * k + c."""

    weights: Tensor
    slot: Tensor
