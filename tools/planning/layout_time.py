"""How long a step of a layout takes, by parts: a model of few constants, each with where it comes from.

A rank computes the counted operations, each kind at its rate, and moves the bytes of its weights in every microbatch; it sends what its
layout asks for; but it is not faster than the host starts all that, without graphs. What was measured, and how far this is from it, is in
`measured.py`: one H200 with 6 and 30 layers of the released width, two with 6 to 12. More GPUs are an extrapolation.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dllm.config import RunConfig
from megatron_dllm.training.draft_pass import PassSizes, chosen_apart, may_be_joint, wants_joint
from megatron_dllm.training.forecast import keeps_experts, num_passes
from megatron_dllm.training.operations import Operations, StepOperations, TokenCounts, causal_pairs, stack_operations, step_operations

# TFLOP/s of the layers' products, of attention (by visible pairs, the backward counted as twice the forward) and of the head; bytes that a
# microbatch moves for a weight: reads of it, its gradient, which the first microbatch of a step writes. Fitted to forward and backward by
# CUDA graphs on one H200, which they meet within 4 % (measured.py, the newer figures), all with every row self-conditioned; what is read
# for a recompute to older ones.
LAYER_TFLOPS, ATTENTION_TFLOPS, HEAD_TFLOPS = 450.0, 250.0, 750.0
TRAINED_BYTES, FROZEN_BYTES, REPEATED_BYTES = 11, 7, 2
ONE_BACKWARD_BYTES = 2  # that are not read where both passes have one backward, or drafts are made beforehand, without any
# Each further backward of a step reads and writes a weight's fp32 gradient once more, and 16-bit gradients of dense layers are added to
# theirs one by one: bytes in whose time that is done, where by count they would be 8. In a pipeline the backward of each pass is one by
# itself, unless they are joined. Two H200s by graphs, pp2 with 2 and 8 microbatches and pp2 vpp2 with streams, ask for 20, 17 and 18, one
# H200's four microbatches of four layers for 19 and, joined, 21.
ADDED_BYTES = 18
# What residual streams add to the work at n = 4, by CUDA graphs on one H200: 106.2 ms beside 100.3 for 6 layers with the head.
STREAMS_SHARE = 0.06
# Milliseconds in which the host starts a layer's forward and backward for one microbatch, without graphs, on the faster of the hosts that
# were measured (`Machine.host` says how much slower another is). One H200: adapters on 30 layers 13 at 1 x 1024, all weights of 6 and 12
# layers 14 to 18. Two H200s, beyond that: experts over ranks by deepep (22 in all) and by alltoall, whose sizes the host waits for (26); 4
# where a recompute exchanges layouts anew; tensor parallelism (34 in all, with experts by alltoall); residual streams (0.5 to 8). Full
# recompute starts the forward again and takes the checkpoint's own time: 32 for 22, 40 for 26.
LAUNCH_MS_PER_LAYER, DISPATCH_LAUNCH_MS, ALLTOALL_LAUNCH_MS, ANEW_LAUNCH_MS = 16.0, 6.0, 4.0, 4.0
TENSOR_LAUNCH_MS, STREAMS_LAUNCH_MS = 8.0, 3.0
RECOMPUTED_LAUNCHES = 1.45
MEASURED_ON = "H200"
COPY_TB_PER_S = 4.26
# Bytes that AdamW reads and writes for an element: master, two moments, the fp32 gradient, the 16-bit copy; and the rate at which it does.
OPTIMIZER_BYTES, OPTIMIZER_TB_PER_S = 30, 4.0
# GB/s that one GPU sends. In a node: two H200s summed 4.8 GB of gradients over NCCL in 8.7 ms (273) beside nothing, 22.6 in 98 (230) beside
# the backward. Between nodes: an assumption.
NVLINK_GB_PER_S, NETWORK_GB_PER_S = 250.0, 40.0
# Milliseconds beyond its bytes of one dispatch or combine by deepep, of one exchange by NCCL, and of what the device does more around a
# dispatch or combine: two H200s' graphs of 8 layers exposed 2.3 ms of 64 by deepep beyond their bytes, 1.4 of 112 by alltoall, 3.1 of 240
# with tensor parallelism as well; and they took 9 ms more than the same work without.
DEEPEP_MS, NCCL_MS, ROUTING_MS = 0.03, 0.013, 0.16
# Of the host's time for a layer, what is left of two forwards and two backwards where there is one backward. Drafts made beforehand: 0.8
# on two H200s with alltoall (0.63 of the operations, counted on the toy); with recompute one forward less besides, which is counted in
# proportion: not measured. One backward for both passes: the same is taken; adapters on one H200 give 10 ms a layer, of 13 to 16 before.
ONE_BACKWARD_LAUNCHES = {None: 0.8, "selective": 0.8, "full": 0.75}
# Of the device's work of the last microbatch, what gradients are summed beside, where no pipeline runs it.
HIDDEN_SHARE = 0.3
# Dense bf16 peaks, to scale the achieved rate to another GPU (an extrapolation); memory in GiB.
WITHOUT_KERNELS = ("A100",)  # ours are for sm_90 and sm_100: nothing is recorded on others, and no two passes have one backward
GPUS = {"H200": (989, 139.0), "H100": (989, 79.0), "A100": (312, 79.0), "B200": (2250, 178.0)}


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one optimizer step on a rank.

    compute        what the device computes and moves
    communication  what it sends meanwhile for tensors, tokens and sequences, none of it hidden
    launches       the least that the host takes to start it (0: graphs)
    gradients      sums of gradients and gathers of parameters that nothing runs beside
    beside         sums of gradients that run beside the backward
    optimizer      the update
    bubble         share of the pipeline's time in which a rank waits, by the device's time; host_bubble: where the host decides it
    """

    compute: float
    communication: float
    launches: float
    gradients: float
    beside: float
    optimizer: float
    bubble: float = 0.0
    host_bubble: float = 0.0

    @property
    def launch_bound(self) -> bool:
        return self.launches / (1 - self.host_bubble) > (self.compute + self.communication) / (1 - self.bubble)

    @property
    def waiting(self) -> float:
        """The bubble that counts."""
        return self.host_bubble if self.launch_bound else self.bubble

    @property
    def total(self) -> float:
        busy = self.launches if self.launch_bound else self.compute + self.communication
        return busy / (1 - self.waiting) + self.gradients + self.optimizer

    @property
    def exposed(self) -> float:
        """The share of the step in which something is sent and nothing computed; while the host is behind, the device has nothing else."""
        return (self.communication + self.gradients + self.beside * self.launch_bound) / self.total


@dataclass(frozen=True)
class Fill:
    """What --cuda-graph-token-multiple and --cuda-graph-canvas-multiple add to a microbatch of full rows: clean tokens, a document of their
    own, and canvases that see no clean tokens. has_one_form: whether canvases are filled up, so that all of them are decoded twice and all
    tokens scored."""

    clean: int = 0
    canvases: int = 0
    has_one_form: bool = False

    @classmethod
    def of(cls, run: RunConfig, canvases: int) -> Fill:
        """Of rows with so many canvases each."""
        training, rows = run.training, run.training.micro_batch_size
        multiple = training.cuda_graph_canvas_multiple
        clean = -rows * run.data.seq_length % training.cuda_graph_token_multiple
        if multiple is None or not run.objective.has_canvases:
            return cls(clean)
        return cls(clean, max(-(-rows * canvases // multiple), 1) * multiple - rows * canvases, True)

    def __bool__(self) -> bool:
        return self != Fill()


def token_counts(run: RunConfig, rows: int, *, canvases: int = 1, conditioned: float | None = None, filled: bool = True) -> TokenCounts:
    """Tokens of `rows` full rows, each with so many canvases that begin half way on average; `conditioned` is the share with a draft;
    `filled`: with what is added to each microbatch."""
    length, canvas, objective = run.data.seq_length, run.model.canvas_length, run.objective
    fill, microbatches = Fill.of(run, canvases) if filled else Fill(), -(-rows // run.training.micro_batch_size)
    count = rows * canvases if objective.has_canvases else 0
    share = objective.self_conditioning_prob if conditioned is None else conditioned
    if fill.has_one_form:
        share = float(objective.decodes_twice)
    added = microbatches * fill.canvases
    clean = np.array([length] * rows + [fill.clean] * (microbatches if fill.clean else 0), np.int64)
    # Losses of the answer alone are taken of about a canvas of tokens.
    scored = rows * (min(canvas, length - 1) if objective.encoder_loss_tokens == "response" else length - 1)
    return TokenCounts(
        clean=clean, canvas=np.full(count + added, canvas, np.int64),
        canvas_prefix=np.repeat(np.array([max(length - canvas, 0) // 2, 0], np.int64), [count, added]),
        self_conditioned=np.repeat([True, False, share > 0], [round(share * count), count - round(share * count), added]),
        text_tokens=rows * length, encoder_targets=int(clean.sum()) if fill.has_one_form else scored,
        decoder_targets=(count + added) * canvas)


def filled(run: RunConfig, canvases: int) -> tuple[RunConfig, float]:
    """(run, canvases of a row) whose full rows have as many tokens as those of `run` with what fills microbatches up."""
    fill, rows = Fill.of(run, canvases), run.training.micro_batch_size
    length = run.data.seq_length + math.ceil(fill.clean / rows)
    return replace(run, data=replace(run.data, seq_length=length)), canvases + fill.canvases / rows


def operations(run: RunConfig, rows: int, canvases: int, conditioned: float | None = None, *, filled: bool = True) -> StepOperations:
    tokens = token_counts(run, rows, canvases=canvases, conditioned=conditioned, filled=filled)
    counted = step_operations(run.model, tokens, recompute=run.training.recompute_granularity,
                              recompute_modules=run.training.recompute_modules, frozen=run.lora.lora_rank is not None)
    if run.training.draft_pass != "apart":
        return counted
    seen = pass_sizes(tokens, canvases).seen
    again = stack_operations(run.model, tokens=int(seen.sum()), full_pairs=causal_pairs(seen, None),
                             sliding_pairs=causal_pairs(seen, run.model.window_size))
    return replace(counted, repeated=dict(Counter(counted.repeated) + Counter(again)))


def pass_sizes(tokens: TokenCounts, canvases: int) -> PassSizes:
    """Of rows with so many canvases each. Drafts of one row see the same clean tokens."""
    drafted = tokens.self_conditioned
    return PassSizes(int(tokens.clean.sum()), tokens.canvas_prefix[drafted][::canvases], int(tokens.canvas.sum()),
                     int(tokens.canvas[drafted].sum()), int(tokens.clean.max()), int(tokens.canvas.max(initial=0)))


def with_draft_pass(run: RunConfig, canvases: int, gpu: str = MEASURED_ON) -> RunConfig:
    """`run` with the --draft-pass that its microbatches of full rows take on a GPU where they have drafts."""
    if run.training.draft_pass not in ("auto", "joint"):
        return run
    drafted = float(run.objective.self_conditioning_prob > 0)
    tokens = token_counts(run, run.training.micro_batch_size, canvases=canvases, conditioned=drafted)
    if run.parallel.expert_model_parallel_size > 1:
        # Ranks that share experts agree, so that the row whose draft sees most decides for all.
        tokens = replace(tokens, canvas_prefix=np.full_like(tokens.canvas_prefix, max(run.data.seq_length - run.model.canvas_length, 0)))
    sizes = pass_sizes(tokens, canvases)
    # Of a CPU the configuration alone is asked, not what it can; our kernels for a GPU take 16 bits.
    is_joint = (gpu not in WITHOUT_KERNELS and sizes.drafts and run.training.bf16 and wants_joint(run, on_gpu=True)
                and may_be_joint(run, torch.device("cpu")))
    is_apart = run.training.draft_pass == "auto" and chosen_apart(run, sizes)
    return replace(run, training=replace(run.training, draft_pass="joint" if is_joint else "apart" if is_apart else "shared"))


def operations_ms(counted: Operations, gpu: str) -> float:
    """Of so many operations on one GPU."""
    scale = 1e9 * GPUS[gpu][0] / GPUS[MEASURED_ON][0]
    rates = {"attention": ATTENTION_TFLOPS, "head": HEAD_TFLOPS, "soft_embedding": HEAD_TFLOPS}
    return sum(count / (rates.get(part, LAYER_TFLOPS) * scale) for part, count in counted.items())


def work_ms(counted: StepOperations, gpu: str) -> float:
    """Of all operations of a step on one GPU."""
    return sum(operations_ms(part, gpu) for part in (counted.draft, counted.forward, counted.backward, counted.repeated))


def moved_ms(weights: Mapping[tuple[str, bool, int], float], run: RunConfig, microbatches: int) -> float:
    """For what a microbatch, in the mean of a step's, moves for one rank's weights, given as elements by (grid, trained, bytes of an
    element)."""
    training = run.training
    has_one = training.draft_pass in ("apart", "joint")
    backwards = microbatches * (num_passes(run) if run.parallel.pipeline_model_parallel_size > 1 and not has_one else 1)
    added = ADDED_BYTES * (backwards - 1) / microbatches
    spared = ONE_BACKWARD_BYTES if has_one else 0

    def again(grid: str) -> int:
        is_again = training.recompute_granularity == "full" or grid == "expert" and not keeps_experts(training)
        return REPEATED_BYTES * is_again - spared

    return sum(count * ((TRAINED_BYTES + added if trained else FROZEN_BYTES) + again(grid))
               for (grid, trained, _), count in weights.items()) / COPY_TB_PER_S / 1e9


def streams_factor(run: RunConfig) -> float:
    """What residual streams make of the layers' work."""
    return 1 + STREAMS_SHARE * run.model.mhc_num_residual_streams / 4 if run.model.enable_mhc_connections else 1.0


def launch_ms(run: RunConfig, layers: float, host: float = 1.0) -> float:
    """The time, for one microbatch of so many layers, of a host that takes `host` times as long as the faster of those measured; graphs are
    taken to serve every microbatch."""
    if run.training.cuda_graph_impl != "none":
        return 0.0
    parallel, training = run.parallel, run.training
    spread, recomputes = parallel.expert_model_parallel_size > 1, training.recompute_granularity == "full"
    a_layer = (LAUNCH_MS_PER_LAYER + DISPATCH_LAUNCH_MS * spread + ALLTOALL_LAUNCH_MS * (spread and run.moe.dispatcher == "alltoall")
               + TENSOR_LAUNCH_MS * (parallel.tensor_model_parallel_size > 1) + STREAMS_LAUNCH_MS * run.model.enable_mhc_connections)
    if training.draft_pass in ("apart", "joint"):
        a_layer *= ONE_BACKWARD_LAUNCHES[training.recompute_granularity]
    anew = ANEW_LAUNCH_MS * (spread and recomputes and not run.moe.moe_recompute_replay)
    return layers * host * (a_layer * (RECOMPUTED_LAUNCHES if recomputes else 1) + anew)


def communication_ms(run: RunConfig, tokens: float, *, gpus_per_node: int) -> float:
    """What one rank sends in a layer for a microbatch's `tokens` (of the whole sequence over cp), none of it hidden."""
    parallel, model = run.parallel, run.model
    tp, cp, ep, etp = (parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size,
                       parallel.expert_tensor_parallel_size)
    size = 2 if run.training.bf16 else 4
    passes, loops = 3 if run.training.recompute_granularity == "full" else 2, num_passes(run)
    row = model.hidden_size * size

    def rate(ranks: int) -> float:
        return (NVLINK_GB_PER_S if ranks <= gpus_per_node else NETWORK_GB_PER_S) * 1e6

    total = 4 * tokens * row * (tp - 1) / tp * passes / rate(tp) + 4 * passes * loops * NCCL_MS * (tp > 1)
    if ep * etp > 1:
        # By alltoall with rooms each pass sends all of its room.
        own = loops * run.moe.moe_max_tokens_per_rank if has_rooms(run) else tokens / tp
        sent = 2 * own * row * sent_rows(run) * (2 if keeps_experts(run.training) else 3)
        each = NCCL_MS if run.moe.dispatcher == "alltoall" else DEEPEP_MS
        total += sent / rate(ep * etp) + (num_transfers(run) + num_small_transfers(run)) * each
    full = model.layer_kinds.count("full") / model.num_layers
    keys = 2 * tokens * model.num_global_query_groups * model.global_kv_channels * size
    return total + keys * (cp - 1) * full * passes / rate(tp * cp) + passes * loops * NCCL_MS * (cp > 1)


def edge_ms(run: RunConfig, tokens: float, gpus_per_node: int) -> float:
    """For `tokens` over an edge of the pipeline, forward and backward: streams of a rank's own tokens."""
    parallel = run.parallel
    tp, ranks = parallel.tensor_model_parallel_size, (parallel.tensor_model_parallel_size * parallel.context_parallel_size
                                                      * parallel.pipeline_model_parallel_size)
    row = run.model.hidden_size * run.model.num_residual_streams * (2 if run.training.bf16 else 4)
    rate = NVLINK_GB_PER_S if ranks <= gpus_per_node else NETWORK_GB_PER_S
    return 2 * tokens * row / (tp if parallel.sequence_parallel else 1) / rate / 1e6


def has_rooms(run: RunConfig) -> bool:
    """Whether alltoall sends rooms of a fixed size."""
    return run.moe.dispatcher == "alltoall" and run.moe.moe_max_tokens_per_rank is not None


def num_transfers(run: RunConfig) -> int:
    """Dispatches and combines of a layer in a microbatch, there and in the backward back."""
    loops = num_passes(run)
    return 2 * (loops + _loops_back(run) * (1 if keeps_experts(run.training) else 2))


def num_small_transfers(run: RunConfig) -> int:
    """What alltoall with rooms sends beside them: the choices of experts in each pass, weights with each dispatch, their gradients back."""
    if not has_rooms(run):
        return 0
    again = not keeps_experts(run.training)
    anew = again and not run.moe.moe_recompute_replay
    return 2 * num_passes(run) + _loops_back(run) * (1 + again + anew)


def _loops_back(run: RunConfig) -> int:
    return 1 if run.training.draft_pass == "apart" else num_passes(run)


def routing_ms(run: RunConfig, layers: float) -> float:
    """What the device does more in a microbatch of so many layers where ranks share experts."""
    parallel = run.parallel
    spread = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size > 1
    return layers * num_transfers(run) * ROUTING_MS * spread


def sent_rows(run: RunConfig) -> float:
    """Copies of a token that leave its rank: deepep sends one to each rank that has any of its experts, alltoall one to each expert or,
    where its rooms are bounded, to each rank."""
    ranks, topk = run.parallel.expert_model_parallel_size * run.parallel.expert_tensor_parallel_size, run.model.moe_router_topk
    if run.moe.dispatcher == "alltoall" and run.moe.moe_max_tokens_per_rank is None:
        return topk * (ranks - 1) / ranks
    if run.moe.dispatcher in ("deepep", "hybridep"):
        return (1 - (1 - 1 / ranks) ** topk) * (ranks - 1)
    return ranks - 1


def summed_ms(elements: float, ranks: int, *, distributed: bool, gpus_per_node: int, ranks_before: int) -> tuple[float, float]:
    """(sum of so many fp32 gradients over data-parallel ranks, gather of their 16-bit parameters where each rank steps its share)."""
    speed = (NVLINK_GB_PER_S if ranks * ranks_before <= gpus_per_node else NETWORK_GB_PER_S) * 1e6
    sent = elements * (ranks - 1) / ranks / speed
    return (4 * sent, 2 * sent) if distributed else (2 * 4 * sent, 0.0)


def exchanged_ms(elements: float, ranks: int, gpus_per_node: int) -> float:
    """Two of so many ranks send each other so many fp32 gradients."""
    return 4 * elements / (NVLINK_GB_PER_S if ranks <= gpus_per_node else NETWORK_GB_PER_S) / 1e6
