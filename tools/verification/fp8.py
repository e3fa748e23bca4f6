"""FP8 against BF16: the loss of a toy over 100 steps, and what a layer's products take at the released model's widths.

Trains the toy on 4 x 4 Sudokus by the real loop, in bf16 with our own layers and in FP8 by Transformer Engine, experts too, each from the
same seeds. The gate: by the last steps, FP8 is behind by no more than seeds are off each other. One CUDA device (FP8 wants sm_89 or later).

usage: python tools/verify.py fp8 [--fp8-recipe tensorwise blockwise]
"""
from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from benchmarking.workload import DeviceNormal, calm_model, measure, real_width, synthetic
from torch import Tensor
from torch.nn.functional import linear

from megatron_dllm.config import MoEConfig, TrainingConfig, format_problems, parse, validate
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.kernels.graphs import CudaRecorder
from megatron_dllm.moe.experts import Experts
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.graphs import GraphedMicrobatches, MicrobatchResult, forward_backward_of
from megatron_dllm.training.loop import Trainer
from megatron_dllm.training.metrics_file import read_metrics
from megatron_dllm.transformer_engine import install, load_engine
from megatron_dllm.transformer_engine.linear import EngineLinear
from tools.refusal import Refusal
from verification.table import Figure, print_figures

# Wider than the preset, whose sums of 64 products do not even out their roundings, and with rows enough for a loss that tells something.
TOY = ("--preset toy --num-layers 2 --layer-types sliding,full --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 "
       "--num-query-groups 4 --kv-channels 32 --num-global-query-groups 2 --global-kv-channels 64 --moe-ffn-hidden-size 256 --vocab-size 9 "
       "--canvas-length 16 --data-source sudoku --sudoku-num-puzzles 3200 --seq-length 34 --micro-batch-size 64 --global-batch-size 64 "
       "--lr 1e-3 --lr-decay-style constant --lr-warmup-iters 10 --log-interval 1 --bf16").split()
ENGINE = "--transformer-impl transformer_engine --moe-grouped-gemm-backend transformer_engine".split()
LAST = 20  # steps whose mean is compared: a step's loss alone is that of its batch
REPEATS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fp8-format", choices=["e4m3", "hybrid"], default="hybrid", help="As of training.")
    parser.add_argument("--fp8-recipe", nargs="+", choices=["tensorwise", "blockwise"], default=["tensorwise"], help="One or both.")
    parser.add_argument("--steps", type=int, default=100, help="Optimizer steps of a run; 0: train nothing.")
    parser.add_argument("--seeds", type=int, default=3, help="Runs of each kind.")
    parser.add_argument("--tokens", type=int, default=8192, help="Tokens of the timed products; 0: time nothing.")


def run(arguments: argparse.Namespace) -> int:
    """Print the losses, the figures and the times; the number of missed figures."""
    if not torch.cuda.is_available():
        raise Refusal("fp8 needs a CUDA device of sm_89 or later, and torch sees none; run it on such a machine")
    device = torch.device("cuda", torch.cuda.current_device())

    def runs(kind: str, words: Sequence[str]) -> list[list[float]]:
        found = []
        for seed in range(1, arguments.seeds + 1):
            started = time.monotonic()
            found.append(losses_of(words, seed, arguments.steps, device))
            print(f"{kind:16} seed {seed}: loss of step 1 {found[-1][0]:.4f}, of the last {LAST} {ending(found[-1]):.4f}; "
                  f"{time.monotonic() - started:.1f} s", flush=True)
        return found

    missed = 0
    if arguments.steps:
        bf16 = runs("bf16", [])
        for recipe in arguments.fp8_recipe:
            fp8 = runs(f"FP8 {recipe}", [*ENGINE, "--fp8-format", arguments.fp8_format, "--fp8-recipe", recipe])
            missed += print_figures(f"fp8 {arguments.fp8_format} {recipe}", loss_figures(bf16, fp8))
    if arguments.tokens:
        for by_graph in (False, True):
            for line in time_table(arguments.tokens, arguments.fp8_format, device, by_graph=by_graph):
                print(line, flush=True)
            for line in step_table(arguments.fp8_format, device, by_graph=by_graph):
                print(line, flush=True)
    return missed


def losses_of(words: Sequence[str], seed: int, steps: int, device: torch.device) -> list[float]:
    """The loss of every step of the toy, trained with these flags beside its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = parse([*TOY, *words, "--seed", str(seed), "--train-iters", str(steps), "--device", device.type, "--run-dir", folder])
        if problems := validate(run):
            raise ValueError(format_problems(problems))
        trainer = Trainer.build(run, ParallelContext.single(device))
        calm_queries(trainer)
        trainer.fit()
        return [record["loss"] for record in read_metrics(Path(folder) / "metrics.jsonl").records if "loss" in record]


@torch.no_grad()
def calm_queries(trainer: Trainer) -> None:
    """Have attention begin with logits of deviation 1: queries, normed and not scaled, give one of head_dim^0.5 with norms of 1. FP8's
    rounding of queries and keys, magnified by it, then decides at random who attends to whom, and half of the gradient is noise."""
    parameters = dict(trainer.model.named_parameters())
    for held in trainer.optimizer.held:
        if held.name.endswith("q_norm.weight"):
            scale = len(parameters[held.name]) ** -0.5
            held.master.mul_(scale)
            parameters[held.name].mul_(scale)


def ending(losses: Sequence[float]) -> float:
    return statistics.mean(losses[-LAST:])


def loss_figures(bf16: Sequence[Sequence[float]], fp8: Sequence[Sequence[float]]) -> list[Figure]:
    """Of runs with the same seeds, seed by seed."""
    endings = [ending(losses) for losses in bf16]
    noise = statistics.stdev(endings)
    off = statistics.mean(ending(low) - plain for low, plain in zip(fp8, endings, strict=True))
    same = sum(list(low) == list(plain) for low, plain in zip(fp8, bf16, strict=True))
    return [
        Figure("FP8's last losses less bf16's", off, noise, "mean over seeds; limit: the deviation of bf16's seeds"),
        Figure("their fall, of the first loss", max(ending(low) / low[0] for low in fp8), 0.9, "a toy that learns nothing tells nothing"),
        Figure("runs without any difference", same, 0, "FP8 would not be in use"),
    ]


@dataclass(frozen=True)
class Product:
    """Something to time: `function` of `x`, with weights that ask for a gradient."""

    name: str
    x: Tensor
    weights: tuple[Tensor, ...]
    function: Callable[[Tensor], Tensor]


def time_table(tokens: int, fp8_format: str, device: torch.device, *, by_graph: bool) -> list[str]:
    """Forward and backward of a sliding layer's products, ours, and by Transformer Engine in bf16 and FP8: a line each. Launched by the
    host, experts too, or replayed as CUDA graphs: the package's modules keep the host longer than the device."""
    kinds = {"ours, bf16": None, "bf16": TrainingConfig(), "FP8 tensorwise": TrainingConfig(fp8_format=fp8_format),
             "FP8 blockwise": TrainingConfig(fp8_format=fp8_format, fp8_recipe="blockwise")}
    rows: dict[str, dict[str, float]] = {}
    for kind, training in kinds.items():
        for product in products(tokens, training, device):
            if product.name != "experts" or not by_graph:  # the package has the host wait for their numbers of rows
                rows.setdefault(product.name, {})[kind] = milliseconds(product, by_graph=by_graph)
        torch.cuda.empty_cache()
    dense = [times for name, times in rows.items() if name != "experts"]
    rows["all but experts"] = {kind: sum(times[kind] for times in dense) for kind in kinds}
    title = f"{tokens} tokens, forward and backward, {'graphs' if by_graph else 'launched'}, ms (times as fast)"
    return [f"{title:66}" + "".join(f"{kind:>24}" for kind in kinds), *(_line(name, times) for name, times in rows.items())]


def _line(name: str, times: Mapping[str, float]) -> str:
    ours = times["ours, bf16"]
    return f"{name:66}" + "".join(f"{f'{time:.3f} ({ours / time:.2f})':>24}" for time in times.values())


def step_table(fp8_format: str, device: torch.device, *, by_graph: bool) -> Iterator[str]:
    """Forward and backward of 4 x 1024 tokens through six layers of the released widths, each row self-conditioned: a line each."""
    config = real_width(["sliding"] * 5 + ["full"])
    model, workload = calm_model(config, device, torch.bfloat16), synthetic(config, 4, 1024, device)
    run, how = forward_backward_of(model), "a graph" if by_graph else "launched by the host"

    def from_none(inputs: MicrobatchInputs) -> MicrobatchResult:
        for parameter in model.parameters():
            parameter.grad = None
        return run(inputs)

    def line(kind: str) -> str:
        graphs = GraphedMicrobatches(from_none, lambda notes: None, CudaRecorder(device), device=device, limit=int(by_graph))
        timing = measure(lambda: graphs(workload.inputs).total.item(), device, warmup=3)
        return f"{kind:66}{timing.median:9.1f} ms{timing.peak_gib:8.1f} GiB   loss {timing.value:.4f}   {how}"

    yield line("6 layers, 4 x 1024, forward and backward: ours, bf16")
    for kind, training in (("bf16", TrainingConfig()), (f"FP8 {fp8_format} tensorwise", TrainingConfig(fp8_format=fp8_format)),
                           (f"FP8 {fp8_format} blockwise", TrainingConfig(fp8_format=fp8_format, fp8_recipe="blockwise"))):
        install(model, load_engine(training, MoEConfig(), device))
        yield line(f"  linear layers by Transformer Engine: {kind}")
    if not by_graph:
        install(model, load_engine(training, MoEConfig(moe_grouped_gemm_backend="transformer_engine"), device))
        yield line("  experts too")


def products(tokens: int, training: TrainingConfig | None, device: torch.device) -> Iterator[Product]:
    """Of one sliding layer of the released model; `training` None: our own."""
    model, draw = real_width(["sliding"]), DeviceNormal(device)
    moe = MoEConfig(moe_grouped_gemm_backend="transformer_engine")
    engine = None if training is None else load_engine(training, moe, device)
    hidden, ffn, heads = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    for name, width, depth in (("q", heads, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, heads),
                               ("gate_up", 2 * ffn, hidden), ("down", hidden, ffn)):
        weight = draw(name, (width, depth), torch.bfloat16).requires_grad_()
        product = linear if engine is None else EngineLinear(engine, depth, width)
        yield Product(f"{name} {depth} x {width}", draw("x", (tokens, depth), torch.bfloat16).requires_grad_(), (weight,),
                      partial(_apply, product, weight))
    experts = Experts("experts", model, context=ParallelContext.single(device), init=draw, dtype=torch.bfloat16)
    if engine is not None:
        install(torch.nn.ModuleList([experts]), engine)
    # As a router deals them: not in multiples of what FP8 wants.
    chosen = torch.randint(model.num_experts, (tokens * model.moe_router_topk,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(chosen, minlength=model.num_experts).to(device)
    rows = draw("x", (len(chosen), hidden), torch.bfloat16).requires_grad_()
    yield Product("experts", rows, tuple(experts.parameters()), lambda x: experts(x, counts))


def _apply(product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
    return product(x, weight)


def milliseconds(product: Product, *, by_graph: bool) -> float:
    """The median of forward and backward."""
    grad = torch.randn_like(product.function(product.x))

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(product.function(product.x), (product.x, *product.weights), grad)

    run = step
    if by_graph:
        recorder = CudaRecorder(product.x.device)
        recorder.warm_up(step)
        run = recorder.record(step).replay
    times = []
    for repeat in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)
