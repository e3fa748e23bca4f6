"""CUDA graphs over the ranks of a launched world: steps that are replayed against the same steps as ordinary calls, bit for bit.

Usage: torchrun --nproc-per-node 2 tools/verify.py graphs [--cases TEXT ...]      (more cases with 4 and 8; it needs GPUs, or one and
       SHARE_GPU=1)

Of each layout two toy models in bf16, equal at first, take six steps of four microbatches or more, each step with other tokens: the one by
ordinary calls, the other by graphs of a microbatch or, over a pipeline, of a whole step. Losses, gradient norms, numbers noted beside
them and at last every parameter must be the same, and at least half of what was asked for must have been replayed. Texts are of one length,
or, where the case says so, of all lengths and with coins, filled up to one form.
"""
from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from benchmarking.scaling import RandomRows
from benchmarking.workload import DeviceNormal, calm

from megatron_dllm import config
from megatron_dllm.config import ParallelConfig, RunConfig
from megatron_dllm.data.order import Row
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.nested import tensors_of
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.kernels.graphs import CudaRecorder, Recorder
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.models.diffusion_gemma.stages import ModelPipeline, build_pipeline
from megatron_dllm.parallel import ParallelContext, Topology, communication, create_context, initialize
from megatron_dllm.parallel.initialize import close
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.graphs import GraphedMicrobatches, graphs_of
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import StepResult, train_step
from tools.refusal import Refusal

from .table import Figure, print_figures

STEPS, BATCH, LENGTH, CANVAS = 6, 8, 96, 16
COMMON = ("--preset", "toy", "--num-layers", "4", "--layer-types", "sliding*3,full", "--canvas-length", str(CANVAS), "--window-size", "32",
          "--seq-length", str(LENGTH), "--no-packing", "--micro-batch-size", "1", "--global-batch-size", str(BATCH), "--train-iters",
          str(STEPS), "--data-path", "none", "--self-conditioning-prob", "1", "--lr", "1e-3")
BOUND = ("--moe-max-tokens-per-rank", str(LENGTH + CANVAS))
EP2, TP2, CP2 = (("--" + name, "2") for name in ("expert-model-parallel-size", "tensor-model-parallel-size", "context-parallel-size"))
ONE_FORM = ("--self-conditioning-prob", "0.5", "--cuda-graph-token-multiple", str(LENGTH), "--cuda-graph-canvas-multiple", "3")
SHARED, JOINT = ("--draft-pass", "shared"), ("--draft-pass", "joint")
EXPERTS_AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
STREAMS = ("--enable-mhc-connections", "--mhc-num-residual-streams", "4")
PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout")


@dataclass(frozen=True)
class Case:
    """A layout over `ranks` processes, by the flags of a run. varied: texts of all lengths, several in a row. response: the tokens of a
    row that are not prompt, else half of it; with one canvas all microbatches attend alike."""

    name: str
    ranks: int
    flags: tuple[str, ...]
    varied: bool = False
    response: int | None = None

    def run(self, further: tuple[str, ...]) -> RunConfig:
        """The run of these flags."""
        return config.parse([*COMMON, *self.flags, *further])


CASES = (
    Case("dp2, auxiliary loss", 2, ("--moe-aux-loss-coeff", "0.1")),
    Case("dp2, coins", 2, ("--self-conditioning-prob", "0.5", "--use-distributed-optimizer")),
    Case("ep2 alltoall", 2, (*EP2, *BOUND)),
    Case("ep2 alltoall, full recompute", 2, (*EP2, *BOUND, "--recompute-granularity", "full")),
    Case("tp2", 2, TP2),
    Case("tp2+sp", 2, (*TP2, "--sequence-parallel")),
    Case("tp2+sp ep2", 2, (*TP2, "--sequence-parallel", *EP2, *BOUND)),
    Case("cp2", 2, (*CP2, "--use-distributed-optimizer")),
    Case("cp2, a2a", 2, (*CP2, "--cp-comm-type", "a2a", "--cp-comm-type-sliding", "a2a")),
    Case("cp2, all_gather", 2, (*CP2, "--cp-comm-type", "all_gather", "--cp-comm-type-sliding", "all_gather")),
    Case("pp2", 2, (*PP2, "Ett|ttL", *JOINT)),
    Case("pp2, messages one by one", 2, (*PP2, "Ett|ttL", "--no-batch-p2p-communication")),
    Case("pp2 vpp2, MTP, mHC", 2, (*PP2, "Et|t||ttmL", "--mtp-num-layers", "1", *STREAMS, *JOINT)),
    Case("pp2 vpp2, full recompute", 2, (*PP2, "Et|t|t|tL", "--recompute-granularity", "full")),
    Case("pp2, adapters", 2, (*PP2, "Ett|ttL", "--lora-rank", "4")),
    Case("pp2, two backwards", 2, (*PP2, "Ett|ttL", *SHARED)),
    Case("pp2 vpp2, MTP, mHC, two backwards", 2, (*PP2, "Et|t||ttmL", "--mtp-num-layers", "1", *STREAMS, *SHARED)),
    Case("ep2 alltoall, texts of all lengths", 2, (*EP2, "--moe-max-tokens-per-rank", str(LENGTH + 3 * CANVAS), *ONE_FORM), varied=True),
    Case("pp2, texts of all lengths", 2, (*PP2, "Ett|ttL", *ONE_FORM, "--self-conditioning-null", "uniform"), varied=True),
    Case("tp2+sp pp2 ep2", 4, (*TP2, "--sequence-parallel", *EP2, *BOUND, *PP2, "Ett|ttL")),
    Case("cp2 pp2", 4, (*CP2, *PP2, "Ett|ttL"), response=CANVAS),
    Case("ep4 alltoall", 4, ("--expert-model-parallel-size", "4", *BOUND)),
    Case("ep8 alltoall, experts again", 8, ("--expert-model-parallel-size", "8", *BOUND, *EXPERTS_AGAIN, "--use-distributed-optimizer")),
    Case("tp2+sp pp2 ep2, two copies", 8, (*TP2, "--sequence-parallel", *EP2, *BOUND, *PP2, "Ett|ttL", "--use-distributed-optimizer")),
    Case("pp4 vpp2, MTP, mHC, two copies", 8, ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout",
                                               "Et|t||t||t||mL", "--mtp-num-layers", "1", *STREAMS)),
    Case("cp8, adapters", 8, ("--context-parallel-size", "8", "--lora-rank", "4", "--use-distributed-optimizer"), response=CANVAS),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", metavar="TEXT", help="Those whose name has one of these texts.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table on rank 0; the number of missed figures."""
    rank, world = launched()
    if world < 2 or not torch.cuda.is_available():
        raise Refusal("graphs needs several processes with a GPU each: start it by torchrun --nproc-per-node 2; SHARE_GPU=1: one for all")
    torch.set_num_threads(1)
    base = initialize(ParallelConfig(), device="cuda", timeout_minutes=1.0)
    figures: list[Figure] = []
    for case in CASES:
        if case.ranks > world or world % case.ranks or (arguments.cases is not None and not any(t in case.name for t in arguments.cases)):
            continue
        start = time.perf_counter()
        found = compare(case, base, lambda optimizer: CudaRecorder(base.device), ("--bf16", "--device", "cuda"))
        figures += found
        if rank == 0:
            print(f"{case.name}: {time.perf_counter() - start:.1f} s, " + ", ".join(f"{f.value:.0f}" for f in found), flush=True)
        torch.cuda.empty_cache()
    missed = print_figures("graphs", figures) if rank == 0 else 0
    dist.destroy_process_group()
    return missed


def compare(case: Case, base: ParallelContext, recorder: Callable[[MasterOptimizer], Recorder],
            further: tuple[str, ...] = (), *, steps: int = STEPS, limit: int = 8) -> tuple[Figure, Figure, Figure]:
    """On every rank: how many of the `steps` and parameters differ on any of them, and how many units too few were replayed."""
    run = case.run(further)
    context = create_context(Topology.of(run.parallel, base.world.size), rank=base.world.rank, device=base.device,
                             sequence_parallel=run.parallel.sequence_parallel)
    plain, graphed = Trained.build(run, context), Trained.build(run, context)
    graphs = graphs_of(graphed.model, recorder(graphed.optimizer), limit=limit, pipeline=graphed.pipeline, optimizer=graphed.optimizer,
                       sums_load=run.moe.moe_aux_loss_coeff > 0)
    count, vocabulary = steps * BATCH, run.model.vocab_size
    rows = VariedRows(count, vocabulary) if case.varied else RandomRows(count, LENGTH, vocabulary, case.response)
    maker = BatchMaker(run, rows, rows, Stream.TRAIN, context)
    different = units = 0
    for number in range(steps):
        batch = tuple(maker.batch(range(number * BATCH, (number + 1) * BATCH), number).microbatches())
        different += not same(plain.step(batch), graphed.step(batch, graphs))
        units += 1 if graphed.pipeline is not None else len(batch)
    wrong = sum(not torch.equal(a, b) for a, b in zip(plain.model.parameters(), graphed.model.parameters(), strict=True))
    # Counts alone: sums of fp32 are added up in another order.
    noted = ([x for x in tensors_of(model.routing.drain()) if x.dtype == torch.int64] for model in (plain.model, graphed.model))
    wrong += sum(not torch.equal(a, b) for a, b in zip(*noted, strict=True))
    lacking = max(0, units // 2 - graphs.drain().replayed) + (not graphs.has_summed)
    totals = communication.all_reduce(torch.tensor([different, wrong, lacking], device=context.device), context.world).tolist()
    # NCCL ends a group only when no recording has hold of it any more.
    del graphs
    plain.release()
    graphed.release()
    gc.collect()
    close(context)
    return (Figure(f"{case.name}: steps", totals[0], 0, f"of {steps} that differ in loss, gradient norm or another number"),
            Figure(f"{case.name}: parameters", totals[1], 0, "that differ at last, or counts of routers"),
            Figure(f"{case.name}: replays", totals[2], 0, f"of {units} calls too few"))


class VariedRows(RandomRows):
    """Rows of one to three texts, each of some tokens of prompt and of response, which is filled up to a canvas."""

    def __init__(self, batch: int, vocab_size: int):
        super().__init__(3 * batch, LENGTH, vocab_size)
        draws = np.random.default_rng(0)
        self.lengths = draws.integers(2, CANVAS, (3 * batch, 2)).astype(np.int32)
        self.counts = draws.integers(1, 4, batch)

    def row(self, n: int) -> Row:
        """Texts 3 n and on."""
        return Row(0, tuple(range(3 * n, 3 * n + int(self.counts[n]))))


@dataclass(frozen=True)
class Trained:
    """A model that takes steps."""

    model: DiffusionGemma
    optimizer: MasterOptimizer
    pipeline: ModelPipeline | None

    @classmethod
    def build(cls, run: RunConfig, context: ParallelContext) -> Trained:
        model = build_model(run, context, init=DeviceNormal(context.device))
        calm(model)
        model.train()
        optimizer = MasterOptimizer(model, run.optimizer, context, distributed=run.parallel.use_distributed_optimizer)
        return cls(model, optimizer, build_pipeline(model, run))

    def release(self) -> None:
        """Let go of what would keep itself alive."""
        self.optimizer.buckets.release()

    def step(self, batch: Sequence[MicrobatchInputs], graphs: GraphedMicrobatches | None = None) -> StepResult:
        """One step of training."""
        return train_step(self.model, self.optimizer, batch, 1e-3, pipeline=self.pipeline, graphs=graphs)


def same(a: StepResult, b: StepResult) -> bool:
    """Whether all that two steps say is the same, bit for bit."""
    return (a.loss, a.grad_norm, a.replay) == (b.loss, b.grad_norm, b.replay) and all(
        torch.equal(x, y) for x, y in zip(tensors_of(a.terms), tensors_of(b.terms), strict=True))
