"""Several examples in one row."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np


def pack_rows(lengths: np.ndarray, capacity: int, max_canvases: int, canvases: np.ndarray | None = None) -> np.ndarray:
    """Next fit: row r holds examples offsets[r] to offsets[r + 1], order kept; an example that does not fit opens the next row.

        lengths    int [N]    tokens of each example with its fill, at least 1
        canvases   int [N]    canvases that each example decodes; None: one each
        offsets    int64 [R + 1]

    With lengths 3 4 2 5 in rows of 8 and at most two canvases: 0 2 4, the rows (3 4) and (2 5).
    ValueError for an example that no row can hold.
    """
    canvases = np.ones(len(lengths), np.int64) if canvases is None else canvases
    for values, limit, remedy in ((lengths, capacity, "raise --seq-length"), (canvases, max_canvases, "raise --max-canvases-per-row")):
        if len(values) and values.max() > limit:
            place = int(np.argmax(values))
            raise ValueError(f"example {place} needs {int(values[place])} of the {limit} {'tokens' if values is lengths else 'canvases'} "
                             f"of a row; {remedy}")
    token_ends, canvas_ends = np.cumsum(lengths, dtype=np.int64).tolist(), np.cumsum(canvases, dtype=np.int64).tolist()
    offsets = [0]
    while offsets[-1] < len(lengths):
        start = offsets[-1]
        tokens, decoded = (token_ends[start - 1], canvas_ends[start - 1]) if start else (0, 0)
        holds_tokens = bisect_right(token_ends, tokens + capacity, lo=start)
        holds_canvases = bisect_right(canvas_ends, decoded + max_canvases, lo=start)
        offsets.append(min(holds_tokens, holds_canvases))
    return np.asarray(offsets, np.int64)
