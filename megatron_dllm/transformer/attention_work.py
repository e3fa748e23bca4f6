"""Work lists of attention: which queries meet which keys, in groups of equal shape, derived from a Visibility.

Keys are one flat array [clean keys ; canvas keys]. A group holds G pieces that share one pattern:

    causal      n queries, n keys, query i sees keys 0..i
    rectangle   every query sees every key (a canvas: its prefix and itself)
    band        one small mask [n, m] that all pieces share (a sliding window cut in blocks, or new tokens after a cache)

No group holds a mask whose size grows with the square of the sequence.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .visibility import CLEAN, Visibility

LEAST_BLOCK = 32  # shorter blocks of a window would be many small products
LEAST_BLOCK_ON_CPU = 16


@dataclass(frozen=True)
class WorkGroup:
    """G pieces of n queries and m keys: queries int64 [G, n], keys int64 [G, m], mask bool [n, m] or None, causal: without a mask."""

    queries: np.ndarray
    keys: np.ndarray
    mask: np.ndarray | None
    causal: bool


def work_list(visibility: Visibility, window: int | None, *, on_cpu: bool = False) -> tuple[WorkGroup, ...]:
    """Groups that together compute every query once. `visibility` is that of a full layer; `window` is the layer's own.

    A window is cut into blocks as long as itself or, on a CPU, where it is work that counts and not launches, half as long.
    """
    block = None if window is None else max(window // 2, LEAST_BLOCK_ON_CPU) if on_cpu else max(window, LEAST_BLOCK)
    pieces: dict[tuple, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    masks: dict[tuple, np.ndarray | None] = {}
    num_clean = int((visibility.canvas_id == CLEAN).sum())
    for piece in (*_clean_pieces(visibility, num_clean, window, block), *_canvas_pieces(visibility.windowed(window), num_clean)):
        queries, keys, pattern, mask = piece
        shape = (pattern, len(queries), len(keys))
        pieces[shape].append((queries, keys))
        masks[shape] = mask
    return tuple(
        WorkGroup(np.stack([q for q, _ in members]), np.stack([k for _, k in members]), masks[shape], causal=shape[0] == "causal")
        for shape, members in pieces.items())


Piece = tuple[np.ndarray, np.ndarray, str, np.ndarray | None]


def _clean_pieces(visibility: Visibility, num_clean: int, window: int | None, block: int | None) -> Iterator[Piece]:
    """Runs of clean queries whose last key moves on by one and whose first key stays: each is one document, or its new part."""
    first, past = visibility.first_key[:num_clean], visibility.past_key[:num_clean]
    breaks = np.flatnonzero((np.diff(past) != 1) | (np.diff(first) != 0)) + 1
    bounds = [0, *breaks.tolist(), num_clean] if num_clean else []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        yield from _causal_run(np.arange(start, stop), int(first[start]), int(past[start]), window, block)


def _causal_run(queries: np.ndarray, first_key: int, past_key: int, window: int | None, block: int | None) -> Iterator[Piece]:
    """Queries whose number i sees keys first_key <= j < past_key + i, of those the last `window`; so many go together then."""
    count, before = len(queries), past_key - first_key - 1  # keys before the first query's own
    if window is None or before + count <= window:
        keys = np.arange(first_key, past_key + count - 1)
        if before == 0:
            yield queries, keys, "causal", None
        else:
            yield queries, keys, "band", _band(count, len(keys), before, len(keys))
        return
    for start in range(0, count, block):
        part = queries[start:start + block]
        earlier = min(before + start, window - 1)  # keys before the block's first own key that anything in it may see
        own = past_key - 1 + start
        keys = np.arange(own - earlier, own + len(part))
        yield part, keys, "band", _band(len(part), len(keys), earlier, window)


def _band(num_queries: int, num_keys: int, before: int, window: int) -> np.ndarray:
    distance = np.arange(num_queries)[:, None] + before - np.arange(num_keys)
    return (distance >= 0) & (distance < window)


def _canvas_pieces(visibility: Visibility, num_clean: int) -> Iterator[Piece]:
    """Runs of queries of one canvas: they see the same clean keys and all of their canvas."""
    ids = visibility.canvas_id[num_clean:]
    bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)] if len(ids) else []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        query = num_clean + start
        own = np.flatnonzero(visibility.canvas_keys == ids[start]) + visibility.num_clean_keys
        prefix = np.arange(visibility.first_key[query], visibility.past_key[query])
        yield np.arange(query, num_clean + stop), np.concatenate([prefix, own]), "rectangle", None
