"""Dropout whose every draw is a function of (token, module, global feature): the same under every layout, recompute and restart.

A token has a word of 64 bits, drawn on the host with its batch; a module has one for each of its input features, drawn from its name. An
element is dropped where the two, mixed, fall below a bound: integers only, so that every device drops the same elements.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

# The multipliers of MurmurHash3's 64-bit finaliser, as signed numbers: products wrap.
FIRST, SECOND = 0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64
BITS = 31  # that the bound is compared with


@dataclass(frozen=True)
class TokenDraws:
    """What linear layers are told of a pass's tokens.

    Words for dropout, int64: of all T of a pass (fill included), and of our piece of them under sequence parallelism; None without dropout.
    num_live: only so many of them, the first ones, may get a gradient that is not zero (None: all).
    """

    every: Tensor | None
    own: Tensor | None
    num_live: int | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenDraws:
        """The draws of those tokens that the function takes out of a word a token."""
        return TokenDraws(*(None if words is None else function(words) for words in (self.every, self.own)))


class Dropout(nn.Module):
    """x with elements dropped with probability `rate`, the others divided by 1 - rate; x as it is in evaluation.

    `first`, `count`: which of the module's `size` input features this rank has.
    """

    def __init__(self, name: str, rate: float, size: int, *, first: int, count: int, device: torch.device):
        super().__init__()
        self.rate, self.bound = rate, int(rate * 2**BITS)
        key = int.from_bytes(hashlib.blake2b(f"dropout/{name}".encode(), digest_size=16).digest(), "little")
        features = np.random.Philox(key=key).random_raw(size).view(np.int64)[first:first + count]
        # No buffer: it is no part of a checkpoint.
        self.features = torch.from_numpy(features.copy()).to(device)

    def forward(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """x [T, count]; tokens int64 [T]."""
        if not self.training:
            return x
        assert tokens is not None, "dropout in training wants the batch's draws (build_streams with dropout=True)"
        mixed = (tokens[:, None] ^ self.features) * FIRST
        mixed = (mixed ^ _shifted(mixed, 32)) * SECOND
        kept = _shifted(mixed, 64 - BITS) >= self.bound
        return x * kept * (1 / (1 - self.rate))


def undropped(x: Tensor, tokens: Tensor | None) -> Tensor:
    """What stands in for a dropout of rate zero."""
    return x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted right, with zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
