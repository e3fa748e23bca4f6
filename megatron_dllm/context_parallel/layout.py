"""Which tokens of a microbatch are on which context-parallel rank: pure arithmetic on lengths, the same on every rank.

The clean stream (all examples of the microbatch, one after the other) is cut in 2R chunks as equal as they can be; rank r of R has chunks
r and 2R - 1 - r, since under causal attention an early chunk has little work and a late one much. Lengths need not divide, and nothing is
filled up: 11 tokens over 2 ranks are

    token   0 1 2 3 4 5 6 7 8 9 10
    chunk   0 0 1 1 1 2 2 2 3 3 3       rank 0: 0 1 8 9 10      rank 1: 2 3 4 5 6 7
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..config import ObjectiveConfig, ParallelConfig
from ..parallel import ParallelContext


@dataclass(frozen=True)
class ContextSplit:
    """How the ranks of cp share a microbatch, and how keys travel in layers of each type ("sliding", "full"); one rank without it."""

    rank: int = 0
    size: int = 1
    whole_canvases: bool = False
    comm_types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, context: ParallelContext, parallel: ParallelConfig, objective: ObjectiveConfig) -> ContextSplit:
        """The split that a run asks for."""
        types = {"sliding": parallel.cp_comm_type_sliding, "full": parallel.cp_comm_type}
        return cls(context.cp.rank, context.cp.size, objective.canvases_scored == "all", types)


@dataclass(frozen=True)
class SequenceLayout:
    """By rank, int64, rising: the places in the clean stream and in the canvas stream of the tokens that the rank has."""

    clean: tuple[np.ndarray, ...]
    canvas: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, num_clean: int, canvas_ids: np.ndarray, *, ranks: int, whole_canvases: bool) -> SequenceLayout:
        """The layout of `num_clean` clean tokens and canvas tokens with these ids (int64 [Tc], rising), for so many ranks.

        Each rank has an equal contiguous part of every canvas; with `whole_canvases` canvases are dealt out whole, the way of the chunks.
        """
        deal = deal_whole_canvases if whole_canvases else share_each_canvas
        return cls(zigzag(num_clean, ranks), deal(canvas_ids, ranks))


def chunk_bounds(length: int, chunks: int) -> list[int]:
    """chunks + 1 bounds of near-equal pieces: 11 in 4 is [0, 2, 5, 8, 11]."""
    return [number * length // chunks for number in range(chunks + 1)]


def zigzag(length: int, ranks: int) -> tuple[np.ndarray, ...]:
    """By rank: the elements of chunks r and 2R - 1 - r of range(length)."""
    bounds = chunk_bounds(length, 2 * ranks)
    chunks = [np.arange(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return tuple(np.concatenate([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else np.arange(length) for rank in range(ranks))


def share_each_canvas(canvas_ids: np.ndarray, ranks: int) -> tuple[np.ndarray, ...]:
    """By rank: the r-th part of each canvas."""
    parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for start, stop in canvas_bounds(canvas_ids):
        bounds = chunk_bounds(stop - start, ranks)
        for rank in range(ranks):
            parts[rank].append(np.arange(start + bounds[rank], start + bounds[rank + 1]))
    return tuple(np.concatenate([np.zeros(0, np.int64), *part]) for part in parts)


def deal_whole_canvases(canvas_ids: np.ndarray, ranks: int) -> tuple[np.ndarray, ...]:
    """By rank: whole canvases, the elements of `zigzag` of their number."""
    bounds = canvas_bounds(canvas_ids)
    return tuple(
        np.concatenate([np.zeros(0, np.int64), *(np.arange(*bounds[number]) for number in own)]) for own in zigzag(len(bounds), ranks))


def canvas_bounds(canvas_ids: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of each run of equal ids."""
    if len(canvas_ids) == 0:
        return []
    edges = [0, *(np.flatnonzero(np.diff(canvas_ids)) + 1).tolist(), len(canvas_ids)]
    return list(zip(edges, edges[1:], strict=False))
