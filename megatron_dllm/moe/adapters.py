"""Low-rank adapters of the router and of the experts: y + alpha / rank * B A x (see tensor_parallel/adapters.py).

Legend: N rows, E experts of this rank, F outputs and D inputs of a product (of this etp rank).
"""
from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel import place, sum_grad_over
from ..tensor_parallel.adapters import ZERO, LowRank
from ..tensor_parallel.initialization import make_parameter
from .experts import Experts, choose_product, looped_linear
from .router import Router


class RouterAdapter(nn.Module):
    """Of the router's projection [E, D], in at least fp32: a [rank, D], b [E, rank]. Each tp rank routes tokens of its own, so that
    gradients are summed over tp.
    """

    def __init__(self, name: str, router: Router, common: LowRank):
        super().__init__()
        self.scale, context = common.scale, common.context
        num_experts, depth = router.weight.placement.shape

        def parameter(which: str, shape: tuple[int, int], init) -> nn.Parameter:
            placement = place(shape, context, hold_fp32=True, partial_over_tp=context.tp.size > 1)
            return make_parameter(f"{name}.{which}", placement, init=init, dtype=common.dtype, device=context.device)

        self.a = parameter("a", (common.rank, depth), common.init_for(depth))
        self.b = parameter("b", (num_experts, common.rank), ZERO)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """Logits [T, E] with the adapter's part added; x [T, D]."""
        return torch.addmm(y, F.linear(x, self.a), self.b.t(), alpha=self.scale)


class ExpertAdapter(nn.Module):
    """Of one of the experts' weights, an adapter for each expert: two grouped products.

        gate_up   a [E, rank, H]  b [E, 2, I, rank]   one for both parts, as PEFT has it for a fused weight
        down      a [E, rank, I]  b [E, H, rank]

    Cut over ep and etp as the weight. What etp does not cut (gate_up's a, down's b) has on each etp rank its share of the gradient.
    """

    def __init__(self, name: str, experts: Experts, which: Literal["gate_up", "down"], common: LowRank):
        super().__init__()
        self.scale, self.etp, self.is_gate_up, context = common.scale, common.context.etp, which == "gate_up", common.context
        weight = getattr(experts, which)
        num_experts, *width, depth = weight.placement.shape

        def parameter(part: str, shape: tuple[int, ...], cut: dict[str, int], init) -> nn.Parameter:
            placement = place(shape, context, cut={"ep": 0, **cut}, grid="expert")
            return make_parameter(f"{name}.{part}", placement, init=init, dtype=common.dtype, device=context.device)

        cut_of_a, cut_of_b = ({}, {"etp": 2}) if self.is_gate_up else ({"etp": 2}, {})
        self.a = parameter("a", (num_experts, common.rank, depth), cut_of_a, common.init_for(depth))
        self.b = parameter("b", (num_experts, *width, common.rank), cut_of_b, ZERO)
        # The loop takes what the grouped product does not: it wants ranks that fill whole rows of 16 bytes.
        self.product = choose_product(common.dtype, context.device, self.a.shape[2], common.rank,
                                      grouped=experts.product is not looped_linear)

    def forward(self, y: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """y [N, F] with the adapters' part added; rows [N, D], sorted by expert, counts [E]."""
        a, b = self.a, self.b
        if self.is_gate_up:
            a = sum_grad_over(a, self.etp)
        else:
            b = sum_grad_over(b, self.etp)
        low = self.product(rows, a, counts) * self.scale
        return y + self.product(low, b.flatten(1, -2), counts)
