"""The gated delta rule as a loop over tokens: the oracle of the chunked form, with which it shares nothing."""
from __future__ import annotations

import torch
from torch import Tensor


def recurrent_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
                               state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, h, dv] and the last state [h, dk, dv] of one sequence; query, key [T, h, dk], value [T, h, dv], decay, beta [T, h].

        S = exp(decay) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q / sqrt(dk)
    """
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) / query.shape[-1] ** 0.5)
    return torch.stack(outputs), state
