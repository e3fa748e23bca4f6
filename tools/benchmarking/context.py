"""Long documents: optimizer steps on texts with a hidden pass key, whole layers recomputed, each text shared by as many ranks as there are.

Six layers of the released widths in bf16 with fp32 masters and moments (--toy: toy widths in fp32, on CPU processes), random weights, one
document a step: a text in which a number is hidden, the question for it, and a canvas that holds the answer; each canvas is decoded twice.
The learned loss is that of the answer. Masters and moments are shared over the ranks.

    ms, tokens/s   median of the slowest rank, the first steps left out; clean tokens
    state GiB      weights, gradients, masters and moments: what is allocated between steps; peak: most in a step, of any rank
    KiB a token    (peak - state) over the tokens of a rank
    contexts       bytes a token that the first trip through the layers keeps for the second
    cp, gradients  MiB that a rank sends a step for context parallelism, and to sum gradients and gather weights

--attention measures after that the attention of one layer of each type alone, ours and (in heads of 256) Transformer Engine's.

usage: torchrun --nproc-per-node 2 tools/benchmark.py --suite context [--toy]        or python tools/benchmark.py, for one device
"""
from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from examples.diffusion_gemma.synthetic_data import passkey
from megatron_dllm.config import ObjectiveConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_dllm.data.order import Row
from megatron_dllm.data.tokenizers import ByteTokenizer
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext, communication, initialize
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from tools.refusal import Refusal

from .context_attention import IMPLS, attention_rows
from .workload import DeviceNormal, calm, real_width, release_memory, toy_width

SIX = ["sliding"] * 5 + ["full"]
LEFT_OUT = 3  # steps at the start that are not timed: kernels are compiled and buffers allocated
ENDS = 5  # steps at either end whose mean losses are compared, at most half of all
FURTHER_STEPS = 3
PEAK_LR, WARMUP = 3e-4, 4


class PasskeyRows:
    """Documents of exactly `seq_length` tokens, one a row (an ExampleSource and its order): the prompt, then one canvas for the answer."""

    name = "passkey"

    def __init__(self, number: int, seq_length: int, canvas_length: int):
        self.prompt_length, self.tokenizer = seq_length - canvas_length, ByteTokenizer()
        answers = [len(self._answer(index)) for index in range(number)]
        self.lengths = np.array([[self.prompt_length, answer] for answer in answers], np.int32)
        self.keys = np.stack([np.arange(number), np.zeros(number, np.int64)], 1)
        self.truncated = np.zeros(number, bool)

    def __len__(self) -> int:
        return len(self.keys)

    def _answer(self, index: int) -> list[int]:
        return [*self.tokenizer.encode(passkey(index, 0)[1]), self.tokenizer.eos_ids[0]]

    def tokens(self, index: int) -> np.ndarray:
        """The text, lengthened at its front to the length of all prompts, and the answer."""
        text = passkey(index, self.prompt_length)[0]
        missing = self.prompt_length - len(self.tokenizer.encode(text))
        if missing < 0:
            raise ValueError(f"{self.prompt_length} tokens are too few for the question; set a longer --seq-length")
        opening = ("Read what the boxes hold. " * (missing // 26 + 1))[:missing]
        return np.array([*self.tokenizer.encode(opening + text), *self._answer(index)], np.int32)

    def describe(self, index: int) -> str:
        return f"passkey text {index}"

    def row(self, n: int) -> Row:
        return Row(0, (n,))

    def rows_before(self, epoch: int) -> int:
        return epoch * len(self)


@dataclass(frozen=True)
class Result:
    """Of one length: medians, GiB and MiB as the module says; `losses` of every step."""

    seq_length: int
    ranks: int
    planning_ms: float
    step_ms: float
    state_gib: float
    peak_gib: float
    context_bytes: float
    cp_mib: float
    gradient_mib: float
    losses: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))

    @property
    def ends(self) -> tuple[float, float]:
        """Mean loss of the first steps and of the last."""
        number = max(min(ENDS, len(self.losses) // 2), 1)
        return statistics.mean(self.losses[:number]), statistics.mean(self.losses[-number:])

    @property
    def falls(self) -> bool:
        return self.ends[1] < self.ends[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--toy", action="store_true", help="Toy widths in fp32, over processes of this machine's CPU.")
    parser.add_argument("--seq-length", type=int, default=None, help="Tokens of a document; 100096, with --toy 512.")
    parser.add_argument("--steps", type=int, default=20, help="Optimizer steps; 0: none, for --attention by itself.")
    parser.add_argument("--further-lengths", type=int, nargs="*", default=[], metavar="LENGTH",
                        help=f"After them {FURTHER_STEPS} steps at each of these lengths, to show how memory grows.")
    parser.add_argument("--attention", action="store_true", help="Then measure attention alone, beside Transformer Engine's.")


def run(arguments: argparse.Namespace) -> int:
    """Print every step, the table so far after each length; 1 if the loss is not finite or does not fall."""
    ranks = launched()[1]
    parallel = ParallelConfig(context_parallel_size=ranks, use_distributed_optimizer=True)
    context = initialize(parallel, device="cpu" if arguments.toy else "cuda", timeout_minutes=2.0)
    if arguments.toy:
        torch.set_num_threads(1)
    length = arguments.seq_length or (512 if arguments.toy else 100096)
    run = make_run(parallel, arguments.toy, length, max(arguments.steps, 1))
    results = train(run, context, arguments) if arguments.steps else []
    release_memory(context.device)
    if arguments.attention:
        measure_attention(run, ["local"] if arguments.toy else list(IMPLS), context)
    if ranks > 1:
        dist.destroy_process_group()
    return int(not all(result.is_finite for result in results) or bool(results) and not results[0].falls)


def train(run: RunConfig, context: ParallelContext, arguments: argparse.Namespace) -> list[Result]:
    """The steps at each length; rank 0 prints the table so far after each."""
    bench, results = Bench.build(run, context), []
    for each, steps in ((run.data.seq_length, arguments.steps), *((further, FURTHER_STEPS) for further in arguments.further_lengths)):
        results.append(bench.measure(each, steps))
        if context.world.rank == 0:
            print(table(results), flush=True)
    bench.optimizer.buckets.release()
    return results


def measure_attention(run: RunConfig, impls: Sequence[str], context: ParallelContext) -> None:
    """Print a line for each part of a layer."""
    if context.cp.size == 1:
        raise Refusal("--attention needs several processes: start it by torchrun --nproc-per-node 2")
    rows = PasskeyRows(1, run.data.seq_length, run.model.canvas_length)
    for line in attention_rows(run, impls, rows, rows, context):
        if context.world.rank == 0:
            print(line, flush=True)


def make_run(parallel: ParallelConfig, toy: bool, seq_length: int, steps: int) -> RunConfig:
    """The run, as flags would give it."""
    run = RunConfig(
        model=(toy_width if toy else real_width)(SIX), parallel=parallel,
        objective=ObjectiveConfig(encoder_loss_tokens="response", self_conditioning_prob=1.0), optimizer=OptimizerConfig(adam_beta2=0.98),
        training=TrainingConfig(recompute_granularity="full", bf16=not toy))
    return run.with_values(seq_length=seq_length, global_batch_size=1, micro_batch_size=1, train_iters=steps)


@dataclass(frozen=True)
class Bench:
    """A model and its optimizer, which go on from length to length."""

    run: RunConfig
    context: ParallelContext
    model: DiffusionGemma
    optimizer: MasterOptimizer

    @classmethod
    def build(cls, run: RunConfig, context: ParallelContext) -> Bench:
        """With random weights, equal on every rank."""
        model = build_model(run, context, init=DeviceNormal(context.device))
        calm(model)
        model.train()
        return cls(run, context, model, MasterOptimizer(
            model, run.optimizer, context, distributed=run.parallel.use_distributed_optimizer))

    def measure(self, seq_length: int, steps: int) -> Result:
        """So many steps on documents of this length; every rank calls it, rank 0 prints each step and gets the result."""
        release_memory(self.context.device)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.context.device)
        run = self.run.with_values(seq_length=seq_length)
        rows = PasskeyRows(steps, seq_length, run.model.canvas_length)
        maker = BatchMaker(run, rows, rows, Stream.TRAIN, self.context)
        losses, planning, times, kept, left_out = [], [], [], 0, min(LEFT_OUT, steps - 1)
        for step in range(steps):
            if step == left_out:
                self.context.log.clear()
            start = time.perf_counter()
            inputs = tuple(maker.batch([step], step).microbatches())
            planning.append((time.perf_counter() - start) * 1e3)
            kept = self.context_bytes(inputs[0])
            loss, milliseconds = self.timed_step(inputs, PEAK_LR * min(1.0, (step + 1) / WARMUP))
            losses.append(loss)
            times.append(milliseconds)
            if self.context.world.rank == 0:
                print(f"{seq_length} tokens, step {step + 1}: loss {loss:.4f}, {milliseconds:.0f} ms, planned in {planning[-1]:.0f} ms",
                      flush=True)
        cp, others = (sent / (steps - left_out) / 2**20 for sent in self.sent_bytes())
        plan_ms, state, peak, *timed = self.slowest([statistics.median(planning), *self.memory_gib(), *times[left_out:]])
        return Result(seq_length, self.context.cp.size, plan_ms, statistics.median(timed), state, peak, self.summed(kept) / seq_length, cp,
                      others, tuple(losses))

    def sent_bytes(self) -> tuple[int, int]:
        """What this rank has sent since the log was cleared, over cp and over all else."""
        cp, every = self.context.log.total(group_name="cp")[1], self.context.log.total()[1]
        return cp, every - cp

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest that any rank has."""
        return communication.all_reduce(torch.tensor(values, device=self.context.device), self.context.world, "max").tolist()

    def summed(self, value: float) -> float:
        """The sum over the ranks."""
        return communication.all_reduce(torch.tensor(float(value), device=self.context.device), self.context.world).item()

    def timed_step(self, inputs: Sequence[MicrobatchInputs], lr: float) -> tuple[float, float]:
        """(loss, milliseconds) of a step that all ranks begin together."""
        communication.all_reduce(torch.zeros((), device=self.context.device), self.context.world).item()
        start = time.perf_counter()
        loss = train_step(self.model, self.optimizer, inputs, lr).loss
        if self.on_gpu:
            torch.cuda.synchronize(self.context.device)
        return loss, (time.perf_counter() - start) * 1e3

    def context_bytes(self, inputs: MicrobatchInputs) -> int:
        """Of the keys and values that this rank's first pass hands on."""
        config, width = self.run.model, 2 * self.model.dtype.itemsize
        return sum(len(inputs.first_pass.layers[kind].kept) * config.kv_heads(layer) * config.head_dim(layer) * width
                   for layer, kind in enumerate(config.layer_types))

    def memory_gib(self) -> tuple[float, float]:
        """What is allocated now, and the most that was."""
        if not self.on_gpu:
            return 0.0, 0.0
        device = self.context.device
        return torch.cuda.memory_allocated(device) / 2**30, torch.cuda.max_memory_allocated(device) / 2**30

    @property
    def on_gpu(self) -> bool:
        return self.context.device.type == "cuda"


def table(results: Sequence[Result]) -> str:
    """A row for each length."""
    lines = [("tokens", "ranks", "steps", "plan ms", "ms", "tokens/s", "state GiB", "peak GiB", "KiB a token", "contexts B a token",
              "cp MiB", "gradients MiB", "loss, first to last")]
    for r in results:
        per_token = (r.peak_gib - r.state_gib) * 2**20 * r.ranks / r.seq_length
        lines.append((str(r.seq_length), str(r.ranks), str(len(r.losses)), f"{r.planning_ms:.0f}", f"{r.step_ms:.0f}",
                      f"{r.seq_length / r.step_ms * 1e3:,.0f}", f"{r.state_gib:.1f}", f"{r.peak_gib:.1f}", f"{per_token:.0f}",
                      f"{r.context_bytes:.0f}", f"{r.cp_mib:.1f}", f"{r.gradient_mib:.1f}", " to ".join(f"{end:.3f}" for end in r.ends)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
