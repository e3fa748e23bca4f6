"""Attention over short work groups on a CPU: plain products of all of a pass's groups, in one function with a backward of its own.

What SDPA would want of each group (heads repeated, pieces copied, results joined and put in order, each with a node of autograd) takes
longer at such sizes than attention itself. What is kept, the probabilities, grows with queries times keys of a piece, so that longer
pieces go to SDPA.

Legend: G pieces of n queries and m keys, h query heads, g key and value heads, r = h / g, d head dimension.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .attention_work import WorkGroup
from .plain_function import PlainFunction
from .precision import at_least_fp32
from .rows import Rows

MOST_SCORES = 1 << 17  # of a piece and head
CAUSAL_ROWS = 128  # of a causal piece go together: what none of them sees is left out
MOST_FILL = 1 << 13  # scores that may be computed for nothing in order to have a group less: its operations take as long


@dataclass(frozen=True)
class SmallGroup:
    """G pieces: which rows their queries and keys are. `hidden` fp32 [1 or G, 1, n, m]: -inf where a query does not see a key, 0 elsewhere
    (None: every query sees every key).

    Pieces that are shorter than others are filled up: with keys that nobody sees, and with queries that count for nothing: `idle` bool
    [G, 1, n, 1] (None: none). `real` int64: the places of the others in G * n, `queries.index[real]` being distinct.
    """

    queries: Rows
    keys: Rows
    num_pieces: int
    hidden: Tensor | None
    real: Tensor | None = None
    idle: Tensor | None = None


def small_attention(query: Tensor, key: Tensor, value: Tensor, groups: Sequence[SmallGroup], *, keeps_rows: bool = False) -> Tensor:
    """softmax(q k^T) v [Q, h, d] from query [Q, h, d], key and value [K, g, d]; each query is in one group. In at least fp32.

    keeps_rows: for the backward, only what has a row a token is kept (see joint_backward), and probabilities are made again.
    """
    return _SmallAttention.of(query, key, value, groups, keeps_rows)


def is_small(num_queries: int, num_keys: int, *, causal: bool) -> bool:
    """Whether a piece of so many queries and keys (or its rows, where it is causal) is small enough."""
    return (min(num_queries, CAUSAL_ROWS) if causal else num_queries) * num_keys <= MOST_SCORES


def whole_group(mask: np.ndarray) -> SmallGroup:
    """All queries and all keys as one piece, from who sees whom, bool [Q, K]."""
    queries, keys = (Rows(slice(0, count), True) for count in mask.shape)
    return SmallGroup(queries, keys, 1, _minus_infinity(mask[None]))


def small_groups(work: Sequence[WorkGroup]) -> tuple[SmallGroup, ...] | None:
    """The work in few groups: causal pieces in blocks of rows, pieces of near sizes filled up to one. None where a piece is too large."""
    blocks = sorted((block for group in work for block in _row_blocks(group)), key=_scores, reverse=True)
    if blocks and _scores(blocks[0]) > MOST_SCORES:
        return None
    joined: list[list[WorkGroup]] = []
    for block in blocks:
        if joined and _fill([*joined[-1], block]) - _fill(joined[-1]) <= MOST_FILL:
            joined[-1].append(block)
        else:
            joined.append([block])
    return tuple(map(_small_group, joined))


def _row_blocks(group: WorkGroup) -> Iterator[WorkGroup]:
    """A group whose pieces are not causal, or those of its rows, a mask instead."""
    if not group.causal:
        yield group
        return
    size = group.queries.shape[1]
    for start in range(0, size, CAUSAL_ROWS):
        stop = min(start + CAUSAL_ROWS, size)
        seen = np.tri(stop - start, stop, start, dtype=bool)
        yield WorkGroup(group.queries[:, start:stop], group.keys[:, :stop], seen, causal=False)


def _scores(group: WorkGroup) -> int:
    """Of a piece and head."""
    return group.queries.shape[1] * group.keys.shape[1]


def _size(groups: Sequence[WorkGroup]) -> tuple[int, int]:
    """Queries and keys of the pieces that all pieces of these groups fit in."""
    return max(group.queries.shape[1] for group in groups), max(group.keys.shape[1] for group in groups)


def _fill(groups: Sequence[WorkGroup]) -> int:
    """Scores for nothing where the pieces of these groups are filled up to one size."""
    queries, keys = _size(groups)
    return sum(len(group.queries) * (queries * keys - _scores(group)) for group in groups)


def _small_group(groups: Sequence[WorkGroup]) -> SmallGroup:
    """One group of all pieces, filled up by the last query and the last key of each."""
    num_queries, num_keys = _size(groups)
    queries, keys, seen, is_real = [], [], [], []
    for group in groups:
        (pieces, own_queries), own_keys = group.queries.shape, group.keys.shape[1]
        more_queries, more_keys = (0, num_queries - own_queries), (0, num_keys - own_keys)
        queries.append(np.pad(group.queries, ((0, 0), more_queries), "edge"))
        keys.append(np.pad(group.keys, ((0, 0), more_keys), "edge"))
        mask = np.ones((own_queries, own_keys), bool) if group.mask is None else group.mask
        mask = np.pad(np.pad(mask, ((0, 0), more_keys)), (more_queries, (0, 0)), "edge")
        seen.append(np.broadcast_to(mask, (pieces if len(groups) > 1 else 1, num_queries, num_keys)))
        is_real.append(np.broadcast_to(np.arange(num_queries) < own_queries, (pieces, num_queries)))
    every = np.concatenate(is_real).reshape(-1)
    real = idle = None
    if not every.all():
        real, idle = torch.from_numpy(np.flatnonzero(every)), torch.from_numpy(~every).view(-1, 1, num_queries, 1)
    hidden = None if all(mask.all() for mask in seen) else _minus_infinity(np.concatenate(seen))
    rows, device = np.concatenate(queries), torch.device("cpu")
    return SmallGroup(Rows.of(rows, device), Rows.of(np.concatenate(keys), device), len(rows), hidden, real, idle)


def _minus_infinity(seen: np.ndarray) -> Tensor:
    """fp32 [G, 1, n, m] of bool [G, n, m]."""
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))[:, None]


def _keys(x: Tensor, group: SmallGroup) -> Tensor:
    """[G * g, m, d] of x [K, g, d]."""
    taken = _taken(x, group.keys)
    if group.num_pieces == 1:
        return taken.transpose(0, 1)
    return taken.view(group.num_pieces, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 1)


def _queries(x: Tensor, group: SmallGroup, groups: int) -> Tensor:
    """[G * g, r * n, d] of x [Q, h, d]: the heads that share keys stand together."""
    heads, head_dim = x.shape[1:]
    pieces = _taken(x, group.queries).view(group.num_pieces, -1, heads, head_dim)
    return pieces.transpose(1, 2).reshape(group.num_pieces * groups, -1, head_dim)


def _taken(x: Tensor, rows: Rows) -> Tensor:
    """x[rows], contiguous but for a run of rows of an x that is not."""
    return _run(x, rows.index) if isinstance(rows.index, slice) else x.index_select(0, rows.index)


def _run(x: Tensor, run: slice) -> Tensor:
    """x[run], without a view where these are all rows."""
    return x if run == slice(0, x.shape[0]) else x[run]


def _place_queries(x: Tensor, rows: Tensor, group: SmallGroup) -> None:
    """The inverse of `_queries`: x [G * g, r * n, d] into its places of rows [Q, h, d]."""
    heads, head_dim = rows.shape[1:]
    pieces = x.view(group.num_pieces, heads, -1, head_dim).transpose(1, 2)
    if isinstance(group.queries.index, slice):
        _run(rows, group.queries.index).view(pieces.shape).copy_(pieces)
        return
    flat, index = pieces.reshape(-1, heads, head_dim), group.queries.index
    if group.real is not None:
        flat, index = flat.index_select(0, group.real), index.index_select(0, group.real)
    rows.index_copy_(0, index, flat)


def _add_keys(x: Tensor, rows: Tensor, group: SmallGroup) -> None:
    """Add x [G * g, m, d] where `_keys` took it from rows [K, g, d]. Pieces may share keys."""
    heads, head_dim = rows.shape[1:]
    pieces = x.view(group.num_pieces, heads, -1, head_dim).transpose(1, 2)
    if isinstance(group.keys.index, slice):
        _run(rows, group.keys.index).view(pieces.shape).add_(pieces)
    else:
        rows.index_add_(0, group.keys.index, pieces.reshape(-1, heads, head_dim))


def _factors(query: Tensor, key: Tensor, value: Tensor, group: SmallGroup) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a group."""
    return _queries(query, group, key.shape[1]), _keys(key, group), _keys(value, group)


def _probabilities(q: Tensor, k: Tensor, group: SmallGroup) -> Tensor:
    scores = torch.bmm(q, k.mT)
    if group.hidden is not None:
        # Several times as fast as masked_fill_.
        scores.view(group.num_pieces, -1, *group.hidden.shape[2:]).add_(group.hidden)
    return torch.softmax(scores, -1, out=scores)  # row by row: in place


class _SmallAttention(PlainFunction):
    """Saved: of each group q, k, v and the probabilities p, or the inputs. ds = p * (dp - sum of dp * p) with dp = do v^T."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[SmallGroup], keeps_rows: bool) -> Tensor:
        wide = tuple(map(at_least_fp32, (query, key, value)))
        out, saved = torch.empty_like(wide[0], memory_format=torch.contiguous_format), []
        for group in groups:
            q, k, v = _factors(*wide, group)
            p = _probabilities(q, k, group)
            _place_queries(torch.bmm(p, v), out, group)
            saved += [] if keeps_rows else [q, k, v, p]
        ctx.save_for_backward(*(wide if keeps_rows else saved))
        ctx.groups, ctx.keeps_rows, ctx.dtype, ctx.query_shape, ctx.key_shape = groups, keeps_rows, query.dtype, query.shape, key.shape
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, dout: Tensor):
        saved, dout, num_heads = ctx.saved_tensors, at_least_fp32(dout), ctx.key_shape[1]
        dquery, dkey, dvalue = dout.new_empty(ctx.query_shape), dout.new_zeros(ctx.key_shape), dout.new_zeros(ctx.key_shape)
        for number, group in enumerate(ctx.groups):
            if ctx.keeps_rows:
                q, k, v = _factors(*saved, group)
                p = _probabilities(q, k, group)
            else:
                q, k, v, p = saved[4 * number:4 * number + 4]
            do = _queries(dout, group, num_heads)
            if group.idle is not None:
                do.view(group.num_pieces, ctx.query_shape[1], -1, do.shape[-1]).masked_fill_(group.idle, 0)
            _add_keys(torch.bmm(p.mT, do), dvalue, group)
            dp = torch.bmm(do, v.mT)
            dscores = torch._softmax_backward_data(dp, p, -1, p.dtype, grad_input=dp)
            _add_keys(torch.bmm(dscores.mT, q), dkey, group)
            _place_queries(torch.bmm(dscores, k), dquery, group)
        return dquery.to(ctx.dtype), dkey.to(ctx.dtype), dvalue.to(ctx.dtype), None, None
