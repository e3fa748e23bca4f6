"""Ranks every legal layout of a run on a number of GPUs by predicted step time, with the memory of its fullest GPU by kind.

The run is given by the flags of pretrain_dllm.py, after --. Legal is what validate() has no objection to. Example:

    python tools/plan.py layouts --num-gpus 8 -- --preset diffusiongemma-26b-a4b --bf16 --seq-length 2048 --global-batch-size 64 \\
        --train-iters 1000 --data-path chat.jsonl
"""
from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_dllm import config
from megatron_dllm.config import DataConfig, RunConfig, TrainingConfig
from megatron_dllm.training import forecast as memory
from megatron_dllm.training.operations import StepOperations
from planning import layout_time as timing
from planning import stages

GIB = 2**30
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 15, 16, 32, 64, 128)
RECOMPUTE = {
    "none": {"recompute_granularity": None, "recompute_modules": ()},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "full": {"recompute_granularity": "full", "recompute_modules": ()},
}


@dataclass(frozen=True)
class Machine:
    """So many GPUs of a kind, `gpus_per_node` of them on one host, which takes `host` times as long to start work as the faster of those
    that were measured: the other took 1.3 times as long."""

    gpus: int
    gpu: str = timing.MEASURED_ON
    gpus_per_node: int = 8
    host: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A layout, what its fullest GPU holds (bytes by kind), its step, and the operations that the step needs on all GPUs."""

    run: RunConfig
    gpus: int
    held: dict[str, float]
    time: timing.StepTime
    operations: float

    @property
    def bytes(self) -> float:
        return sum(self.held.values())

    @property
    def tokens_per_second(self) -> float:
        """Clean tokens, of one GPU."""
        return self.run.training.global_batch_size * self.run.data.seq_length / self.time.total / self.gpus * 1e3

    @property
    def tflops(self) -> float:
        """TFLOP/s that one GPU gives to what the step needs."""
        return self.operations / self.time.total / self.gpus / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-gpus", type=int, required=True, metavar="N")
    parser.add_argument("--gpu", choices=timing.GPUS, default=timing.MEASURED_ON)
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a GPU; without it: that of --gpu")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    parser.add_argument("--canvases-per-row", type=int, default=1, metavar="N", help="canvases that a row carries, where rows are packed")
    parser.add_argument("--given", action="store_true", help="plan the layout that the flags give, and no other")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layouts that are shown")
    add_host_argument(parser)
    parser.add_argument("flags", nargs="+", metavar="FLAGS", help="after --: flags of pretrain_dllm.py; weights are not read")


def add_host_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", type=float, default=1.0, metavar="TIMES",
                        help="how long the host takes to start work, beside the faster of two that were measured; the other: 1.3")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 when no legal layout fits. ValueError for flags that cannot work."""
    base = config.parse(without_weights(arguments.flags))
    gib = arguments.memory_gib or timing.GPUS[arguments.gpu][1]
    candidates = [base] if arguments.given else layouts(base, arguments.num_gpus)
    legal, machine = [], Machine(arguments.num_gpus, arguments.gpu, arguments.gpus_per_node, arguments.host)
    for candidate in candidates:
        problems = config.validate(candidate, world_size=arguments.num_gpus)
        if not problems:
            legal.append(plan(candidate, machine, arguments.canvases_per_row))
        elif arguments.given:
            raise ValueError(config.format_problems(problems))
    fitting = sorted((p for p in legal if p.bytes <= gib * GIB), key=lambda p: p.time.total)
    shown = fitting[:arguments.top] or sorted(legal, key=lambda p: p.bytes)[:arguments.top]
    print(f"{arguments.num_gpus} x {arguments.gpu} ({gib:g} GiB): {len(legal)} legal layouts, {len(fitting)} fit")
    if not shown:
        print("no layout is legal; plan one with --given to see why")
        return 1
    print(table(shown))
    for note in notes(shown[0], machine):
        print(f"note: {note}")
    if not fitting:
        print("none fits: the layouts with the least memory are shown")
        return 1
    if not arguments.given:
        print("flags of the first:\n" + flags_block(shown[0].run))
    return 0


def without_weights(flags: Sequence[str]) -> list[str]:
    """The flags without those that name files of weights and tokenizers, which a plan does not read."""
    dropped = ("--pretrained-checkpoint", "--load", "--tokenizer-model", "--tokenizer-type")
    kept, skip = [], False
    for word in flags:
        skip = word in dropped or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept


def layouts(base: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Every way to deal the run out over the GPUs that differs in what is planned; legal or not."""
    sizes = [n for n in SIZES if n <= gpus and gpus % n == 0]
    streams = base.training.recompute_modules if "mhc" in base.training.recompute_modules else ()
    for tp, cp, pp, ep in itertools.product(sizes, repeat=4):
        batch, model = base.training.global_batch_size, base.model
        if gpus % (tp * cp * pp) or gpus % (ep * pp) or model.num_experts % ep or model.num_attention_heads % tp:
            continue
        for etp, distributed, recompute, micro, per_stage in itertools.product(
                {1, tp}, (False, True), RECOMPUTE.values(), (1, 2, 4), virtual_stages(base.model.num_layers, pp)):
            if gpus % (etp * ep * pp) or batch % (micro * (gpus // (tp * cp * pp))):
                continue
            parallel = replace(
                base.parallel, tensor_model_parallel_size=tp, sequence_parallel=tp > 1, context_parallel_size=cp,
                pipeline_model_parallel_size=pp, pipeline_model_parallel_layout=None, num_layers_per_virtual_pipeline_stage=per_stage,
                expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, use_distributed_optimizer=distributed)
            if distributed and gpus == pp * tp == pp * etp * ep:
                continue  # nothing to share: no rank has what another one has
            kept = recompute if not streams else {**recompute, "recompute_modules": recompute["recompute_modules"] + ("mhc",)}
            if streams and recompute["recompute_granularity"] is None:
                kept["recompute_granularity"] = "selective"
            yield replace(base, parallel=parallel, training=replace(base.training, micro_batch_size=micro, **kept))


def virtual_stages(num_layers: int, pp: int) -> list[int | None]:
    """None: one stage a rank; else layers of a virtual stage, for 2 and 3 stages a rank."""
    return [None] + [num_layers // (pp * v) for v in (2, 3) if pp > 1 and num_layers % (pp * v) == 0]


def plan(run: RunConfig, machine: Machine, canvases_per_row: int = 1) -> Plan:
    """Memory and time of a legal layout."""
    run = timing.with_draft_pass(run, canvases_per_row)
    gpus, training = machine.gpus, run.training
    predicted = memory.forecast(run, gpus, canvases_per_row)
    counted = _operations(run.model, run.objective, run.lora, run.data.seq_length, training.global_batch_size, canvases_per_row,
                          training.recompute_granularity, training.recompute_modules, training.draft_pass)
    return Plan(run, gpus, dict(predicted.fullest), _time(run, predicted, counted, machine), counted.model)


def _time(run: RunConfig, predicted: memory.Forecast, counted: StepOperations, machine: Machine) -> timing.StepTime:
    parallel, gpus = run.parallel, machine.gpus
    pp, microbatches = parallel.pipeline_model_parallel_size, num_microbatches(run, gpus)
    # One layer more for each prediction depth; the head weighs as its operations, not as launches.
    layers = (run.model.num_layers + run.model.mtp_num_layers) / pp
    own = predicted.elements.of_stage(*memory.stage_of(run, None, 0))
    moved = timing.moved_ms(own, run) / pp
    compute = (timing.work_ms(counted, machine.gpu) / gpus + microbatches * moved) * timing.streams_factor(run)
    hidden = timing.HIDDEN_SHARE * compute / microbatches if pp == 1 else 0.0
    compute += microbatches * timing.routing_ms(run, layers)
    # Edges of a pipeline are part of its waiting.
    per_layer = timing.communication_ms(run, predicted.tokens, gpus_per_node=machine.gpus_per_node)
    bubble = 0.0
    if pp > 1:
        bubble = stages.bubble(run, counted, predicted, gpus=gpus, gpu=machine.gpu, beside_ms=timing.routing_ms(run, 1) + per_layer,
                               gpus_per_node=machine.gpus_per_node)
    parts = _gradient_ms(run, predicted, own, machine)
    beside = min(parts.early, hidden)
    return timing.StepTime(
        compute, microbatches * layers * per_layer, microbatches * timing.launch_ms(run, layers, machine.host),
        parts.early + parts.late - beside + parts.gathers * (not parallel.overlap_param_gather), beside,
        parts.stepped * timing.OPTIMIZER_BYTES / (timing.OPTIMIZER_TB_PER_S * 1e9), bubble, predicted.bubble)


@dataclass(frozen=True)
class GradientParts:
    """Milliseconds: sums that can begin during the last backward, and those of the embedding, which is complete at its end; gathers of
    parameters. stepped: elements that the fullest rank updates."""

    early: float
    late: float
    gathers: float
    stepped: float


def _gradient_ms(run: RunConfig, predicted: memory.Forecast, own: memory.Elements, machine: Machine) -> GradientParts:
    """own: the whole model's elements on a rank of its tensor and expert groups."""
    parallel = run.parallel
    pp, shared = parallel.pipeline_model_parallel_size, parallel.use_distributed_optimizer
    embedding = sum(count for (_, trains, _), count in predicted.elements.parts["embedding"].items() if trains)
    layout = memory.model_layout(run) if pp > 1 else None
    ranks_elements = [predicted.elements.of_stage(*memory.stage_of(run, layout, rank)) for rank in range(pp)]
    early, late, gathers, stepped = 0.0, 0.0, 0.0, 0.0
    for grid, ranks in replicas(run, machine.gpus).items():
        elements = _trained(own, grid) / pp
        summed, gathered = timing.summed_ms(elements, ranks, distributed=shared, gpus_per_node=machine.gpus_per_node,
                                            ranks_before=machine.gpus // ranks)
        at_the_end = summed * embedding / pp / elements if grid == "dense" and elements else 0.0
        early, late, gathers = early + summed - at_the_end, late + at_the_end, gathers + gathered
        shares = ranks if shared else 1
        stepped += max(_trained(of_rank, grid) for of_rank in ranks_elements) / shares
        if grid == "dense" and pp > 1:  # the first and the last stage have the embedding, and exchange its gradients
            late += timing.exchanged_ms(embedding / shares, pp * ranks, machine.gpus_per_node)
    return GradientParts(early, late, gathers, stepped)


def _trained(elements: memory.Elements, grid: str) -> float:
    return sum(count for (of, trains, _), count in elements.items() if trains and of == grid)


def num_microbatches(run: RunConfig, gpus: int) -> int:
    return run.training.global_batch_size // (run.training.micro_batch_size * run.parallel.data_parallel_size(gpus))


def virtual_stages_of(run: RunConfig) -> int:
    """Virtual stages of a rank."""
    return memory.model_layout(run).chunks


def replicas(run: RunConfig, gpus: int) -> dict[str, int]:
    """By grid, the ranks that have the same parameters."""
    parallel = run.parallel
    pp = parallel.pipeline_model_parallel_size
    return {"dense": parallel.data_parallel_size(gpus) * parallel.context_parallel_size,
            "expert": gpus // (parallel.expert_tensor_parallel_size * parallel.expert_model_parallel_size * pp)}


@cache
def _operations(*key) -> StepOperations:
    """timing.operations, made once for all layouts that share it."""
    model, objective, lora, seq_length, rows, canvases, recompute, modules, draft_pass = key
    run = RunConfig(model=model, objective=objective, lora=lora, data=DataConfig(seq_length=seq_length), training=TrainingConfig(
        recompute_granularity=recompute, recompute_modules=modules, draft_pass=draft_pass))
    return timing.operations(run, rows, canvases)


COLUMNS = ("tp", "cp", "pp", "vpp", "ep", "etp", "rows", "recompute", "shared", "ms/step", "tokens/s", "TFLOP/s", "bubble", "exposed",
           *memory.KINDS, "GiB")


def table(plans: Sequence[Plan]) -> str:
    """A line a layout: sizes, step, memory of the fullest GPU in GiB."""
    lines = [COLUMNS]
    for p in plans:
        parallel, training, time = p.run.parallel, p.run.training, p.time
        pp = parallel.pipeline_model_parallel_size
        recompute = {None: "-", "full": "full"}.get(training.recompute_granularity, "+".join(training.recompute_modules))
        lines.append((
            parallel.tensor_model_parallel_size, parallel.context_parallel_size, pp, virtual_stages_of(p.run) if pp > 1 else 1,
            parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size, training.micro_batch_size, recompute,
            "yes" if parallel.use_distributed_optimizer else "-", f"{time.total:.0f}{'*' if time.launch_bound else ''}",
            f"{p.tokens_per_second:.0f}", f"{p.tflops:.0f}", f"{time.waiting:.0%}",
            f"{time.exposed:.0%}", *(f"{p.held[kind] / GIB:.1f}" for kind in memory.KINDS), f"{p.bytes / GIB:.1f}"))
    texts = [[str(cell) for cell in line] for line in lines]
    widths = [max(len(line[n]) for line in texts) for n in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in texts)


def notes(best: Plan, machine: Machine) -> list[str]:
    """What the figures stand on."""
    found = ["rows: --micro-batch-size; shared: --use-distributed-optimizer; *: the host's launches are the limit; tokens/s and TFLOP/s: "
             "of a GPU; exposed: share of the step in which something is sent and nothing computed; GiB: of the fullest GPU"]
    if machine.gpu != timing.MEASURED_ON:
        found.append(f"speeds of {machine.gpu} are scaled from {timing.MEASURED_ON} by their peaks: extrapolated")
    found.append(f"compute is fitted to one {timing.MEASURED_ON} with 6 and 30 layers of the released width; other widths are extrapolated")
    if machine.gpus > 1:
        found.append(f"time between GPUs is fitted to two of them ({timing.NVLINK_GB_PER_S:g} GB/s); more are extrapolated, and "
                     f"{timing.NETWORK_GB_PER_S:g} GB/s between nodes are assumed")
    if best.run.training.recompute_granularity is not None or best.run.model.enable_mhc_connections:
        found.append("activations with recompute or residual streams are extrapolated from those without")
    return found


def flags_block(run: RunConfig) -> str:
    """The layout's flags, one a line, ready to be pasted into a command."""
    lines, keep = [], False
    for word in config.to_flags(run):
        if word.startswith("--"):
            keep = word in LAYOUT_FLAGS
            if keep:
                lines.append(f"    {word}")
        elif keep:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


LAYOUT_FLAGS = {
    "--tensor-model-parallel-size", "--sequence-parallel", "--context-parallel-size", "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage", "--expert-model-parallel-size", "--expert-tensor-parallel-size",
    "--use-distributed-optimizer", "--micro-batch-size", "--recompute-granularity", "--recompute-modules"}
