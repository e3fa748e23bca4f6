"""flash-linear-attention as far as we use it, on any device: the function that we call, token by token."""
from __future__ import annotations

import torch

from megatron_dllm.transformer.gated_delta_rule_reference import recurrent_gated_delta_rule


def by_tokens(q, k, v, g, beta, *, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu):
    """The package's interface: [1, T, ...] of sequences one after the other, each from a state of its own."""
    assert output_final_state and torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu) and cu_seqlens[-1] == q.shape[1]
    assert len(initial_state) == len(cu_seqlens) - 1
    outputs, ends = zip(*(recurrent_gated_delta_rule(*(x[0, start:end] for x in (q, k, v, g, beta)), state) for start, end, state in zip(
        cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), initial_state, strict=True)), strict=True)
    return torch.cat(outputs)[None], torch.stack(ends)
