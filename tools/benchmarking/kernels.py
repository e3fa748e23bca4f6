"""Attention, the experts' products and mHC at the released widths beside what torch has for them: checked first, then timed.

Processes beside this one compile the kernels of the groups at once. Milliseconds on the device, medians; MiB: what a piece needs beside its
inputs at most. The fused norms, gates, permutations and the head are in tools/benchmark_kernels.py.
"""
from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from tools.refusal import Refusal

from . import kernels_attention, kernels_experts, kernels_streams
from .kernel_cases import Case, Check, Sizes
from .workload import release_memory

PARTS = 3  # processes a group
COMPILING_S = 45.0  # a process that takes longer leaves the rest to be compiled here


class Group(Protocol):
    """A module of cases."""

    def checks(self, sizes: Sizes, device: torch.device) -> Iterator[Check]:
        """What has to hold before anything is timed."""

    def cases(self, sizes: Sizes, device: torch.device) -> Iterator[Case]:
        """What is timed, the most wanted first."""


GROUPS: dict[str, Group] = {"attention": kernels_attention, "experts": kernels_experts, "mHC": kernels_streams}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS), help="Groups to run.")
    parser.add_argument("--repeats", type=int, default=10, help="Timed runs of each (3 of those beyond 20 ms).")
    parser.add_argument("--limit", type=float, default=55.0, help="Seconds after which no further case is begun.")
    parser.add_argument("--toy", action="store_true", help="Toy sizes.")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; the number of checks, cases and aims that failed."""
    if not torch.cuda.is_available():
        raise Refusal("the suite kernels needs a CUDA device, and torch sees none; --suite cpu runs here")
    return run_on(torch.device("cuda", 0), arguments, Sizes.toy() if arguments.toy else Sizes())


@dataclass(frozen=True)
class Found:
    """Milliseconds of forward, and of forward and backward."""

    forward: float
    whole: float


def run_on(device: torch.device, arguments: argparse.Namespace, sizes: Sizes) -> int:
    """As `run`, on a device that is known to run kernels."""
    start, failed, lines = time.monotonic(), 0, []
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'interpreted'}, torch {torch.__version__}")
    if device.type == "cuda":
        compile_beside(arguments.only, sizes, device)
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    for name in arguments.only:
        for check in guarded(name, lambda name=name: list(GROUPS[name].checks(sizes, device)), []):
            failed += not check.holds
            print(f"{'ok    ' if check.holds else 'MISSED'} {name}: {check.text}", flush=True)
        release_memory(device)
    # The groups in turn, so that whatever time is left, each has its first cases.
    queues = [GROUPS[name].cases(sizes, device) for name in arguments.only]
    while queues:
        for queue in list(queues):
            case = next(queue, None)
            if case is None:
                queues.remove(queue)
            elif time.monotonic() - start > arguments.limit:
                print(f"no time left for {case.name}")
            else:
                line = guarded(case.name, lambda case=case: measure_case(case, device, arguments.repeats), None)
                failed += line is None or line.endswith("missed")
                lines += [line] if line else []
                release_memory(device)
    print(f"{'piece, bf16':50} {'forward':>8} {'whole':>8} {'TFLOP/s':>8} {'MiB':>7} {'aim':>5}  beside (forward, whole)")
    print("\n".join(lines))
    return failed


def guarded(name: str, function: Callable, otherwise):
    """function(), or a message and `otherwise`: the other cases are still wanted."""
    try:
        return function()
    except (RuntimeError, AssertionError, ValueError) as error:
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return otherwise


def measure_case(case: Case, device: torch.device, repeats: int) -> str:
    """A line of the table."""
    ways = case.prepare()
    found, mebibytes = {}, 0.0
    for name, way in ways.items():
        if device.type == "cuda" and not found:
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            way.whole()
            mebibytes = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        found[name] = Found(milliseconds(way.forward, device, repeats), milliseconds(way.whole, device, repeats))
    ours = found.pop(next(iter(found)))
    beside = "; ".join(f"{name} {other.forward:.3f}, {other.whole:.3f}" for name, other in found.items())
    aim = "" if case.aim is None else f"{case.aim:.1f}"
    rate = f"{case.operations / ours.whole / 1e9:.0f}" if case.operations else ""
    verdict = " missed" if case.aim is not None and ours.whole > case.aim else ""
    line = f"{case.name:50} {ours.forward:8.3f} {ours.whole:8.3f} {rate:>8} {mebibytes:7.0f} {aim:>5}  {beside}{verdict}"
    print(line, flush=True)
    return line


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of so many runs, or of three where one takes long; on a GPU as the device sees them."""
    times: list[float] = []
    warmup = 2 if device.type == "cuda" else 0
    for number in range(warmup + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device is kept busy while the host enqueues, so that its launches are not what is timed.
            torch.cuda._sleep(3_000_000)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize(device)
            took = begin.elapsed_time(end)
        else:
            begun = time.perf_counter()
            function()
            took = (time.perf_counter() - begun) * 1e3
        times += [took] if number >= warmup else []
        if len(times) >= 3 and took > 20:
            break
    return statistics.median(times)


def compile_beside(groups: list[str], sizes: Sizes, device: torch.device) -> None:
    """Have each part of each group compiled by a process of its own, into the cache that all share."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=compile_part, args=(name, part, sizes, device)) for name in groups for part in range(PARTS)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + COMPILING_S
    for worker in workers:
        worker.join(max(0.1, deadline - time.monotonic()))
        if worker.is_alive():
            worker.terminate()


def compile_part(name: str, part: int, sizes: Sizes, device: torch.device) -> None:
    """Run what a group has of ours once, and its checks: every third case, beginning with `part`."""
    group = GROUPS[name]
    for number, case in enumerate(group.cases(sizes, device)):
        if number % PARTS == part and case.is_compiled_apart:
            guarded(f"compiling {case.name}", next(iter(case.prepare().values())).whole, None)
            release_memory(device)
    if part == PARTS - 1:
        guarded(f"compiling the checks of {name}", lambda: list(group.checks(sizes, device)), None)
