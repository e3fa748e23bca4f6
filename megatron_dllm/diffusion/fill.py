"""Tokens of fill after the clean stream, and canvases of it, so that microbatches of many lengths have few forms (see training/graphs.py).

They are documents of their own that predict nothing and that nobody sees, so no loss and no gradient changes; they cost what other tokens
cost, and routers' figures and losses leave them out.
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


def filled_up_canvases(streams: Streams, multiple: int, length: int, pad_token: int, *, drafted: bool) -> Streams:
    """`streams` with canvases of `length` tokens up to a multiple of so many, at least one; `drafted`: these go through the second loop."""
    there = len(np.unique(streams.visibility.canvas_keys))
    missing = -there % multiple if there else multiple
    count, seen = missing * length, streams.visibility
    if count == 0:
        return streams
    nothing, own = np.zeros(count, np.int64), there + np.repeat(np.arange(missing), length)
    canvas = TokenStream(*(np.concatenate([have, fill]) for have, fill in (
        (streams.canvas.tokens, np.full(count, pad_token)), (streams.canvas.positions, np.tile(np.arange(length), missing)),
        (streams.canvas.targets, nothing), (streams.canvas.weights, np.zeros(count)))))
    visibility = Visibility(
        np.concatenate([seen.first_key, nothing]), np.concatenate([seen.past_key, nothing]), np.concatenate([seen.canvas_id, own]),
        np.concatenate([seen.canvas_keys, own]), seen.num_clean_keys)
    words, left_out = streams.dropout, streams.left_out
    return dataclasses.replace(
        streams, canvas=canvas, visibility=visibility, self_conditioned=np.concatenate([streams.self_conditioned, np.full(count, drafted)]),
        noise_level=np.concatenate([streams.noise_level, np.zeros(count)]),
        observed_bonus=np.concatenate([streams.observed_bonus, np.zeros(count)]),
        dropout=words and DropoutWords(words.clean, *(np.concatenate([part, nothing]) for part in (words.canvas, words.second))),
        left_out=None if left_out is None else np.concatenate([left_out, np.ones(count, bool)]),
        num_fill_canvas=streams.num_fill_canvas + count)
