"""Which tiles of the scores are computed: lists made once a pass on the host, read by every layer and kernel of one type.

A query sees two intervals of the flat keys: bounds [Q, 4] = first and past of the one, first and past of the other, apart and each
possibly empty. Scores are cut in tiles of `tile` x `tile`. With tile 2, a document of 5 tokens and a canvas of 2 after its 3rd, the
first two queries made blind:

              keys   0 1   2 3   4 c0  c1
    query 0, 1       .     .     .     .      nobody sees anything: in no list
    query 2, 3       f     m     .     .      full: every query that sees anything sees all of it, and nothing is checked
    query 4, c0      f     m     m     m      masked: the bounds are read
    query c1         f     m     m     m      the last tile reaches over the last key: masked

Lists are filled up to few different lengths, so that a recorded graph of launches can be replayed with the lists of another batch; what is
filled in names no tile.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .launch import has_large_shared_memory, next_power_of_2, takes

TILE = 128
# The backward holds the probabilities of so many tiles at once: with 16 heads in 16 bits, two times 320 MiB. Those of 4096 causal tokens
# and a canvas fit. On an H200 fewer cost time (512: 5 %, 128: 20 % of their backward), more gain little (2048 for 16384 tokens: 5 %).
PAIRS_AT_ONCE = 640
LEAST_LENGTH = 64
LEAST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 512


@dataclass(frozen=True)
class Chunk:
    """Some query tiles, with all their pairs (query tile, key tile). A slot is the place of a pair, and of its probabilities in memory.

    pairs      int32 [slots, 3]        query tile, key tile, 1 if nothing is to be checked; -1, 0, 0 in slots that are filled in
    by_query   int32 [query tiles, 2]  first slot, how many; 0, -1 for the tiles of other chunks
    by_key     int32 [key tiles, 2]    first row of `slots`, how many
    slots      int32 [slots, 2]        slot, query tile; sorted by key tile
    """

    pairs: Tensor
    by_query: Tensor
    by_key: Tensor
    slots: Tensor


@dataclass(frozen=True)
class AttentionTiles:
    """The lists of one pass and layer type.

    bounds   int32 [query tiles * tile, 4]   zero after the last query
    rows     int32 [query tiles, 6]          full key tiles as two runs (first, how many; twice); first of `masked`, how many
    masked   int32 [n]                       key tiles that need the bounds
    chunks   the same pairs for the backward, and for the forward of wide heads
    live     for the backward where only some queries have a gradient: the pairs of these (None: all have)
    """

    bounds: Tensor
    rows: Tensor
    masked: Tensor
    chunks: tuple[Chunk, ...]
    num_queries: int
    num_keys: int
    tile: int
    live: tuple[Chunk, ...] | None = None

    @property
    def in_backward(self) -> tuple[Chunk, ...]:
        """The chunks that the backward goes through."""
        return self.chunks if self.live is None else self.live


def num_slots(chunks: tuple[Chunk, ...]) -> int:
    """Pairs that are held at once."""
    return max(len(chunk.pairs) for chunk in chunks)


def takes_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels are meant for these (see `suits_attention`)."""
    return takes(query, key, value) and suits_attention(query.shape[-1], query.dtype, query.device)


def suits_attention(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are meant for such: 16 bit, a head dimension that is a power of two from 16 to 512, a device with their memory.

    (fp32 works, without the matrix units.)
    """
    fits = LEAST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM and head_dim == next_power_of_2(head_dim)
    return fits and dtype in (torch.bfloat16, torch.float16) and has_large_shared_memory(device)


def attention_tiles(bounds: np.ndarray, num_keys: int, device: torch.device, *, tile: int = TILE,
                    pairs_at_once: int = PAIRS_AT_ONCE, num_live: int | None = None, one_form: bool = False) -> AttentionTiles:
    """The lists for queries with `bounds` int64 [Q, 4] over `num_keys` flat keys. Chunks hold `pairs_at_once` pairs, or one query tile.

    Only the first `num_live` queries (None: all) have a gradient that is not zero. one_form: lists of one chunk are filled up to the most
    that so many queries and keys can have in one, whatever the bounds.
    """
    num_queries = len(bounds)
    query_tiles = -(-num_queries // tile)
    padded = np.zeros((query_tiles * tile, 4), np.int64)
    padded[:num_queries] = bounds
    touched, full = _visible_tiles(padded, num_keys, tile)
    rows, masked = _rows(touched, full)
    least = min(touched.size, pairs_at_once) if one_form else 0
    chunks, live = _chunks(touched, full, pairs_at_once, least, device), None
    if num_live is not None:
        of_live = touched & (np.arange(query_tiles) < -(-num_live // tile))[:, None]
        live = _chunks(of_live, full, pairs_at_once, least, device)
    return AttentionTiles(
        _int32(padded, device), _int32(rows, device), _int32(_filled(masked, 0, least), device), chunks, num_queries, num_keys, tile, live)


def _visible_tiles(bounds: np.ndarray, num_keys: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [query tiles, key tiles], twice: any query sees any key; every query that sees anything sees every key."""
    query_tiles, key_tiles = len(bounds) // tile, -(-num_keys // tile)
    query_tile = np.arange(len(bounds)) // tile
    any_edges, all_edges = (np.zeros((query_tiles, key_tiles + 1), np.int64) for _ in range(2))
    for first, past in (bounds[:, :2].T, bounds[:, 2:].T):
        _add_intervals(any_edges, query_tile, first // tile, np.where(first < past, -(-past // tile), 0))
        _add_intervals(all_edges, query_tile, -(-first // tile), past // tile)
    seeing = ((bounds[:, 0] < bounds[:, 1]) | (bounds[:, 2] < bounds[:, 3])).reshape(query_tiles, tile).sum(1)
    any_count, all_count = (np.cumsum(edges[:, :-1], axis=1) for edges in (any_edges, all_edges))
    return any_count > 0, (all_count == seeing[:, None]) & (any_count > 0)


def _add_intervals(edges: np.ndarray, row: np.ndarray, first: np.ndarray, past: np.ndarray) -> None:
    """Marks where intervals begin (+1) and end (-1); empty ones are left out."""
    some = first < past
    np.add.at(edges, (row[some], first[some]), 1)
    np.add.at(edges, (row[some], past[some]), -1)


def _rows(touched: np.ndarray, full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AttentionTiles.rows and .masked. Full tiles beyond two runs, which no layer has, are put among the masked ones."""
    number = np.cumsum(np.diff(full, axis=1, prepend=False) & full, axis=1)
    runs = [full & (number == which) for which in (1, 2)]
    rest = touched & ~runs[0] & ~runs[1]
    count = rest.sum(1)
    columns = [column for run in runs for column in (_first(run), run.sum(1))]
    return np.stack([*columns, np.cumsum(count) - count, count], axis=1), np.nonzero(rest)[1]


def _first(marks: np.ndarray) -> np.ndarray:
    """The first mark in each row, 0 if there is none."""
    return marks.argmax(1) if marks.shape[1] else np.zeros(len(marks), np.int64)


def _chunks(touched: np.ndarray, full: np.ndarray, pairs_at_once: int, least: int, device: torch.device) -> tuple[Chunk, ...]:
    bounds, held = [0], 0
    for query_tile, count in enumerate(touched.sum(1).tolist()):
        if held and held + count > pairs_at_once:
            bounds.append(query_tile)
            held = 0
        held += count
    bounds.append(len(touched))
    return tuple(_chunk(touched, full, start, stop, least, device) for start, stop in zip(bounds, bounds[1:], strict=False))


def _chunk(touched: np.ndarray, full: np.ndarray, start: int, stop: int, least: int, device: torch.device) -> Chunk:
    """Query tiles start to stop; the first chunk of all has at least the tiles without a pair, whose gradient is zero."""
    query, key = np.nonzero(touched[start:stop])
    query += start
    count = np.where((np.arange(len(touched)) >= start) & (np.arange(len(touched)) < stop), touched.sum(1), -1)
    first = np.zeros(len(touched), np.int64)
    first[start:stop] = np.cumsum(count[start:stop]) - count[start:stop]
    by_key = np.bincount(key, minlength=touched.shape[1])
    slots = np.argsort(key, kind="stable")
    lists = (
        _filled(np.stack([query, key, full[query, key]], axis=1), (-1, 0, 0), least), np.stack([first, count], axis=1),
        np.stack([np.cumsum(by_key) - by_key, by_key], axis=1), _filled(np.stack([slots, query[slots]], axis=1), 0, least))
    return Chunk(*(_int32(values, device) for values in lists))


def _filled(values: np.ndarray, fill, least: int) -> np.ndarray:
    """`values` with rows of `fill` after them, up to one of eight lengths between a power of two and the next, from `least` on."""
    length = max(len(values), least)
    step = max(next_power_of_2(length) // 8, LEAST_LENGTH)
    out = np.empty((max(-(-length // step) * step, step), *values.shape[1:]), np.int64)
    out[:len(values)], out[len(values):] = values, fill
    return out


def _int32(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
