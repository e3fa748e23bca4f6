"""Whole training steps by dispatcher and recompute, over ranks that share the experts: time, memory, exchanges, exposed communication.

    torchrun --nproc-per-node 2 tools/benchmark.py --suite moe [--width real|toy] [--cases NAME ...] [--profile-cases NAME ...] [--budget S]

Full fine-tuning with fp32 masters and moments shared over the ranks, AdamW and clipping; the router is frozen. 8 layers, 6 of them sliding;
a row of random tokens a rank, half of it a prompt, its canvas self-conditioned. Layout exchanges are counted in the call that makes them;
those of a CUDA graph when it is recorded, and once more for each replay. GiB are what the allocator took from the device, the graph's too.
"""
from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dllm.config import ModelConfig, MoEConfig, ObjectiveConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_dllm.diffusion.batch_plan import RowRequest, fit_example, plan_batch
from megatron_dllm.diffusion.inputs import MicrobatchInputs, to_device
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.random import DrawKey, Stream
from megatron_dllm.diffusion.streams import build_streams
from megatron_dllm.kernels.row_weights import RowWeights
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.moe.dispatchers.interface import LAYOUT_EXCHANGE, Dispatcher, Trip
from megatron_dllm.parallel import ParallelContext, communication, initialize
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.graphs import GraphedMicrobatches, graphed
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import StepResult, train_step
from tools.refusal import Refusal

from .exposed import exposure, profile
from .workload import FIRST_TOKEN, DeviceNormal, calm, real_width, toy_width

LAYERS = ["sliding"] * 3 + ["full"] + ["sliding"] * 3 + ["full"]
OBJECTIVE = ObjectiveConfig(self_conditioning_prob=1.0, freeze_router=True)
LEARNING_RATE = 1.5e-4
BF16_AGREES = 2e-3  # relative, of losses: near-ties are routed differently where results are rounded in another order


@dataclass(frozen=True)
class Case:
    """A dispatcher, what is recomputed how, and whether there is room for the worst case, so that the host waits for no numbers of rows;
    `graphed`: then also replayed as a CUDA graph."""

    dispatcher: str
    recomputes: bool = True
    replays: bool = True
    bounded: bool = False
    graphed: bool = False

    def __str__(self) -> str:
        recompute = ("replay" if self.replays else "no replay") if self.recomputes else "no recompute"
        return f"{self.dispatcher}, {recompute}{', graph' if self.graphed else ', bounded' if self.bounded else ''}"

    @property
    def runs_anywhere(self) -> bool:
        """Whether a CPU will do."""
        return self.dispatcher != "deepep" and not self.graphed


# In this order they run, and a budget cuts off the last.
CASES = (*(Case(dispatcher, recomputes, bounded=True, graphed=True)
           for dispatcher in ("deepep", "alltoall") for recomputes in (True, False)),
         Case("deepep"), Case("deepep", replays=False), Case("alltoall", recomputes=False), Case("alltoall"),
         Case("deepep", recomputes=False), Case("allgather"), Case("deepep", recomputes=False, bounded=True),
         Case("alltoall", recomputes=False, bounded=True), Case("deepep", replays=False, bounded=True, graphed=True))
BY_NAME = {str(case): case for case in CASES}
PROFILED = (Case("deepep", recomputes=False, bounded=True, graphed=True), Case("alltoall", recomputes=False, bounded=True, graphed=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", choices=["real", "toy"], help="Without it: real on CUDA, toy on a CPU.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="Where to run.")
    parser.add_argument("--seq-length", type=int, default=1024, help="Clean tokens a rank.")
    parser.add_argument("--cases", nargs="*", choices=BY_NAME, default=list(BY_NAME), metavar="NAME", help=f"Of: {'; '.join(BY_NAME)}.")
    parser.add_argument("--profile-cases", nargs="*", choices=BY_NAME, default=list(map(str, PROFILED)),
                        metavar="NAME", help="Cases that are also profiled, with transfers beside other work and apart from it (CUDA).")
    parser.add_argument("--repeats", type=int, default=5, help="Timed steps of each case, after three untimed ones.")
    parser.add_argument("--budget", type=float, default=120.0, metavar="SECONDS",
                        help="Begin no case when so much time has passed; the first one compiles the kernels, for half a minute or more.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of cases that failed, and of those whose losses or exchanges are not as they must be."""
    _, world = launched()
    if world < 2:
        raise Refusal("the suite moe shares experts over ranks; start it with torchrun --nproc-per-node 2")
    # A rank whose case fails may leave the others waiting: not for long.
    context = initialize(ParallelConfig(expert_model_parallel_size=world), device=arguments.device, timeout_minutes=2.0)
    try:
        return _run_cases(arguments, context)
    finally:
        dist.destroy_process_group()


def _run_cases(arguments: argparse.Namespace, context: ParallelContext) -> int:
    on_gpu = context.device.type == "cuda"
    config = (real_width if (arguments.width or ("real" if on_gpu else "toy")) == "real" else toy_width)(LAYERS)
    inputs = own_share(config, arguments.seq_length, context)
    cases = [BY_NAME[name] for name in arguments.cases if on_gpu or BY_NAME[name].runs_anywhere]
    start = time.monotonic()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    say(context, f"torch {torch.__version__}, {context.world.size} x {device}, {len(LAYERS)} layers of hidden {config.hidden_size}, "
                 f"{config.num_experts} experts, {arguments.seq_length} tokens a rank")
    say(context, f"{'case':<32}{'step ms':>9}{'(least':>9}{'most)':>9}{'forward':>9}{'backward':>9}{'optimizer':>10}{'tokens/s':>10}"
                 f"{'GiB':>7}{'layouts':>9}{'replayed':>9}{'anew':>6}{'first loss':>12}{'last loss':>12}")
    measured, failed = {}, 0
    for case in cases:
        if longest_since(start, context) > arguments.budget:
            say(context, f"{case}: left out, {arguments.budget:g} s have passed")
            continue
        bench = None
        try:
            bench = Bench(case, config, inputs, context)
            measured[case] = bench.measure(repeats=arguments.repeats, tokens=arguments.seq_length * context.world.size)
            if on_gpu and str(case) in arguments.profile_cases:
                bench.profile()
            if on_gpu and case.bounded and not case.graphed:
                bench.check_synchronisation()
        except (RuntimeError, ValueError) as error:  # one case must not cost the others their figures
            print(f"{case}, rank {context.world.rank}: FAILED: {error}", flush=True)
            failed += 1
        if bench is not None:
            bench.release()
        bench = None
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return failed + sum(not holds for holds in judge(measured, config.num_layers, context))


class Bench:
    """The model and optimizer of a case."""

    def __init__(self, case: Case, config: ModelConfig, inputs: MicrobatchInputs, context: ParallelContext):
        self.case, self.inputs, self.context = case, inputs, context
        training = TrainingConfig(bf16=True, recompute_granularity="full" if case.recomputes else None)
        run = RunConfig(
            model=config, objective=OBJECTIVE, training=training,
            moe=MoEConfig(moe_token_dispatcher_type=case.dispatcher, moe_recompute_replay=case.replays,
                          moe_max_tokens_per_rank=inputs.first_pass.num_tokens if case.bounded else None))
        self.model = build_model(run, context, init=DeviceNormal(context.device))
        calm(self.model)
        self.optimizer = MasterOptimizer(self.model, OptimizerConfig(lr=LEARNING_RATE), context, distributed=True)
        self.clock = Clock(self.model, self.optimizer, splits=not case.graphed)
        self.graphs = self._recorder()

    def _recorder(self) -> GraphedMicrobatches | None:
        return graphed(self.model, limit=1, message=lambda text: None) if self.case.graphed else None

    def step(self) -> StepResult:
        return train_step(self.model, self.optimizer, [self.inputs], LEARNING_RATE, graphs=self.graphs)

    def release(self) -> None:
        """Let go of what would keep itself alive."""
        self.graphs = None
        self.optimizer.buckets.release()

    def meet(self) -> None:
        """Wait for all ranks."""
        communication.all_reduce(torch.ones(1, device=self.context.device), self.context.world).item()

    def measure(self, *, repeats: int, tokens: int, warmup: int = 3) -> Measured:
        """Steps timed, and printed as a line."""
        steps = []
        for number in range(warmup + repeats):
            if number == warmup and self.context.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.meet()
            self.context.log.clear()
            result, parts = self.clock.timed(self.step)
            steps.append(TimedStep(parts, result, self.context.log.calls[LAYOUT_EXCHANGE, "ep"]))
        measured = Measured(tuple(steps), warmup, tokens, peak_gib(self.context))
        say(self.context, measured.text(self.case))
        return measured

    def profile(self) -> None:
        """Print what of the communication is exposed, as it is and with every transfer waited for at once."""
        for title, prepare in (("transfers beside other work", lambda: None), ("every transfer waited for at once", self.wait_at_once)):
            prepare()
            for _ in range(3 if self.case.graphed else 1):
                self.step()
            say(self.context, f"{self.case}, {title} (rank 0):\n{exposure(profile(self.step, self.meet)).text()}")

    def check_synchronisation(self) -> None:
        """RuntimeError, from torch, at the first call in a forward and backward that lets the host wait for the device."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.optimizer.buckets.last_microbatch()
            self.model(self.inputs).total.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.optimizer.finish_gradients()
        self.optimizer.drop_gradients()
        say(self.context, f"ok     {self.case}: no host synchronisation in forward and backward")

    def wait_at_once(self) -> None:
        """Let nothing run beside transfers from now on."""
        for block in self.model.layers.values():
            block.moe.dispatcher = WaitingDispatcher(block.moe.dispatcher)
        self.graphs = None
        gc.collect()
        self.graphs = self._recorder()


class Clock:
    """Milliseconds of a training step: forward, backward with the sum of gradients that it begins, and the rest, optimizer included.
    Unless it `splits` them, forward and backward are one (a graph), in the place of the backward."""

    def __init__(self, model: DiffusionGemma, optimizer: MasterOptimizer, *, splits: bool):
        self.on_gpu, self.splits = model.context.device.type == "cuda", splits
        self.marks: list[Any] = []
        if splits:
            model.register_forward_hook(lambda *_: self._mark())
        finish = optimizer.finish_gradients

        def finish_gradients() -> None:
            self._mark()
            finish()

        optimizer.finish_gradients = finish_gradients

    def _mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def timed(self, step: Callable[[], StepResult]) -> tuple[StepResult, tuple[float, ...]]:
        """The step's result, and (whole, forward, backward, rest)."""
        self.marks.clear()
        start = time.perf_counter()
        self._mark()
        result = step()
        self._mark()
        if self.on_gpu:
            torch.cuda.synchronize()
        whole = (time.perf_counter() - start) * 1e3
        parts = [self._between(a, b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return result, (whole, *([] if self.splits else [math.nan]), *parts)

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) if self.on_gpu else (second - first) * 1e3


@dataclass(frozen=True)
class TimedStep:
    """times: milliseconds as `Clock.timed` gives them; exchanges: of layouts, on this rank."""

    times: tuple[float, ...]
    result: StepResult
    exchanges: int


@dataclass(frozen=True)
class Measured:
    """The steps of a case, the first `warmup` of them untimed; tokens: clean ones of a step, on all ranks."""

    steps: tuple[TimedStep, ...]
    warmup: int
    tokens: int
    peak_gib: float

    @property
    def losses(self) -> list[float]:
        return [step.result.loss for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step.result.grad_norm for step in self.steps]

    @property
    def exchanges(self) -> int:
        return self.steps[-1].exchanges

    @property
    def milliseconds(self) -> float:
        return statistics.median(step.times[0] for step in self.steps[self.warmup:])

    def text(self, case: Case) -> str:
        timed = [step.times for step in self.steps[self.warmup:]]
        parts = [statistics.median(column) for column in zip(*timed, strict=True)]
        replay = self.steps[-1].result.replay
        hits, misses = ("-", "-") if replay is None else (replay.hits, replay.misses)
        shown = "".join(f"{'-':>9}" if math.isnan(part) else f"{part:9.1f}" for part in parts[1:])
        return (f"{case!s:<32}{self.milliseconds:9.1f}{min(t[0] for t in timed):9.1f}{max(t[0] for t in timed):9.1f}"
                f"{shown} {self.tokens / self.milliseconds * 1e3:10.0f}{self.peak_gib:7.1f}"
                f"{self.exchanges:9d}{hits:>9}{misses:>6}{self.losses[0]:12.6f}{self.losses[-1]:12.6f}")


def judge(measured: dict[Case, Measured], num_layers: int, context: ParallelContext) -> list[bool]:
    """Print, and give, whether each claim holds that the cases allow to be checked."""
    verdicts = []
    for case, with_replay in measured.items():
        without = measured.get(dataclasses.replace(case, replays=False))
        if not case.recomputes or not case.replays or without is None:
            continue
        for name, ours, other in (("losses", with_replay.losses, without.losses), ("gradient norms", with_replay.norms, without.norms)):
            differing = [step for step, (a, b) in enumerate(zip(ours, other, strict=True)) if a != b]
            verdicts.append(not differing)
            say(context, f"{_verdict(verdicts[-1])} {case.dispatcher}: {name} of {len(ours)} steps with and without replay are bit-equal"
                         + (f"; steps {differing} differ, by up to {max(abs(a / b - 1) for a, b in zip(ours, other, strict=True)):.1e}"
                            if differing else ""))
    for case, of in measured.items():
        eager = measured.get(dataclasses.replace(case, graphed=False))
        if case.graphed and eager is not None:
            verdicts.append(of.losses == eager.losses and of.norms == eager.norms)
            say(context, f"{_verdict(verdicts[-1])} {case}: losses and gradient norms bit-equal to those of ordinary calls")
    reference = next((of for case, of in measured.items() if case.dispatcher != "deepep"), None)
    for case, of in measured.items():
        if reference is not None and of is not reference:
            difference = abs(of.losses[0] / reference.losses[0] - 1)
            verdicts.append(difference <= BF16_AGREES)
            say(context, f"{_verdict(verdicts[-1])} {case}: first loss {difference:.1e} from that of plain dispatch (to {BF16_AGREES:g}), "
                         f"gradient norm {abs(of.norms[0] / reference.norms[0] - 1):.1e}")
    forwards = 2 * num_layers  # the pass of clean tokens and canvas, and that of the self-conditioned canvas
    for case, of in measured.items():
        expected = forwards * (1 if not case.recomputes or case.replays else 2)
        verdicts.append(of.exchanges == expected)
        say(context, f"{_verdict(verdicts[-1])} {case}: {of.exchanges} layout exchanges a step, {expected} expected of {forwards} forward "
                     "dispatches")
    return verdicts


def _verdict(holds: bool) -> str:
    return "ok    " if holds else "MISSED"


class WaitingDispatcher:
    """A dispatcher whose transfers are waited for as soon as they are started, in the backward too: nothing runs beside them."""

    def __init__(self, dispatcher: Dispatcher):
        self.dispatcher = dispatcher

    def prepare(self, indices: Tensor) -> Any:
        return self.dispatcher.prepare(indices)

    def trip(self, plan: Any, weights: Tensor) -> WaitingTrip:
        return WaitingTrip(self.dispatcher.trip(plan, weights))


class WaitingTrip:
    """See WaitingDispatcher."""

    def __init__(self, trip: Trip):
        self.trip = trip

    def dispatch(self, x: Tensor) -> None:
        self.trip.dispatch(x)
        self.arrived = self.trip.after_dispatch()

    def after_dispatch(self) -> tuple[Tensor, Tensor]:
        return self.arrived

    def take_weights(self) -> RowWeights | None:
        return self.trip.take_weights()

    def combine(self, rows: Tensor) -> None:
        self.trip.combine(rows)
        self.combined = self.trip.after_combine()

    def after_combine(self) -> Tensor:
        return self.combined


def own_share(config: ModelConfig, seq_length: int, context: ParallelContext) -> MicrobatchInputs:
    """This rank's row of a batch with one for each."""
    ranks, rank = context.dp.size, context.dp.rank
    half = seq_length // 2
    fit = fit_example(half, seq_length - half, seq_length=seq_length, canvas_length=config.canvas_length)
    rows = [RowRequest([row], [DrawKey(0, Stream.TRAIN, 0, row, 0)], [fit], [False]) for row in range(ranks)]
    plan = plan_batch(rows, OBJECTIVE, micro_batch_size=1, data_parallel_size=ranks)
    tokens = [np.random.default_rng(rank).integers(FIRST_TOKEN, config.vocab_size, seq_length)]
    streams = build_streams(plan.microbatches[rank][0], tokens, OBJECTIVE, plan.denominators, vocab_size=config.vocab_size,
                            fill_token=config.fill_token_id)
    return to_device(microbatch_inputs(streams, config, PassOptions(torch.float32)), context.device)


def longest_since(start: float, context: ParallelContext) -> float:
    """Seconds since `start` of the rank for which it is longest ago: the same on all ranks."""
    return communication.all_reduce(torch.tensor(time.monotonic() - start, device=context.device), context.world, "max").item()


def peak_gib(context: ParallelContext) -> float:
    """The most that any rank has taken of its device; 0 on a CPU."""
    own = torch.cuda.max_memory_reserved() / 2**30 if context.device.type == "cuda" else 0.0
    return communication.all_reduce(torch.tensor(own, device=context.device), context.world, "max").item()


def say(context: ParallelContext, text: str) -> None:
    if context.world.rank == 0:
        print(text, flush=True)
