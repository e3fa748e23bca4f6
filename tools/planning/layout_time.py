"""How long a step of a layout takes, by parts: a model of few constants, each with where it comes from.

Compute is the counted operations at a rate, and the bytes of weights that each microbatch moves, but not faster than the host can launch
it all. What was measured is one H200 with 6 and 30 layers of the released width (docs/performance.md); everything between GPUs is an
assumption until it is measured.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_dllm.config import RunConfig, TrainingConfig
from megatron_dllm.training.operations import StepOperations, TokenCounts, step_operations

# Forward and backward by CUDA graphs, every row self-conditioned. 6 layers, all trained: 114.7 ms at 4 x 1024, 95.5 at 1 x 4096, 46.4 at
# 1 x 1024; 30 layers with adapters alone: 271.8 at 4 x 1024, 116.5 at 1 x 1024. One rate and these bytes give all five within 6 %.
ACHIEVED_TFLOPS = 500.0
TRAINED_BYTES, FROZEN_BYTES = 14, 12  # that one microbatch moves for a weight: reads of it, and its gradient
# Without graphs: adapters on 30 layers took 398 ms at 1 x 1024, and 728 with full recompute.
LAUNCH_MS_PER_LAYER = 16.0
MEASURED_ON = "H200"
COPY_TB_PER_S = 4.26
# Bytes that AdamW reads and writes for an element: master, two moments, the fp32 gradient, the 16-bit copy.
OPTIMIZER_BYTES = 30
# GB/s of one GPU: NVLink inside a node, the network between nodes. Assumptions.
NVLINK_GB_PER_S, NETWORK_GB_PER_S = 300.0, 40.0
# Dense bf16 peaks, to scale the achieved rate to another GPU (an extrapolation); memory in GiB.
GPUS = {"H200": (989, 139.0), "H100": (989, 79.0), "A100": (312, 79.0), "B200": (2250, 178.0)}


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one optimizer step. bubble: the share of the pipeline's time in which a rank waits."""

    compute: float
    communication: float
    gradients: float
    optimizer: float
    bubble: float
    launch_bound: bool

    @property
    def total(self) -> float:
        return (self.compute + self.communication) / (1 - self.bubble) + self.gradients + self.optimizer


def token_counts(run: RunConfig, rows: int, *, canvases: int = 1, conditioned: float | None = None) -> TokenCounts:
    """Tokens of `rows` full rows, each with so many canvases that begin half way on average; `conditioned` is the share with a draft."""
    length, canvas = run.data.seq_length, run.model.canvas_length
    diffusion = run.objective.objective != "ar"
    count = rows * canvases if diffusion else 0
    share = run.objective.self_conditioning_prob if conditioned is None else conditioned
    return TokenCounts(
        clean=np.full(rows, length, np.int64), canvas=np.full(count, canvas, np.int64),
        canvas_prefix=np.full(count, max(length - canvas, 0) // 2, np.int64),
        self_conditioned=np.arange(count) < round(share * count), text_tokens=rows * length,
        encoder_targets=rows * (length - 1), decoder_targets=count * canvas)


def operations(run: RunConfig, rows: int, canvases: int, conditioned: float | None = None) -> StepOperations:
    return step_operations(run.model, token_counts(run, rows, canvases=canvases, conditioned=conditioned),
                           recompute=run.training.recompute_granularity, recompute_modules=run.training.recompute_modules,
                           frozen=run.lora.lora_rank is not None)


def moved_bytes(weights: Mapping[tuple[str, bool, int], float]) -> float:
    """What a microbatch moves for one rank's weights, given as elements by (grid, trained, bytes of an element)."""
    return sum(count * (TRAINED_BYTES if trained else FROZEN_BYTES) for (_, trained, _), count in weights.items())


def compute_ms(flop: float, moved: float, layers: float, microbatches: int, run: TrainingConfig, gpu: str) -> tuple[float, bool]:
    """Time of so many operations on one GPU in so many microbatches of `layers` layers, each of which moves so many bytes of weights; and
    whether launches are the limit. Graphs are taken to serve every microbatch."""
    rate = ACHIEVED_TFLOPS * GPUS[gpu][0] / GPUS[MEASURED_ON][0]
    work = flop / rate / 1e9 + microbatches * moved / COPY_TB_PER_S / 1e9
    if run.cuda_graph_impl != "none":
        return work, False
    # Of forward and backward the forward's launches come a second time under full recompute: a third of them.
    launches = LAUNCH_MS_PER_LAYER * layers * microbatches * (4 / 3 if run.recompute_granularity == "full" else 1)
    return max(work, launches), launches > work


def communication_ms(run: RunConfig, tokens: float, layers: float, *, gpus_per_node: int) -> float:
    """What one rank sends in a step for its `tokens` (of the whole sequence over cp) in `layers` layers, none of it hidden."""
    parallel, model = run.parallel, run.model
    tp, cp, ep, etp = (parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size,
                       parallel.expert_tensor_parallel_size)
    size = 2 if run.training.bf16 else 4
    passes = 3 if run.training.recompute_granularity == "full" else 2
    hidden = tokens * model.hidden_size * size

    def rate(ranks: int) -> float:
        return (NVLINK_GB_PER_S if ranks <= gpus_per_node else NETWORK_GB_PER_S) * 1e6

    total = 4 * hidden * (tp - 1) / tp * passes / rate(tp)
    rows = hidden * model.moe_router_topk / tp
    # Dispatch and combine each go there and back.
    total += 2 * rows * (ep * etp - 1) / (ep * etp) * passes / rate(tp * ep)
    full = model.layer_kinds.count("full") / model.num_layers
    keys = 2 * tokens * model.num_global_query_groups * model.global_kv_channels * size
    total += keys * (cp - 1) * full * passes / rate(tp * cp)
    return total * layers


def gradient_ms(bytes_by_group: dict[int, float], hidden_ms: float, *, gpus_per_node: int, ranks_before: int) -> float:
    """The sum of gradients over data-parallel groups {size: bytes}, beyond the `hidden_ms` of backward that it runs beside."""
    total = 0.0
    for size, count in bytes_by_group.items():
        speed = NVLINK_GB_PER_S if size * ranks_before <= gpus_per_node else NETWORK_GB_PER_S
        total += 2 * count * (size - 1) / size / (speed * 1e6)
    return max(0.0, total - hidden_ms)
