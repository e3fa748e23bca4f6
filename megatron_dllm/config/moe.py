"""How tokens get to their experts, and what keeps the experts' loads even."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts"""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "deepep", "hybridep"] = flag(
        "How tokens get to the ranks of their experts: to all ranks (the simple reference), by all-to-all, or by the kernels of the "
        "deep_ep package (on CUDA, with --expert-model-parallel-size above 1).",
        "alltoall",
    )
    moe_recompute_replay: bool = flag(
        "Under recompute, follow the routing and the layout of the forward instead of deciding and exchanging them again.", True
    )
    moe_grouped_gemm: bool = flag(
        "One grouped matrix product for all experts where the compute type has one (bf16); otherwise a loop over experts.", True
    )
    moe_aux_loss_coeff: float = flag("Weight of the loss that evens out the experts' loads; 1e-2 is usual.", 0.0)
    moe_z_loss_coeff: float = flag("Weight of the loss that keeps the router's logits small; 1e-3 is usual.", 0.0)
    moe_router_enable_expert_bias: bool = flag(
        "Choose experts by probability plus a bias that each step raises where an expert had few tokens and lowers where it had many. "
        "Exported models have no place for it.",
        False,
    )
    moe_router_bias_update_rate: float = flag("How much --moe-router-enable-expert-bias changes a bias in a step.", 1e-3)
