"""Ranks every legal layout of a run on a number of GPUs by predicted step time, with the memory of its fullest GPU by kind.

The run is given by the flags of pretrain_dllm.py, after --. Legal is what validate() has no objection to. With the layout go the flags that
depend on it: room for a rank's tokens (--moe-max-tokens-per-rank) where the flags or graphs ask for it, and --moe-token-dispatcher-type
alltoall where that which is given cannot work. Example:

    python tools/plan.py layouts --num-gpus 8 -- --preset diffusiongemma-26b-a4b --bf16 --seq-length 2048 --global-batch-size 64 \\
        --train-iters 1000 --data-path chat.jsonl
"""
from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_dllm import config
from megatron_dllm.config import DataConfig, RunConfig, TrainingConfig
from megatron_dllm.config.run import FLAGS
from megatron_dllm.training import forecast as memory
from megatron_dllm.training.operations import StepOperations
from planning import layout_time as timing
from planning import stages
from planning.candidates import check_device, dispatch, layouts, legal_layouts, most_tokens, what_stands_in_the_way

GIB = 2**30


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
    parser.add_argument("--num-gpus", type=positive, required=True, metavar="N")
    parser.add_argument("--gpu", choices=timing.GPUS, default=timing.MEASURED_ON)
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a GPU; without it: that of --gpu")
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N")
    parser.add_argument("--canvases-per-row", type=positive, default=1, metavar="N",
                        help="canvases that a row carries: of packed rows one a conversation")
    parser.add_argument("--given", action="store_true", help="plan the layout that the flags give, and no other")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="layouts that are shown")
    add_host_argument(parser)
    parser.add_argument("flags", nargs="+", metavar="FLAGS", help="after --: flags of pretrain_dllm.py; weights are not read")


def positive(word: str) -> int:
    """A whole number from 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number from 1")
    return int(word)


def add_host_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", type=float, default=1.0, metavar="TIMES",
                        help="how long the host takes to start work, beside the faster of two that were measured; the other: 1.3")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 when no legal layout fits. ValueError for flags that cannot work."""
    base = config.parse(without_weights(arguments.flags))
    gib = arguments.memory_gib or timing.GPUS[arguments.gpu][1]
    machine, canvases = Machine(arguments.num_gpus, arguments.gpu, arguments.gpus_per_node, arguments.host), arguments.canvases_per_row
    check_device(base, machine.gpu)
    where = dict(gpus_per_node=machine.gpus_per_node, canvases=canvases)
    runs = legal_layouts([base] if arguments.given else layouts(base, machine.gpus, **where), machine.gpus)
    if arguments.given and not runs:
        raise ValueError(config.format_problems(config.validate(base, world_size=machine.gpus)))
    if not runs:
        raise ValueError("no layout is legal; " + config.format_problems(what_stands_in_the_way(base, machine.gpus, **where)))
    least = [plan(run, machine, canvases, waits=False) for run in runs]
    fitting = [p for p in least if p.bytes <= gib * GIB]
    shown = fastest(fitting, machine, canvases, arguments.top)
    if not fitting:
        shown = [plan(p.run, machine, canvases) for p in sorted(least, key=lambda p: p.bytes)[:arguments.top]]
    print(f"{arguments.num_gpus} x {arguments.gpu} ({gib:g} GiB): {len(least)} legal layouts, {len(fitting)} fit")
    print(table(shown))
    for note in notes(shown[0], machine, canvases, gib):
        print(f"note: {note}")
    if not fitting:
        print("none fits: the layouts with the least memory are shown")
        return 1
    if not arguments.given:
        if dropped := left_out(base, shown[0].run):
            print(f"of your flags the first leaves out: {' '.join(dropped)}")
        print("flags of the first:\n" + flags_block(base, shown[0].run))
    return 0


def fastest(least: Sequence[Plan], machine: Machine, canvases: int, top: int) -> list[Plan]:
    """The so many that take the least time, of plans whose stages do not wait: how long they do is played for those alone that may be among
    them."""
    found: list[Plan] = []
    for each in sorted(least, key=lambda p: p.time.total):
        if len(found) >= top and each.time.total >= found[top - 1].time.total:
            break
        found = sorted([*found, plan(each.run, machine, canvases)], key=lambda p: p.time.total)
    return found[:top]


def without_weights(flags: Sequence[str]) -> list[str]:
    """The flags without those that name files of weights and tokenizers, which a plan does not read."""
    dropped = ("--pretrained-checkpoint", "--load", "--tokenizer-model", "--tokenizer-type")
    kept, skip = [], False
    for word in flags:
        skip = word.partition("=")[0] in dropped or (skip and not word.startswith("--"))
        if not skip:
            kept.append(word)
    return kept


def plan(run: RunConfig, machine: Machine, canvases_per_row: int = 1, *, waits: bool = True) -> Plan:
    """Memory and time of a legal layout, what fills microbatches up included; what the step needs without it. `waits`: with the time that
    stages of a pipeline wait for each other's devices."""
    run = timing.with_draft_pass(run, canvases_per_row, machine.gpu)
    filled, canvases_in_all = timing.filled(run, canvases_per_row)
    predicted = memory.forecast(filled, machine.gpus, canvases_in_all)
    counted = _operations(*_counted_by(run, canvases_per_row), True)
    needed = _operations(*_counted_by(run, canvases_per_row), False) if timing.Fill.of(run, canvases_per_row) else counted
    played = canvases_per_row if waits else None
    return Plan(run, machine.gpus, dict(predicted.fullest), _time(run, predicted, counted, machine, played), needed.model)


def _time(run: RunConfig, predicted: memory.Forecast, counted: StepOperations, machine: Machine, canvases: int | None) -> timing.StepTime:
    """canvases: of a row; None where stages are not to wait."""
    parallel, gpus = run.parallel, machine.gpus
    pp, microbatches = parallel.pipeline_model_parallel_size, num_microbatches(run, gpus)
    # One layer more for each prediction depth; the head weighs as its operations, not as launches.
    layers = (run.model.num_layers + run.model.mtp_num_layers) / pp
    own = predicted.elements.of_stage(*memory.stage_of(run, None, 0))
    moved = timing.moved_ms(own, run, microbatches) / pp
    compute = (timing.work_ms(counted, machine.gpu) / gpus + microbatches * moved) * timing.streams_factor(run)
    hidden = timing.HIDDEN_SHARE * compute / microbatches if pp == 1 else 0.0
    compute += microbatches * timing.routing_ms(run, layers)
    # Edges of a pipeline are part of its waiting.
    per_layer = timing.communication_ms(run, predicted.tokens, gpus_per_node=machine.gpus_per_node)
    bubble = 0.0
    if pp > 1 and canvases is not None:
        bubble = stages.bubble(run, counted, predicted, gpus=gpus, gpu=machine.gpu, beside_ms=timing.routing_ms(run, 1) + per_layer,
                               gpus_per_node=machine.gpus_per_node, canvases=canvases)
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


def _counted_by(run: RunConfig, canvases: int) -> tuple:
    """What decides how many operations a step has: layouts that share it are counted once."""
    training = run.training
    # How many rows a microbatch has matters to what fills it up alone.
    rows = training.micro_batch_size if timing.Fill.of(run, canvases) else 1
    counting = TrainingConfig(
        micro_batch_size=rows, cuda_graph_token_multiple=training.cuda_graph_token_multiple,
        cuda_graph_canvas_multiple=training.cuda_graph_canvas_multiple, recompute_granularity=training.recompute_granularity,
        recompute_modules=training.recompute_modules, draft_pass=training.draft_pass)
    return run.model, run.objective, run.lora, DataConfig(seq_length=run.data.seq_length), counting, training.global_batch_size, canvases


@cache
def _operations(model, objective, lora, data, training, rows: int, canvases: int, filled: bool) -> StepOperations:
    run = RunConfig(model=model, objective=objective, lora=lora, data=data, training=training)
    return timing.operations(run, rows, canvases, filled=filled)


def has_spread_experts(run: RunConfig) -> bool:
    """Whether tokens are sent to experts."""
    return run.parallel.expert_model_parallel_size * run.parallel.expert_tensor_parallel_size > 1


COLUMNS = ("tp", "cp", "pp", "vpp", "ep", "etp", "dispatcher", "rows", "recompute", "shared", "ms/step", "tokens/s", "TFLOP/s", "bubble",
           "exposed", *memory.KINDS, "GiB")


def table(plans: Sequence[Plan]) -> str:
    """A line a layout: sizes, step, memory of the fullest GPU in GiB."""
    lines = [COLUMNS]
    for p in plans:
        parallel, training, time = p.run.parallel, p.run.training, p.time
        pp = parallel.pipeline_model_parallel_size
        recompute = {None: "-", "full": "full"}.get(training.recompute_granularity, "+".join(training.recompute_modules))
        lines.append((
            parallel.tensor_model_parallel_size, parallel.context_parallel_size, pp, virtual_stages_of(p.run) if pp > 1 else 1,
            parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size, p.run.moe.dispatcher if has_spread_experts(p.run)
            else "-", training.micro_batch_size, recompute,
            "yes" if parallel.use_distributed_optimizer else "-", f"{time.total:.0f}{'*' if time.launch_bound else ''}",
            f"{p.tokens_per_second:.0f}", f"{p.tflops:.0f}", f"{time.waiting:.0%}",
            f"{time.exposed:.0%}", *(f"{p.held[kind] / GIB:.1f}" for kind in memory.KINDS), f"{p.bytes / GIB:.1f}"))
    texts = [[str(cell) for cell in line] for line in lines]
    widths = [max(len(line[n]) for line in texts) for n in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in texts)


def notes(best: Plan, machine: Machine, canvases: int, gib: float) -> list[str]:
    """What the figures stand on, and what else could be done."""
    run = best.run
    found = ["rows: --micro-batch-size; shared: --use-distributed-optimizer; *: the host's launches are the limit; tokens/s and TFLOP/s: "
             "of a GPU; exposed: share of the step in which something is sent and nothing computed; GiB: of the fullest GPU"]
    if machine.gpu != timing.MEASURED_ON:
        found.append(f"speeds of {machine.gpu} are scaled from {timing.MEASURED_ON} by their peaks: extrapolated")
    found.append(f"compute is fitted to one {timing.MEASURED_ON} with 6 and 30 layers of the released width; other widths are extrapolated")
    if not run.training.bf16:
        found.append("compute is fitted to --bf16, which these flags leave out: without it steps take far longer than this says")
    if machine.gpus > 1:
        found.append(f"time between GPUs is fitted to two of them ({timing.NVLINK_GB_PER_S:g} GB/s); more are extrapolated, and "
                     f"{timing.NETWORK_GB_PER_S:g} GB/s between nodes are assumed")
    if run.training.recompute_granularity is not None or run.model.enable_mhc_connections:
        found.append("activations with recompute or residual streams are extrapolated from those without")
    return found + notes_on_rows(run, canvases) + notes_on_graphs(best, machine, canvases, gib)


def notes_on_rows(run: RunConfig, canvases: int) -> list[str]:
    """What is taken for a microbatch, where the flags let it be another."""
    found, data, fill, rows = [], run.data, timing.Fill.of(run, canvases), run.training.micro_batch_size
    if data.packing and run.objective.has_canvases and canvases == 1:
        found.append(f"rows are planned with one canvas; packed ones have one for each conversation, up to {data.max_canvases_per_row}: "
                     "--canvases-per-row")
    if fill:
        twice = ", every canvas decoded twice" if fill.has_one_form and run.objective.decodes_twice else ""
        found.append(f"a microbatch of {rows * data.seq_length} clean tokens and {rows * canvases} canvases is planned with {fill.clean} "
                     f"and {fill.canvases} more that fill it up{twice}; tokens/s and TFLOP/s leave them out")
    bound, most = run.moe.moe_max_tokens_per_rank, most_tokens(run, canvases)
    if bound is not None and bound < most:
        found.append(f"--moe-max-tokens-per-rank {bound}: training stops where a rank has more in a pass, and full rows give it {most}")
    return found


def notes_on_graphs(best: Plan, machine: Machine, canvases: int, gib: float) -> list[str]:
    """What the layout takes by CUDA graphs, where its host is the limit and they help within so much memory."""
    if not best.time.launch_bound or machine.gpu in timing.WITHOUT_KERNELS:
        return []
    run = replace(best.run, training=replace(best.run.training, cuda_graph_impl="local"))
    run = replace(run, moe=dispatch(run, machine.gpus_per_node, canvases))
    if config.validate(run, world_size=machine.gpus):
        return []
    recorded, bound = plan(run, machine, canvases), run.moe.moe_max_tokens_per_rank
    if recorded.time.total >= best.time.total or recorded.bytes > gib * GIB:
        return ["the host's launches are the limit of the first, which CUDA graphs do not help; another layout with --cuda-graph-impl "
                "local may be faster: plan with it"]
    room = f" --moe-max-tokens-per-rank {bound}" if bound else ""
    return [f"the host's launches are the limit of the first: with --cuda-graph-impl local{room} it takes {recorded.time.total:.0f} ms and "
            f"{recorded.bytes / GIB:.1f} GiB; which layout is best then, a plan with --cuda-graph-impl local says"]


# The flags that make a layout; those of sizes are always said.
LAYOUT_SIZES = (
    "micro_batch_size", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size")
LAYOUT_FIELDS = (
    *LAYOUT_SIZES, "sequence_parallel", "num_layers_per_virtual_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "use_distributed_optimizer", "overlap_param_gather",
    "recompute_granularity", "recompute_modules", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_max_tokens_per_rank",
    "cuda_graph_token_multiple", "cuda_graph_canvas_multiple")


def flags_block(base: RunConfig, run: RunConfig) -> str:
    """The flags that turn the run `base` into the layout's, one a line, to be pasted after its own."""
    lines = []
    for field in LAYOUT_FIELDS:
        flag, value = FLAGS[field][1], run.value(field)
        if field in LAYOUT_SIZES or not value == base.value(field) == flag.default:
            lines += [f"    {shlex.join(words)}"] if (words := flag.to_command_line(value)) else []
    return " \\\n".join(lines)


def left_out(base: RunConfig, run: RunConfig) -> list[str]:
    """The flags of `base` that the layout does without, and which no later flag takes back."""
    return [FLAGS[field][1].name for field in LAYOUT_FIELDS if run.value(field) is None and base.value(field) is not None]
