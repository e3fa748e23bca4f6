"""Attention over short work groups on a CPU: plain products of all of a pass's groups, in one function with a backward of its own.

What SDPA would want of each group (heads repeated, pieces copied, results joined and put in order, each with a node of autograd) takes
longer at such sizes than attention itself. What is kept, the probabilities, grows with queries times keys of a piece, so that longer
pieces go to SDPA.

All moves are of rows of d numbers, one of a head, and of one operation: pieces are gathered as the products want them, results are gathered
back, and a key's gradient is the sum of a bag of rows, one from each piece that has it.

Legend: G pieces of n queries and m keys, h query heads, g key and value heads, r = h / g, d head dimension.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_work import WorkGroup
from .plain_function import PlainFunction
from .precision import at_least_fp32

MOST_SCORES = 1 << 17  # of a piece and head
CAUSAL_ROWS = 64  # of a causal piece go together: what none of them sees is left out
MOST_FILL = 1 << 13  # scores that may be computed for nothing in order to have a group less: its operations take as long
VECTOR = 16  # numbers of fp32 that a CPU takes at once: products and softmax of 47 keys take twice as long as those of 48


@dataclass(frozen=True)
class SmallGroup:
    """G pieces, whose queries are rows int64 [G, n] and whose keys are rows int64 [G, m]. `hidden` fp32 [1 or G, 1, n, m]: -inf where a
    query does not see a key, 0 elsewhere (None: every query sees every key).

    Pieces that are shorter than others are filled up: with keys that nobody sees, and with queries that count for nothing. real_queries
    bool [G, n], real_keys bool [G, m]: which are no fill.
    """

    queries: np.ndarray
    keys: np.ndarray
    hidden: Tensor | None
    real_queries: np.ndarray
    real_keys: np.ndarray

    @cached_property
    def idle(self) -> Tensor | None:
        """bool [G, 1, n, 1]: which queries are fill (None: none)."""
        return None if self.real_queries.all() else torch.from_numpy(~self.real_queries)[:, None, :, None]


@dataclass(frozen=True)
class SmallWork:
    """Groups in which each query of a pass is once, and where their rows of heads stand: made when first asked for, for all layers.

    A tensor x [T, heads, d] is read as rows of heads, `apart` of them from one token to the next (more than heads in a part of a tensor).
    is_whole: there is one piece, of all queries and all keys, for which views are enough.
    """

    groups: tuple[SmallGroup, ...]
    is_whole: bool = False

    @cached_property
    def _made(self) -> dict[tuple, Any]:
        return {}

    def _once(self, make: Callable[..., Any], *sizes: Any) -> Any:
        """make(*sizes), made once."""
        key = make.__name__, *sizes
        if key not in self._made:
            self._made[key] = make(*sizes)
        return self._made[key]

    def queries(self, x: Tensor, key_heads: int) -> list[Tensor]:
        """Of each group [G * g, r * n, d] of x [Q, h, d]: the heads that share keys stand together."""
        if self.is_whole:
            return [x.transpose(0, 1).reshape(key_heads, -1, x.shape[2])]
        rows, apart = _rows_of_heads(x)
        return [rows.index_select(0, own).view(len(group.queries) * key_heads, -1, x.shape[2])
                for group, own in zip(self.groups, self._once(self._query_rows, x.shape[1], apart), strict=True)]

    def _query_rows(self, heads: int, apart: int) -> list[Tensor]:
        return [_by_head(group.queries, heads, apart) for group in self.groups]

    def keys(self, x: Tensor) -> list[Tensor]:
        """Of each group [G * g, m, d] of x [K, g, d]."""
        if self.is_whole:
            return [x[:self.groups[0].keys.size].transpose(0, 1)]  # after them there may be fill
        rows, apart = _rows_of_heads(x)
        return [rows.index_select(0, own).view(-1, group.keys.shape[1], x.shape[2])
                for group, own in zip(self.groups, self._once(self._key_rows, x.shape[1], apart), strict=True)]

    def _key_rows(self, heads: int, apart: int) -> list[Tensor]:
        return [_by_head(group.keys, heads, apart) for group in self.groups]

    def placed(self, parts: Sequence[Tensor], num_queries: int, heads: int) -> Tensor:
        """[Q, h, d], the inverse of `queries`."""
        if self.is_whole:
            return parts[0].view(heads, num_queries, -1).transpose(0, 1).contiguous()  # else whoever flattens it has a node more
        places = self._once(self._places, num_queries, heads)
        return _joined(parts).index_select(0, places).view(num_queries, heads, -1)

    def _places(self, num_queries: int, heads: int) -> Tensor:
        """int64 [Q * h]: which of the groups' rows each of the result is."""
        rows, real = self._ends("queries", heads)
        places = np.empty(num_queries * heads, np.int64)
        places[rows[real]] = np.flatnonzero(real)
        return torch.from_numpy(places)

    def summed(self, parts: Sequence[Tensor], num_keys: int, heads: int) -> Tensor:
        """[K, g, d], to each key what is its own of what `keys` has of it: pieces may share keys."""
        if self.is_whole:
            total, fill = parts[0].transpose(0, 1), num_keys - parts[0].shape[1]
            return F.pad(total, (0, 0, 0, 0, 0, fill)) if fill else total
        # Several times as fast as adding rows in turn to where they belong.
        total, *_ = torch.embedding_bag(_joined(parts), *self._once(self._bags, num_keys, heads))
        return total.view(num_keys, heads, -1)

    def _bags(self, num_keys: int, heads: int) -> tuple[Tensor, Tensor]:
        """The groups' rows int64 [n] sorted by the row of the result that each is added to, and where each of these begins, [K * g]."""
        rows, real = self._ends("keys", heads)
        numbers = np.flatnonzero(real)
        counts = np.bincount(rows[real], minlength=num_keys * heads)
        return torch.from_numpy(numbers[np.argsort(rows[real], kind="stable")]), torch.from_numpy(np.cumsum(counts) - counts)

    def _ends(self, which: str, heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Of all groups' rows, of queries or of keys, int64 [N] which row of [T * heads, d] it is, and bool [N] whether it is no fill."""
        of_groups = [(getattr(group, which), getattr(group, f"real_{which}")) for group in self.groups]
        rows = np.concatenate([_by_head(tokens, heads, heads).numpy() for tokens, _ in of_groups])
        return rows, np.concatenate([np.repeat(real[:, None], heads, 1).reshape(-1) for _, real in of_groups])

    def hidden(self, heads: int, key_heads: int, dtype: torch.dtype) -> list[Tensor | None]:
        """Of each group what is added to its scores, [G * g, r * n, m]."""
        return self._once(self._hidden, heads, key_heads, dtype)

    def _hidden(self, heads: int, key_heads: int, dtype: torch.dtype) -> list[Tensor | None]:
        def of_heads(group: SmallGroup) -> Tensor:
            pieces, num_keys = group.keys.shape
            return group.hidden.to(dtype).expand(pieces, heads, -1, -1).reshape(pieces * key_heads, -1, num_keys)

        return [None if group.hidden is None else of_heads(group) for group in self.groups]


def small_attention(query: Tensor, key: Tensor, value: Tensor, work: SmallWork, *, keeps_rows: bool = False) -> Tensor:
    """softmax(q k^T) v [Q, h, d] from query [Q, h, d], key and value [K, g, d]. In at least fp32.

    keeps_rows: for the backward, only what has a row a token is kept (see joint_backward), and probabilities are made again.
    """
    return _SmallAttention.of(query, key, value, work, keeps_rows)


def is_small(num_queries: int, num_keys: int, *, causal: bool) -> bool:
    """Whether a piece of so many queries and keys (or two blocks of its rows, where it is causal) is small enough."""
    return (min(num_queries, 2 * CAUSAL_ROWS) if causal else num_queries) * num_keys <= MOST_SCORES


def whole_work(mask: np.ndarray) -> SmallWork:
    """All queries and all keys as one piece, from who sees whom, bool [Q, K]."""
    queries, keys = (np.arange(count)[None] for count in mask.shape)
    hidden = None if mask.all() else _minus_infinity(mask[None])
    return SmallWork((SmallGroup(queries, keys, hidden, queries >= 0, keys >= 0),), is_whole=True)


def small_work(work: Sequence[WorkGroup]) -> SmallWork | None:
    """The work in few groups: causal pieces in blocks of rows, pieces of near sizes filled up to one. None where a piece is too large."""
    if not all(is_small(group.queries.shape[1], group.keys.shape[1], causal=group.causal) for group in work):
        return None
    blocks = sorted((block for group in work for block in _row_blocks(group)), key=_scores, reverse=True)
    joined: list[list[WorkGroup]] = []
    for block in blocks:
        if joined and _fill([*joined[-1], block]) - _fill(joined[-1]) <= MOST_FILL:
            joined[-1].append(block)
        else:
            joined.append([block])
    return SmallWork(tuple(map(_small_group, joined)))


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
    if any(group.mask is not None or group.keys.shape[1] < num_keys for group in groups):  # there is a mask anyway
        num_keys = -(-num_keys // VECTOR) * VECTOR
    queries, keys, seen, real_queries, real_keys = [], [], [], [], []
    for group in groups:
        (pieces, own_queries), own_keys = group.queries.shape, group.keys.shape[1]
        more_queries, more_keys = (0, num_queries - own_queries), (0, num_keys - own_keys)
        queries.append(np.pad(group.queries, ((0, 0), more_queries), "edge"))
        keys.append(np.pad(group.keys, ((0, 0), more_keys), "edge"))
        mask = np.ones((own_queries, own_keys), bool) if group.mask is None else group.mask
        mask = np.pad(np.pad(mask, ((0, 0), more_keys)), (more_queries, (0, 0)), "edge")
        seen.append(np.broadcast_to(mask, (pieces if len(groups) > 1 else 1, num_queries, num_keys)))
        real_queries.append(np.broadcast_to(np.arange(num_queries) < own_queries, (pieces, num_queries)))
        real_keys.append(np.broadcast_to(np.arange(num_keys) < own_keys, (pieces, num_keys)))
    hidden = None if all(mask.all() for mask in seen) else _minus_infinity(np.concatenate(seen))
    return SmallGroup(np.concatenate(queries), np.concatenate(keys), hidden, np.concatenate(real_queries), np.concatenate(real_keys))


def _minus_infinity(seen: np.ndarray) -> Tensor:
    """fp32 [G, 1, n, m] of bool [G, n, m]."""
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))[:, None]


def _by_head(tokens: np.ndarray, heads: int, apart: int) -> Tensor:
    """int64 [G * heads * n]: the rows of heads of tokens [G, n], piece by piece and head by head."""
    return torch.from_numpy((tokens[:, None] * apart + np.arange(heads)[:, None]).reshape(-1))


def _rows_of_heads(x: Tensor) -> tuple[Tensor, int]:
    """x [T, heads, d] as rows [n, d], and how many there are from a token to the next; without a copy where x lies as rows do."""
    (tokens, heads, dim), (of_token, of_head, one) = x.shape, x.stride()
    if tokens == 1 or one != 1 or (heads > 1 and of_head != dim) or of_token % dim:
        x, of_token = x.contiguous(), heads * dim
    apart = of_token // dim
    return x.as_strided(((tokens - 1) * apart + heads, dim), (dim, 1)), apart


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[rows, d] of all parts [pieces, rows, d]."""
    return parts[0].flatten(0, 1) if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    scores = torch.bmm(q, k.mT) if hidden is None else torch.baddbmm(hidden, q, k.mT)
    return torch.softmax(scores, -1, out=scores)  # row by row: in place


class _SmallAttention(PlainFunction):
    """Saved: of each group q, k, v and the probabilities p, or the inputs. ds = p * (dp - sum of dp * p) with dp = do v^T."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, work: SmallWork, keeps_rows: bool) -> Tensor:
        wide = tuple(map(at_least_fp32, (query, key, value)))
        pieces = _pieces(*wide, work)
        out = work.placed([torch.bmm(p, v) for _, _, v, p in pieces], *query.shape[:2])
        ctx.save_for_backward(*(wide if keeps_rows else [tensor for piece in pieces for tensor in piece]))
        ctx.work, ctx.keeps_rows, ctx.dtype, ctx.query_shape, ctx.key_shape = work, keeps_rows, query.dtype, query.shape, key.shape
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, dout: Tensor):
        saved, work, num_keys, key_heads = ctx.saved_tensors, ctx.work, *ctx.key_shape[:2]
        num_queries, heads, _ = ctx.query_shape
        pieces = _pieces(*saved, work) if ctx.keeps_rows else [saved[start:start + 4] for start in range(0, len(saved), 4)]
        of_queries, of_keys, of_values = [], [], []
        for group, do, (q, k, v, p) in zip(work.groups, work.queries(at_least_fp32(dout), key_heads), pieces, strict=True):
            if group.idle is not None:
                do.view(len(group.queries), heads, -1, do.shape[-1]).masked_fill_(group.idle, 0)
            of_values.append(torch.bmm(p.mT, do))
            dp = torch.bmm(do, v.mT)
            dscores = torch._softmax_backward_data(dp, p, -1, p.dtype, grad_input=dp)
            of_keys.append(torch.bmm(dscores.mT, q))
            of_queries.append(torch.bmm(dscores, k))
        dquery = work.placed(of_queries, num_queries, heads)
        dkey, dvalue = (work.summed(parts, num_keys, key_heads) for parts in (of_keys, of_values))
        return dquery.to(ctx.dtype), dkey.to(ctx.dtype), dvalue.to(ctx.dtype), None, None


def _pieces(query: Tensor, key: Tensor, value: Tensor, work: SmallWork) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v and p of each group."""
    heads, key_heads = query.shape[1], key.shape[1]
    factors = zip(work.queries(query, key_heads), work.keys(key), work.keys(value), work.hidden(heads, key_heads, query.dtype), strict=True)
    return [(q, k, v, _probabilities(q, k, hidden)) for q, k, v, hidden in factors]
