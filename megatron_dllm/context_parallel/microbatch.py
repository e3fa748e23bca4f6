"""One microbatch's tokens over the ranks of cp: what our own are, and who has what in its two passes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..transformer.visibility import CLEAN, Visibility
from .layout import ContextSplit, SequenceLayout
from .plan import Shards


@dataclass(frozen=True)
class SharedMicrobatch:
    """The layout of a microbatch, and how its attention is to be shared."""

    split: ContextSplit
    layout: SequenceLayout

    @classmethod
    def of(cls, visibility: Visibility, split: ContextSplit) -> SharedMicrobatch:
        """That of a first pass with this visibility."""
        clean = visibility.canvas_id == CLEAN
        layout = SequenceLayout.of(
            visibility.num_clean_keys, visibility.canvas_keys, ranks=split.size, whole_canvases=split.whole_canvases,
            documents=np.unique(visibility.first_key[clean]) if split.by_package else None)
        return cls(split, layout)

    @property
    def own_clean(self) -> np.ndarray:
        """int64, rising: our places in the clean stream."""
        return self.layout.clean[self.split.rank]

    @property
    def own_canvas(self) -> np.ndarray:
        """int64, rising: our places in the canvas stream."""
        return self.layout.canvas[self.split.rank]

    def own_kept(self, kept: np.ndarray) -> np.ndarray:
        """Where, among our own clean tokens, those stand whose keys are `kept` (places in the clean stream)."""
        return np.flatnonzero(np.isin(self.own_clean, kept))

    def first_pass(self) -> dict[str, Shards] | None:
        """By layer type, who has what of all tokens; None for one rank."""
        return self._shards({kind: self.layout.clean for kind in self.split.comm_types}, self.layout.clean, self.layout.canvas)

    def second_pass(self, kept: Mapping[str, np.ndarray], again: np.ndarray) -> dict[str, Shards] | None:
        """The same of the canvas tokens that `again` (bool [Tc]) marks; what is kept of clean keys stays with its rank."""
        number = np.cumsum(again) - 1
        held = {kind: tuple(np.flatnonzero(np.isin(kept[kind], own)) for own in self.layout.clean) for kind in self.split.comm_types}
        nothing = tuple(own[:0] for own in self.layout.clean)
        return self._shards(held, nothing, tuple(number[own[again[own]]] for own in self.layout.canvas))

    def _shards(self, held: Mapping[str, tuple], clean: tuple, canvas: tuple) -> dict[str, Shards] | None:
        if self.split.size == 1:
            return None
        split = self.split
        return {kind: Shards(held[kind], clean, canvas, split.whole_canvases, comm_type, split.rank, package=kind in split.by_package)
                for kind, comm_type in split.comm_types.items()}
