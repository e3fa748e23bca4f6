"""The gated delta rule in chunks: plain torch, the same bits on every run.

Legend: N chunks of L tokens (short ones filled up with zeros), h heads, k and v the sizes of a key and a value. In a chunk that starts
with the state S, with G the running sum of the decays,

    (I + A) U = beta (V - exp(G) K S),  A[i, j] = beta[i] exp(G[i] - G[j]) K[i].K[j] for j < i
    O = (exp(G) Q S + P U) / sqrt(k),   P[i, j] = exp(G[i] - G[j]) Q[i].K[j] for j <= i
    next S = exp(G[L]) S + sum over j of exp(G[L] - G[j]) K[j] U[j]^T

All but S is known for all chunks at once; the states follow one after the other.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .precision import at_least_fp32

CHUNK = 64


@dataclass(frozen=True)
class Level:
    """Chunks `start` to `stop`; the states before them are rows `parents` (int64) of those after the level before (the first: initial)."""

    start: int
    stop: int
    parents: Tensor


def chunked_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, initial: Tensor,
                             levels: Sequence[Level]) -> tuple[Tensor, Tensor]:
    """Outputs [N, L, h, v] and states [I + N, h, k, v], the initial ones, then those after each chunk; at least fp32.

    query, key [N, L, h, k], value [N, L, h, v], decay (a logarithm, not positive) and beta [N, L, h], initial [I, h, k, v].
    """
    q, k, v, g, b, state = (at_least_fp32(x) for x in (query, key, value, decay, beta, initial))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lower = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    # A product, since torch refuses cumsum of floats on a GPU where repeats have to be bit-equal.
    running, b = g.transpose(1, 2) @ lower.mT.to(g.dtype), b.transpose(1, 2)[..., None]
    # Masked before the exponential: above the diagonal it could overflow, and its gradient would be no number.
    between = (running[..., :, None] - running[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (b * between * (k @ k.mT)).tril(-1)  # solved as I + system
    grown = running.exp()[..., None]
    from_value, from_state = torch.linalg.solve_triangular(
        system, torch.cat([b * v, b * grown * k], -1), upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
    attention, carried = between * (q @ k.mT), (running[..., -1:] - running).exp()[..., None] * k
    outputs, states = [], [state]
    for level in levels:
        own, before = slice(level.start, level.stop), states[-1][level.parents]
        update = from_value[own] - from_state[own] @ before
        outputs.append((grown[own] * q[own]) @ before + attention[own] @ update)
        states.append(grown[own, :, -1:] * before + carried[own].mT @ update)
    return torch.cat(outputs).transpose(1, 2) * q.shape[-1] ** -0.5, torch.cat(states)
