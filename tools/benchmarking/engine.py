"""Attention, rotary positions and cross entropy by Transformer Engine beside ours at the released widths, which is what decides who is the
default (docs/transformer_engine.md). Each is first compared, value and gradients, then timed: forward and backward.

Milliseconds, medians; host: until the host has launched all of it, which decides where it comes near the whole; GiB: what is needed beside
the inputs at most; first: the package's first call, with what it plans. Then attention with batches of new lengths, one after the other.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_dllm.config import MoEConfig, TrainingConfig
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.tensor_parallel import linear_cross_entropy
from megatron_dllm.transformer.core_attention import attend, attention_plan
from megatron_dllm.transformer.packed_attention import packed_plan
from megatron_dllm.transformer.rotary import inverse_frequencies, norm_and_rotate_pair, rotary_table
from megatron_dllm.transformer.visibility import CLEAN, Visibility
from megatron_dllm.transformer_engine import Engine, load_engine
from megatron_dllm.transformer_engine.cross_entropy import engine_cross_entropy
from megatron_dllm.transformer_engine.norms import engine_rms_norm
from megatron_dllm.transformer_engine.rotary import EngineRotary
from tools.refusal import Refusal

TOLERANCE = 2e-2  # of the largest number: both are some roundings of bf16 from the truth
NEW_LENGTHS = 8  # batches


@dataclass(frozen=True)
class Batch:
    """Documents by their length, the first ones with a canvas after half of their tokens."""

    lengths: tuple[int, ...]
    num_canvases: int

    def visibility(self, canvas: int) -> Visibility:
        """With canvases of so many tokens."""
        bounds = np.cumsum((0, *self.lengths))
        ids = np.repeat(np.arange(self.num_canvases), canvas)
        starts = bounds[:self.num_canvases]
        halves = starts + np.array(self.lengths[:self.num_canvases], int) // 2
        return Visibility(np.concatenate([np.repeat(bounds[:-1], self.lengths), starts[ids]]),
                          np.concatenate([np.arange(bounds[-1]) + 1, halves[ids]]),
                          np.concatenate([np.full(bounds[-1], CLEAN), ids]), ids, int(bounds[-1]))


@dataclass(frozen=True)
class Sizes:
    """The released model's. batches: in sliding layers; whole: in a layer without a window; tokens: of the rotary; scored: of the loss."""

    heads: int = 16
    groups: int = 8
    wide_groups: int = 2
    head: int = 256
    wide_head: int = 512
    window: int = 1024
    canvas: int = 256
    batches: tuple[Batch, ...] = (Batch((1024,) * 4, 4), Batch((300, 1900, 700, 1111, 80, 2047, 999, 1055), 8), Batch((32768,), 1))
    whole: Batch = Batch((8192,), 1)
    tokens: tuple[int, ...] = (8192, 65536)
    scored: int = 4096
    vocabulary: int = 262144
    hidden: int = 2816


TOY = Sizes(heads=4, groups=2, wide_groups=1, head=16, wide_head=32, window=5, canvas=4, batches=(Batch((9, 1, 12), 2),),
            whole=Batch((17,), 1), tokens=(9,), scored=7, vocabulary=61, hidden=16)


@dataclass(frozen=True)
class Case:
    """The same by us and by the package, of inputs that ask for a gradient."""

    name: str
    inputs: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]


@dataclass(frozen=True)
class Times:
    """Milliseconds, and bytes beside the inputs."""

    whole: float
    host: float
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.whole:10.2f} {self.host:8.2f} {self.peak_bytes / 2**30:6.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=8, help="Timed runs of each.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of cases that differ."""
    if not torch.cuda.is_available():
        raise Refusal("the suite engine needs a CUDA device, and torch sees none; --suite cpu runs here")
    device = torch.device("cuda", 0)
    try:
        engine = load_engine(TrainingConfig(), MoEConfig(), device)
    except ValueError as error:
        raise Refusal(str(error)) from error
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    return run_on(device, engine, Sizes(), arguments.repeats)


def run_on(device: torch.device, engine: Engine, sizes: Sizes, repeats: int) -> int:
    """As `run`, with a package at hand."""
    lines, failed = [], 0
    for case in cases(device, engine, sizes):
        start = time.perf_counter()
        whole(case.theirs, case.inputs)
        synchronize(device)
        first = 1e3 * (time.perf_counter() - start)
        difference = largest_difference(case)
        failed += not difference <= TOLERANCE
        ours, theirs = (timed(function, case.inputs, repeats) for function in (case.ours, case.theirs))
        verdict = "" if difference <= TOLERANCE else f"   DIFFER by {difference:.1e}"
        lines.append(f"{case.name:58}{ours}   {theirs} {first:8.0f}{verdict}")
        print(lines[-1], flush=True)
    print("the package's attention, batches of new lengths, ms each:", " ".join(f"{ms:.1f}" for ms in new_lengths(device, sizes)))
    header = f"{'ms':>10} {'host':>8} {'GiB':>6}"
    print(f"\n{'forward and backward; ours, then the package':58}{header}   {header} {'first':>8}", *lines, sep="\n")
    return failed


def cases(device: torch.device, engine: Engine, sizes: Sizes) -> Iterator[Case]:
    """All of them; inputs are made when a case is due."""
    for batch, window in (*((batch, sizes.window) for batch in sizes.batches), (sizes.whole, None)):
        seen = batch.visibility(sizes.canvas)
        layer = f"window {window}" if window else "no window"
        name = f"attention, head {sizes.head}, {layer}, {len(batch.lengths)} x {max(batch.lengths)}, {batch.num_canvases} canvases"
        yield Case(name, attention_inputs(seen, sizes, device), partial(attend, plan=attention_plan(seen, window, device)),
                   packed_plan(seen, window, device).attend)
    engine_turn = EngineRotary(engine_rms_norm())
    for tokens in sizes.tokens:
        for size, groups, fraction in ((sizes.head, sizes.groups, 1.0), (sizes.wide_head, sizes.wide_groups, 0.25)):
            table = rotary_table(torch.arange(tokens, device=device), inverse_frequencies(size, 1e6, fraction, device))
            inputs = tuple(drawn(*shape, device=device, seed=seed) for seed, shape in enumerate(
                ((tokens, sizes.heads, size), (tokens, groups, size), (size,), (size,))))
            yield Case(f"norm and rotary, head {size}, {tokens} tokens", inputs,
                       *(partial(turned, turn, table) for turn in (norm_and_rotate_pair, engine_turn)))
    yield loss_case(device, engine, sizes)


def attention_inputs(seen: Visibility, sizes: Sizes, device: torch.device) -> tuple[Tensor, ...]:
    num_keys = seen.num_clean_keys + len(seen.canvas_keys)
    query, key, value = ((len(seen.canvas_id), sizes.heads), (num_keys, sizes.groups), (num_keys, sizes.groups))
    calm = sizes.head ** -0.25  # logits of deviation 1
    return tuple(drawn(*shape, sizes.head, device=device, scale=scale, seed=seed)
                 for seed, (shape, scale) in enumerate(((query, calm), (key, calm), (value, 1.0))))


def turned(turn: Callable, table: object, *tensors: Tensor) -> Tensor:
    """Queries and keys side by side."""
    return torch.cat(turn(*tensors, table, 1e-6), dim=1)


def loss_case(device: torch.device, engine: Engine, sizes: Sizes) -> Case:
    """With the products of the output layer, which are ours."""
    targets = torch.randint(0, sizes.vocabulary, (sizes.scored,), generator=torch.Generator().manual_seed(0)).to(device)
    weights = torch.full((sizes.scored,), 1 / sizes.scored, device=device)

    def score(*tensors: Tensor, **options: object) -> Tensor:
        return linear_cross_entropy(*tensors, targets, weights, softcap=30.0, tp=ParallelContext.single(device).tp,
                                    vocab_size=sizes.vocabulary, **options).loss

    inputs = (drawn(sizes.scored, sizes.hidden, device=device), drawn(sizes.vocabulary, sizes.hidden, device=device, scale=0.02, seed=1))
    by_package = partial(score, logit_loss=engine_cross_entropy(engine))
    return Case(f"cross entropy with its products, {sizes.scored} x {sizes.vocabulary}", inputs, score, by_package)


def drawn(*shape: int, device: torch.device, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers in bf16, with a gradient."""
    normal = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return (scale * normal).bfloat16().requires_grad_()


def whole(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The value and the gradients of its sum."""
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))


def largest_difference(case: Case) -> float:
    """Of the value and each gradient, of the largest number; infinite where one is none."""
    worst = 0.0
    for a, b in zip(*(whole(function, case.inputs) for function in (case.ours, case.theirs)), strict=True):
        difference = ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def timed(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], repeats: int) -> Times:
    """Of calls after two that are not counted."""
    device, hosts, times, held = inputs[0].device, [], [], 0
    for repeat in range(repeats + 2):
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        whole(function, inputs)
        host = time.perf_counter() - start
        synchronize(device)
        if repeat > 1:
            hosts.append(1e3 * host)
            times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    return Times(statistics.median(times), statistics.median(hosts), peak)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def new_lengths(device: torch.device, sizes: Sizes) -> Iterator[float]:
    """Milliseconds of the package's attention to batches none of which is like another."""
    longest = max(sizes.batches[0].lengths)
    for number in range(NEW_LENGTHS):
        seen = Batch((longest - number, 1 + longest // (number + 2), longest), 2).visibility(sizes.canvas)
        inputs, plan = attention_inputs(seen, sizes, device), packed_plan(seen, sizes.window, device)
        synchronize(device)
        start = time.perf_counter()
        whole(plan.attend, inputs)
        synchronize(device)
        yield 1e3 * (time.perf_counter() - start)
