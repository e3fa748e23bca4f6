"""Pipelines of two ranks beside one process, with mHC (four residual streams) and without: equal steps, time, bubble, what mHC adds.

    torchrun --nproc-per-node 2 tools/benchmark.py --suite pipeline [--width toy|real] [--microbatches 8] [--seq-length 1024]

The released model's widths (toy: the toy's, on a CPU over gloo too) in bf16, from random weights, half of the examples self-conditioned by
a draw. PP2 and PP2/VPP2 take optimizer steps of the 6-layer model, and forward and backward of the 12-layer one; losses and gradient norms
must lie as near to one process as twice bf16's own distance: that of the first step in one process in fp32, or of all steps in bf16 with a
step's microbatches the other way round. Bubble: the share of both ranks' time that no compute step fills, measured, and as the schedule has
it when messages take no time.
"""
from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from verification.table import Figure, print_figures

from benchmarking.workload import FIRST_TOKEN, DeviceNormal, Gradients, real_width, toy_width
from megatron_dllm.config import ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline
from megatron_dllm.parallel import ParallelContext, initialize
from megatron_dllm.parallel.launch import launched
from megatron_dllm.pipeline import parse_layout
from megatron_dllm.pipeline.clock import ActionClock, expected_bubble, stage_times
from megatron_dllm.pipeline.layout import StageLayout, layer_letters
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import forward_backward, train_step

PATTERN = ["sliding"] * 5 + ["full"]
# Layers -> layouts over two ranks, both with as many layers on each.
LAYOUTS = {6: {"pp2": "Ettt|tttL", "pp2 vpp2": "Et|tt|tt|tL"}, 12: {"pp2": "Et*6|t*6L", "pp2 vpp2": "Ett|t*4|t*4|ttL"}}
STEPS, TIMED, LEARNING_RATE = 3, 3, 1e-5
FACTOR = 2.0  # of bf16's own distance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", choices=("toy", "real"), default="real", help="of the model")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, one row each")
    parser.add_argument("--seq-length", type=int, default=1024, help="clean tokens of a row, half of them a prompt")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--layers", type=int, choices=LAYOUTS, action="append", help="only the model of so many layers")


@dataclass(frozen=True)
class Outcome:
    """Of one way of running: losses and gradient norms by step; seconds of a step, and of its forward and backward alone (0: not timed)."""

    losses: list[float]
    norms: list[float]
    step: float = 0.0
    passes: float = 0.0


@dataclass(frozen=True)
class Suite:
    """What all runs share. `world` is the context of the two ranks, `alone` that of one process on this rank's device."""

    arguments: argparse.Namespace
    world: ParallelContext
    alone: ParallelContext

    @property
    def device(self) -> torch.device:
        return self.world.device

    def config(self, layers: int, *, mhc: bool) -> ModelConfig:
        width = {"toy": toy_width, "real": real_width}[self.arguments.width]
        return dataclasses.replace(width([PATTERN[i % len(PATTERN)] for i in range(layers)]), enable_mhc_connections=mhc)

    def inputs(self, config: ModelConfig, step: int, context: ParallelContext) -> list[MicrobatchInputs]:
        """The microbatches of a step: random tokens, the draws of the step's number."""
        length, objective = self.arguments.seq_length, ObjectiveConfig()
        fit = fit_example(length // 2, length - length // 2, seq_length=length, canvas_length=config.canvas_length)
        rows = [RowRequest([row], [DrawKey(step, Stream.TRAIN, 0, row, 0)], [fit], [False]) for row in range(self.arguments.microbatches)]
        plan, draw, made = plan_batch(rows, objective, micro_batch_size=1), np.random.default_rng(step), []
        for number, microbatch in enumerate(plan.microbatches[0]):
            tokens = [draw.integers(FIRST_TOKEN, config.vocab_size, length) for _ in microbatch.examples]
            streams = build_streams(microbatch, tokens, objective, plan.denominators, vocab_size=config.vocab_size,
                                    fill_token=config.fill_token_id)
            again = context.pp.size > 1 and plan.second_loop(number)
            made.append(microbatch_inputs(streams, config, dtype=torch.float32, second_loop=again))
        return made


@dataclass(frozen=True)
class RoundedNormal:
    """Normal weights of bf16's values whatever the dtype, so that a model in fp32 starts from the same."""

    normal: DeviceNormal

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, expert: int | None = None) -> Tensor:
        return self.normal(name, shape, torch.bfloat16, expert=expert).to(dtype)

    def with_std(self, std: float) -> RoundedNormal:
        return RoundedNormal(self.normal.with_std(std))


def run(arguments: argparse.Namespace) -> int:
    """Print the table on rank 0; the number of missed figures."""
    rank, world = launched()
    if world != 2:
        raise SystemExit(f"this suite needs two processes, not {world}: start it by torchrun --nproc-per-node 2")
    context = initialize(ParallelConfig(pipeline_model_parallel_size=2), device=arguments.device)
    suite = Suite(arguments, context, ParallelContext.single(context.device))
    figures, lines, started = [], [], time.monotonic()
    for layers in arguments.layers or LAYOUTS:
        plain: dict[str, float] = {}
        for mhc in (False, True):
            try:
                for figure_or_line in cases(suite, layers, mhc=mhc, plain=plain):
                    (figures if isinstance(figure_or_line, Figure) else lines).append(figure_or_line)
                    if rank == 0:
                        print(f"{time.monotonic() - started:4.0f} s  {figure_or_line}", flush=True)
            except torch.OutOfMemoryError as error:
                figures.append(Figure(f"{layers} layers, mHC {'on' if mhc else 'off'}: one process lacks memory", 1, 0, str(error)[:90]))
                release(suite)
    missed = 0
    if rank == 0:
        name = torch.cuda.get_device_name() if suite.device.type == "cuda" else "cpu"
        print(f"\ntwo ranks, {name}, torch {torch.__version__}, {dist.get_backend()}; {arguments.width} width, {arguments.microbatches} "
              f"microbatches of {arguments.seq_length} clean tokens; {time.monotonic() - started:.0f} s")
        print("\n".join(lines))
        missed = print_figures("pipeline", figures)
    dist.destroy_process_group()
    return missed


def cases(suite: Suite, layers: int, *, mhc: bool, plain: dict[str, float]) -> Iterator[Figure | str]:
    """The figures and lines of one model; `plain` keeps the times without mHC for the one with."""
    config, name = suite.config(layers, mhc=mhc), f"{layers} layers, {'mHC 4' if mhc else 'plain'}"
    steps = STEPS if layers == min(LAYOUTS) else 0
    reference = from_rank_0(suite, lambda: one_process(suite, config, torch.bfloat16, steps, timed=TIMED))
    own = own_distance(suite, config, steps, reference)
    yield f"{name}, one process: {times_of(plain, f'{layers} one', reference, mhc=mhc)}{describe(reference)}"
    for where, text in LAYOUTS[layers].items():
        layout = parse_layout(text, ranks=2, layers=layer_letters(config.layer_types))
        found, bubble = pipelined(suite, config, layout, steps)
        yield f"{name}, {where}: {times_of(plain, f'{layers} {where}', found, mhc=mhc)}{bubble}{describe(found)}, {text}"
        for what, ours, theirs, limit in (("loss", found.losses, reference.losses, own[0]), ("norm", found.norms, reference.norms, own[1])):
            far = [relative(a, b) for a, b in zip(ours, theirs, strict=True)]
            yield Figure(f"{name}, {where}: {what} of {len(ours)} steps against one process", max(far), FACTOR * limit,
                         f"in the first {far[0]:.2g}; bf16's own distance {limit:.2g}")


def own_distance(suite: Suite, config: ModelConfig, steps: int, reference: Outcome) -> tuple[float, float]:
    """How far one process in bf16 is from itself in fp32 (in the first step), and from itself with a step's microbatches the other way
    round: the largest relative distance of losses, and of gradient norms."""
    others = [from_rank_0(suite, lambda: one_process(suite, config, torch.float32, 0)),
              from_rank_0(suite, lambda: one_process(suite, config, torch.bfloat16, steps, backwards=True))]
    return (max(relative(a, b) for other in others for a, b in zip(reference.losses, other.losses, strict=False)),
            max(relative(a, b) for other in others for a, b in zip(reference.norms, other.norms, strict=False)))


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def describe(outcome: Outcome) -> str:
    losses, norms = (" ".join(f"{value:.5f}" for value in values) for values in (outcome.losses, outcome.norms))
    return f"losses {losses}, norms {norms}"


def times_of(plain: dict[str, float], key: str, outcome: Outcome, *, mhc: bool) -> str:
    """The times, and what mHC adds to forward and backward, beside the plain run of the same key; nothing where there was no timing."""
    if not outcome.passes:
        return ""
    times = f"step {outcome.step * 1e3:.0f} ms, forward and backward {outcome.passes * 1e3:.0f}"
    if not mhc:
        plain[key] = outcome.passes
        return f"{times}; "
    return f"{times}, mHC adds {100 * (outcome.passes / plain[key] - 1):.1f} %; "


def from_rank_0(suite: Suite, make) -> Outcome:
    """What rank 0 makes while the other waits; torch.OutOfMemoryError on both where it does not fit."""
    box = [None]
    if suite.world.world.rank == 0:
        try:
            box = [make()]
        except torch.OutOfMemoryError as error:
            box = [str(error)]
    release(suite)
    dist.broadcast_object_list(box, src=0, device=suite.device)
    if isinstance(box[0], str):
        raise torch.OutOfMemoryError(box[0])
    return box[0]


def release(suite: Suite) -> None:
    """Give memory back before the next model."""
    gc.collect()
    if suite.device.type == "cuda":
        torch.cuda.empty_cache()


def built(suite: Suite, config: ModelConfig, dtype: torch.dtype, context: ParallelContext,
          layout: StageLayout | None = None) -> DiffusionGemma:
    """The model, or this rank's part, at weights that are nowhere special."""
    init = RoundedNormal(DeviceNormal(suite.device))
    part = None if layout is None else layout.part(context.pp.rank)
    model = DiffusionGemma(config, context=context, init=init, dtype=dtype, part=part)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("connection.alpha"):
                parameter.fill_(0.7)
            elif name.endswith("connection.bias"):
                parameter.copy_(init.with_std(0.5)(name, tuple(parameter.shape), parameter.dtype))
    return model


def one_process(suite: Suite, config: ModelConfig, dtype: torch.dtype, steps: int, *, timed: int = 0, backwards: bool = False) -> Outcome:
    """Optimizer steps and their time; without steps one forward and backward. `backwards`: the last microbatch first."""
    model = built(suite, config, dtype, suite.alone)
    gradients = holder(model, steps)
    try:
        return taken(suite, model, gradients, None, steps, timed=timed, backwards=backwards)
    finally:
        gradients.buckets.release()  # or the model would stay beside the next


def holder(model: DiffusionGemma, steps: int) -> MasterOptimizer | Gradients:
    """What takes the model's gradients: an optimizer where it is to step. A model can have one alone."""
    return MasterOptimizer(model, OptimizerConfig(), model.context) if steps else Gradients(model, model.context)


def pipelined(suite: Suite, config: ModelConfig, layout: StageLayout, steps: int) -> tuple[Outcome, str]:
    """The same over the pipeline, and a line about its bubble."""
    model = built(suite, config, torch.bfloat16, suite.world, layout)
    pipeline = ModelPipeline(model, layout, ParallelConfig(pipeline_model_parallel_size=2))
    gradients = holder(model, steps)
    outcome = taken(suite, model, gradients, pipeline, steps, timed=TIMED)
    bubble = bubbles(suite, pipeline, gradients, suite.inputs(config, 0, suite.world)) if steps else ""
    gradients.buckets.release()
    del model, pipeline, gradients
    release(suite)
    return outcome, bubble


def taken(suite: Suite, model: DiffusionGemma, gradients: MasterOptimizer | Gradients, pipeline: ModelPipeline | None,
          steps: int, *, timed: int, backwards: bool = False) -> Outcome:
    """`steps` optimizer steps, then so many timed ones; for 0 steps, one forward and backward."""
    config, context, order = model.config, model.context, -1 if backwards else 1
    if steps == 0:
        terms = forward_backward(model, gradients, suite.inputs(config, 0, context)[::order], pipeline)
        return Outcome([terms.total.item()], [gradients.grad_norm().item()])
    results = [train_step(model, gradients, suite.inputs(config, step, context)[::order], LEARNING_RATE, pipeline=pipeline)
               for step in range(steps)]
    inputs, whole, passes = suite.inputs(config, 0, context), [0.0] * (not timed), [0.0] * (not timed)
    for _ in range(timed):
        whole.append(seconds(context, lambda: train_step(model, gradients, inputs, LEARNING_RATE, pipeline=pipeline)))
        passes.append(seconds(context, lambda: forward_backward(model, gradients, inputs, pipeline)))
        gradients.drop_gradients()
    return Outcome([r.loss for r in results], [r.grad_norm for r in results], statistics.median(whole), statistics.median(passes))


def seconds(context: ParallelContext, act) -> float:
    """The longest time that a rank of the context takes, all starting together."""
    wait(context)
    start = time.perf_counter()
    act()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    return largest(time.perf_counter() - start, context)


def wait(context: ParallelContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    if context.world.size > 1:
        dist.barrier()


def largest(value: float, context: ParallelContext) -> float:
    """The largest of the ranks' values."""
    if context.world.size == 1:
        return value
    found = [0.0] * context.world.size
    dist.all_gather_object(found, value)
    return max(found)


def bubbles(suite: Suite, pipeline: ModelPipeline, gradients: MasterOptimizer | Gradients, inputs: Sequence[MicrobatchInputs]) -> str:
    """The share of the ranks' time without a compute step, measured and as expected from the steps' own times."""
    clock, rank = ActionClock(suite.device), suite.world.pp.rank
    pipeline.executor.clock = clock
    whole = seconds(suite.world, lambda: pipeline.train(inputs))
    pipeline.executor.clock = None
    taken = clock.drain()
    gradients.drop_gradients()
    schedule = pipeline.schedule(tuple(microbatch.second_pass is not None for microbatch in inputs), False)
    found = [None] * suite.world.world.size
    dist.all_gather_object(found, (sum(duration for _, duration in taken), stage_times(schedule, rank, taken)))
    measured = 1 - sum(busy for busy, _ in found) / (whole * len(found))
    expected, makespan = expected_bubble(schedule, {key: value for _, times in found for key, value in times.items()})
    twice = sum(microbatch.second_pass is not None for microbatch in inputs)
    return (f"bubble {100 * measured:.1f} % of {whole * 1e3:.0f} ms, by the schedule {100 * expected:.1f} % of {makespan * 1e3:.0f} "
            f"({twice} of {len(inputs)} microbatches twice); ")
