"""Tokens traded for heads (a2a): every rank gets all tokens of its share of the heads, attends as one process does, and trades back.

Fewer key heads than ranks: consecutive ranks get the same one.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel import Group, all_to_all
from ..transformer.core_attention import AttentionPlan, attend
from ..transformer.rows import Rows


@dataclass(frozen=True)
class HeadsPlan:
    """query_counts, key_counts: by rank, its rows. query_order, key_order: where the j-th query or key of all stands among the
    rows of rank 0, 1, ...; query_places: the inverse. attention: all queries over all keys."""

    query_counts: tuple[int, ...]
    key_counts: tuple[int, ...]
    query_order: Rows
    query_places: Rows
    key_order: Rows
    attention: AttentionPlan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cp: Group) -> Tensor:
        """[Q, h, d] from own query [Q, h, d], key and value [K, g, d]."""
        assert query.shape[1] % cp.size == 0, f"{query.shape[1]} query heads over {cp.size} ranks"
        queries = self.query_order.take(to_heads(query, self.query_counts, cp))
        keys, values = (self.key_order.take(to_heads(x, self.key_counts, cp)) for x in (key, value))
        return to_tokens(self.query_places.take(attend(queries, keys, values, self.attention)), self.query_counts, cp)


def heads_of(rank: int, ranks: int, heads: int) -> slice:
    """The heads of a rank: an equal share, or the one that it shares with its neighbours."""
    if heads % ranks and ranks % heads:
        raise ValueError(f"{heads} heads neither divide over {ranks} context-parallel ranks nor repeat evenly on them; "
                         "set --cp-comm-type to p2p or all_gather")
    first = rank * heads // ranks
    return slice(first, first + max(heads // ranks, 1))


def to_heads(x: Tensor, counts: Sequence[int], cp: Group) -> Tensor:
    """[sum of counts, our heads, d], in rank order, from own [n, heads, d]."""
    pieces = torch.cat([x[:, heads_of(rank, cp.size, x.shape[1])] for rank in range(cp.size)])
    return all_to_all(pieces, [len(x)] * cp.size, counts, cp)


def to_tokens(x: Tensor, counts: Sequence[int], cp: Group) -> Tensor:
    """The inverse of `to_heads` for heads that are on one rank each."""
    own = counts[cp.rank]
    pieces = all_to_all(x, counts, [own] * cp.size, cp)
    return pieces.unflatten(0, (cp.size, own)).transpose(0, 1).flatten(1, 2)
