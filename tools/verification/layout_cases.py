"""What the layouts suite runs: layouts, and what is trained under them, as tables; pure.

A new layout is a row of LAYOUTS.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_dllm.config import ModelConfig, ObjectiveConfig, ParallelConfig, TrainingConfig

GLOBAL_BATCH = 16
TOY = ModelConfig(
    num_layers=3, hidden_size=32, ffn_hidden_size=32, num_attention_heads=4, num_query_groups=4, kv_channels=8, num_global_query_groups=2,
    global_kv_channels=16, window_size=12, layer_types=("full", "sliding", "full"), num_experts=8, moe_router_topk=2,
    moe_ffn_hidden_size=16, vocab_size=68, canvas_length=8, eos_token_id=(1,), max_position_embeddings=256)


@dataclass(frozen=True)
class Layout:
    """How many processes do what. `model` and `objective` change the toy and what it is trained on; the reference changes with them, but
    not with what computes the layers (`transformer_impl`)."""

    name: str
    processes: int
    parallel: ParallelConfig
    model: Mapping[str, object] = field(default_factory=dict, hash=False)
    objective: Mapping[str, object] = field(default_factory=dict, hash=False)
    transformer_impl: str = "local"

    @property
    def data_parallel_size(self) -> int:
        return self.parallel.data_parallel_size(self.processes)


def sizes(tp: int = 1, *, sp: bool = False, cp: int = 1, ep: int = 1, etp: int = 1, distributed: bool = False) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp, sequence_parallel=sp, context_parallel_size=cp, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp, use_distributed_optimizer=distributed)


FEW_HEADS = {"num_query_groups": 2, "num_global_query_groups": 1}
LAYOUTS = (
    Layout("dp2", 2, sizes()),
    Layout("dp2 distributed optimizer", 2, sizes(distributed=True)),
    Layout("tp2", 2, sizes(2)),
    Layout("tp2+sp", 2, sizes(2, sp=True)),
    Layout("tp4, 2 KV heads", 4, sizes(4), FEW_HEADS),
    Layout("tp4+sp, 2 KV heads", 4, sizes(4, sp=True), FEW_HEADS),
    Layout("tp4, vocabulary 67", 4, sizes(4), {"vocab_size": 67}),
    Layout("tp2+sp dp2 distributed optimizer", 4, replace(sizes(2, sp=True, distributed=True), overlap_param_gather=True),
           {"vocab_size": 67}),
    Layout("cp2", 2, sizes(cp=2)),
    Layout("cp4", 4, sizes(cp=4)),
    Layout("cp2, all canvases", 2, sizes(cp=2), objective={"canvases_scored": "all"}),
    Layout("cp2 all_gather", 2, replace(sizes(cp=2), cp_comm_type="all_gather")),
    Layout("cp2 a2a", 2, replace(sizes(cp=2), cp_comm_type="a2a", cp_comm_type_sliding="a2a")),
    Layout("ep2", 2, sizes(ep=2)),
    Layout("ep4 over dp4", 4, sizes(ep=4)),
    Layout("etp2", 2, sizes(etp=2)),
    Layout("tp2 ep2 without sp", 2, sizes(2, ep=2)),
    Layout("cp2 ep2", 2, sizes(cp=2, ep=2)),
    Layout("tp2+sp cp2 ep2", 4, sizes(2, sp=True, cp=2, ep=2)),
)

# Which rows of a global batch are self-conditioned, and the loss. One row alone: only one rank has a second loop.
OBJECTIVES: dict[str, tuple[ObjectiveConfig, frozenset[int]]] = {
    "diffusion, 5 coins": (ObjectiveConfig(), frozenset({1, 4, 7, 10, 13})),
    "diffusion, 1 coin": (ObjectiveConfig(diffusion_loss="loo", self_conditioning_null="uniform"), frozenset({6})),
    "ar": (ObjectiveConfig(objective="ar"), frozenset()),
}
# Lengths of the examples. None of them divides by anything but 1; some are longer than the window, some prompts are empty.
LENGTHS = ("unequal", "packed", "one supervised")
SUPERVISED_ROW = 6  # of "one supervised": all other rows have no token that is scored
ACCUMULATION = (1, 2, 4)
RECOMPUTE: dict[str, TrainingConfig] = {
    "none": TrainingConfig(),
    "selective": TrainingConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp", "moe")),
    "full": TrainingConfig(recompute_granularity="full"),
}

# Of a toy in bf16: every token goes to all experts. Where it has a choice rounding decides near-ties, differently in every layout, and
# moves one process's own gradient by 2 to 12 % of it, in which a fault could hide.
# Heads are as wide as the attention kernels want them.
BF16_CHANGES = {"num_experts": 4, "moe_router_topk": 4, "kv_channels": 16, "global_kv_channels": 32}


@dataclass(frozen=True)
class Case:
    """One cell of the product."""

    layout: Layout
    objective: str
    lengths: str
    accumulation: int
    recompute: str

    @property
    def factors(self) -> tuple[str, str, str, str, str]:
        return self.layout.name, self.objective, self.lengths, f"accumulation {self.accumulation}", f"recompute {self.recompute}"

    @property
    def name(self) -> str:
        return " · ".join(self.factors)

    @property
    def alone(self) -> Case:
        """The same on one process, without accumulation and recompute."""
        layout = replace(self.layout, parallel=ParallelConfig(), processes=1, transformer_impl="local")
        return replace(self, layout=layout, accumulation=1, recompute="none")

    @property
    def for_bf16(self) -> Case:
        """The same on the toy that is trained in bf16."""
        return replace(self, layout=replace(self.layout, model={**self.layout.model, **BF16_CHANGES}))

    @property
    def reference(self) -> Reference:
        """What one process must compute to compare with; accumulation and recompute change nothing in it."""
        changes = (tuple(sorted(changed.items())) for changed in (self.layout.model, self.layout.objective))
        return Reference(*changes, self.objective, self.lengths)


@dataclass(frozen=True)
class Reference:
    """The key of a one-process run."""

    model: tuple[tuple[str, object], ...]
    objective_changes: tuple[tuple[str, object], ...]
    objective: str
    lengths: str


def product(layouts: Sequence[Layout]) -> list[Case]:
    """Every case of these layouts."""
    return [Case(*factors) for factors in itertools.product(layouts, OBJECTIVES, LENGTHS, ACCUMULATION, RECOMPUTE)]


def covering_array(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases in which every two values of two factors meet: greedily the one with most new pairs, the first of equals."""
    pairs = {case: frozenset(itertools.combinations(case.factors, 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
