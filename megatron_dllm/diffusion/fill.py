"""Tokens of fill after the clean stream, so that microbatches of many lengths have few forms (see training/graphs.py).

They are a document of their own that predicts nothing and that nobody sees, so no loss and no gradient changes; they cost what a clean
token costs, and routers' figures and losses leave them out.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from ..transformer.visibility import CLEAN, Visibility
from .streams import DropoutWords, Streams, TokenStream

SCORED_MULTIPLE = 256  # of scored tokens, which cost more than others: the head computes their logits


def filled_up(streams: Streams, multiple: int, pad_token: int) -> Streams:
    """`streams` with its clean tokens filled up to a multiple; `num_fill` says by how many."""
    length = len(streams.clean)
    count = -length % multiple
    if count == 0:
        return streams
    nothing, seen = np.zeros(count, np.int64), streams.visibility
    clean = TokenStream(*(np.concatenate([own, fill]) for own, fill in (
        (streams.clean.tokens, np.full(count, pad_token)), (streams.clean.positions, np.arange(count)), (streams.clean.targets, nothing),
        (streams.clean.weights, np.zeros(count)))))

    def with_fill(own: np.ndarray, fill: np.ndarray) -> np.ndarray:
        return np.concatenate([own[:length], fill, own[length:]])

    visibility = Visibility(
        with_fill(seen.first_key, np.full(count, length)), with_fill(seen.past_key, length + 1 + np.arange(count)),
        with_fill(seen.canvas_id, np.full(count, CLEAN)), seen.canvas_keys, length + count)
    words = streams.dropout and DropoutWords(
        np.concatenate([streams.dropout.clean, nothing]), streams.dropout.canvas, streams.dropout.second)
    return dataclasses.replace(streams, clean=clean, visibility=visibility, dropout=words, num_fill=streams.num_fill + count)
