"""Counter-based random draws: every draw is a pure function of its key.

The key is (seed, stream, purpose, epoch, sample, unit) and a position; nothing is remembered between calls, so a sample turns into the
same batch under every layout, padding, accumulation and restart, and there is no generator state to save. Draws are integers made on the
CPU, so they are equal on every device. Generator: Philox-4x64 (Salmon et al. 2011), keyed through numpy's SeedSequence.
"""
from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

WORDS_PER_COUNT = 4  # Philox-4x64 makes four 64-bit words for each value of its counter


class Stream(enum.IntEnum):
    """What the draws are for as a whole: the same sample is drawn apart in training and in evaluation."""

    TRAIN = 0
    EVALUATE = 1
    GENERATE = 2


class Purpose(enum.IntEnum):
    """What one draw decides."""

    NOISE_LEVEL = 1
    CORRUPTION = 2
    REPLACEMENT = 3
    CANVAS = 4
    SELF_CONDITIONING = 5
    DROPOUT_CLEAN = 6
    DROPOUT_CANVAS = 7
    DROPOUT_SECOND = 8


@dataclass(frozen=True)
class DrawKey:
    """Names one example's draws: (seed, stream, epoch, sample index, turn or document)."""

    seed: int
    stream: Stream
    epoch: int
    sample: int
    unit: int

    def words(self, purpose: Purpose, start: int, count: int) -> np.ndarray:
        """uint64 [count]: the words at positions start to start + count of this key and purpose."""
        return words((self.seed, int(self.stream), int(purpose), self.epoch, self.sample, self.unit), start, count)

    def uint32(self, purpose: Purpose, start: int = 0, count: int = 1) -> np.ndarray:
        """uint64 [count] holding values below 2^32 (64 bits wide, so that comparing with 2^32 itself cannot wrap)."""
        return self.words(purpose, start, count) >> np.uint64(32)

    def below(self, bound: int, purpose: Purpose, start: int = 0, count: int = 1) -> np.ndarray:
        """int64 [count], uniform in [0, bound), for a bound up to 2^31."""
        return ((self.uint32(purpose, start, count) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def words(key: tuple[int, ...], start: int, count: int) -> np.ndarray:
    """uint64 [count]: words start to start + count of the sequence that `key` (non-negative integers) names."""
    generator = np.random.Philox(key=np.random.SeedSequence(key).generate_state(2, np.uint64))
    skipped, offset = divmod(start, WORDS_PER_COUNT)
    generator.advance(skipped)
    return generator.random_raw(offset + count)[offset:]
