"""Weights of rows, where they are applied to rows and not to what these are summed into; and which rows have a gradient."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LiveRows:
    """The rows of the first `num_tokens` tokens, which alone have a gradient that is not zero; counts int64 [E]: how many of each expert's,
    which are the first of them."""

    num_tokens: int
    counts: Tensor


@dataclass(frozen=True)
class RowWeights:
    """weights at least fp32 [T, k]; slot int64 [N]: row n is weighted by number slot[n] of them, counted t * k + c. live: None for all."""

    weights: Tensor
    slot: Tensor
    live: LiveRows | None = None

    @property
    def num_live_slots(self) -> int:
        """Slots of rows that may have a gradient are smaller."""
        return self.weights.numel() if self.live is None else self.live.num_tokens * self.weights.shape[1]
