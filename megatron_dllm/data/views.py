"""Sources made of other sources: a range of one, and several as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .source import ExampleSource


class SourceRange:
    """Examples start to stop of a source; their keys, and so their draws, stay what they are in the whole."""

    def __init__(self, source: ExampleSource, start: int, stop: int, name: str):
        self.name = name
        self.source = source
        self.start, self.stop = start, stop
        self.lengths, self.truncated, self.keys = (array[start:stop] for array in (source.lengths, source.truncated, source.keys))

    def __len__(self) -> int:
        return self.stop - self.start

    def tokens(self, index: int) -> np.ndarray:
        return self.source.tokens(self._place(index))

    def describe(self, index: int) -> str:
        return self.source.describe(self._place(index))

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {self.name}, which has {len(self)}")
        return self.start + index


class BlendedSource:
    """Several sources one after the other, with the weights that an order gives their rows.

    Sample numbers in the keys are shifted so that no two sources share one.
    """

    def __init__(self, parts: Sequence[ExampleSource], weights: Sequence[float]):
        self.name = " + ".join(f"{weight:g} {part.name}" for part, weight in zip(parts, weights, strict=True))
        self.parts = tuple(parts)
        self.weights = tuple(weights)
        self._starts = np.cumsum([0, *map(len, parts)])
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.truncated = np.concatenate([part.truncated for part in parts])
        shift, keys = 0, []
        for part in parts:
            keys.append(part.keys + np.array([shift, 0]))
            shift += int(part.keys[:, 0].max()) + 1
        self.keys = np.concatenate(keys)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def tokens(self, index: int) -> np.ndarray:
        part, within = self._place(index)
        return self.parts[part].tokens(within)

    def describe(self, index: int) -> str:
        part, within = self._place(index)
        return self.parts[part].describe(within)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {self.name}, which has {len(self)}")
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return part, index - int(self._starts[part])


def split_source(source: ExampleSource, shares: Sequence[float]) -> list[SourceRange]:
    """Consecutive ranges of a source in these shares (sum 1), moved so that all turns of a conversation stay in one range.

    Otherwise a validation turn would have its own conversation's other turns in training. Some ranges may come out empty.
    """
    new_sample = np.flatnonzero(np.diff(source.keys[:, 0], prepend=-1))  # the first example of each sample
    firsts = np.append(new_sample, len(source))
    edges = [0]
    for share in np.cumsum(shares)[:-1]:
        edges.append(int(firsts[np.searchsorted(firsts, round(float(share) * len(source)))]))
    edges.append(len(source))
    return [SourceRange(source, start, stop, source.name) for start, stop in zip(edges[:-1], edges[1:], strict=True)]
