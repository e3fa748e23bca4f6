"""Attention to some of a query's keys, and the merge of such partial results: softmax(q k^T) v, scale 1; kernels where they
take it (`takes_attention`), elsewhere plain torch, a block of queries at a time.

    lse = log sum_j exp(q . k_j),  out = sum_j exp(q . k_j - lse) v_j                                    over the keys j at hand
    merged: lse = log(exp(lse_1) + exp(lse_2)),  out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The backward needs the merged lse and out alone, never a part's own: p_j = exp(q . k_j - lse), delta = dout . out, dv_j = p_j dout,
ds_j = p_j (dout . v_j - delta), dq = sum_j ds_j k_j, dk_j = ds_j q (Dao et al. 2022, arXiv 2205.14135, appendix B).

Legend: Q queries, K keys, h query heads, g key heads (h = g r), d head dimension, n and m the queries and keys of a block.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention_tiles import AttentionTiles, attention_tiles, takes_attention
from ..transformer.precision import accumulation_dtype, at_least_fp32
from ..transformer.visibility import CLEAN, Visibility

QUERY_BLOCK = 256  # scores [h, n, m] of one block of so many queries are held at once: memory grows with the keys, not with their square


@dataclass(frozen=True)
class Block:
    """Consecutive queries and the keys [clean ; canvas] that any of them sees; all see `canvas`, and `clean` too if not `masked`."""

    queries: slice
    clean: slice
    canvas: slice
    masked: bool

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start


@dataclass(frozen=True)
class PartialPlan:
    """The blocks of one Visibility, with the window in it; queries that see nothing may be in none.

    bounds: int64 [2, Q, 1], first and past clean key of each query. tiles: the same for the kernels.
    """

    blocks: tuple[Block, ...]
    bounds: Tensor
    tiles: AttentionTiles

    def hidden(self, block: Block) -> Tensor:
        """bool [n, m]: the clean keys of a block that its queries do not see."""
        place = torch.arange(block.clean.start, block.clean.stop, device=self.bounds.device)
        first, past = self.bounds[:, block.queries]
        return (place < first) | (place >= past)


def partial_plan(visibility: Visibility, device: torch.device, block: int = QUERY_BLOCK) -> PartialPlan:
    """The plan of queries over keys [clean ; canvas]; canvas keys of one id stand together."""
    blocks = []
    for start, stop in _query_runs(visibility.canvas_id, block):
        first, past = visibility.first_key[start:stop], visibility.past_key[start:stop]
        seeing = first < past
        low, high = (int(first[seeing].min()), int(past[seeing].max())) if seeing.any() else (0, 0)
        own = np.flatnonzero(visibility.canvas_keys == visibility.canvas_id[start]) + visibility.num_clean_keys
        if visibility.canvas_id[start] == CLEAN or len(own) == 0:
            own = np.zeros(0, np.int64)
        canvas = slice(int(own[0]), int(own[-1]) + 1) if len(own) else slice(0, 0)
        assert canvas.stop - canvas.start == len(own), "the keys of a canvas stand apart"
        if high == low and len(own) == 0:
            continue
        masked = not ((first == low) & (past == high)).all()
        blocks.append(Block(slice(start, stop), slice(low, high), canvas, bool(masked)))
    bounds = torch.from_numpy(np.stack([visibility.first_key, visibility.past_key])[..., None])
    num_keys = visibility.num_clean_keys + len(visibility.canvas_keys)
    return PartialPlan(tuple(blocks), bounds.to(device), attention_tiles(visibility.key_intervals(), num_keys, device))


def _query_runs(canvas_id: np.ndarray, block: int) -> Iterator[tuple[int, int]]:
    """Runs of queries with one canvas id, cut in blocks."""
    edges = [0, *(np.flatnonzero(np.diff(canvas_id)) + 1).tolist(), len(canvas_id)]
    for start, stop in zip(edges, edges[1:], strict=False):
        yield from ((at, min(at + block, stop)) for at in range(start, stop, block))


@dataclass(frozen=True)
class Partial:
    """out [Q, h, d] and lse [Q, h], fp32 at least; of a query that has seen nothing 0 and -inf."""

    out: Tensor
    lse: Tensor

    def merge(self, other: Partial) -> Partial:
        """The result over the keys of both."""
        lse = torch.logaddexp(self.lse, other.lse)
        shift = _finite(lse)
        mine, theirs = ((part.lse - shift).exp()[..., None] for part in (self, other))
        return Partial(mine * self.out + theirs * other.out, lse)


def partial_attention(query: Tensor, key: Tensor, value: Tensor, plan: PartialPlan) -> Partial:
    """query [Q, h, d], key and value [K, g, d]. No gradient is recorded: see `partial_gradients`."""
    if takes_attention(query, key, value):
        from ..kernels import attention as kernel  # Triton is there with CUDA alone

        return Partial(*kernel.attention_forward(query, key, value, plan.tiles, dtype=torch.float32))
    dtype, groups = accumulation_dtype(query.dtype), key.shape[1]
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    for block in plan.blocks:
        scores = _scores(query, key, plan, block)
        block_lse = scores.logsumexp(-1)
        weights = scores.sub_(_finite(block_lse)[..., None]).exp_()
        mixed = _product(weights, _by_group(_keys(value, block), groups))
        out[block.queries] = _by_query(mixed, block.num_queries)
        lse[block.queries] = _by_query(block_lse[..., None], block.num_queries)[..., 0]
    return Partial(out, lse)


@dataclass(frozen=True)
class Gradients:
    """Of query [Q, h, d], key and value [K, g, d], fp32 at least."""

    query: Tensor
    key: Tensor
    value: Tensor


def partial_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, delta: Tensor, plan: PartialPlan) -> Gradients:
    """What these keys give and get: `grad` [Q, h, d] of the merged out, `lse` [Q, h] merged, `delta` [Q, h] = grad . out."""
    if takes_attention(query, key, value):
        from ..kernels import attention as kernel

        grad = grad.to(query.dtype)
        return Gradients(*kernel.attention_backward(grad, query, key, value, lse, delta, plan.tiles, dtype=torch.float32))
    dtype, groups = accumulation_dtype(query.dtype), key.shape[1]
    dquery, dkey, dvalue = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value))
    for block in plan.blocks:
        rows = block.queries
        shift, block_delta = (_by_group(x[rows][..., None], groups) for x in (_finite(lse), delta))
        weights = _scores(query, key, plan, block).sub_(shift).exp_()
        upstream, queries = (_by_group(x[rows], groups) for x in (grad, query))
        keys, values = (_by_group(_keys(x, block), groups) for x in (key, value))
        dscores = _product(upstream, values.mT).sub_(block_delta).mul_(weights)
        dquery[rows] = _by_query(_product(dscores, keys), block.num_queries)
        _add(dkey, _product(dscores.mT, queries), block)
        _add(dvalue, _product(weights.mT, upstream), block)
    return Gradients(dquery, dkey, dvalue)


def _scores(query: Tensor, key: Tensor, plan: PartialPlan, block: Block) -> Tensor:
    """[g, r n, m], -inf where a query does not see a key."""
    groups = key.shape[1]
    scores = _product(_by_group(query[block.queries], groups), _by_group(_keys(key, block), groups).mT)
    if block.masked:
        hidden = plan.hidden(block)
        scores.unflatten(1, (-1, len(hidden)))[..., :hidden.shape[1]].masked_fill_(hidden, -torch.inf)
    return scores


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by group, fp32 at least. CUDA multiplies 16-bit factors as they are and adds up in fp32."""
    if b.is_cuda and b.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return at_least_fp32(a) @ at_least_fp32(b)


def _keys(x: Tensor, block: Block) -> Tensor:
    if block.canvas.start == block.canvas.stop:
        return x[block.clean]
    return torch.cat([x[block.clean], x[block.canvas]])


def _add(total: Tensor, gradient: Tensor, block: Block) -> None:
    """Adds [g, m, d] to the block's rows of [K, g, d]."""
    by_key, num_clean = gradient.transpose(0, 1), block.clean.stop - block.clean.start
    total[block.clean] += by_key[:num_clean]
    total[block.canvas] += by_key[num_clean:]


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[g, r n, d] from [n, g r, d]; a group's heads one after the other."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_query(x: Tensor, num_queries: int) -> Tensor:
    """[n, g r, d] from [g, r n, d]."""
    return x.unflatten(1, (-1, num_queries)).permute(2, 0, 1, 3).flatten(1, 2)


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf, so that exp(-inf - lse) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
