"""The layouts that a run may take on a number of GPUs, with the flags that go with them, and those of them that the trainer takes."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megatron_dllm import config
from megatron_dllm.config import MoEConfig, ParallelConfig, RunConfig
from megatron_dllm.config.problems import Problem
from megatron_dllm.models.diffusion_gemma.stages import model_layout
from megatron_dllm.moe.dispatchers.deepep import INSIDE_A_HOST
from planning import layout_time as timing

RECOMPUTE = {
    "none": {"recompute_granularity": None, "recompute_modules": ()},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "full": {"recompute_granularity": "full", "recompute_modules": ()},
}
ROWS = {1, 2, 4}
KERNELS = ("deepep", "hybridep")  # that send tokens over several ranks alone, to whole experts
# Whether the embedding and the head count as layers where stages are of equal size.
ACCOUNTS = ((False, False), (False, True), (True, True))


def layouts(base: RunConfig, gpus: int, *, gpus_per_node: int = 8, canvases: int = 1) -> Iterator[RunConfig]:
    """Every way to deal the run out over the GPUs that differs in what is planned; legal or not. canvases: of a row."""
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    streams = base.training.recompute_modules if "mhc" in base.training.recompute_modules else ()
    batch, model = base.training.global_batch_size, base.model
    for tp, cp, pp, ep in itertools.product(sizes, repeat=4):
        if gpus % (tp * cp * pp) or gpus % (ep * pp) or model.num_experts % ep or model.num_attention_heads % tp:
            continue
        for etp, distributed, recompute, micro, stages in itertools.product(
                sorted({1, tp}), (False, True), RECOMPUTE.values(), sorted(ROWS | {base.training.micro_batch_size}),
                stage_splits(base, pp)):
            if gpus % (etp * ep * pp) or batch % (micro * (gpus // (tp * cp * pp))):
                continue
            if distributed and gpus == pp * tp == pp * etp * ep:
                continue  # nothing to share: no rank has what another one has
            parallel = replace(
                base.parallel, tensor_model_parallel_size=tp, sequence_parallel=tp > 1, context_parallel_size=cp,
                pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
                use_distributed_optimizer=distributed, overlap_param_gather=base.parallel.overlap_param_gather and distributed and pp == 1,
                **stages)
            kept = recompute if not streams else {**recompute, "recompute_modules": recompute["recompute_modules"] + ("mhc",)}
            if streams and recompute["recompute_granularity"] is None:
                kept["recompute_granularity"] = "selective"
            run = replace(base, parallel=parallel, training=replace(base.training, **rows_of(base, micro), **kept))
            yield replace(run, moe=dispatch(run, gpus_per_node, canvases))


def rows_of(base: RunConfig, micro: int) -> dict[str, int | None]:
    """The fields of so many rows a microbatch. Where graphs' multiples are those of full rows, they stay so."""
    training = base.training
    before, tokens, canvases = training.micro_batch_size, training.cuda_graph_token_multiple, training.cuda_graph_canvas_multiple
    if tokens == before * base.data.seq_length:
        tokens = micro * base.data.seq_length
        canvases = canvases and -(-canvases * micro // before)
    return {"micro_batch_size": micro, "cuda_graph_token_multiple": tokens, "cuda_graph_canvas_multiple": canvases}


def stage_splits(base: RunConfig, pp: int) -> list[dict[str, Any]]:
    """The fields of each way to deal layers out over so many pipeline ranks: stages of equal size, 1 to 3 a rank, with embedding and head
    counted as layers or not, as far as they differ; and the layout that is given, if it may be of so many ranks."""
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "num_layers_per_virtual_pipeline_stage",
             "pipeline_model_parallel_layout")
    if pp == 1:
        return [dict(zip(names, (False, False, None, None), strict=True))]
    wanted = [(*accounts, None if stages == 1 else counted // (pp * stages), None) for accounts in ACCOUNTS for stages in (1, 2, 3)
              if (counted := base.model.num_layers + sum(accounts)) % (pp * stages) == 0]
    if base.parallel.pipeline_model_parallel_layout is not None:
        wanted.append((False, False, None, base.parallel.pipeline_model_parallel_layout))
    found = {}
    for values in wanted:
        fields = dict(zip(names, values, strict=True))
        try:
            layout = model_layout(replace(base, parallel=replace(base.parallel, pipeline_model_parallel_size=pp, **fields)))
        except ValueError:  # the layout that is given is of another number of ranks, say
            continue
        found.setdefault(layout, fields)
    return list(found.values())


def dispatch(run: RunConfig, gpus_per_node: int, canvases: int) -> MoEConfig:
    """The run's, with room for its tokens where room is asked for or a recording needs it, and another dispatcher where its own cannot
    work."""
    moe, parallel = run.moe, run.parallel
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    has_rooms = moe.moe_max_tokens_per_rank is not None or run.training.cuda_graph_impl != "none"
    moe = replace(moe, moe_max_tokens_per_rank=most_tokens(run, canvases) if has_rooms and ep * etp > 1 else None)
    # Between hosts deep_ep tells the host how many tokens come, whatever room there is.
    is_apart = moe.moe_max_tokens_per_rank is not None and (ep not in INSIDE_A_HOST or ep > gpus_per_node)
    if moe.dispatcher in KERNELS and (ep == 1 or etp > 1 or moe.dispatcher == "deepep" and is_apart):
        return replace(moe, moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None)
    return moe


def most_tokens(run: RunConfig, canvases: int) -> int:
    """Of all ranks the most tokens that one brings to the experts in a pass: those of full rows, with as many canvases as rows may have."""
    data, parallel, rows = run.data, run.parallel, run.training.micro_batch_size
    if data.packing:
        canvases = max(canvases, data.max_canvases_per_row)
    elif run.objective.scores_all_canvases:
        canvases = max(canvases, -(-data.seq_length // run.model.canvas_length))
    fill, cp = timing.Fill.of(run, canvases), parallel.context_parallel_size
    # Of context-parallel ranks each has two chunks of all clean tokens, and its part of each canvas, or as many whole ones.
    clean = 2 * math.ceil((rows * data.seq_length + fill.clean) / (2 * cp)) if cp > 1 else rows * data.seq_length + fill.clean
    count, canvas = (rows * canvases + fill.canvases) * run.objective.has_canvases, run.model.canvas_length
    if cp == 1:
        own = count * canvas
    else:
        own = 2 * math.ceil(count / (2 * cp)) * canvas if run.objective.scores_all_canvases else count * math.ceil(canvas / cp)
    return math.ceil((clean + own) / parallel.tensor_model_parallel_size)


def legal_layouts(candidates: Iterable[RunConfig], gpus: int) -> list[RunConfig]:
    """Those that the trainer takes."""
    return [run for run in candidates if not config.validate(run, world_size=gpus)]


def what_stands_in_the_way(base: RunConfig, gpus: int, *, gpus_per_node: int, canvases: int) -> list[Problem]:
    """Why none of the layouts of `base` is legal: the problems of the one that has fewest, copies alone first."""
    plain = replace(base, parallel=ParallelConfig())
    plain = replace(plain, moe=dispatch(plain, gpus_per_node, canvases))
    every = [plain, *layouts(base, gpus, gpus_per_node=gpus_per_node, canvases=canvases)]
    return min((problems for run in every if (problems := config.validate(run, world_size=gpus))), key=len)


def check_device(run: RunConfig, gpu: str) -> None:
    """ValueError for what such a GPU does not do."""
    if run.training.cuda_graph_impl != "none" and gpu in timing.WITHOUT_KERNELS:
        raise ValueError(f"--cuda-graph-impl {run.training.cuda_graph_impl}, --gpu {gpu}: without the kernels for sm_90 and sm_100, "
                         "attention is cut by the lengths of the batch, which the host reads; set --cuda-graph-impl none")
