"""What stands in the way of a --draft-pass: said once, as checks of the flags, and for the training loop, which chooses among the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dllm.config.check import CHECKS, Check, Fault
from megatron_dllm.config.run import RunConfig

Order = Literal["apart", "joint"]
BOTH: tuple[Order, ...] = ("apart", "joint")
APART: tuple[Order, ...] = ("apart",)
JOINT: tuple[Order, ...] = ("joint",)


@dataclass(frozen=True)
class Obstacle:
    """Settings under which drafts are not made beforehand (apart), or two passes have no one backward (joint).

    `stands` takes the values of `fields`; `remedy` is what to set in place of the order.
    """

    orders: tuple[Order, ...]
    fields: tuple[str, ...]
    stands: Callable[..., bool]
    why: str
    remedy: str

    @property
    def name(self) -> str:
        return f"passes: {self.fields[0]}"

    def fault(self, draft_pass: str, *values: Any) -> Fault | None:
        """The rule of a check: the order that is asked for must not be one that is in the way."""
        if draft_pass not in self.orders or not self.stands(*values):
            return None
        return Fault(self.why, f"set --draft-pass auto, or {self.remedy}", {"draft_pass": "auto"})


def is_over_ranks(size: int) -> bool:
    return size > 1


def is_given(value: Any) -> bool:
    return value is not None


WHOLE_ROWS = "drafts change places only where a rank has all tokens of its rows"
WHOLE_EXPERTS = "two passes have one backward only where a rank has its layers whole, with all experts"
ALL_KEPT = "one backward of two passes joins what layers keep, so nothing may be computed again"
OUR_LAYERS = "one backward of two passes joins what attention, experts and norms of our own keep"
OBSTACLES = (
    Obstacle(BOTH, ("context_parallel_size",), is_over_ranks, WHOLE_ROWS, "leave --context-parallel-size out"),
    Obstacle(BOTH, ("sequence_parallel",), bool, WHOLE_ROWS, "leave --sequence-parallel out"),
    Obstacle(BOTH, ("moe_aux_loss_coeff",), bool,
             "the loss on the experts' loads takes those of each pass apart, so other passes would make it another loss",
             "--moe-aux-loss-coeff 0"),
    Obstacle(APART, ("pipeline_model_parallel_size",), is_over_ranks, "drafts are made beforehand only where a rank has all layers",
             "leave --pipeline-model-parallel-size out"),
    Obstacle(APART, ("cuda_graph_canvas_multiple",), is_given, "what drafts see beforehand differs from microbatch to microbatch",
             "leave --cuda-graph-canvas-multiple out"),
    Obstacle(JOINT, ("tensor_model_parallel_size",), is_over_ranks, WHOLE_EXPERTS, "leave --tensor-model-parallel-size out"),
    Obstacle(JOINT, ("expert_model_parallel_size",), is_over_ranks, WHOLE_EXPERTS, "leave --expert-model-parallel-size out"),
    Obstacle(JOINT, ("expert_tensor_parallel_size",), is_over_ranks, WHOLE_EXPERTS, "leave --expert-tensor-parallel-size out"),
    Obstacle(JOINT, ("recompute_granularity",), is_given, ALL_KEPT, "leave --recompute-granularity out"),
    Obstacle(JOINT, ("transformer_impl",), lambda impl: impl != "local", OUR_LAYERS, "--transformer-impl local"),
    Obstacle(JOINT, ("moe_token_dispatcher_type",), lambda kind: kind != "alltoall", OUR_LAYERS, "--moe-token-dispatcher-type alltoall"),
    Obstacle(JOINT, ("moe_grouped_gemm",), lambda is_grouped: not is_grouped, OUR_LAYERS, "--moe-grouped-gemm"),
    Obstacle(JOINT, ("layer_types",), lambda kinds: bool(set(kinds) - {"sliding", "full"}), OUR_LAYERS,
             "make all of --layer-types sliding or full"),
    Obstacle(JOINT, ("moe_router_topk",), lambda choices: choices == 1,
             "with one expert a token, rows of tokens could not be told from rows of choices", "--moe-router-topk above 1"),
    Obstacle(JOINT, ("moe_z_loss_coeff",), bool, "what the loss on the router's logits keeps is not joined", "--moe-z-loss-coeff 0"),
    Obstacle(JOINT, ("lora_dropout",), bool, "what dropout keeps is not joined", "leave --lora-dropout out"),
    Obstacle(JOINT, ("lora_targets", "lora_rank"), lambda targets, rank: rank is not None and "experts" in targets,
             "what adapters of experts keep is not joined", "take experts out of --lora-targets"),
)  # fmt: skip
CHECKS.extend(Check(("draft_pass", *obstacle.fields), obstacle.fault, obstacle.name) for obstacle in OBSTACLES)


def is_possible(order: Order, run: RunConfig) -> bool:
    """Whether the configuration lets passes have this order; what devices can do is not asked."""
    return not any(order in obstacle.orders and obstacle.stands(*map(run.value, obstacle.fields)) for obstacle in OBSTACLES)
