"""The experts' feed-forwards over rows sorted by expert: grouped matrix products, or a loop over experts (the oracle).

Legend: N rows, E experts, I expert width, H hidden.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..parallel import ParallelContext, place
from ..tensor_parallel.initialization import Init, make_parameter
from ..transformer.activations import gated_gelu


class Experts(nn.Module):
    """down_e(gelu(gate_e(x)) * up_e(x)) for the expert e of each row.

        gate_up  [E, 2, I, H]   gate and up on an axis of their own, so that a cut along I stays a rectangle
        down     [E, H, I]
    """

    def __init__(self, name: str, config: ModelConfig, *, context: ParallelContext, init: Init, dtype: torch.dtype):
        super().__init__()
        num_experts, inner, hidden = config.num_experts, config.moe_ffn_hidden_size, config.hidden_size

        def parameter(which: str, shape: tuple[int, ...]) -> nn.Parameter:
            placement = place(shape, context, cut={"ep": 0, "etp": 2}, grid="expert")
            return make_parameter(f"{name}.{which}", placement, init=init, dtype=dtype, device=context.device)

        self.gate_up = parameter("gate_up", (num_experts, 2, inner, hidden))
        self.down = parameter("down", (num_experts, hidden, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[N, H] from rows [N, H], sorted by expert; counts int64 [E]. An expert without rows still gets a (zero) gradient."""
        hidden = grouped_linear(rows, self.gate_up.flatten(1, 2), counts)
        gate, up = hidden.chunk(2, dim=-1)
        return grouped_linear(gated_gelu(gate, up), self.down, counts)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """[N, out]: rows [N, in] times the transposed weight [E, out, in] of each row's expert.

    bf16 goes to torch's grouped product; other types, for which it has no kernel everywhere, to the loop.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    return looped_linear(rows, weight, counts)


def looped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same, one product an expert. Reads the counts on the host."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, expert) for part, expert in zip(parts, weight.unbind(0), strict=True)])
