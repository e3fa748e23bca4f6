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
