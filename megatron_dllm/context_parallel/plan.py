"""Attention of one layer type over tokens that the ranks of cp share, planned from lengths alone: nothing is negotiated at run time.

Every plan is derived from one Visibility, that of the whole microbatch: since a query sees an interval of the clean keys, it sees an
interval of any rising choice of them, and three integers say which. With 6 clean keys over 2 ranks and a query that sees keys 1 to 4:

    key            0 1 2 3 4 5
    rank 0 holds   0 . . . 4 5       first 1, past 2 of its three
    rank 1 holds   . 1 2 3 . .       first 0, past 3 of its three
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..parallel import Group
from ..transformer.core_attention import attention_plan
from ..transformer.rows import Rows
from ..transformer.visibility import CLEAN, Visibility
from . import transformer_engine
from .heads import HeadsPlan
from .partial import PartialPlan, partial_plan
from .replicated import ReplicatedPlan
from .stationary import GatherPlan, HaloPlan, Meeting, PairsPlan


@dataclass(frozen=True)
class Shards:
    """Who has what in one pass, by rank of cp; numbers are those of the pass's Visibility, rising.

    held       int64: clean keys (own clean tokens, or what an earlier pass kept of them)
    clean      int64: clean queries
    canvas     int64: canvas tokens, counted from the first canvas query; a rank has the keys of its canvas queries
    whole      canvases are on one rank each
    comm_type  how keys come to queries: halo, p2p, all_gather or a2a
    rank       ours
    package    the attention is Transformer Engine's; documents are cut by `layout.zigzag_documents`
    """

    held: tuple[np.ndarray, ...]
    clean: tuple[np.ndarray, ...]
    canvas: tuple[np.ndarray, ...]
    whole: bool
    comm_type: str
    rank: int
    package: bool = False


class Attending(Protocol):
    """What a plan does for own queries [Q, h, d] and own keys and values [K, g, d]."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor: ...


@dataclass(frozen=True)
class ShardedPlan:
    """Rows of the queries are [stationary ; replicated ; fill], rows of the keys [held ; canvas ; fill].

    None: no rank has such queries.
    """

    num_stationary: int
    num_replicated: int
    num_held: int
    num_keys: int
    stationary: Attending | None
    replicated: Attending | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]; rows of fill are zero."""
        if self.stationary is None and self.replicated is None:
            return query
        outputs, num_queries = [], self.num_stationary + self.num_replicated
        if self.stationary is not None:
            # Canvases that are shared out are no affair of the clean queries.
            stop = self.num_keys if self.replicated is None else self.num_held
            outputs.append(self.stationary.attend(query[:self.num_stationary], key[:stop], value[:stop], cp))
        if self.replicated is not None:
            outputs.append(self.replicated.attend(query[self.num_stationary:num_queries], key[:self.num_keys], value[:self.num_keys], cp))
        outputs.append(query.new_zeros(len(query) - num_queries, *query.shape[1:]))
        return torch.cat(outputs)


def sharded_plan(visibility: Visibility, window: int | None, shards: Shards, device: torch.device) -> ShardedPlan:
    """The plan of a layer type. `visibility` is that of all queries and keys of the pass, without the window."""
    num_clean = len(visibility.canvas_id) - len(visibility.canvas_keys)
    rank, seen = shards.rank, visibility.windowed(window)
    own_canvas = shards.canvas[rank]
    assert not (shards.package and shards.whole), "Transformer Engine has a part of every canvas on every rank"
    queries = [np.concatenate([clean, num_clean + canvas]) if shards.whole else clean
               for clean, canvas in zip(shards.clean, shards.canvas, strict=True)]
    keys = [canvas if shards.whole else canvas[:0] for canvas in shards.canvas]
    stationary = replicated = None
    if sum(map(len, queries)) and shards.package:
        stationary = package_plan(visibility, window, shards)
    elif sum(map(len, queries)):
        build = {"halo": halo_plan, "all_gather": gather_plan, "p2p": pairs_plan, "a2a": heads_plan}[shards.comm_type]
        stationary = build(visibility, window, Stationary(shards.held, tuple(queries), tuple(keys), rank), device)
    if shards.package and sum(map(len, shards.canvas)):
        parts = [seen_by(seen, num_clean + own_canvas, held, canvas) for held, canvas in zip(shards.held, shards.canvas, strict=True)]
        replicated = transformer_engine.canvas_plan(parts, counts_of(shards.canvas), device)
    elif not shards.whole and sum(map(len, shards.canvas)):
        everyone = num_clean + np.concatenate(shards.canvas)
        replicated = ReplicatedPlan(
            counts_of(shards.canvas), partial_plan(seen_by(seen, everyone, shards.held[rank], own_canvas), device))
    num_replicated = 0 if shards.whole else len(own_canvas)
    num_held = len(shards.held[rank])
    return ShardedPlan(len(queries[rank]), num_replicated, num_held, num_held + len(own_canvas), stationary, replicated)


@dataclass(frozen=True)
class Stationary:
    """By rank: clean keys, queries, and canvas keys of the queries that keys come to."""

    held: tuple[np.ndarray, ...]
    queries: tuple[np.ndarray, ...]
    canvas: tuple[np.ndarray, ...]
    rank: int


def counts_of(parts: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The length of each."""
    return tuple(len(part) for part in parts)


def seen_by(visibility: Visibility, queries: np.ndarray, held: np.ndarray, canvas: np.ndarray) -> Visibility:
    """The visibility of some queries over some clean keys (`held`, rising) and some canvas keys alone."""
    first, past = (np.searchsorted(held, bound[queries]) for bound in (visibility.first_key, visibility.past_key))
    return Visibility(first, past, visibility.canvas_id[queries], visibility.canvas_keys[canvas], len(held))


def reached_keys(visibility: Visibility, window: int | None, queries: np.ndarray) -> np.ndarray:
    """The clean keys, rising, that any of the queries sees."""
    marks = np.zeros(len(visibility.canvas_id), bool)
    marks[queries] = True
    return visibility.windowed(window).kept_keys(marks)


def package_plan(visibility: Visibility, window: int | None, shards: Shards) -> transformer_engine.CausalPlan:
    """Transformer Engine's plan of the clean queries."""
    own = shards.clean[shards.rank]
    assert np.array_equal(own, shards.held[shards.rank]), "clean queries come with their keys, and no others"
    starts = np.unique(visibility.first_key[visibility.canvas_id == CLEAN])
    return transformer_engine.causal_plan(own, starts, visibility.num_clean_keys, window, shards.comm_type, len(shards.clean))


def halo_plan(visibility: Visibility, window: int | None, parts: Stationary, device: torch.device) -> HaloPlan:
    """Each rank gets what its queries reach and it does not hold."""
    rank, held = parts.rank, parts.held
    reached = [reached_keys(visibility, window, queries) for queries in parts.queries]
    send = [np.flatnonzero(np.isin(held[rank], keys)) if other != rank else np.zeros(0, np.int64) for other, keys in enumerate(reached)]
    received = [np.intersect1d(reached[rank], keys) if other != rank else np.zeros(0, np.int64) for other, keys in enumerate(held)]
    at_hand = np.concatenate([held[rank], *received])
    order = np.argsort(at_hand)
    own = seen_by(visibility, parts.queries[rank], at_hand[order], parts.canvas[rank])
    return HaloPlan(
        len(held[rank]), tuple(Rows.of(places, device) for places in send), counts_of(send), counts_of(received),
        attention_plan(own, window, device, key_order=order))


def gather_plan(visibility: Visibility, window: int | None, parts: Stationary, device: torch.device) -> GatherPlan:
    """Every rank gets every key."""
    everyone = np.concatenate(parts.held)
    order = np.argsort(everyone)
    own = seen_by(visibility.windowed(window), parts.queries[parts.rank], everyone[order], parts.canvas[parts.rank])
    return GatherPlan(counts_of(parts.held), Rows.of(order, device), partial_plan(own, device))


def pairs_plan(visibility: Visibility, window: int | None, parts: Stationary, device: torch.device) -> PairsPlan:
    """Each rank gets from each other what its queries reach, in turn."""
    seen, nothing, rank, ranks = visibility.windowed(window), np.zeros(0, np.int64), parts.rank, len(parts.held)
    reached = [reached_keys(visibility, window, queries) for queries in parts.queries]

    def over(held: np.ndarray, canvas: np.ndarray) -> PartialPlan:
        return partial_plan(seen_by(seen, parts.queries[rank], held, canvas), device)

    meetings = []
    for distance in range(1, ranks):
        send = np.flatnonzero(np.isin(parts.held[rank], reached[(rank + distance) % ranks]))
        received = np.intersect1d(parts.held[(rank - distance) % ranks], reached[rank])
        meetings.append(Meeting(Rows.of(send, device), len(send), len(received), over(received, nothing)))
    return PairsPlan(len(parts.held[rank]), over(parts.held[rank], parts.canvas[rank]), tuple(meetings))


def heads_plan(visibility: Visibility, window: int | None, parts: Stationary, device: torch.device) -> HeadsPlan:
    """Every rank gets all queries and keys of some heads."""
    num_keys = visibility.num_clean_keys
    keys = [np.concatenate([held, num_keys + canvas]) for held, canvas in zip(parts.held, parts.canvas, strict=True)]
    query_order, key_order = (np.argsort(np.concatenate(rows)) for rows in (parts.queries, keys))
    every_query, every_canvas = np.sort(np.concatenate(parts.queries)), np.sort(np.concatenate(parts.canvas))
    everything = seen_by(visibility, every_query, np.sort(np.concatenate(parts.held)), every_canvas)
    return HeadsPlan(
        counts_of(parts.queries), counts_of(keys), Rows.of(query_order, device), Rows.of(np.argsort(query_order), device),
        Rows.of(key_order, device), attention_plan(everything, window, device))
