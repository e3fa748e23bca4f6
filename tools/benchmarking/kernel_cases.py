"""What a benchmark of kernels is made of."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """The released model's. lengths: of sequences for wide heads, the first for others too; wide_aim: its milliseconds; rows: of an expert
    layer's two passes; tokens: mHC's."""

    heads: int = 16
    wide_groups: int = 2
    groups: int = 8
    wide_head: int = 512
    head: int = 256
    window: int = 1024
    lengths: tuple[int, ...] = (4096, 16384, 32768)
    wide_aim: float | None = 4.0
    experts: int = 128
    hidden: int = 2816
    inner: int = 704
    rows: tuple[tuple[int, int], ...] = ((40960, 8192), (8192, 2048))
    tokens: int = 5120
    streams: int = 4

    @classmethod
    def toy(cls) -> Sizes:
        """Small enough for an interpreter."""
        return cls(heads=2, wide_groups=1, groups=2, wide_head=32, head=16, window=4, lengths=(9,), wide_aim=None, experts=3, hidden=16,
                   inner=8, rows=((9, 4),), tokens=5, streams=2)


class Check(NamedTuple):
    """Something that holds or not, with the figures that it was decided by."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Way:
    """One implementation: forward, and forward with backward; both may be called again and again."""

    forward: Callable[[], object]
    whole: Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Ours, which comes first, and others by name, made when the case is due. operations: of a whole; aim: milliseconds of a whole.

    `is_compiled_apart`: whether a process of its own may run it to have it compiled, beside others and their memory.
    """

    name: str
    prepare: Callable[[], Mapping[str, Way]]
    operations: float = 0.0
    aim: float | None = None
    is_compiled_apart: bool = True


def compare(name: str, ours: Tensor, plain: Tensor, exact: Tensor, units: float = 1.0) -> Check:
    """Whether our error is at most twice that of plain torch in the same dtype, beside some units of the result's rounding."""
    unit = units * torch.finfo(ours.dtype).eps * exact.abs().max()
    error, others = ((x.double() - exact).abs().max() for x in (ours, plain))
    return Check(f"{name}: error {error / exact.abs().max():.1e} of the largest, torch {others / exact.abs().max():.1e}",
                 bool(error <= 2 * others + unit))
