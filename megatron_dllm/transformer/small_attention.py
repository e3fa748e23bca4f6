"""Attention over short work groups on a CPU: plain products of all of a pass's groups, in one function with a backward of its own.

What SDPA would want of each group (heads repeated, pieces copied, results joined and put in order, each with a node of autograd) takes
longer at such sizes than attention itself. What is kept, the probabilities, grows with queries times keys of a piece, so that longer
pieces go to SDPA.

Legend: G pieces of n queries and m keys, h query heads, g key and value heads, r = h / g, d head dimension.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .plain_function import PlainFunction
from .precision import at_least_fp32
from .rows import Rows

MOST_SCORES = 1 << 16  # of a piece and head


@dataclass(frozen=True)
class SmallGroup:
    """G pieces: which rows their queries and keys are, and who does not see whom, bool [n, m] (None: every query sees every key)."""

    queries: Rows
    keys: Rows
    num_pieces: int
    hidden: Tensor | None


def small_attention(query: Tensor, key: Tensor, value: Tensor, groups: Sequence[SmallGroup]) -> Tensor:
    """softmax(q k^T) v [Q, h, d] from query [Q, h, d], key and value [K, g, d]; each query is in one group. In at least fp32."""
    return _SmallAttention.of(query, key, value, groups)


def whole_group(mask: np.ndarray) -> SmallGroup:
    """All queries and all keys as one piece, from who sees whom, bool [Q, K]."""
    queries, keys = (Rows(slice(0, count), True) for count in mask.shape)
    return SmallGroup(queries, keys, 1, torch.from_numpy(~mask))


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
    else:
        rows.index_copy_(0, group.queries.index, pieces.reshape(-1, heads, head_dim))


def _add_keys(x: Tensor, rows: Tensor, group: SmallGroup) -> None:
    """Add x [G * g, m, d] where `_keys` took it from rows [K, g, d]. Pieces may share keys."""
    heads, head_dim = rows.shape[1:]
    pieces = x.view(group.num_pieces, heads, -1, head_dim).transpose(1, 2)
    if isinstance(group.keys.index, slice):
        _run(rows, group.keys.index).view(pieces.shape).add_(pieces)
    else:
        rows.index_put_((group.keys.index,), pieces.reshape(-1, heads, head_dim), accumulate=True)


class _SmallAttention(PlainFunction):
    """Saved: of each group q, k, v and the probabilities p. ds = p * (dp - sum of dp * p) with dp = do v^T."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[SmallGroup]) -> Tensor:
        q, k, v = map(at_least_fp32, (query, key, value))
        out, saved, num_heads = torch.empty_like(q, memory_format=torch.contiguous_format), [], key.shape[1]
        for group in groups:
            factors = _queries(q, group, num_heads), _keys(k, group), _keys(v, group)
            scores = torch.bmm(factors[0], factors[1].mT)
            if group.hidden is not None:
                scores.view(-1, *group.hidden.shape).masked_fill_(group.hidden, -torch.inf)
            p = scores.softmax(-1)
            _place_queries(torch.bmm(p, factors[2]), out, group)
            saved += *factors, p
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.dtype, ctx.query_shape, ctx.key_shape = groups, query.dtype, query.shape, key.shape
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, dout: Tensor):
        saved, dout, num_heads = iter(ctx.saved_tensors), at_least_fp32(dout), ctx.key_shape[1]
        dquery, dkey, dvalue = dout.new_empty(ctx.query_shape), dout.new_zeros(ctx.key_shape), dout.new_zeros(ctx.key_shape)
        for group, q, k, v, p in zip(ctx.groups, saved, saved, saved, saved, strict=False):
            do = _queries(dout, group, num_heads)
            _add_keys(torch.bmm(p.mT, do), dvalue, group)
            dp = torch.bmm(do, v.mT)
            dscores = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p)
            _add_keys(torch.bmm(dscores.mT, q), dkey, group)
            _place_queries(torch.bmm(dscores, k), dquery, group)
        return dquery.to(ctx.dtype), dkey.to(ctx.dtype), dvalue.to(ctx.dtype), None
