"""What the attention kernels compute, in plain torch on fp32 (float64 stays) from a whole mask. Imports nothing of the kernels."""
from __future__ import annotations

import torch
from torch import Tensor


def visible(bounds: Tensor, num_keys: int) -> Tensor:
    """bool [Q, K]: the keys first <= j < past of either interval of bounds [Q, 4]."""
    key = torch.arange(num_keys, device=bounds.device)
    first, past, own_first, own_past = (bound[:, None] for bound in bounds.unbind(1))
    return (key >= first) & (key < past) | (key >= own_first) & (key < own_past)


def attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """out [Q, h, d] and log-sum-exp [Q, h] of softmax(q k^T) v; 0 and -inf for a query that sees nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    repeats = query.shape[1] // key.shape[1]
    q, k, v = query.to(wide), key.to(wide).repeat_interleave(repeats, 1), value.to(wide).repeat_interleave(repeats, 1)
    mask = visible(bounds, len(key))
    scores = torch.einsum("qhd,khd->qhk", q, k).masked_fill(~mask[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    # 0 in place of -inf: exp(-inf - 0) is 0, and its gradient too.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", weights, v).to(query.dtype), lse
