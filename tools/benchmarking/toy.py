"""Training steps of the toy beside transformers', on one core of a CPU: the same weights, tokens and draws, forward and backward.

Such a step is thousands of small operations, and what else the machine does moves it by half. So the sides take turns, step by step; what
is compared is processor time, which leaves out the time that others had the core; and the ratio is the median of those of neighbouring
steps, shown with its quartiles. Operations and nodes of autograd are counted beside: they do not depend on the machine at all.
"""
from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dllm.config import ModelConfig
from megatron_dllm.diffusion.inputs import PassOrder
from megatron_dllm.models.diffusion_gemma.model import DiffusionGemma
from megatron_dllm.training.graphs import forward_backward_of
from tools.refusal import Refusal

from .peers import TransformersStep, transformers_model
from .training import AGREE, SIX, agree_in_fp32
from .workload import Workload, calm_model, synthetic, toy_width

CPU = torch.device("cpu")
WARMUP = 3


@dataclass(frozen=True)
class Row:
    """One measurement; `aim`: how many times faster than transformers it is to be; `draft_pass` as the training's flag --draft-pass."""

    name: str
    batch: int
    seq_length: int
    draft_pass: PassOrder
    aim: float = 1.5


ROWS = (Row("4 x 128", 4, 128, "apart"), Row("1 x 512", 1, 512, "shared"), Row("1 x 64", 1, 64, "apart"))


@dataclass(frozen=True)
class Turns:
    """Milliseconds of the steps of both sides, pair by pair: of the processor, and on the clock."""

    ours: list[float]
    theirs: list[float]
    ours_clock: list[float]
    theirs_clock: list[float]

    @property
    def ratios(self) -> list[float]:
        """Of the processor's time, theirs over ours, of each pair."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def clock_ratio(self) -> float:
        """The same on the clock: the median."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.ours_clock, self.theirs_clock, strict=True))


@dataclass(frozen=True)
class Side:
    """What does not depend on the machine: the loss, operations of torch in a step, nodes of the loss's graph."""

    loss: float
    operations: int
    nodes: int


@dataclass(frozen=True)
class Line:
    """A row's measurements."""

    row: Row
    turns: Turns
    ours: Side
    theirs: Side

    @property
    def agrees(self) -> bool:
        return abs(self.ours.loss - self.theirs.loss) <= AGREE[torch.float32] * abs(self.theirs.loss)

    @property
    def holds(self) -> bool:
        return self.agrees and statistics.median(self.turns.ratios) >= self.row.aim

    def text(self) -> str:
        turns = self.turns
        low, middle, high = statistics.quantiles(turns.ratios, n=4)
        verdict = "losses differ" if not self.agrees else "" if self.holds else "missed"
        return (f"{self.row.name:10} {self.row.draft_pass:7} {statistics.median(turns.ours):8.1f} {min(turns.ours):6.1f} "
                f"{statistics.median(turns.theirs):8.1f} {min(turns.theirs):6.1f} {middle:6.2f} {f'{low:.2f}-{high:.2f}':>10} "
                f"{turns.clock_ratio:6.2f} {self.row.aim:5.1f} {f'{self.ours.operations} / {self.theirs.operations}':>15} "
                f"{f'{self.ours.nodes} / {self.theirs.nodes}':>13} {self.ours.loss:9.5f} {self.theirs.loss:9.5f} {verdict}")


HEAD = (f"{'row':10} {'drafts':7} {'ours ms':>8} {'least':>6} {'peer ms':>8} {'least':>6} {'ratio':>6} {'quartiles':>10} {'clock':>6} "
        f"{'aim':>5} {'operations':>15} {'nodes':>13} {'ours loss':>9} {'peer loss':>9}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="*", metavar="NAME", help="Rows to run, by name; all of them if not given.")
    parser.add_argument("--repeats", type=int, default=40, help="Timed steps of each row and side.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of rows whose losses disagree or that are slower than their aim."""
    if arguments.repeats < 2:
        raise Refusal(f"--repeats {arguments.repeats}: quartiles want 2 at least; set --repeats 2 or more")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, both sides compute in fp32; ms of the processor; {arguments.repeats} pairs of steps")
    failed = not agree_in_fp32(toy_width(["sliding", "full"]), CPU)
    lines = [_run_row(row, toy_width(SIX), arguments.repeats) for row in ROWS if not arguments.rows or row.name in arguments.rows]
    print(HEAD)
    for line in lines:
        print(line.text())
    return failed + sum(not line.holds for line in lines)


def _run_row(row: Row, config: ModelConfig, repeats: int) -> Line:
    model = calm_model(config, CPU, torch.float32)
    workload = synthetic(config, row.batch, row.seq_length, CPU, passes=row.draft_pass)
    ours, theirs = _our_step(model, workload), TransformersStep(transformers_model(model), config, workload)
    turns = in_turn(ours, theirs, repeats)
    return Line(row, turns, Side(ours(), operations(ours), nodes(model(workload.inputs).total)),
                Side(theirs(), operations(theirs), nodes(theirs.losses())))


def _our_step(model: DiffusionGemma, workload: Workload) -> Callable[[], float]:
    run, parameters = forward_backward_of(model), list(model.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        return run(workload.inputs).terms.total.item()

    return step


def in_turn(ours: Callable[[], float], theirs: Callable[[], float], repeats: int) -> Turns:
    """Time both sides, a step of each in turn. As in timeit, Python's collector of cycles waits meanwhile."""
    for _ in range(WARMUP):
        ours()
        theirs()
    gc.collect()
    gc.disable()
    try:
        pairs = [(_timed(ours), _timed(theirs)) for _ in range(repeats)]
    finally:
        gc.enable()
    return Turns(*([pair[side][which] for pair in pairs] for which in (0, 1) for side in (0, 1)))


def _timed(step: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds of the processor, and on the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    step()
    return (time.process_time() - processor) * 1e3, (time.perf_counter() - clock) * 1e3


class _Operations(TorchDispatchMode):
    """Counts what reaches torch's kernels, backward included, views too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(step: Callable[[], float]) -> int:
    """Of torch in a step."""
    with _Operations() as counter:
        step()
    return counter.count


def nodes(loss: Tensor) -> int:
    """Of autograd behind a loss, those of grafted graphs too."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [behind for behind, _ in node.next_functions]
            waiting += [result.grad_fn for result in getattr(node, "results", ())]
    return len(seen)
