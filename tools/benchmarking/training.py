"""Training steps beside transformers' and, with --nemo, NeMo AutoModel's: the same weights, tokens and draws, in one process in turn.

A row counts only if both losses agree to 2e-3 relative in bf16; before, two layers in fp32 must agree to 1e-5. GiB: the most that was held,
graphs' pools included; MFU: the operations that ours needs (none for padding, norms, streams), over the time and the peak that is printed.
"""
from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_dllm.config import ModelConfig, ObjectiveConfig, OptimizerConfig
from megatron_dllm.diffusion.inputs import MicrobatchInputs
from megatron_dllm.kernels.graphs import CudaRecorder
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.training.graphs import GraphedMicrobatches, MicrobatchResult, forward_backward_of, graphed
from megatron_dllm.training.optimizer import MasterOptimizer
from megatron_dllm.training.step import train_step
from megatron_dllm.training.throughput import describe_peak, peak_of
from tools.refusal import Refusal

from .exposed import kernel_table
from .peers import TransformersStep, transformers_model
from .workload import (
    Timing,
    Workload,
    calm_model,
    gradient_dtypes,
    measure,
    measure_in_turn,
    real_width,
    release_memory,
    synthetic,
    utilization,
)

AGREE = {torch.bfloat16: 2e-3, torch.float32: 1e-5}
SIX = ["sliding"] * 5 + ["full"]


@dataclass(frozen=True)
class Row:
    """One measurement. `aim`, `nemo`: how many times faster than transformers and than NeMo it is to be; None where the peer cannot run."""

    name: str
    batch: int
    seq_length: int
    aim: float | None = None
    nemo: float | None = None
    all_canvases: bool = False
    optimizer: bool = False
    streams: int = 1

H200_ROWS = (
    Row("4 x 1024", 4, 1024, 2.5, 3.0), Row("1 x 4096", 1, 4096, 3.0, 4.0), Row("1 x 1024", 1, 1024, 3.0, 4.0),
    Row("1 x 4096, all canvases", 1, 4096, None, 2.5, all_canvases=True), Row("1 x 32768", 1, 32768),
    Row("4 x 1024 with AdamW", 4, 1024, 2.0, optimizer=True), Row("4 x 1024, mHC n = 4", 4, 1024, streams=4))
MHC_COST = 0.05  # the most that streams may add to a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="*", metavar="NAME", help="Rows to run, by name; all of them if not given.")
    parser.add_argument("--nemo", action="store_true", help="NeMo AutoModel beside them, which must be installed.")
    parser.add_argument("--draft-pass", choices=("joint", "apart", "shared"), default="joint", help="As in training (its auto: joint).")
    parser.add_argument("--repeats", type=int, default=5, help="Timed steps of each row and side.")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="Print the N kernels that take longest in each of our steps.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of rows whose losses disagree or that are slower than their aim."""
    if not torch.cuda.is_available():
        raise Refusal("the suite training needs a CUDA device, and torch sees none; --suite cpu runs here")
    device = torch.device("cuda", 0)
    rows = [row for row in H200_ROWS if not arguments.rows or row.name in arguments.rows]
    machine = torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, {machine}, both sides compute in bf16")
    failed = not agree_in_fp32(real_width(["sliding", "full"]), device)
    lines = [result for row in rows for result in _run_row(row, real_width(SIX), device, torch.bfloat16, arguments)]
    print(describe_peak(peak_of(device, peak_tflops=None), machine))
    print(f"{'row':24} {'peer':12} {'ours ms':>9} {'peer ms':>9} {'ratio':>6} {'aim':>5} {'MFU':>5} {'ours GiB':>9} {'peer GiB':>9} "
          f"{'ours loss':>10} {'peer loss':>10} gradients of ours / of the peer")
    for line in lines:
        print(line.text())
    return failed + sum(not line.holds for line in lines)


def agree_in_fp32(config: ModelConfig, device: torch.device) -> bool:
    """Whether two layers in fp32 give both sides one loss."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = calm_model(config, device, torch.float32)
    workload = synthetic(config, 2, 4 * config.canvas_length, device)
    theirs = TransformersStep(transformers_model(model), config, workload)()
    ours = _forward_backward(model, workload)()
    difference = abs(ours - theirs) / abs(theirs)
    holds = difference <= AGREE[torch.float32]
    print(f"{'ok    ' if holds else 'MISSED'} two layers, fp32: loss {ours:.7f}, transformers {theirs:.7f}, relative {difference:.1e}")
    return holds


@dataclass(frozen=True)
class Line:
    """A row's measurements beside one peer's, or beside nothing."""

    row: Row
    ours: Timing
    dtype: torch.dtype
    mfu: float
    gradients: str
    peer: str = "-"
    theirs: Timing | None = None
    aim: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.theirs is None or abs(self.ours.value - self.theirs.value) <= AGREE[self.dtype] * abs(self.theirs.value)

    @property
    def holds(self) -> bool:
        return self.agrees and (self.theirs is None or self.theirs.median >= self.aim * self.ours.median)

    def text(self) -> str:
        start = f"{self.row.name:24} {self.peer:12} {self.ours.median:9.1f}"
        mfu = "-" if math.isnan(self.mfu) else f"{self.mfu:.0%}"
        if self.theirs is None:
            return (f"{start} {'-':>9} {'-':>6} {'-':>5} {mfu:>5} {self.ours.peak_gib:9.1f} {'-':>9} {self.ours.value:10.4f} {'-':>10} "
                    f"{self.gradients}")
        verdict = "losses differ" if not self.agrees else "" if self.holds else "missed"
        return (f"{start} {self.theirs.median:9.1f} {self.theirs.median / self.ours.median:6.2f} {self.aim:5.2f} {mfu:>5} "
                f"{_gib(self.ours)} {_gib(self.theirs)} {self.ours.value:10.4f} {self.theirs.value:10.4f} "
                f"{self.gradients} {verdict}")


def _gib(timing: Timing) -> str:
    return f"{'-' if math.isnan(timing.peak_gib) else f'{timing.peak_gib:.1f}':>9}"


def _run_row(row: Row, config: ModelConfig, device: torch.device, dtype: torch.dtype, arguments: argparse.Namespace) -> list[Line]:
    objective = ObjectiveConfig(self_conditioning_prob=1.0, canvases_scored="all" if row.all_canvases else "one")
    if row.streams > 1:
        return [_beside_no_streams(row, config, device, dtype, objective, arguments)]
    model = calm_model(config, device, dtype)
    workload = synthetic(config, row.batch, row.seq_length, device, passes=arguments.draft_pass, objective=objective)
    repeats = arguments.repeats
    with _step(row, model, workload) as step:
        ours = measure(step, device, warmup=3, repeats=repeats)
        # Masters are stepped by fp32 gradients of their own.
        own = "float32" if row.optimizer else gradient_dtypes(model.parameters())
        if arguments.kernels and device.type == "cuda":
            print(f"{row.name}\n{kernel_table(step, arguments.kernels)}", flush=True)
    mfu = utilization(config, workload, ours.median, device)
    del step
    lines = []
    if row.aim is not None:
        theirs, gradients = _measure_peer(row, model, config, workload, device, repeats)
        lines.append(Line(row, ours, dtype, mfu, f"{own} / {gradients}", "transformers", theirs, row.aim))
    if row.nemo is not None and arguments.nemo:
        from .nemo import NemoStep, nemo_model  # an optional package, asked for

        nemo = NemoStep(nemo_model(model), config, workload)
        theirs = measure(nemo, device, repeats=repeats)
        lines.append(Line(row, ours, dtype, mfu, f"{own} / {nemo.gradients}", "nemo", theirs, row.nemo))
        del nemo
    lines = lines or [Line(row, ours, dtype, mfu, own)]
    print("\n".join(line.text() for line in lines), flush=True)
    del model
    release_memory(device)
    return lines


def _beside_no_streams(row: Row, config: ModelConfig, device: torch.device, dtype: torch.dtype, objective: ObjectiveConfig,
                       arguments: argparse.Namespace) -> Line:
    """The step with mHC's streams beside the same without, which as initialised are one function: in turn, both in memory, since what they
    differ by is less than what a GPU's clock does to a step in a few minutes."""
    with_streams = dataclasses.replace(config, enable_mhc_connections=True, mhc_num_residual_streams=row.streams)
    # What is held is of both, and so is said of neither.
    models = [calm_model(each, device, dtype) for each in (with_streams, config)]
    workload = synthetic(config, row.batch, row.seq_length, device, passes=arguments.draft_pass, objective=objective)
    with _step(row, models[0], workload) as ours, _step(row, models[1], workload) as plain:
        measured = measure_in_turn((ours, plain), device, warmup=3, repeats=3 * arguments.repeats)
        timings = [dataclasses.replace(timing, peak_gib=math.nan) for timing in measured]
        if arguments.kernels and device.type == "cuda":
            print(f"{row.name}\n{kernel_table(ours, arguments.kernels)}", flush=True)
    own = gradient_dtypes(models[0].parameters())
    line = Line(row, timings[0], dtype, utilization(with_streams, workload, timings[0].median, device), own, "no streams", timings[1],
                1 / (1 + MHC_COST))
    print(f"{line.text()}\n{row.name}: adds {timings[0].median / timings[1].median - 1:.1%} to the step (aim {MHC_COST:.0%})", flush=True)
    release_memory(device)
    return line


def _measure_peer(row: Row, model: DiffusionGemma, config: ModelConfig, workload: Workload, device: torch.device,
                  repeats: int) -> tuple[Timing, str]:
    """Its time, and the dtypes of its gradients."""
    release_memory(device)
    theirs = transformers_model(model)
    step = TransformersStep(theirs, config, workload)
    if not row.optimizer:
        return measure(step, device, repeats=repeats), step.gradients
    # Its parameters are views of ours: a learning rate of zero leaves them as they are.
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.0, weight_decay=0.0, fused=device.type == "cuda")
    gradients = ""

    def whole() -> float:
        nonlocal gradients
        loss = step.losses()
        loss.backward()
        value = loss.item()
        optimizer.step()
        gradients = gradient_dtypes(theirs.parameters())
        optimizer.zero_grad()
        return value

    return measure(whole, device, repeats=repeats), gradients


def _forward_backward(model: DiffusionGemma, workload: Workload) -> Callable[[], float]:
    """Gradients in the compute dtype, made anew each time, as the peers' are; on a GPU replayed as a CUDA graph."""
    run = forward_backward_of(model)

    def from_none(inputs: MicrobatchInputs) -> MicrobatchResult:
        for parameter in model.parameters():
            parameter.grad = None
        return run(inputs)

    device = model.context.device
    if device.type != "cuda" or model.dtype != torch.bfloat16:  # experts one by one wait for the host
        return lambda: from_none(workload.inputs).terms.total.item()
    graphs = GraphedMicrobatches(from_none, lambda result: None, CudaRecorder(device), device=device, limit=1)
    return lambda: graphs(workload.inputs).total.item()


@contextmanager
def _step(row: Row, model: DiffusionGemma, workload: Workload) -> Iterator[Callable[[], float]]:
    """Our step, of which nothing is left on the device afterwards."""
    if row.optimizer:
        # A whole step with fp32 masters, moments and gradients.
        optimizer = MasterOptimizer(model, OptimizerConfig(lr=0.0, min_lr=0.0, weight_decay=0.0), model.context)
        graphs = graphed(model, limit=1, message=print)
        yield lambda: train_step(model, optimizer, [workload.inputs], 0.0, graphs=graphs).loss
        optimizer.buckets.release()
    else:
        yield _forward_backward(model, workload)
    for parameter in model.parameters():
        parameter.grad = parameter.main_gradient = None
