"""Whole training steps of the released model by layout, as the recipes start them, beside one device's loss: what eight GPUs give.

Full fine-tuning (sft_26b.sh) with experts over all ranks by dispatcher and recompute, and with tensor, pipeline and expert parallelism;
residual streams over an interleaved pipeline; adapters on a long document over context-parallel ranks. All by CUDA graphs, then some of
them started by the host, more of these by --cases. Random weights, drawn by parameter name, so that they are one model in every layout;
rows of random tokens, each canvas self-conditioned; the same batch in every step. Cases of "one device" give the loss of the whole batch,
forward alone. With fewer ranks or layers, or toy widths (--toy), the same code runs.

    ms          median of the timed steps, of the slowest rank; tokens/s: clean tokens, a GPU; TFLOP/s: what the step needs, a GPU
    GiB         the most that any rank took from its device
    exposed     share of a step in which something is sent and nothing else runs (rank 0; CUDA)
    beside one  the first loss's relative distance from one device's; predicted: milliseconds, by tools/plan.py

Starts its processes itself, and again after a case that failed or took too long, whose processes tell their stacks; under torchrun it uses
those that it is given. However it goes, the table of what there is comes last, and in time.

usage: python tools/benchmark.py --suite full --processes 8        (4 with --toy, for this machine's CPU)
       SHARE_GPU=1 python tools/benchmark.py --suite full --toy --device cuda --processes 8        (a rehearsal on one GPU: losses alone)
"""
from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from planning import layouts as planning

from megatron_dllm.config import ParallelConfig, RunConfig
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.stages import build_pipeline
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context, initialize
from megatron_dllm.parallel.launch import launched, shares_gpu
from megatron_dllm.training.batches import Batch, BatchMaker
from megatron_dllm.training.graphs import graphed, on_device
from megatron_dllm.training.loop import barrier
from megatron_dllm.training.operations import TokenCounts, step_operations
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from tools.refusal import Refusal

from .context import PasskeyRows
from .exposed import exposure, profile
from .full_cases import Case, Size, cases
from .scaling import RandomRows
from .workload import DeviceNormal, calm, release_memory
from .worlds import END_SECONDS, Watch, leave, run_parts, stack_file

TIMEOUT_MINUTES = 2.0
TABLE_SECONDS = 10.0  # of --seconds: kept for ending what has not ended, and for the table with its predictions
SCRIPT = Path(__file__).resolve().parents[1] / "benchmark.py"
AGREE = {"cpu": 1e-5, "cuda": 2e-3}  # relative difference of first losses: of the toy's in fp32, of those in bf16
WARMUP = 5  # steps: with graphs the first ones are calls and recordings, of microbatches and of the last one with the gradients' sums


@dataclass(frozen=True)
class Result:
    """What was measured of a case, as the module says. step_ms of a forward alone, where the case does not train; exposed_ms (of which:
    by kind), busy_ms, span_ms: of the profiled step, 0 where there is none; tokens: of a step; tflop: of a step over all ranks."""

    case: str
    ranks: int
    step_ms: float
    least_ms: float
    most_ms: float
    tokens: int
    tflop: float
    peak_gib: float
    exposed_ms: float
    span_ms: float
    losses: tuple[float, ...]
    norm: float
    busy_ms: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = "".join(f", {kind} {ms:.1f}" for kind, ms in self.by_kind.items())
        return (f"{self.case}: {self.step_ms:.1f} ms ({self.least_ms:.1f} to {self.most_ms:.1f}), {self.peak_gib:.1f} GiB, exposed "
                f"{self.exposed_ms:.1f}{kinds} of {self.span_ms:.1f} ms, busy {self.busy_ms:.1f}, losses "
                f"{' '.join(f'{loss:.5f}' for loss in self.losses)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=None, metavar="N", help="To start; without it: one for each GPU, 4 with --toy.")
    parser.add_argument("--toy", action="store_true", help="Toy widths.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="Of toy widths: the CPU, in fp32 (the default), or GPUs.")
    parser.add_argument("--layers", type=int, default=None, metavar="N", help="Layers; 30, with --toy 4. With mHC: three a pipeline rank.")
    parser.add_argument("--seq-length", type=int, default=None, metavar="N", help="Clean tokens of a row; 1024, with --toy 64.")
    parser.add_argument("--long-length", type=int, default=None, metavar="N", help="Tokens of the document; 100096, with --toy 512.")
    parser.add_argument("--cases", nargs="*", metavar="TEXT", help="Those whose name has one of these texts.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed steps of each case.")
    parser.add_argument("--seconds", type=float, default=520.0, help="So long in all, start and table included; what is left is not run.")
    parser.add_argument("--case-seconds", type=float, default=90.0, help="End the processes of a case that takes longer.")
    # Of processes that the suite has started: the first case to run, where to put what was measured, and when they end.
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=None, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print each case as it ends and the table last; the number of cases that failed or whose loss is not one device's."""
    rank, ranks = launched()
    if arguments.device is None:
        arguments.device = "cpu" if arguments.toy else "cuda"
    if (arguments.toy, arguments.device) == (False, "cpu"):
        raise Refusal("--device cpu: the released widths need GPUs; add --toy")
    if arguments.end is None:
        arguments.end = arguments.begun + arguments.seconds - TABLE_SECONDS
    if ranks > 1:
        results = run_in_world(chosen(ranks, arguments), arguments)
        if rank > 0 or arguments.results is not None:
            dist.destroy_process_group()
            leave(0)
    else:
        ranks = arguments.processes or (4 if arguments.toy else torch.cuda.device_count())
        if ranks < 2:
            raise Refusal("the suite full shares the model over several GPUs; set --processes, or --toy")
        results = start_worlds(ranks, arguments)
    lines, missed = table(chosen(ranks, arguments), {result.case: result for result in results}, toy=arguments.toy,
                          device=arguments.device)
    if shares_gpu():
        print("all ranks share a GPU: no time, speed or exposure says anything of a layout; deepep's layouts are left out")
    print("\n".join(lines), flush=True)
    if launched()[1] > 1:
        dist.destroy_process_group()
        leave(1 if missed else 0)
    return missed


def chosen(ranks: int, arguments: argparse.Namespace) -> list[Case]:
    """The cases that are asked for and can run here, with those that they are compared with."""
    size = Size.of(arguments.toy, arguments.layers, arguments.seq_length, arguments.long_length)
    there = [case for case in cases(ranks, size) if (arguments.device == "cuda" or not case.needs_cuda)
             and not (shares_gpu() and "deepep" in case.flags)]

    def is_wanted(case: Case) -> bool:
        if arguments.cases is None:
            return arguments.device == "cpu" or not case.on_request
        return any(text in case.name for text in arguments.cases)

    wanted = [case for case in there if is_wanted(case)]
    compared = {case.reference for case in wanted}
    return [case for case in there if case in wanted or case.name in compared]


def start_worlds(ranks: int, arguments: argparse.Namespace) -> list[Result]:
    """Run the cases in processes started for them."""
    own = [word for name in ("layers", "seq_length", "long_length") if (value := getattr(arguments, name)) is not None
           for word in (f"--{name.replace('_', '-')}", str(value))]

    def command(part: int, path: Path) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "--", str(SCRIPT),
                "--suite", "full", "--part", str(part), "--results", str(path), "--repeats", str(arguments.repeats), *own,
                "--end", str(arguments.end), "--case-seconds", str(arguments.case_seconds),
                "--device", arguments.device, *(["--toy"] if arguments.toy else []),
                *([] if arguments.cases is None else ["--cases", *arguments.cases])]

    found = run_parts([case.name for case in chosen(ranks, arguments)], command, arguments.end)
    return [Result(**{**values, "losses": tuple(values["losses"])}) for values in found]


def run_in_world(todo: Sequence[Case], arguments: argparse.Namespace) -> list[Result]:
    """The cases in turn from --part on, on the processes that there are; what was measured, complete on rank 0.

    A case that fails on a rank ends its process, and torchrun the others: they would wait for it. What hangs ends itself, here or later:
    the processes stay under watch until they end.
    """
    start, rank = time.monotonic(), launched()[0]
    watch = Watch(arguments.end, None if arguments.results is None else stack_file(arguments.results, rank))
    watch.allow(arguments.case_seconds)
    torch.set_num_threads(1)
    base = initialize(ParallelConfig(), device=arguments.device, timeout_minutes=TIMEOUT_MINUTES)
    contexts: dict[tuple[ParallelConfig, int], ParallelContext] = {}
    results: list[Result] = []
    for case in todo[arguments.part:]:
        watch.allow(arguments.case_seconds)
        result = run_case(case, base, contexts, arguments)
        if result is not None:
            results.append(result)
            print(f"{time.monotonic() - start:4.0f} s  {result}", flush=True)
            if arguments.results is not None:
                arguments.results.write_text(json.dumps([asdict(one) for one in results]), encoding="utf-8")
    watch.allow(END_SECONDS)
    return results


def run_case(case: Case, base: ParallelContext, contexts: dict[tuple[ParallelConfig, int], ParallelContext],
             arguments: argparse.Namespace) -> Result | None:
    """On every rank; rank 0 gets the result. A case of one device runs on rank 0, and the others wait for it. Groups are kept in
    `contexts` for cases to come, since kernels of the last one may still have hold of them."""
    run, result = case.run(arguments.toy, arguments.device), None
    if case.ranks > 1:
        key = run.parallel, case.ranks
        if key not in contexts:
            contexts[key] = create_context(Topology.of(run.parallel, case.ranks), rank=base.world.rank, device=base.device,
                                           sequence_parallel=run.parallel.sequence_parallel)
        result = measure(case, run, contexts[key], arguments)
    elif base.world.rank == 0:
        result = measure(case, run, ParallelContext.single(base.device), arguments)
    release_memory(base.device)
    barrier(base)
    return result if base.world.rank == 0 else None


def measure(case: Case, run: RunConfig, context: ParallelContext, arguments: argparse.Namespace) -> Result:
    """Build the model and the batch, take the steps, profile one."""
    release_memory(context.device)
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    model = build_model(run, context, init=DeviceNormal(context.device))
    calm(model)
    batch = batch_of(case, run, context)
    exposed = span = busy = 0.0
    by_kind: dict[str, float] = {}
    if case.trains:
        bench = Bench(run, model, batch)
        steps = [bench.step() for _ in range(WARMUP + arguments.repeats)]
        if context.device.type == "cuda":
            found = exposure(profile(bench.take, lambda: barrier(context)))
            exposed, span, busy = found.total.exposed, found.span, found.busy
            by_kind = {kind: share.exposed for kind, share in found.by_kind.items()}
        bench.release()
    else:
        steps = [forward(model, batch)]
    times, losses, norms = zip(*steps, strict=True)
    timed = times[WARMUP:] or times
    on_gpu = context.device.type == "cuda"
    peak = slowest(torch.cuda.max_memory_reserved(context.device) / 2**30 if on_gpu else 0.0, context)
    operations = step_operations(run.model, TokenCounts.of(batch.plan, run.objective), frozen=run.lora.lora_rank is not None)
    tflop = operations.model / 1e12 if case.trains else 0.0
    return Result(case.name, case.ranks, statistics.median(timed), min(timed), max(timed),
                  run.training.global_batch_size * run.data.seq_length, tflop, peak, exposed, span, losses, norms[0], busy, by_kind)


def batch_of(case: Case, run: RunConfig, context: ParallelContext) -> Batch:
    """The global batch of every step."""
    number = run.training.global_batch_size
    rows = (PasskeyRows(number, run.data.seq_length, run.model.canvas_length) if case.is_long
            else RandomRows(number, run.data.seq_length, run.model.vocab_size))
    return BatchMaker(run, rows, rows, Stream.TRAIN, context).batch(range(number), 0)


@torch.no_grad()
def forward(model: DiffusionGemma, batch: Batch) -> tuple[float, float, float]:
    """(milliseconds, loss of the whole batch, 0 for a gradient's norm) on one device."""
    start = time.perf_counter()
    loss = sum(model(on_device(inputs, model.context.device)).total.item() for inputs in batch.microbatches())
    return (time.perf_counter() - start) * 1e3, loss, 0.0


class Bench:
    """A model with its optimizer, pipeline or graphs, and the microbatches of this rank."""

    def __init__(self, run: RunConfig, model: DiffusionGemma, batch: Batch):
        self.model, self.context, self.lr = model, model.context, run.optimizer.lr
        model.train()
        self.optimizer = MasterOptimizer(model, run.optimizer, model.context, distributed=run.parallel.use_distributed_optimizer)
        self.pipeline = build_pipeline(model, run)
        self.graphs = None
        if run.training.cuda_graph_impl == "local":
            self.graphs = graphed(model, limit=run.training.cuda_graph_limit, message=lambda text: None, pipeline=self.pipeline,
                                  optimizer=self.optimizer, sums_load=run.moe.moe_aux_loss_coeff > 0)
        self.inputs = tuple(on_device(inputs, model.context.device) for inputs in batch.microbatches())

    def take(self) -> tuple[float, float]:
        """(loss, gradient norm) of a step."""
        result = train_step(self.model, self.optimizer, self.inputs, self.lr, pipeline=self.pipeline, graphs=self.graphs)
        return result.loss, result.grad_norm

    def step(self) -> tuple[float, float, float]:
        """(milliseconds of the slowest rank, loss, gradient norm) of a step that all ranks begin together."""
        barrier(self.context)
        self._finish()
        start = time.perf_counter()
        loss, norm = self.take()
        self._finish()
        return slowest((time.perf_counter() - start) * 1e3, self.context), loss, norm

    def _finish(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)

    def release(self) -> None:
        """Let go of what would keep itself alive."""
        self.graphs = self.pipeline = None
        self.optimizer.buckets.release()
        gc.collect()


def slowest(value: float, context: ParallelContext) -> float:
    """The largest of the ranks' values."""
    return communication.all_reduce(torch.tensor(value, dtype=torch.float64, device=context.device), context.world, "max").item()


COLUMNS = ("case", "ms", "least", "most", "tokens/s", "TFLOP/s", "GiB", "exposed", "first loss", "last loss", "grad norm", "beside one",
           "predicted", "GiB", "")


def table(todo: Sequence[Case], results: dict[str, Result], *, toy: bool, device: str) -> tuple[list[str], int]:
    """(a line a case, how many failed or have another loss than one device)."""
    rows, missed = [COLUMNS], 0
    for case in todo:
        r, one = results.get(case.name), results.get(case.reference or "")
        if r is None:
            rows.append((case.name, *["-"] * (len(COLUMNS) - 2), "NOT MEASURED"))
            missed += 1
            continue
        seconds = r.step_ms * r.ranks / 1e3
        apart = abs(r.losses[0] / one.losses[0] - 1) if one else None
        agrees = apart is not None and apart <= AGREE[device]
        verdict = "" if not case.trains else "nothing to compare with" if one is None else "ok" if agrees else "LOSS DIFFERS"
        missed += verdict not in ("", "ok")
        rows.append((
            r.case, *(f"{value:.1f}" for value in (r.step_ms, r.least_ms, r.most_ms)), f"{r.tokens / seconds:.0f}",
            f"{r.tflop / seconds:.0f}" if r.tflop else "-", f"{r.peak_gib:.1f}",
            f"{r.exposed_ms / r.span_ms:.1%}" if r.span_ms else "-", f"{r.losses[0]:.5f}", f"{r.losses[-1]:.5f}", f"{r.norm:.5g}",
            "-" if apart is None else f"{apart:.1e}", *predicted(case, toy), verdict))
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) if place in (0, len(COLUMNS) - 1) else cell.rjust(width)
                      for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows], missed


def predicted(case: Case, toy: bool) -> tuple[str, str]:
    """Milliseconds and GiB, of a case of the released widths that trains."""
    if toy or not case.trains:
        return "-", "-"
    plan = planning.plan(case.run(toy), planning.Machine(case.ranks))
    return f"{plan.time.total:.0f}", f"{plan.bytes / planning.GIB:.1f}"
