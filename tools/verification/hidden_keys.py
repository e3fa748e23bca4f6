"""Canvas attention where all keys of a rank are hidden from some queries, ours and Transformer Engine's, against all keys at once.

With Q queries on each of two ranks and K keys on each:

                              keys of rank 0   keys of rank 1
    first half of a rank's    seen             hidden
    second half               seen             seen

Scores of a hidden part must neither count nor give NaN, forward or backward. A document's canvas has keys on every rank, so that training
alone does not come to this; whole tiles of other documents' keys are hidden there.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_dllm.context_parallel.partial import partial_plan
from megatron_dllm.context_parallel.plan import Attending
from megatron_dllm.context_parallel.replicated import ReplicatedPlan
from megatron_dllm.context_parallel.transformer_engine import canvas_plan
from megatron_dllm.parallel import Group, communication
from megatron_dllm.transformer.visibility import Visibility

QUERIES, KEYS, HEADS, KV_HEADS = 100, 256, 4, 2  # of a rank; the package fills the queries up, and fill sees nothing at all


def seen_of(holder: int, ranks: int = 1) -> Visibility:
    """What the queries of so many ranks see of one rank's keys."""
    hidden = np.tile(np.arange(QUERIES) < QUERIES // 2, ranks) & (holder > 0)
    none = np.zeros(len(hidden), np.int64)
    return Visibility(none, np.where(hidden, 0, KEYS), none, none[:0], KEYS)


def plan_of(impl: str, cp: Group, device: torch.device) -> Attending:
    """The way's plan of this rank."""
    if impl == "local":
        return ReplicatedPlan((QUERIES,) * cp.size, partial_plan(seen_of(cp.rank, cp.size), device))
    return canvas_plan([seen_of(holder) for holder in range(cp.size)], [QUERIES] * cp.size, device)


def largest_error(impl: str, cp: Group, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Over the output and the gradients of queries, keys and values: |found - exact| / |exact|, the largest; NaN if there is one."""
    draw = torch.Generator().manual_seed(cp.rank)
    shapes = ((QUERIES, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS), (QUERIES, HEADS))
    query, key, value, upstream = (torch.randn(*shape, head_dim, generator=draw).to(device, dtype) for shape in shapes)
    query, key = (x * head_dim**-0.25 for x in (query, key))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = plan_of(impl, cp, device).attend(*leaves, cp)
    found = [out, *torch.autograd.grad(out, leaves, upstream)]
    errors = [(got.double() - want).norm() / want.norm() for got, want in zip(found, exactly(query, key, value, upstream, cp), strict=True)]
    return torch.stack(errors).max().item()


def exactly(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, cp: Group) -> list[Tensor]:
    """In float64 from all keys gathered: the output, and the gradients of own queries, keys and values."""
    own = [query.detach().double().requires_grad_()]
    own += [communication.all_gather(x.detach().double(), cp).requires_grad_() for x in (key, value)]
    visible = torch.from_numpy(np.concatenate([seen_of(holder).dense() for holder in range(cp.size)], 1)).to(query.device)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in own[1:])
    scores = torch.einsum("qhd,khd->hqk", own[0], keys).masked_fill(~visible, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    dquery, *others = torch.autograd.grad(out, own, upstream.double())
    return [out.detach(), dquery, *(communication.all_reduce(x, cp).chunk(cp.size)[cp.rank] for x in others)]
