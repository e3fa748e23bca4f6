"""Which keys a query may attend to, as three integers a query.

Keys are flat: [clean keys ; canvas keys]. A query sees the clean keys first_key <= j < past_key, and, when its canvas id is not negative,
every canvas key with the same id. Nothing else. An example of prompt P0 P1, a response of two canvases of two tokens and canvas 1 chosen:

                 clean keys     canvas keys
                 P0 P1 a b c d   x y
    clean P0      1  0 0 0 0 0   0 0     first 0, past 1, canvas -1
    clean P1      1  1 0 0 0 0   0 0     first 0, past 2, canvas -1
    ...
    canvas x      1  1 1 1 0 0   1 1     first 0, past 4, canvas 0
    canvas y      1  1 1 1 0 0   1 1     first 0, past 4, canvas 0

The dense oracle, the work lists of the kernels and context parallelism all read these integers.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLEAN = -1  # the canvas id of a clean token


@dataclass(frozen=True)
class Visibility:
    """first_key, past_key, canvas_id: int64 [Q], a value a query; canvas_keys: int64 [K], the canvas id of each canvas key."""

    first_key: np.ndarray
    past_key: np.ndarray
    canvas_id: np.ndarray
    canvas_keys: np.ndarray
    num_clean_keys: int

    def windowed(self, window: int | None) -> Visibility:
        """What a sliding layer sees: a clean query its last `window` keys (itself included), a canvas query the last window - 1
        before its canvas, the same bound for every query of the canvas. `None` is no window."""
        if window is None:
            return self
        reach = np.where(self.canvas_id == CLEAN, window, window - 1)
        first = np.maximum(self.first_key, self.past_key - reach)
        return Visibility(first, self.past_key, self.canvas_id, self.canvas_keys, self.num_clean_keys)

    def dense(self) -> np.ndarray:
        """bool [Q, num_clean_keys + K]: the same, as a mask. For oracles and pictures; grows with the square of the sequence."""
        key = np.arange(self.num_clean_keys)
        clean = (key >= self.first_key[:, None]) & (key < self.past_key[:, None])
        own = (self.canvas_id[:, None] == self.canvas_keys) & (self.canvas_id[:, None] != CLEAN)
        return np.concatenate([clean, own], axis=1)

    def key_intervals(self) -> np.ndarray:
        """int64 [Q, 4]: the same as two intervals of flat keys a query, first and past clean key, first and past key of its canvas, whose
        keys stand together."""
        ids, first, count = np.unique(self.canvas_keys, return_index=True, return_counts=True)
        assert (np.diff(self.canvas_keys) != 0).sum() == max(len(ids) - 1, 0), "the keys of a canvas stand apart"
        own = np.zeros((len(self.canvas_id), 2), np.int64)
        place = np.searchsorted(ids, self.canvas_id)
        has_keys = (self.canvas_id != CLEAN) & np.isin(self.canvas_id, ids)
        own[has_keys] = self.num_clean_keys + np.stack([first, first + count], axis=1)[place[has_keys]]
        return np.concatenate([np.stack([self.first_key, self.past_key], axis=1), own], axis=1)

    def kept_keys(self, queries: np.ndarray) -> np.ndarray:
        """int64: the clean keys that any of the queries (bool [Q]) sees, rising: what a later loop needs of this one."""
        edges = np.zeros(self.num_clean_keys + 1, np.int64)
        np.add.at(edges, self.first_key[queries], 1)
        np.add.at(edges, self.past_key[queries], -1)
        return np.flatnonzero(np.cumsum(edges[:-1]) > 0)

    def of_queries(self, queries: np.ndarray) -> Visibility:
        """The visibility of some queries alone (bool [Q]), all keys being at hand."""
        return Visibility(self.first_key[queries], self.past_key[queries], self.canvas_id[queries], self.canvas_keys, self.num_clean_keys)

    def against_kept(self, queries: np.ndarray, kept: np.ndarray) -> Visibility:
        """The visibility of some canvas queries alone (bool [Q]) when of the clean keys only `kept` are at hand."""
        canvases = np.unique(self.canvas_id[queries])
        return Visibility(
            np.searchsorted(kept, self.first_key[queries]), np.searchsorted(kept, self.past_key[queries]), self.canvas_id[queries],
            self.canvas_keys[np.isin(self.canvas_keys, canvases)], len(kept))
