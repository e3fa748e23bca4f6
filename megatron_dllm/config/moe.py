"""How tokens get to their experts, and what keeps the experts' loads even."""

from dataclasses import dataclass
from typing import Literal

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts"""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "deepep", "hybridep", "flex"] = flag(
        "How tokens get to the ranks of their experts: to all ranks (the simple reference), by all-to-all, or by the kernels of the "
        "deep_ep package (on CUDA, with --expert-model-parallel-size above 1); flex: by those that --moe-flex-dispatcher-backend names.",
        "alltoall",
    )
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = flag(
        "The kernels of --moe-token-dispatcher-type flex, as Megatron-LM spells it; without it: deepep.", None
    )
    moe_max_tokens_per_rank: int | None = flag(
        "Most tokens that a rank has in one pass (clean ones and canvases of a microbatch). With it alltoall and deepep make room for the "
        "worst case, and the host waits for no number of rows, which --cuda-graph-impl asks for; alltoall then sends each token once to "
        "every rank. Without it rooms are of the right size.",
        None,
    )
    moe_recompute_replay: bool = flag(
        "Under recompute, follow the routing and the layout of the forward instead of deciding and exchanging them again.", True
    )
    moe_grouped_gemm: bool = flag(
        "One grouped matrix product for all experts where the compute type has one (bf16; fp32 on a CPU); otherwise a loop over experts.",
        True,
    )
    moe_grouped_gemm_backend: Literal["local", "transformer_engine"] = flag(
        "What computes --moe-grouped-gemm: our kernels and torch, or Transformer Engine's GroupedLinear, for which the host waits for the "
        "numbers of rows.",
        "local",
    )
    moe_aux_loss_coeff: float = flag("Weight of the loss that evens out the experts' loads; 1e-2 is usual.", 0.0)
    moe_z_loss_coeff: float = flag("Weight of the loss that keeps the router's logits small; 1e-3 is usual.", 0.0)
    moe_router_enable_expert_bias: bool = flag(
        "Choose experts by probability plus a bias that each step raises where an expert had few tokens and lowers where it had many. "
        "Exported models have no place for it.",
        False,
    )
    moe_router_bias_update_rate: float = flag("How much --moe-router-enable-expert-bias changes a bias in a step.", 1e-3)

    @property
    def dispatcher(self) -> str:
        """The dispatcher in use, whichever way it was spelled."""
        return dispatcher_in_use(self.moe_token_dispatcher_type, self.moe_flex_dispatcher_backend)


def dispatcher_in_use(kind: str, backend: str | None) -> str:
    """The dispatcher of --moe-token-dispatcher-type and --moe-flex-dispatcher-backend."""
    return (backend or "deepep") if kind == "flex" else kind
