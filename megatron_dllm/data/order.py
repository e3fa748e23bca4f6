"""Which examples make the n-th row, from n and the seed alone: resuming needs nothing else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from .packing import pack_rows

PERMUTATION = 1000  # sets the keys of permutations apart from those of other draws of the same seed


@dataclass(frozen=True)
class Row:
    """The examples of one row (places in the source) and the pass over the source that they belong to."""

    epoch: int
    indices: tuple[int, ...]


class Order(Protocol):
    """Rows 0, 1, 2, ... without end."""

    def row(self, n: int) -> Row: ...

    def rows_before(self, epoch: int) -> int:
        """Rows that `epoch` epochs come to."""
        ...


def permutation(count: int, *, seed: int, epoch: int, source: int = 0) -> np.ndarray:
    """int64 [count]: 0..count-1 shuffled by (seed, epoch, source).

    Made by sorting raw Philox words, whose values numpy keeps equal over its versions (it does not promise this for Generator.permutation).
    """
    sequence = np.random.SeedSequence((seed, 0, PERMUTATION, epoch, source))
    words = np.random.Philox(key=sequence.generate_state(2, np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True)
class Packing:
    """The limits of a packed row."""

    capacity_tokens: int
    max_canvases: int


class RowOrder:
    """Rows of one source. Each epoch is a fresh permutation of its examples, packed anew when `packing` is given, one a row otherwise.

    lengths    int [N]   tokens of each example as it will lie in a row, whole canvases included; 0 leaves it out
    canvases   int [N]   canvases that each example decodes, for packing; None: one each
    source     number of this source in a blend, so that equal sources are shuffled apart

    `shuffle=False` keeps the source's order in every epoch (evaluation). ValueError if no example is left.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, packing: Packing | None = None, canvases: np.ndarray | None = None,
                 source: int = 0, shuffle: bool = True):
        lengths = np.asarray(lengths)
        self._examples = np.flatnonzero(lengths)
        if not len(self._examples):
            raise ValueError("no example is left to train on: none of them fits the sequence; raise --seq-length")
        self._lengths = lengths[self._examples]
        self._canvases = None if canvases is None else np.asarray(canvases)[self._examples]
        self._seed, self._packing, self._source, self._shuffle = seed, packing, source, shuffle
        self._ends: list[int] = []  # rows through each packed epoch, as far as they were asked for
        self._current: tuple[int, np.ndarray, np.ndarray] | None = None

    def row(self, n: int) -> Row:
        """Row n. Going through n in order costs one permutation (and packing) an epoch; so does each packed epoch that is jumped over."""
        if self._packing is None:
            epoch = n // len(self._examples)
        else:
            while not self._ends or self._ends[-1] <= n:
                self.rows_before(len(self._ends) + 1)
            epoch = bisect_right(self._ends, n)
        place = n - self.rows_before(epoch)
        order, offsets = self._epoch(epoch)
        return Row(epoch, tuple(self._examples[order[offsets[place]:offsets[place + 1]]].tolist()))

    def rows_before(self, epoch: int) -> int:
        """Rows in all epochs before `epoch`: what num_epochs epochs come to is rows_before(num_epochs)."""
        if self._packing is None:
            return epoch * len(self._examples)
        while len(self._ends) < epoch:
            _, offsets = self._epoch(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + len(offsets) - 1)
        return self._ends[epoch - 1] if epoch else 0

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the examples in an epoch and the offsets of its rows in that order."""
        if self._current is None or self._current[0] != epoch:
            count = len(self._examples)
            order = permutation(count, seed=self._seed, epoch=epoch, source=self._source) if self._shuffle else np.arange(count)
            if self._packing is None:
                offsets = np.arange(count + 1)
            else:
                canvases = None if self._canvases is None else self._canvases[order]
                offsets = pack_rows(self._lengths[order], self._packing.capacity_tokens, self._packing.max_canvases, canvases)
            self._current = (epoch, order, offsets)
        return self._current[1:]


class BlendedOrder:
    """Rows of several sources in fixed shares: of the first n rows, each source has its share of n, give or take few.

    The k-th row of a source falls due at (k + 1/2) / share; rows come in the order of their due times, sources in their own order at equal
    ones. Indices are counted through all sources, one after the other (BlendedSource counts the same way).
    """

    def __init__(self, orders: Sequence[RowOrder], weights: Sequence[float], num_examples: Sequence[int]):
        # Exact fractions: the order must not hang on rounding.
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._orders = list(orders)
        self._starts = [0, *np.cumsum(num_examples).tolist()]

    def row(self, n: int) -> Row:
        source, within = self.place(n)
        row = self._orders[source].row(within)
        return Row(row.epoch, tuple(self._starts[source] + index for index in row.indices))

    def rows_before(self, epoch: int) -> int:
        """As many rows as that many epochs of all sources have together; what is seen of each of them is up to its weight."""
        return sum(order.rows_before(epoch) for order in self._orders)

    def place(self, n: int) -> tuple[int, int]:
        """(source, row within it) of row n, without counting through the rows before."""
        # Counts at any moment are within half a row of share * time, so time is within half the number of sources of n.
        slack = len(self._shares) // 2 + 2
        due, passed = [], 0
        for source, share in enumerate(self._shares):
            first = max(0, int(n * share) - slack)
            passed += first
            due += [((k + Fraction(1, 2)) / share, source, k) for k in range(first, int(n * share) + slack + 1)]
        _, source, within = sorted(due)[n - passed]
        return source, within
