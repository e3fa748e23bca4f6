"""Which tokens of a microbatch are on which context-parallel rank: pure arithmetic on lengths, the same on every rank.

The clean stream (all examples of the microbatch, one after the other) is cut in 2R chunks as equal as they can be; rank r of R has chunks
r and 2R - 1 - r, since under causal attention an early chunk has little work and a late one much. Lengths need not divide, and nothing is
filled up: 11 tokens over 2 ranks are

    token   0 1 2 3 4 5 6 7 8 9 10
    chunk   0 0 1 1 1 2 2 2 3 3 3       rank 0: 0 1 8 9 10      rank 1: 2 3 4 5 6 7

Where Transformer Engine attends, each document is cut so by itself, in the chunks that it wants (see transformer_engine.py).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..config import ModelConfig, ObjectiveConfig, ParallelConfig
from ..parallel import ParallelContext
from .transformer_engine import LARGEST_HEAD_DIM, document_chunk, documents_of


@dataclass(frozen=True)
class ContextSplit:
    """How the ranks of cp share a microbatch, and how keys travel in layers of each type ("sliding", "full"); one rank without it.

    by_package: the types whose attention is Transformer Engine's.
    """

    rank: int = 0
    size: int = 1
    whole_canvases: bool = False
    comm_types: Mapping[str, str] = field(default_factory=dict)
    by_package: frozenset[str] = frozenset()

    @classmethod
    def of(cls, context: ParallelContext, parallel: ParallelConfig, objective: ObjectiveConfig, model: ModelConfig) -> ContextSplit:
        """The split that a run asks for."""
        types = {"sliding": parallel.cp_comm_type_sliding, "full": parallel.cp_comm_type}
        return cls(context.cp.rank, context.cp.size, objective.canvases_scored == "all", types, by_package(parallel, model))


def by_package(parallel: ParallelConfig, model: ModelConfig) -> frozenset[str]:
    """The layer types whose attention over context-parallel ranks is Transformer Engine's; ours has no limit of the head dimension."""
    if parallel.context_parallel_impl == "local":
        return frozenset()
    widths = {"sliding": model.kv_channels, "full": model.global_kv_channels}
    return frozenset(kind for kind, width in widths.items() if width <= LARGEST_HEAD_DIM)


@dataclass(frozen=True)
class SequenceLayout:
    """By rank, int64, rising: the places in the clean stream and in the canvas stream of the tokens that the rank has."""

    clean: tuple[np.ndarray, ...]
    canvas: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, num_clean: int, canvas_ids: np.ndarray, *, ranks: int, whole_canvases: bool,
           documents: np.ndarray | None = None) -> SequenceLayout:
        """The layout of `num_clean` clean tokens and canvas tokens with these ids (int64 [Tc], rising), for so many ranks.

        Each rank has an equal contiguous part of every canvas; with `whole_canvases` canvases are dealt out whole, the way of the chunks.
        `documents`: where they begin, if each is to be cut by itself.
        """
        deal = deal_whole_canvases if whole_canvases else share_each_canvas
        clean = zigzag(num_clean, ranks) if documents is None else zigzag_documents(documents, num_clean, ranks)
        return cls(clean, deal(canvas_ids, ranks))


def chunk_bounds(length: int, chunks: int) -> list[int]:
    """chunks + 1 bounds of near-equal pieces: 11 in 4 is [0, 2, 5, 8, 11]."""
    return [number * length // chunks for number in range(chunks + 1)]


def zigzag(length: int, ranks: int) -> tuple[np.ndarray, ...]:
    """By rank: the elements of chunks r and 2R - 1 - r of range(length)."""
    bounds = chunk_bounds(length, 2 * ranks)
    chunks = [np.arange(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return tuple(np.concatenate([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else np.arange(length) for rank in range(ranks))


def zigzag_documents(starts: np.ndarray, num_clean: int, ranks: int) -> tuple[np.ndarray, ...]:
    """By rank: of each document that begins at one of `starts` chunks r and 2R - 1 - r, all of one length but for what the last ones lack.

    With chunks in multiples of 1, a document of 11 tokens after one of 2 over 2 ranks: rank 0 has 0, 2 3 4 and 11 12, rank 1 has 1 and 5 to
    10.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for start, stop in documents_of(starts, num_clean):
        chunk = document_chunk(stop - start, ranks)
        bounds = [min(start + number * chunk, stop) for number in range(2 * ranks + 1)]
        for rank in range(ranks):
            parts[rank] += [np.arange(bounds[number], bounds[number + 1]) for number in (rank, 2 * ranks - 1 - rank)]
    return tuple(np.concatenate([np.zeros(0, np.int64), *part]) for part in parts)


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
