"""What the pipeline suite runs: one model alone in a process or over two ranks; its steps, what they take, and what they leave behind."""
from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarking.workload import FIRST_TOKEN, DeviceNormal, Gradients, calm, real_width, release_memory, toy_width
from megatron_dllm.config import ModelConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.pipeline.clock import ActionClock, expected_bubble, stage_times
from megatron_dllm.pipeline.layout import StageLayout
from megatron_dllm.training.graphs import on_device
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import StepResult, forward_backward, train_step

PATTERN = ["sliding"] * 5 + ["full"]
LEARNING_RATE = 1e-4  # an update of about bf16's unit at weights of 0.02, so that the parameters themselves move
TIMED = 2
CHOICES, CHUNK = 4, 2**22  # of signs, for `fingerprints`; numbers at a time


@dataclass(frozen=True)
class Case:
    """A model, and how many optimizer steps it takes; 0: forward and backward without optimizer."""

    layers: int
    streams: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.layers} layers, {'plain' if self.streams == 1 else f'mHC {self.streams}'}"


@dataclass(frozen=True)
class Variant:
    """Another way of one process to take the same steps: gradients are rounded to 16 bits after each microbatch. (In one process those of
    its two loops are added in 16 bits, in a pipeline in 32.)

    last_first   the microbatches of a step the other way round
    swapped      their second half first
    stale        a fault: the second half of the layers keeps its first weights
    """

    name: str
    last_first: bool = False
    swapped: bool = False
    stale: bool = False

    def order(self, inputs: list[MicrobatchInputs]) -> list[MicrobatchInputs]:
        half = len(inputs) // 2 if self.swapped else 0
        return (inputs[half:] + inputs[:half])[::-1 if self.last_first else 1]


Fingerprints = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Of one way of running: losses and gradient norms by step; how the parameters were changed by the first update and by all; seconds of
    a step, and of its forward and backward alone (0: not timed); the peak of device memory in GiB; whether the model was freed."""

    losses: list[float]
    norms: list[float]
    changes: tuple[Fingerprints, ...] = ()
    step: float = 0.0
    passes: float = 0.0
    peak_gib: float = 0.0
    freed: bool = True


@dataclass(frozen=True)
class Bubble:
    """Share of the ranks' time that no compute step fills, and seconds of the whole; then what the schedule makes of the steps' times."""

    measured: float
    seconds: float
    expected: float
    expected_seconds: float
    twice: int
    microbatches: int

    def __str__(self) -> str:
        return (f"bubble {100 * self.measured:.1f} % of {self.seconds * 1e3:.0f} ms, by the schedule {100 * self.expected:.1f} % of "
                f"{self.expected_seconds * 1e3:.0f} ({self.twice} of {self.microbatches} microbatches twice)")


@dataclass(frozen=True)
class Suite:
    """What all runs share. `world` is the context of the two ranks, `alone` that of one process on this rank's device."""

    arguments: argparse.Namespace
    world: ParallelContext
    alone: ParallelContext

    @property
    def device(self) -> torch.device:
        return self.world.device

    def config(self, case: Case) -> ModelConfig:
        width = {"toy": toy_width, "real": real_width}[self.arguments.width]
        return dataclasses.replace(width([PATTERN[i % len(PATTERN)] for i in range(case.layers)]), enable_mhc_connections=case.streams > 1,
                                   mhc_num_residual_streams=max(case.streams, 2))

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
            made.append(microbatch_inputs(streams, config, PassOptions(torch.float32), second_loop=again))
        return made


def build(suite: Suite, config: ModelConfig, context: ParallelContext, layout: StageLayout | None) -> DiffusionGemma:
    """The model in bf16, or this rank's part of it, calm (see `calm`), its mHC weights nowhere special."""
    init = DeviceNormal(suite.device)
    part = None if layout is None else layout.part(context.pp.rank)
    model = DiffusionGemma(config, context=context, init=init, dtype=torch.bfloat16, part=part)
    calm(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("connection.alpha"):
                parameter.fill_(0.7)
            elif name.endswith("connection.bias"):
                parameter.copy_(init.with_std(0.5)(name, tuple(parameter.shape), parameter.dtype))
    return model


def alone(suite: Suite, case: Case, variant: Variant | None = None) -> Outcome:
    """One process; a `variant` is not timed."""
    def run() -> tuple[Outcome, weakref.ref]:
        model = build(suite, suite.config(case), suite.alone, None)
        gradients = holder(model, case)
        try:
            return taken(suite, case, model, gradients) if variant is None else varied(suite, case, model, gradients, variant), \
                weakref.ref(model)
        finally:
            gradients.buckets.release()  # or the model would stay beside the next

    return counted(suite.device, run)


def pipelined(suite: Suite, case: Case, layout: StageLayout) -> tuple[Outcome, Bubble]:
    """The same over the pipeline, and its bubble."""
    bubbles = []

    def run() -> tuple[Outcome, weakref.ref]:
        model = build(suite, suite.config(case), suite.world, layout)
        pipeline, gradients = ModelPipeline(model, layout, ParallelConfig(pipeline_model_parallel_size=2)), holder(model, case)
        try:
            outcome = taken(suite, case, model, gradients, pipeline)
            bubbles.append(bubble(suite, pipeline, gradients, suite.inputs(model.config, 0, suite.world)))
            return outcome, weakref.ref(model)
        finally:
            gradients.buckets.release()

    return counted(suite.device, run), bubbles[0]


def counted(device: torch.device, run: Callable[[], tuple[Outcome, weakref.ref]]) -> Outcome:
    """What `run` gives, with its peak of memory; its model must be gone afterwards, since the next needs the room."""
    release_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    outcome, model = run()
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    release_memory(device)
    return dataclasses.replace(outcome, peak_gib=peak, freed=model() is None)


def holder(model: DiffusionGemma, case: Case) -> MasterOptimizer | Gradients:
    """What takes the model's gradients: an optimizer where it is to step. A model can have one alone."""
    return MasterOptimizer(model, OptimizerConfig(), model.context) if case.steps else Gradients(model, model.context)


def taken(suite: Suite, case: Case, model: DiffusionGemma, gradients: MasterOptimizer | Gradients,
          pipeline: ModelPipeline | None = None) -> Outcome:
    """The case's steps, or one forward and backward, then timed ones."""
    context, made = model.context, partial(suite.inputs, model.config, context=model.context)
    if case.steps:
        outcome = stepped(case, model, lambda step: train_step(model, gradients, made(step), LEARNING_RATE, pipeline=pipeline))
    else:
        terms = forward_backward(model, gradients, made(0), pipeline)
        outcome = Outcome([terms.total.item()], [gradients.grad_norm().item()])
        gradients.drop_gradients()
    inputs, whole, passes = made(0), [0.0] * (not case.steps), []
    for _ in range(TIMED):
        if case.steps:
            whole.append(seconds(context, lambda: train_step(model, gradients, inputs, LEARNING_RATE, pipeline=pipeline)))
        passes.append(seconds(context, lambda: forward_backward(model, gradients, inputs, pipeline)))
        gradients.drop_gradients()
    return dataclasses.replace(outcome, step=statistics.median(whole), passes=statistics.median(passes))


def stepped(case: Case, model: DiffusionGemma, take: Callable[[int], StepResult]) -> Outcome:
    """The case's steps, `take` being one."""
    results, prints = [], [fingerprints(model)]
    for step in range(case.steps):
        results.append(take(step))
        if step in (0, case.steps - 1):
            prints.append(fingerprints(model))
    changes = tuple({name: after[name] - before for name, before in prints[0].items()} for after in prints[1:])
    return Outcome([result.loss for result in results], [result.grad_norm for result in results], changes)


@torch.no_grad()
def fingerprints(model: DiffusionGemma) -> Fingerprints:
    """Sums of every parameter's elements, each plus or minus by chance: the square of the difference of two sums is, in the mean, that of
    the distance of the two parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        total = torch.zeros(CHOICES, dtype=torch.float64, device=parameter.device)
        for piece in parameter.view(-1).split(CHUNK):
            signs = torch.zeros(CHOICES, len(piece), dtype=torch.float64, device=piece.device).bernoulli_(0.5, generator=generator)
            total += signs.mul_(2).sub_(1) @ piece.double()
        found[name] = total.cpu()
    return found


def varied(suite: Suite, case: Case, model: DiffusionGemma, optimizer: MasterOptimizer, variant: Variant) -> Outcome:
    """The case's steps as the variant takes them."""
    layers = model.config.num_layers
    late = [parameter for name, parameter in model.named_parameters()
            if variant.stale and name.startswith("layers.") and int(name.split(".")[1]) >= layers // 2]
    first = [parameter.detach().clone() for parameter in late]

    def take(step: int) -> StepResult:
        result = rounded_step(model, optimizer, variant.order(suite.inputs(model.config, step, suite.alone)))
        with torch.no_grad():
            for parameter, values in zip(late, first, strict=True):
                parameter.copy_(values)
        return result

    return stepped(case, model, take)


def rounded_step(model: DiffusionGemma, optimizer: MasterOptimizer, microbatches: list[MicrobatchInputs]) -> StepResult:
    """`train_step` with gradients rounded to 16 bits after each microbatch."""
    total = None
    for number, inputs in enumerate(microbatches):
        terms = model(on_device(inputs, model.context.device))
        if number == len(microbatches) - 1:
            optimizer.buckets.last_microbatch()
        terms.total.backward()
        for bucket in optimizer.buckets.buckets:
            bucket.gradients.copy_(bucket.gradients.bfloat16())
        total = terms.detach() if total is None else total + terms.detach()
    optimizer.finish_gradients()
    norm = optimizer.grad_norm()
    optimizer.step(LEARNING_RATE, norm)
    return StepResult(total.total.item(), total, norm.item())


def seconds(context: ParallelContext, act: Callable[[], object]) -> float:
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
    return max(gathered(value, context)) if context.world.size > 1 else value


def gathered(value: object, context: ParallelContext) -> list:
    """What each rank has."""
    found = [None] * context.world.size
    dist.all_gather_object(found, value)
    return found


def bubble(suite: Suite, pipeline: ModelPipeline, gradients: MasterOptimizer | Gradients, inputs: Sequence[MicrobatchInputs]) -> Bubble:
    """Of one more forward and backward."""
    clock, rank = ActionClock(suite.device), suite.world.pp.rank
    pipeline.executor.clock = clock
    whole = seconds(suite.world, lambda: pipeline.train(inputs))
    pipeline.executor.clock = None
    taken = clock.drain()
    gradients.drop_gradients()
    conditioned = tuple(microbatch.second_pass is not None for microbatch in inputs)
    schedule = pipeline.schedule(conditioned, tuple(microbatch.joint is not None for microbatch in inputs), False)
    found = gathered((sum(duration for _, duration in taken), stage_times(schedule, rank, taken)), suite.world)
    measured = 1 - sum(busy for busy, _ in found) / (whole * len(found))
    expected, makespan = expected_bubble(schedule, {key: value for _, times in found for key, value in times.items()})
    return Bubble(measured, whole, expected, makespan, sum(conditioned), len(inputs))
