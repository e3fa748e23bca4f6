"""Where a router's kernel counts what it chose."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ENTROPY_UNITS = 2.0**32  # in a nat: whole numbers add up to the same in any order


@dataclass(frozen=True)
class Tally:
    """What a call adds to. stream int64 [T]: of each token the stream, S and above are not counted; load int64 [S, E]: choices of each
    expert; entropy int64 [S]: sums over tokens of that of the router's distribution, in ENTROPY_UNITS."""

    stream: Tensor
    load: Tensor
    entropy: Tensor
