"""Strong scaling: one global batch on one device, then shared by several in each way. Forward and backward with the gradients' reduction.

The optimizer is left out: on one H200 its state would leave no room for the work. Six layers of the released widths in bf16 (--toy: toy
widths in fp32 on CPU processes), random weights equal in all layouts, every canvas self-conditioned. A row counts only if its loss is that
of one device. Starts its processes itself, again after a row that ended them; under torchrun it uses those that it is given.

    efficiency   time on one device / (devices * time on several), medians of the slowest rank
    collectives  share of the step in which a collective runs on rank 0; exposed: while nothing is computed (CUDA only, one profiled step)
    idle         share in which nothing runs at all: the host is behind

usage: python tools/benchmark.py --suite scaling [--toy]
"""
from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_dllm.config import ObjectiveConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_dllm.data.order import Row as SourceRow
from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.parallel import ParallelContext, Topology, create_context, initialize
from megatron_dllm.parallel.initialize import close
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.loop import barrier
from megatron_dllm.training.step import forward_backward

from .exposed import exposure, profile
from .workload import FIRST_TOKEN, DeviceNormal, Gradients, measure_ranks, real_width, toy_width
from .worlds import END_SECONDS, Watch, leave, run_parts, stack_file

SIX = ["sliding"] * 5 + ["full"]
TIMEOUT_MINUTES = 2.0
CASE_SECONDS = 150.0
AGREE = {torch.bfloat16: 2e-3, torch.float32: 1e-5}  # relative difference of losses


@dataclass(frozen=True)
class Case:
    """A row of the table: how `ranks` devices share `batch` rows of `seq_length` tokens (`toy_length` with --toy)."""

    name: str
    ranks: int
    batch: int
    seq_length: int
    toy_length: int
    parallel: ParallelConfig = ParallelConfig()  # noqa: RUF009 (immutable)
    recompute: str | None = None

    def length(self, toy: bool) -> int:
        return self.toy_length if toy else self.seq_length

    def work(self, toy: bool) -> str:
        return f"{self.batch} x {self.length(toy)}" + (f", recompute {self.recompute}" if self.recompute else "")


SHORT, LONG = (4, 1024, 64), (1, 32768, 256)  # batch, tokens, tokens of the toy
CASES = (
    Case("one device", 1, *SHORT),
    Case("dp2", 2, *SHORT),
    Case("tp2+sp", 2, *SHORT, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    Case("ep2", 2, *SHORT, ParallelConfig(expert_model_parallel_size=2)),
    # What one device keeps of so many tokens without recompute is nearly all that it has.
    Case("one device, long", 1, *LONG, recompute="full"),
    Case("cp2", 2, *LONG, ParallelConfig(context_parallel_size=2), recompute="full"),
)


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds of a step on rank 0's device: in all, with a collective running, of these with nothing else, and with nothing at all."""

    span_ms: float
    collective_ms: float
    exposed_ms: float
    idle_ms: float


@dataclass(frozen=True)
class Result:
    """What was measured of a case: milliseconds (median of the slowest rank), peak GiB of any rank, loss, kernels of rank 0."""

    case: str
    work: str
    ranks: int
    step_ms: float
    peak_gib: float
    loss: float
    kernels: KernelTimes | None


class RandomRows:
    """Rows of random tokens, of which `response`, else half, are not prompt (an ExampleSource and its order)."""

    name = "random"

    def __init__(self, batch: int, seq_length: int, vocab_size: int, response: int | None = None):
        self.vocab_size, prompt = vocab_size, seq_length // 2 if response is None else seq_length - response
        self.lengths = np.tile(np.array([prompt, seq_length - prompt], np.int32), (batch, 1))
        self.keys = np.stack([np.arange(batch), np.zeros(batch, np.int64)], 1)
        self.truncated = np.zeros(batch, bool)

    def __len__(self) -> int:
        return len(self.keys)

    def tokens(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(FIRST_TOKEN, self.vocab_size, self.lengths[index].sum())

    def describe(self, index: int) -> str:
        return f"random row {index}"

    def row(self, n: int) -> SourceRow:
        return SourceRow(0, (n,))

    def rows_before(self, epoch: int) -> int:
        return epoch * len(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--toy", action="store_true", help="Toy widths in fp32, over processes of this machine's CPU.")
    parser.add_argument("--rows", nargs="*", metavar="NAME", help="Rows to run, by name, such as dp2; all of them if not given.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed steps of each row.")
    parser.add_argument("--seconds", type=float, default=900.0, help="End the processes that the suite has started after so long in all.")
    parser.add_argument("--markdown", type=Path, default=None, metavar="FILE", help="Write the table there, for a page of documentation.")
    # Of processes that the suite has started: the first row to run, where to put what was measured, and when they end.
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=math.inf, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of rows that failed or whose loss is not that of one device."""
    cases = [case for case in CASES if not arguments.rows or case.name in arguments.rows]
    if launched()[1] > 1:
        results, printing = run_in_world(cases, arguments), launched()[0] == 0 and arguments.results is None
    else:
        results, printing = start_worlds(cases, arguments), True
    if not printing:
        dist.destroy_process_group()
        leave(0)
    header, rows, missed = table(cases, results, arguments.toy)
    print("\n".join(" ".join(f"{cell:>{width}}" if place > 1 else f"{cell:{width}}" for place, (cell, width) in enumerate(zip(
        row, WIDTHS, strict=True))) for row in (header, *rows)))
    if arguments.markdown is not None:
        lines = [header, ["---"] * len(header), *rows]
        arguments.markdown.write_text("\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n", encoding="utf-8")
    if launched()[1] > 1:
        dist.destroy_process_group()
        leave(1 if missed else 0)
    return missed


def start_worlds(cases: Sequence[Case], arguments: argparse.Namespace) -> dict[str, Result]:
    """Run the cases in processes started for them; after a case that ended them others go on with the next."""
    script = str(Path(__file__).resolve().parents[1] / "benchmark.py")
    end = time.monotonic() + arguments.seconds

    def command(part: int, path: Path) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(max(case.ranks for case in cases)), "--standalone",
                "--", script, "--suite", "scaling", "--repeats", str(arguments.repeats), "--end", str(end), "--part", str(part),
                "--results", str(path),
                *(["--toy"] if arguments.toy else []), "--rows", *(case.name for case in cases)]

    results = {}
    for values in run_parts([case.name for case in cases], command, end):
        kernels = values.pop("kernels")
        results[values["case"]] = Result(**values, kernels=kernels and KernelTimes(**kernels))
    return results


def run_in_world(cases: Sequence[Case], arguments: argparse.Namespace) -> dict[str, Result]:
    """The cases in turn, on the processes that there are; what rank 0 measured. They stay under watch until they end."""
    watch = Watch(arguments.end, None if arguments.results is None else stack_file(arguments.results, launched()[0]))
    watch.allow(CASE_SECONDS)
    torch.set_num_threads(1)
    base = initialize(ParallelConfig(), device="cpu" if arguments.toy else "cuda", timeout_minutes=TIMEOUT_MINUTES)
    results: dict[str, Result] = {}
    for case in cases[arguments.part:]:
        if case.ranks not in (1, base.world.size):
            raise ValueError(f"{case.name} runs on {case.ranks} processes, this world has {base.world.size}: leave it out of --rows")
        watch.allow(CASE_SECONDS)
        result = run_case(case, base, arguments)
        if result is not None:
            results[case.name] = result
            print(f"{case.name}: {result.step_ms:.1f} ms, loss {result.loss:.5f}, {result.peak_gib:.1f} GiB, {result.kernels}", flush=True)
            if arguments.results is not None:
                arguments.results.write_text(json.dumps([asdict(one) for one in results.values()]), encoding="utf-8")
    watch.allow(END_SECONDS)
    return results


def run_case(case: Case, base: ParallelContext, arguments: argparse.Namespace) -> Result | None:
    """On every rank; rank 0 gets the result. A case of one device runs on rank 0, and the others wait for it."""
    barrier(base)
    result = None
    if case.ranks == 1:
        if base.world.rank == 0:
            result = measure_case(case, ParallelContext.single(base.device), arguments)
    else:
        context = create_context(Topology.of(case.parallel, base.world.size), rank=base.world.rank, device=base.device,
                                 sequence_parallel=case.parallel.sequence_parallel)
        result = measure_case(case, context, arguments)
        close(context)
    gc.collect()
    if base.device.type == "cuda":
        torch.cuda.empty_cache()
    barrier(base)
    return result if base.world.rank == 0 else None


def make_run(case: Case, toy: bool) -> RunConfig:
    """The run of a case, as flags would give it."""
    run = RunConfig(
        model=(toy_width if toy else real_width)(SIX), parallel=case.parallel, objective=ObjectiveConfig(self_conditioning_prob=1.0),
        training=TrainingConfig(recompute_granularity=case.recompute, bf16=not toy))
    copies = case.parallel.data_parallel_size(case.ranks)
    return run.with_values(seq_length=case.length(toy), global_batch_size=case.batch,
                           micro_batch_size=case.batch // copies, train_iters=1)


def measure_case(case: Case, context: ParallelContext, arguments: argparse.Namespace) -> Result:
    """Build the model and the batch, time steps, profile one."""
    device, run = context.device, make_run(case, arguments.toy)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = build_model(run, context, init=DeviceNormal(device))
    gradients = Gradients(model, context)
    rows = RandomRows(case.batch, run.data.seq_length, run.model.vocab_size)
    batch = BatchMaker(run, rows, rows, Stream.TRAIN, context).batch(range(case.batch), 0)
    inputs = tuple(to_device(microbatch, device) for microbatch in batch.microbatches())
    timing = measure_ranks(lambda: forward_backward(model, gradients, inputs).total.item(), context, prepare=gradients.buckets.zero,
                           repeats=arguments.repeats)
    kernels = None
    if device.type == "cuda" and case.ranks > 1:
        exposed = exposure(profile(lambda: forward_backward(model, gradients, inputs), lambda: barrier(context)))
        kernels = KernelTimes(exposed.span, exposed.total.running, exposed.total.exposed, exposed.span - exposed.busy)
    gradients.buckets.release()
    return Result(case.name, case.work(arguments.toy), case.ranks, timing.median, timing.peak_gib, timing.value, kernels)


WIDTHS = (18, 28, 9, 11, 12, 8, 6, 9, 10, 14)


def table(cases: Sequence[Case], results: dict[str, Result], toy: bool) -> tuple[list[str], list[list[str]], int]:
    """(titles, rows, how many rows failed or differ in their loss). The row of one device comes before those that share its work."""
    header = ["layout", "work", "ms", "efficiency", "collectives", "exposed", "idle", "peak GiB", "loss", ""]
    tolerance = AGREE[torch.float32 if toy else torch.bfloat16]
    rows, missed, alone = [], 0, None
    for case in cases:
        result = results.get(case.name)
        if case.ranks == 1:
            alone = result
        if result is None:
            rows.append([case.name, case.work(toy), *["-"] * 7, "FAILED"])
            missed += 1
            continue
        shared = alone is not None and alone.work == result.work and case.ranks > 1
        differs = shared and not abs(result.loss - alone.loss) <= tolerance * abs(alone.loss)
        missed += differs
        shares = ["-"] * 3 if result.kernels is None else [
            f"{100 * part / result.kernels.span_ms:.1f} %" for part in (
                result.kernels.collective_ms, result.kernels.exposed_ms, result.kernels.idle_ms)]
        rows.append([case.name, result.work, f"{result.step_ms:.1f}",
                     f"{100 * alone.step_ms / (case.ranks * result.step_ms):.1f} %" if shared else "-", *shares,
                     f"{result.peak_gib:.1f}", f"{result.loss:.4f}", "LOSS DIFFERS" if differs else ""])
    return header, rows, missed
