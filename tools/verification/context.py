"""Context parallelism over the ranks of a launched world against one device, in bf16 on GPUs: ours, and Transformer Engine's.

Usage: torchrun --nproc-per-node 2 tools/verify.py context [--toy] [--impls local]

    one step         six layers of the released widths, a document of 4096 random tokens, its canvas decoded twice: loss and gradient of
                     ours with heads of 256 and 512, and of both with all heads of 256. Bytes are those that a rank sends for attention,
                     counted in the calls. One device's gradient is kept, all others are compared with it where they were added up
    unequal lengths  50 steps of two layers on pairs of documents, of 257 to 4023 tokens by ours, of 84 to 512 by the package: losses and
                     gradients stay finite; then attention alone, where all keys of a rank are hidden from some queries (hidden_keys.py)

The yardstick is one device with another attention kernel: how far rounding alone takes loss and gradient. --toy: toy widths in fp32 on CPU
processes, without the package.
"""
from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from benchmarking.exchanges import counted
from benchmarking.workload import FIRST_TOKEN, DeviceNormal, Gradients, calm, real_width, release_memory, toy_width
from torch import Tensor

from megatron_dllm.config import ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_dllm.data.order import Row
from megatron_dllm.diffusion.inputs import MicrobatchInputs, to_device
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.parallel import ParallelContext, initialize
from megatron_dllm.parallel.launch import launched
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import forward_backward, train_step
from megatron_dllm.transformer import core_attention
from tools.refusal import Refusal

from .hidden_keys import largest_error
from .table import Figure, print_figures

TWO = ["sliding", "full"]
LOSS_LIMIT, LEAST_COSINE = 1e-3, 0.9999
STEPS, LEARNING_RATE = 50, 1e-4
# Prompt and response of the documents of unequal lengths, two a step; a response is filled up to whole canvases. The package's attention is
# planned anew for every shape, for one or two seconds: its documents are of 84 to 512 tokens, all in chunks of 128, those of up to 128
# on one rank alone.
UNEQUAL = {"local": ((3, 20), (3500, 500), (700, 30), (1, 1), (1800, 200), (2047, 1000)),
           "transformer_engine": ((30, 20), (448, 60), (20, 1), (446, 64), (444, 10), (64, 33))}
CANVAS = {"local": 256, "transformer_engine": 64}

@dataclass(frozen=True)
class Rows:
    """Rows of one document of random tokens each, (prompt, response) long (an ExampleSource and its order)."""

    documents: tuple[tuple[int, int], ...]
    vocab_size: int
    name: str = "random"

    @property
    def lengths(self) -> np.ndarray:
        return np.array(self.documents, np.int32)

    @property
    def keys(self) -> np.ndarray:
        return np.stack([np.arange(len(self)), np.zeros(len(self), np.int64)], 1)

    @property
    def truncated(self) -> np.ndarray:
        return np.zeros(len(self), bool)

    def __len__(self) -> int:
        return len(self.documents)

    def tokens(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(FIRST_TOKEN, self.vocab_size, sum(self.documents[index]))

    def describe(self, index: int) -> str:
        return f"random document {index}"

    def row(self, n: int) -> Row:
        return Row(0, (n,))

    def rows_before(self, epoch: int) -> int:
        return epoch * len(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--toy", action="store_true", help="Toy widths in fp32, over CPU processes.")
    parser.add_argument("--impls", nargs="+", choices=tuple(UNEQUAL), default=list(UNEQUAL), help="Whose attention over ranks.")
    parser.add_argument("--num-layers", type=int, default=6, help="Layers of the one step; the last is full.")
    parser.add_argument("--num-experts", type=int, default=None, help="Experts of the one step, for less memory.")
    parser.add_argument("--parts", nargs="+", choices=("step", "lengths"), default=["step", "lengths"], help="What to run.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table on rank 0; the number of missed figures."""
    ranks = launched()[1]
    if ranks < 2:
        raise Refusal("context needs several processes: start it by torchrun --nproc-per-node 2")
    torch.set_num_threads(1)
    context = initialize(ParallelConfig(context_parallel_size=ranks), device="cpu" if arguments.toy else "cuda", timeout_minutes=2.0)
    impls = ["local"] if arguments.toy else arguments.impls
    wide = (toy_width if arguments.toy else real_width)(["sliding"] * (arguments.num_layers - 1) + ["full"])
    wide = dataclasses.replace(wide, num_experts=arguments.num_experts or wide.num_experts)
    suite = Suite(context, arguments.toy, impls, wide, time.perf_counter())
    suite.say(f"{ranks} ranks; the one step: {wide.num_layers} layers of {wide.hidden_size}, {wide.num_experts} experts of "
              f"{wide.moe_ffn_hidden_size}, {wide.num_attention_heads} heads")
    figures = [*(suite.steps() if "step" in arguments.parts else ()), *(suite.unequal_lengths() if "lengths" in arguments.parts else ())]
    missed = print_figures("context", figures) if context.world.rank == 0 else 0
    dist.destroy_process_group()
    return missed


Found = TypeVar("Found")


@dataclass(frozen=True)
class Step(Generic[Found]):
    """Loss, what was made of its gradient, bytes sent for attention, milliseconds of a second run, the most GiB allocated (0 on a CPU)."""

    loss: float
    found: Found
    sent_bytes: int
    ms: float
    peak_gib: float


@dataclass(frozen=True)
class Cosines:
    """Of two gradients: the cosine, the least of any tensor, and that tensor's name."""

    whole: float
    worst: float
    which: str


@dataclass(frozen=True)
class Stepped:
    """A model, and what it takes to run a step of it."""

    suite: Suite
    config: ModelConfig
    context: ParallelContext
    model: DiffusionGemma
    gradients: Gradients

    def step(self, impl: str, look: Callable[[Mapping[str, Tensor]], Found]) -> Step[Found]:
        """Forward and backward of one document, its canvas decoded twice; `look` reads the finished gradient, which does not stay."""
        length = 256 if self.suite.toy else 4096
        run = self.suite.run_of(self.config, self.context.cp.size, impl, seq_length=length, rows=1).with_values(self_conditioning_prob=1.0)
        inputs = inputs_of(run, self.context, Rows(((length // 2, length - length // 2),), self.config.vocab_size), [0])
        self.gradients.buckets.zero()
        if not self.suite.toy:
            torch.cuda.reset_peak_memory_stats(self.context.device)
        with counted(self.context.cp) as count:
            loss = self.loss(inputs)
            sent = count()
        found = look({name: bucket.gradient(number)
                      for bucket in self.gradients.buckets.buckets for number, name in enumerate(bucket.names)})
        self.gradients.buckets.zero()
        start = time.perf_counter()
        self.loss(inputs)
        ms = (time.perf_counter() - start) * 1e3
        return Step(loss, found, sent, ms, 0.0 if self.suite.toy else torch.cuda.max_memory_allocated(self.context.device) / 2**30)

    def loss(self, inputs: tuple[MicrobatchInputs, ...]) -> float:
        """That of the step, once it is done."""
        return forward_backward(self.model, self.gradients, inputs).total.item()


@dataclass(frozen=True)
class Suite:
    """The two parts, over the ranks of `context`; the first has a model `wide`."""

    context: ParallelContext
    toy: bool
    impls: Sequence[str]
    wide: ModelConfig
    start: float

    def run_of(self, config: ModelConfig, ranks: int, impl: str, *, seq_length: int, rows: int) -> RunConfig:
        """As flags would give it, with one microbatch of so many rows."""
        parallel = ParallelConfig(context_parallel_size=ranks)
        if impl != "local":
            parallel = dataclasses.replace(parallel, context_parallel_impl=impl, cp_comm_type_sliding="all_gather")
        run = RunConfig(model=config, parallel=parallel, training=TrainingConfig(bf16=not self.toy))
        return run.with_values(train_iters=STEPS, seq_length=seq_length, global_batch_size=rows, micro_batch_size=rows)

    def steps(self) -> Iterator[Figure]:
        """Of heads as they are and all of one width, loss and gradient against one device."""
        narrow = dataclasses.replace(self.wide, global_kv_channels=self.wide.kv_channels)
        for config, impls in ((self.wide, [impl for impl in self.impls if impl == "local"]), (narrow, self.impls)):
            if not impls:
                continue
            name = f"heads {config.kv_channels}/{config.global_kv_channels}"
            alone, figures = self.alone(config, name, yardstick=config is narrow)
            yield from figures
            yield from self.shared(config, name, impls, alone)
            del alone

    # A method for each model, so that no name keeps one while the next is built: with its fp32 gradients it takes some 30 GiB.
    def alone(self, config: ModelConfig, name: str, *, yardstick: bool) -> tuple[Step[Mapping[str, Tensor]], list[Figure]]:
        """The step on one device with its gradient, and the figures of the yardstick."""
        with self.model(config, 1) as one:
            alone = one.step("local", lambda gradient: {name: part.clone() for name, part in gradient.items()})
            if not yardstick:
                return alone, []
            with mock.patch.object(core_attention, "takes_attention", lambda *inputs: False):
                again = one.step("local", partial(cosines, alone.found))
            return alone, self.compared(f"{name}, yardstick", again, alone, math.inf, -1.0)

    def shared(self, config: ModelConfig, name: str, impls: Sequence[str], alone: Step[Mapping[str, Tensor]]) -> Iterator[Figure]:
        """The figures of the ranks together, each way."""
        with self.model(config, self.context.cp.size) as shared:
            for impl in impls:
                found = shared.step(impl, partial(cosines, alone.found))
                yield from self.compared(f"{name}, {impl} cp{self.context.cp.size}", found, alone, LOSS_LIMIT, LEAST_COSINE)

    def compared(self, name: str, step: Step[Cosines], alone: Step[Mapping[str, Tensor]], loss_limit: float,
                 least_cosine: float) -> list[Figure]:
        """The figures of one way; printed at once, too."""
        cosine = step.found
        note = (f"{step.loss:.5f} and {alone.loss:.5f}; {step.sent_bytes:,} bytes; {step.ms:.1f} ms, one device {alone.ms:.1f}; "
                f"{step.peak_gib:.1f} GiB")
        figures = [Figure(f"{name}: loss", abs(step.loss - alone.loss) / abs(alone.loss), loss_limit, note),
                   Figure(f"{name}: 1 - cosine of the gradient", 1 - cosine.whole, 1 - least_cosine,
                          f"least of a tensor {cosine.worst:.5f} ({cosine.which})")]
        self.say(*(f"{figure.name}: {figure.value:.3g} ({figure.note})" for figure in figures))
        return figures

    def say(self, *lines: str) -> None:
        """Print them on rank 0, with the seconds since the start."""
        if self.context.world.rank == 0:
            print(*(f"[{time.perf_counter() - self.start:4.0f}] {line}" for line in lines), sep="\n", flush=True)

    @contextmanager
    def model(self, config: ModelConfig, ranks: int) -> Iterator[Stepped]:
        """A calm model over all ranks together or (1) on each by itself; its memory is given back."""
        release_memory(self.context.device)
        context = self.context if ranks > 1 else ParallelContext.single(self.context.device)
        run = self.run_of(config, ranks, "local", seq_length=256 if self.toy else 4096, rows=1)
        model = build_model(run, context, init=DeviceNormal(context.device))
        calm(model)
        gradients = Gradients(model, context)
        yield Stepped(self, config, context, model, gradients)
        gradients.buckets.release()

    def unequal_lengths(self) -> Iterator[Figure]:
        """Of each way: steps that are not finite, of 50, and how far attention is off where a rank's keys are hidden."""
        dtype, limit, head_dim = (torch.float32, 1e-5, 16) if self.toy else (torch.bfloat16, 2e-2, 256)
        for impl in reversed(self.impls):
            losses = self.train(impl)
            bad = sum(not math.isfinite(loss) for loss in losses)
            yield Figure(f"{impl}: steps on unequal lengths that are not finite", bad, 0,
                         f"of {len(losses)}; loss {losses[0]:.4f} to {losses[-1]:.4f}")
            error = largest_error(impl, self.context.cp, self.context.device, dtype, head_dim)
            self.say(f"{impl}: off by {error:.2e} where a rank's keys are hidden")
            yield Figure(f"{impl}: canvas attention where a rank's keys are hidden", error, limit, "output and gradients, of their norms")

    def train(self, impl: str) -> list[float]:
        """The loss of every step, NaN where the gradient is not finite."""
        wide = (toy_width if self.toy else real_width)(TWO)
        config = dataclasses.replace(wide, global_kv_channels=wide.kv_channels)
        documents = UNEQUAL[impl]
        if self.toy:
            documents = tuple((1 + prompt // 16, 1 + response // 16) for prompt, response in documents)
        else:
            config = dataclasses.replace(config, canvas_length=CANVAS[impl])
        run = self.run_of(config, self.context.cp.size, impl, seq_length=1024 if self.toy else 4096, rows=2)
        if impl != "local":
            run = run.with_values(self_conditioning_prob=1.0)  # fewer shapes
        release_memory(self.context.device)
        model = build_model(run, self.context, init=DeviceNormal(self.context.device))
        calm(model)
        model.train()
        optimizer = MasterOptimizer(model, run.optimizer, self.context)
        rows = Rows(documents * (-(-2 * STEPS // len(documents))), config.vocab_size)
        losses = []
        for step in range(STEPS):
            result = train_step(model, optimizer, inputs_of(run, self.context, rows, [2 * step, 2 * step + 1]), LEARNING_RATE)
            losses.append(result.loss if result.is_finite else math.nan)
            if step < 6 or step % 5 == 4:  # shapes are new in the first ones
                self.say(f"{impl}, unequal lengths, step {step + 1}: loss {losses[-1]:.4f}")
        optimizer.buckets.release()
        return losses


def inputs_of(run: RunConfig, context: ParallelContext, rows: Rows, chosen: Sequence[int]) -> tuple[MicrobatchInputs, ...]:
    """This rank's microbatches of these rows, on the device."""
    maker = BatchMaker(run, rows, rows, Stream.TRAIN, context)
    return tuple(to_device(microbatch, context.device) for microbatch in maker.batch(chosen, 0).microbatches())


def cosines(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Cosines:
    """Of the whole gradients, and the least of any tensor; tensors whose gradient is zero in both are left out."""
    products = {}
    for name, a in found.items():
        b = wanted[name]
        products[name] = tuple((x * y).sum(dtype=torch.float64).item() for x, y in ((a, b), (a, a), (b, b)))
    dot, own, other = (sum(product[part] for product in products.values()) for part in range(3))
    by_tensor = {name: ab / math.sqrt(aa * bb) if aa * bb > 0 else float(aa == bb) for name, (ab, aa, bb) in products.items()}
    worst = min(by_tensor, key=by_tensor.get)
    return Cosines(dot / math.sqrt(own * other), by_tensor[worst], worst)
