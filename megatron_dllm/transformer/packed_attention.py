"""Attention that takes sequences lying one after the other, as Transformer Engine's does (--attention-backend transformer_engine): a plan.

A document's clean tokens see themselves causally, in sliding layers within the window; the queries of a canvas all see the same keys, its
clean ones and its own, which are brought together. So no mask is held, of any size:

    queries    P0 P1 a b | Q0 c      x y | z        two documents; a canvas of each
    keys       P0 P1 a b | Q0 c      P0 P1 x y | Q0 z
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig, TrainingConfig
from ..config.checks_engine import WIDEST_HEAD
from .rows import Rows
from .visibility import CLEAN, Visibility

LENGTH_MULTIPLE = 128  # of the longest lengths, so that it is told fewer different ones


@dataclass(frozen=True)
class Sequences:
    """Some consecutive queries and the keys that they see, sequence after sequence.

    query_starts, key_starts: int32 [n + 1], where each of the n begins and the last ends. longest_query, longest_key: filled up to a
    multiple. causal: query i of a sequence sees its keys up to i, of those the last `window`; else all.
    """

    num_queries: int
    keys: Rows
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int | None


@dataclass(frozen=True)
class PackedPlan:
    """The queries of one pass in the layers of one type: those of clean tokens, then those of canvases; either may be absent."""

    parts: tuple[Sequences, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[Q, h, d] from query [Q, h, d], key and value [K, g, d], scale 1. Rows after the plan's are fill: zero."""
        from ..transformer_engine.attention import sequence_attention  # there when a flag asks for it

        if not self.parts:
            return query
        outputs, start = [], 0
        for part in self.parts:
            own = query[start:start + part.num_queries]
            outputs.append(sequence_attention(own, part.keys.take(key), part.keys.take(value), part))
            start += part.num_queries
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return F.pad(joined, (0, 0, 0, 0, 0, len(query) - start)) if start < len(query) else joined


def packed_types(training: TrainingConfig, model: ModelConfig) -> frozenset[str]:
    """The layer types whose attention --attention-backend gives to the package; wider heads stay ours."""
    if training.attention_backend == "local":
        return frozenset()
    widths = {kind: model.head_dim(model.layer_types.index(kind)) for kind in set(model.layer_types) - {"linear"}}
    return frozenset(kind for kind, width in widths.items() if width <= WIDEST_HEAD)


def packed_plan(visibility: Visibility, window: int | None, device: torch.device, key_order: np.ndarray | None = None) -> PackedPlan:
    """The plan of one layer type for one pass; `visibility` is without the window. `key_order` int64 [num_clean_keys]: where the clean keys
    stand, if not in its order."""
    num_clean, num_keys = int((visibility.canvas_id == CLEAN).sum()), visibility.num_clean_keys
    places = np.arange(num_keys + len(visibility.canvas_keys))
    if key_order is not None:
        places[:num_keys] = key_order
    parts = []
    if num_clean:
        first, past = visibility.first_key[:num_clean], visibility.past_key[:num_clean]
        starts = np.flatnonzero(np.diff(first, prepend=-1))
        assert (past - first == np.arange(1, num_clean + 1) - np.repeat(starts, np.diff(starts, append=num_clean))).all(), \
            "clean tokens come by whole documents, from their first token on"
        lengths = np.diff(starts, append=num_clean)
        parts.append(_sequences(lengths, lengths, places[past - 1], device, causal=True, window=window))
    if num_clean < len(visibility.canvas_id):
        canvas = visibility.canvas_id[num_clean:]
        starts = np.flatnonzero(np.diff(canvas, prepend=CLEAN))
        intervals = visibility.windowed(window).key_intervals()[num_clean + starts]
        keys = [np.concatenate([np.arange(*seen[:2]), np.arange(*seen[2:])]) for seen in intervals]
        parts.append(_sequences(np.diff(starts, append=len(canvas)), np.array([len(seen) for seen in keys]), places[np.concatenate(keys)],
                                device, causal=False))
    return PackedPlan(tuple(parts))


def _sequences(num_queries: np.ndarray, num_keys: np.ndarray, keys: np.ndarray, device: torch.device, *, causal: bool,
               window: int | None = None) -> Sequences:
    """Sequences of so many queries and keys each; `keys`: where the latter stand."""
    query_starts, key_starts = (torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)).to(device) for counts in (num_queries, num_keys))
    longest = (-(-int(counts.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for counts in (num_queries, num_keys))
    return Sequences(int(num_queries.sum()), Rows.of(keys, device), query_starts, key_starts, *longest, causal, window)
